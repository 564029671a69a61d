"""Rows of tokens at the experts that compute them, as many as the routing of a pass says: how many a plan makes room for.

A model says in its size of dim `rows` how many rows a token has: the experts that it chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

from platform.plan.language.mesh import Mesh
from platform.plan.language.scheme import Scheme


def all_rows(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return a model's `sizes` with dim rows, if it has it, of all tokens in place of one."""
    return {**sizes, **({"rows": sizes["rows"] * sizes["length"] * sizes["batch"]} if "rows" in sizes else {})}


def most_rows(sizes: Mapping[str, int], scheme: Scheme, mesh: Mesh) -> dict[str, int]:
    """Return the `sizes` of a model with room in dim rows for the worst routing on each of the ranks among which the
    scheme divides the experts: for every token as many rows as it chooses experts, or as the rank has."""
    if "rows" not in sizes:
        return dict(sizes)
    ranks, tokens = mesh.extent(scheme.regions["experts"]["experts"]), sizes["length"] * sizes["batch"]
    return {**sizes, "rows": ranks * tokens * min(sizes["rows"] // tokens, max(1, sizes["experts"] // ranks))}
