"""Messages of process groups inside a node and between nodes, after SUPER (Jain et al.), section IV-D."""

from __future__ import annotations

from collections.abc import Sequence

from platform.plan.language.mesh import Mesh


def count_messages(
    mesh: Mesh, axes: Sequence[str], workers_per_node: int, *, from_zero: bool = False
) -> tuple[int, int]:
    """Count the messages of the process groups along `axes`, as (inside a node, between nodes), with consecutive ranks
    on a node: one per ordered pair of ranks of a group, a rank and itself included. Counted one by one: exact for any
    sizes.

    `from_zero`: only from each group's first rank to all (in a join, the other way round), as when D&SP-cSub keeps the
    common layers on sub-grid 0 alone: one in g of them, g being the ranks of a group.
    """
    inside = between = 0
    for group in mesh.groups(axes):
        for sender in group[:1] if from_zero else group:
            near = sum(sender // workers_per_node == receiver // workers_per_node for receiver in group)
            inside += near
            between += len(group) - near
    return inside, between


def with_axes_moved(mesh: Mesh, axes: Sequence[str], *, outer: bool) -> Mesh:
    """Return the mesh with `axes` moved outside of all other axes (slow links), or inside of them, to compare the two
    placements of branch axes."""
    moved = tuple(pair for pair in mesh.shape if pair[0] in axes)
    others = tuple(pair for pair in mesh.shape if pair[0] not in axes)
    return Mesh(moved + others if outer else others + moved)
