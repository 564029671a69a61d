"""Blocks between layouts: conversions at run time, gradients between shards, tensors in one part per rank.
The steps are the plan's.
"""
