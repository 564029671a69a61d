"""The plan itself: a model's operations placed on chunks, their layouts and collectives, the collectives of a step.
What a plan costs in memory, and how it is shown, is computed above.
"""
