"""The words of a plan: mesh axes, layouts of dims, schemes of regions, and the operations that a model is written in.
Nothing here knows a collective or a schedule.
"""
