"""Pipeline schedules: tables of which stage computes which microbatch of which chunk in what order, their generators,
lowering to sends and receives, and simulation. Nothing here knows tensors or layouts.
"""
