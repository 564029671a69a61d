"""Execution of a plan: the driver of a run, from its start (`driver.py`) to the one place where every run ends
(`endings.py`). Nothing here computes a tensor.
"""
