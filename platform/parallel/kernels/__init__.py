"""Mathematics of operations on local blocks: einsum, SUMMA, statistics of split dims, positions, random numbers.
The collectives among these computations are those of the plan.
"""
