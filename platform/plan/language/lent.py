"""Lent experts: busy experts that ranks compute for others (redundant experts: DeepSeek-AI 2024, section 3.4), chosen
between steps by the load of the step before. They change where rows are computed, and no number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from platform.plan.language.scheme import Scheme

Lent = tuple[tuple[int, ...], ...]  # for each rank of a group, the experts of others that it computes too, in order


def lent_experts(load: Sequence[int], ranks: int, seats: int) -> Lent:
    """Return for each of `ranks`, which have the experts in equal blocks, up to `seats` experts of others that it
    computes too. `load`: tokens that chose each expert; an expert's are dealt evenly to the ranks that compute it.

    The busiest rank lends its busiest expert to the idlest rank with a free seat, as long as both are then less busy
    than it was. Example: lent_experts((6, 1, 1, 2), 2, 1) = ((3,), (0,)): 7 and 3 tokens become 5 and 5."""
    each = len(load) // ranks
    at = {expert: [expert // each] for expert in range(len(load))}
    lent: list[list[int]] = [[] for _ in range(ranks)]
    while found := _next(load, at, [rank for rank in range(ranks) if len(lent[rank]) < seats], ranks):
        expert, rank = found
        at[expert].append(rank)
        lent[rank].append(expert)
    return tuple(tuple(sorted(experts)) for experts in lent)


def lent_by_layer(layers: Sequence[str], loads: Sequence[float], scheme: Scheme) -> dict[str, Lent]:
    """Return `lent_experts` of each of `layers`, of whose loads in a step `loads` has one after another."""
    experts = len(loads) // len(layers)
    by_layer = (list(map(int, loads[i : i + experts])) for i in range(0, len(loads), experts))
    return {name: lent_experts(load, scheme.experts, scheme.lent) for name, load in zip(layers, by_layer, strict=True)}


def _next(
    load: Sequence[int], at: Mapping[int, Sequence[int]], free: Sequence[int], ranks: int
) -> tuple[int, int] | None:
    """Return the next expert to lend, and the rank, one of the `free`, that takes it; None if that helps no more.
    `at`: the ranks that compute each expert."""
    busy = [0.0] * ranks
    for expert, there in at.items():
        for rank in there:
            busy[rank] += load[expert] / len(there)
    most = max(range(ranks), key=lambda rank: (busy[rank], -rank))
    own = (expert for expert, there in at.items() if most in there and load[expert])
    for expert in sorted(own, key=lambda expert: (-load[expert] / len(at[expert]), expert)):
        share = load[expert] / (len(at[expert]) + 1)
        takers = [rank for rank in free if rank not in at[expert] and busy[rank] + share < busy[most]]
        if takers:
            return expert, min(takers, key=lambda rank: (busy[rank], rank))
    return None


def dealt(rows: int, source: int, at: Sequence[int]) -> list[int]:
    """Return how many of a rank's `rows` of an expert go to each rank in `at`, all to `source` itself if it is one."""
    if source in at:
        return [rows if rank == source else 0 for rank in at]
    return [len(range((place - source) % len(at), rows, len(at))) for place in range(len(at))]
