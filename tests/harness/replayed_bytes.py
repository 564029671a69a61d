"""Bytes of a training step as counters measure them: by the routing of its experts' rows, and by pairs of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from platform.plan.layout import is_at_index_zero
from platform.plan.model_types import Spec
from platform.plan.operation_plan import TRAFFIC, Collective, PlannedOperation, collective_label
from platform.plan.operations.experts import RowEnds
from platform.plan.plan import Plan
from platform.plan.scheme import Lent
from platform.plan.step_collectives import step_collectives
from platform.predict.tier_traffic import _count_launches, _iterate_pair_traffic
from platform.runtime.parallel_ops import SentRows

# Bytes of a training step by its routing: the plan's bytes, but for collectives of experts' rows.
#
# Of rows there are as many as tokens chose experts, and no more than the plan says.

# routing[rank][layer][pass]: the rows that a rank's tokens have at each expert, and that it sends to each rank of the
# exchange, one for a token that goes once to each; without a rank's other stages
Routing = Sequence[Mapping[str, Sequence[SentRows]]]


NONE_LENT: Mapping[str, Lent] = MappingProxyType({})


class _Layer(NamedTuple):
    """Numbers of rows in a pass of a layer: by rank, at its experts, and sent from its tokens to others' experts."""

    local: Mapping[int, int]
    away: Mapping[int, int]


def replay_traffic(plan: Plan, routing: Routing, lent: Mapping[str, Lent] = NONE_LENT) -> dict[str, int]:
    """Return the bytes that all workers together move in a training step with this `routing`, by `OP/AXES`, to the byte
    as the run's counters measure them. `plan`: the plan of all stages; `lent`: layer -> lent
    experts."""
    bytes_by_label: Counter[str] = Counter()
    for _, c, launches in step_collectives(plan):
        if not c.rows:
            bytes_by_label[collective_label(c.op, plan.mesh.order_axes(c.axes))] += launches * plan.traffic_bytes(c)
    for _, c, moved in moves_of_rows(plan, routing, lent):
        bytes_by_label[collective_label(c.op, plan.mesh.order_axes(c.axes))] += moved
    return {key: n for key, n in sorted(bytes_by_label.items()) if n}


def moves_of_rows(
    plan: Plan, routing: Routing, lent: Mapping[str, Lent] = NONE_LENT
) -> Iterator[tuple[str, Collective, int]]:
    """Yield (operation, collective, bytes that all workers move) for every collective of rows, and of experts that are
    `lent`, in the passes of a step with this `routing`."""
    for chunk in plan.chunks:
        passes: list[_Layer] = []
        for (kind, name), planned in chunk.operations.items():
            if kind == "dispatch_rows":
                lent_experts = lent.get(name, ())
                passes = list(_iterate_layer_passes(plan, planned, chunk.stage, routing, lent_experts))
            for c in planned.collectives:
                if c.rows:
                    twice = 2 if planned.operation.recomputed and c.phase == "forward" else 1
                    if c.op == "all_to_allv" and kind not in ("dispatch_rows", "combine_rows"):
                        moved = sum(map(len, lent_experts)) * sum(
                            _sum_row_widths(plan, c, layer_pass) for layer_pass in passes
                        )
                    else:
                        moved = sum(_count_moved_elements(plan, c, layer_pass) for layer_pass in passes)
                    yield f"{kind} {name}", c, twice * moved * plan.itemsize[c.dtype]


def _iterate_layer_passes(
    plan: Plan, planned: PlannedOperation, stage: int, routing: Routing, lent: Lent
) -> Iterator[_Layer]:
    """Yield the passes of a layer in the microbatches of a step, from the way of its tokens to their experts."""
    (spec, _), (out_spec,), mesh = planned.operation.inputs, planned.operation.outputs, plan.mesh
    assert isinstance(spec, Spec)
    ends, name = RowEnds.find_row_layout(plan.planner, spec, out_spec), planned.operation.name
    ranks = [r for r in range(mesh.world_size) if mesh.rank_coordinates(r)["stage"] == stage and name in routing[r]]
    seats = {rank: ends.exchange_seats(plan.planner, out_spec, rank) for rank in ranks}
    for number in range(len(routing[ranks[0]][name]) if ranks else 0):
        rows = {rank: routing[rank][name][number].by_expert for rank in ranks}
        by_rank = {rank: routing[rank][name][number].by_rank for rank in ranks}
        local_rows, sent_rows = {}, {}
        for rank, (axes, first, count) in seats.items():
            group, number = mesh.group_of_rank(rank, axes) if axes else (rank,), 0
            own_index, local_rows[rank] = group.index(rank), 0
            sent_rows[rank] = sum(by_rank[rank]) - by_rank[rank][own_index]
            for owner, begin in enumerate(first):
                for expert in range(begin, begin + count):
                    owners = sorted([owner, *(i for i, experts in enumerate(lent) if number in experts)])
                    for source, member in enumerate(group):
                        deal = dict(zip(owners, deal_rows(rows[member][expert], source, owners), strict=True))
                        local_rows[rank] += deal.get(own_index, 0)
                    number += 1
        yield _Layer(local_rows, sent_rows)


def deal_rows(rows: int, source: int, at: Sequence[int]) -> list[int]:
    """Return how many of a rank's `rows` of an expert go to each rank in `at`, all to `source` itself if it is one."""
    if source in at:
        return [rows if rank == source else 0 for rank in at]
    return [len(range((position - source) % len(at), rows, len(at))) for position in range(len(at))]


def _count_moved_elements(plan: Plan, c: Collective, layer_pass: _Layer) -> int:
    """Return the elements that all workers move in one launch of the collective `c` of a pass's rows."""
    mesh = plan.mesh
    if c.op == "all_to_allv":
        return sum(rows * _row_width(plan, c, rank) for rank, rows in layer_pass.away.items())
    groups = [
        group
        for group in mesh.list_groups(c.axes)
        if group[0] in layer_pass.local and is_at_index_zero(c.only, mesh.rank_coordinates(group[0]))
    ]
    return sum(
        TRAFFIC[c.op](len(group), layer_pass.local[group[0]] * _row_width(plan, c, group[0])) for group in groups
    )


def _sum_row_widths(plan: Plan, c: Collective, layer_pass: _Layer) -> int:
    """Return the elements of a row of the collective `c` on one rank of each of its groups in a pass, added up."""
    active_ranks = (rank for rank in layer_pass.local if is_at_index_zero(c.only, plan.mesh.rank_coordinates(rank)))
    return sum(_row_width(plan, c, rank) for rank in active_ranks) // plan.mesh.count_ranks(c.axes)


def _row_width(plan: Plan, c: Collective, rank: int) -> int:
    """Return the elements of a row of the collective `c` on a rank."""
    elements, coordinates = c.elements, plan.mesh.rank_coordinates(rank)
    for cut in c.cuts:
        elements = elements // cut.longest_extent() * cut.block_extent(plan.mesh, coordinates)
    return elements // c.rows


def pair_traffic(plan: Plan) -> dict[tuple[int, int], tuple[Fraction, Fraction]]:
    """Return the (messages, bytes) that each (sender, receiver) exchanges in one training step of a plan."""
    traffic: dict[tuple[int, int], tuple[Fraction, Fraction]] = {}
    for kind, (launches, size) in _count_launches(plan).items():
        for pair, messages, share in _iterate_pair_traffic(plan.mesh, kind):
            count, before = traffic.get(pair, (Fraction(), Fraction()))
            traffic[pair] = count + messages * launches, before + share * size
    return traffic
