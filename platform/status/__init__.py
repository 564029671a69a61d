"""Status of a run: a look into its directory from outside, the verdict on it, and its state, as text and as data.

Its files in reading order: run_facts, seen_run, step_facts.
"""
