"""The plan itself: a model's operations placed on chunks, their layouts and collectives, the collectives of a step.
Memory (platform.plan.memory) and reports (platform.plan.reports) are computed from it elsewhere.
"""
