"""A plan for people: the table that a run prints first, `python -m platform.plan`, messages between nodes.
Nothing is decided here.
"""
