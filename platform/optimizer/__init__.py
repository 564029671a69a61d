"""Optimizers and learning-rate schedules by name, and the check that a plan gives an optimizer what it needs whole.
No collective is issued and no plan is made here.

Its files in reading order: optimizers, update_rules, learning_rate.
"""
