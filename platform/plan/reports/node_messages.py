"""Messages of process groups inside a node and between nodes, after SUPER (Jain et al.), section IV-D."""

from __future__ import annotations

from collections.abc import Sequence

from platform.plan.language.mesh import Mesh


def count_messages(
    mesh: Mesh, axes: Sequence[str], workers_per_node: int, *, from_zero: bool = False
) -> tuple[int, int]:
    """Return the number of messages (inside a node, between nodes): one per ordered pair of ranks of each group along
    `axes`, a rank and itself included, with consecutive ranks on a node. Counted one by one: exact for any sizes.

    `from_zero`: only from each group's first rank to all (in a join, the other way round), as when the common layers
    are on sub-grid 0 alone: one in g of them.
    """
    inside = between = 0
    for group in mesh.groups(axes):
        for sender in group[:1] if from_zero else group:
            near = sum(sender // workers_per_node == receiver // workers_per_node for receiver in group)
            inside += near
            between += len(group) - near
    return inside, between


def with_axes_moved(mesh: Mesh, axes: Sequence[str], *, outer: bool) -> Mesh:
    """Return the mesh with `axes` moved outside of all other axes, or inside of them."""
    moved = tuple(pair for pair in mesh.shape if pair[0] in axes)
    others = tuple(pair for pair in mesh.shape if pair[0] not in axes)
    return Mesh(moved + others if outer else others + moved)
