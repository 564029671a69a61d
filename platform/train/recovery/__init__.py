"""How a worker proves what it holds and gets state back: from memory, from storage, from replicas that agree.
The driver decides when.
"""
