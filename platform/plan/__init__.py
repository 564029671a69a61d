"""The plan is data: which block lives where, who computes what when, and what all of it moves and needs.
Pure Python: no torch, no Ray, no configuration. `python -m platform.plan` explains a plan.
"""
