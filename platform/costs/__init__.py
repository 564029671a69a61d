"""Costs of a plan in seconds: the work of a rank by operation, collectives by tier, a step by its schedule. Nothing
here imports torch.
"""
