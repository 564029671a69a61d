"""Optimizers and learning-rate schedules by name, and what an optimizer needs whole of a tensor.
No collective and no plan is made here.
"""
