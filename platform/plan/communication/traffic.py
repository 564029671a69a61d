"""Bytes that each collective moves, by the counting conventions of docs/contract.md."""

from __future__ import annotations

from collections.abc import Iterable

from platform.plan.communication.planned import Collective
from platform.plan.language.mesh import Mesh

# Elements moved by one group of n ranks if one rank's input has e elements. For a scatter e is one rank's output, so
# that it moves as much as its adjoint, the gather. For an all_to_allv e is the most that a rank can send to others.
TRAFFIC = {
    "all_gather": lambda n, e: n * (n - 1) * e,
    "reduce_scatter": lambda n, e: (n - 1) * e,
    "all_to_all": lambda n, e: (n - 1) * e,
    "all_to_allv": lambda n, e: n * e,
    "all_reduce": lambda n, e: 2 * (n - 1) * e,
    "broadcast": lambda n, e: (n - 1) * e,
    "reduce": lambda n, e: (n - 1) * e,
    "scatter": lambda n, e: (n - 1) * e,
    "gather": lambda n, e: (n - 1) * e,
    "rotate": lambda n, e: n * e,
    "send": lambda n, e: n * e,  # each of the n stages sends
}

EVER = {"metrics": 8, "integers": 8}  # bytes per element of the types that are the same in every precision


def label(op: str, axes: Iterable[str]) -> str:
    """Return the key under which a collective is counted in `comm_bytes`, such as `all_reduce/data+t`."""
    return f"{op}/{'+'.join(axes)}"


def moved_bytes(c: Collective, mesh: Mesh, itemsize: dict[str, int]) -> int:
    """Return the bytes that all workers together move in one launch of the planned collective `c`; `itemsize`: bytes
    per element by `Collective.dtype`."""
    n = mesh.extent(c.axes)
    everywhere = c.elements * (mesh.size // n // mesh.extent(c.only))
    for cut in c.cuts:  # the mean of what ranks have, as every combination of blocks occurs alike
        everywhere = everywhere * cut.size // (cut.longest() * cut.blocks)
    return TRAFFIC[c.op](n, everywhere) * {**EVER, **itemsize}[c.dtype]
