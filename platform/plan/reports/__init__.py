"""Reports of a plan for people: the table that a run prints first, the text of `python -m platform.plan`, and counts of
messages between nodes. Nothing is decided here.
"""
