"""Which worker gets which rank in the next generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def seats(before: Sequence[int], alive: Sequence[int], nodes: Mapping[int, str], size: int, same: bool) -> list[int]:
    """The workers of ranks 0 .. size - 1.

    `before`: those of the generation before, by rank, lost ones too. `alive`: in the order in which they sit if nobody
    sat yet (node by node). `nodes`: the node of each, also of lost ones. `same`: the mesh stays as it was: then whoever
    has a rank keeps it, so that no state moves, and a lost one's goes to a spare, of the same node if there is one. On
    another mesh those who sat before sit first, in order: groups of neighbours stay inside nodes.

    | before    | alive         | size, mesh | ranks     |
    |-----------|---------------|------------|-----------|
    |           | 0 1 2 3       | 4          | 0 1 2 3   |
    | 0 1 2 3   | 0 2 3 4       | 4, same    | 0 4 2 3   |
    | 0 1 2 3   | 0 2 3         | 2, another | 0 2       |
    """
    assert size <= len(alive)
    if not same:
        warm = [n for n in alive if n in before] + [n for n in alive if n not in before]
        chosen = set(warm[:size])
        return [n for n in alive if n in chosen]
    assert size == len(before)
    spares = [n for n in alive if n not in before]
    found = []
    for worker in before:
        if worker not in alive:
            worker = next((n for n in spares if nodes[n] == nodes[worker]), spares[0])
            spares.remove(worker)
        found.append(worker)
    return found
