"""Mathematics of operations on local blocks: einsum, SUMMA, statistics of split dims, positions, random numbers. The
collectives among these computations are the plan's, handed in as conversions and axes; no layout is chosen here."""

from platform.parallel.kernels import (  # noqa: F401  (operations reach them as `ops.kernels`)
    dropout,
    einsum,
    positions,
    products,
    random,
    residual,
    statistics,
)
from platform.parallel.kernels.by_index import expert_rows, gated_rows, slots, table_rows  # noqa: F401
from platform.parallel.kernels.chunked import hidden_rows, loss  # noqa: F401
from platform.parallel.kernels.in_panels import panels  # noqa: F401
