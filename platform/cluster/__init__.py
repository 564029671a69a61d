"""Who executes a plan: the driver, from start to the one place where every run ends.
Nothing here computes a tensor.
"""
