"""The workers of a run as one thing: `open.py` starts a crew of any kind.
Nothing here knows steps, plans or checkpoints.
"""
