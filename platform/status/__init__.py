"""Status of a run: a look into its directory from outside, the verdict on it, and its state, as text and as data. A
step of a run, or of a configuration, is looked into for `python -m platform.data` (`step_facts.py`).

Its files in reading order: run_facts, seen_run, step_facts.
"""
