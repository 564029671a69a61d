"""The vocabulary of a plan: mesh axes, layouts of dims, schemes of regions, and the operations that models are
written in. Nothing in this package knows about collectives or schedules.
"""
