"""Execution of a plan on one rank: model operations and pipeline schedules run on the rank's blocks.
Collectives are implemented and counted here; which ones a step launches is decided by the plan.
"""
