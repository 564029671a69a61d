"""Costs of a plan in seconds: work of each rank by operation, collectives by tier, a step by its schedule. Pure, without
torch"""
