"""The local mathematics of operations on blocks: einsum, SUMMA, statistics of split dims, positions, random numbers.
What is communicated in between is the plan's.
"""
