"""Who computes which microbatch of which chunk, and when: tables of actions, their generators, lowering, simulation.
Nothing here knows tensors or layouts.
"""
