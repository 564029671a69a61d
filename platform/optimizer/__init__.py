"""Optimizers and learning-rate schedules by name, and the check that a plan gives an optimizer what it needs whole.
No collective is issued and no plan is made here.

Each optimizer says how many numbers it keeps, what memory its update takes, and what of a parameter it updates.
Adafactor, Lion and Muon, which torch lacks, are written here; they ask for sums and whole matrices over ranks.

Its files in reading order: optimizers, update_rules, stored_states, learning_rate.
"""
