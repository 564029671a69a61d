"""Mathematics of operations on local blocks: einsum, SUMMA, statistics of split dims, positions, random numbers. The
collectives among these computations are the plan's, handed in as conversions and axes; no layout is chosen here."""

from platform.runtime import (  # noqa: F401  (operations reach them as `ops.kernels`)
    chunked_loss,  # noqa: F401
    delta_chunks,  # noqa: F401
    einsum,
    expert_rows,  # noqa: F401
    panels,  # noqa: F401
    positions,
    products,
    recompute,  # noqa: F401
    residual,
    statistics,
)
