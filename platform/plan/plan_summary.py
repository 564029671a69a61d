"""Summary of a plan: a table of layouts per region and a few lines of totals (`describe`), with the work of attention
on each rank, and the parts of a training step by name.

`count_scores_by_rank` counts the keys that a rank's queries see, by causality and windows: documents and padding are
not known to a plan. `fold_into_measured_parts` turns the parts of a predicted step into the ones that clocks measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from platform.plan.chunks import common_name
from platform.plan.layout import DIMS, Stretch, format_count
from platform.plan.model_types import AUTO, NF4
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.registry import OPERATIONS
from platform.plan.plan import Plan
from platform.plan.quantisation import ROLES
from platform.plan.step_collectives import communication, count_kernels


def count_scores_by_rank(plan: Plan) -> list[int]:
    """Return how many scores each rank of a context computes per head of a sequence, in mesh order; [] without."""
    attentions = [o for o in plan.attention_operations if "length" in o.operation.outputs[0].dims]
    return [sum(_count_keys_seen(plan, o, at) for o in attentions) for at in coordinates_of_context(plan)]


def coordinates_of_context(plan: Plan) -> list[dict[str, int]]:
    """Return the mesh coordinates of the ranks that share the plan's first sequences, in mesh order; [] without."""
    sizes, first = dict(plan.scheme.context), plan.mesh.rank_coordinates(0)
    places = (dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values())))
    return [{**first, **at} for at in places] if sizes else []


def attention_imbalance(plan: Plan) -> float:
    """Return the work of attention of the busiest rank of a context, in terms of the mean; 0 without contexts."""
    work = count_scores_by_rank(plan)
    return max(work) * len(work) / sum(work) if sum(work) else 0.0


def _count_keys_seen(plan: Plan, o: PlannedOperation, at: dict[str, int]) -> int:
    """Return how many keys a plan has all queries of an attention see on the rank at mesh coordinates `at`."""
    queries = plan.stretches_of_rank(o.operation.outputs[0], "length", at)
    keys = o.operation.inputs[OPERATIONS[o.operation.kind].keys_input]
    sizes = plan.planner.tensor_sizes(keys)
    if not o.operation["causal"]:
        return sum(q.size for q in queries) * sizes["memory_length" if "memory_length" in keys.dims else "length"]
    return sum(count_causal_keys(q, o.operation["window"]) for q in queries)


def count_causal_keys(queries: Stretch, window: int = 0) -> int:
    """Return how many keys a plan's causal queries at consecutive positions see, at most `window` each if not 0."""

    def count_keys_before(end: int) -> int:
        """Return how many keys the queries before position `end` see, as the attention is planned."""
        growing = min(end, window) if window else end
        return growing * (growing + 1) // 2 + (end - growing) * window

    return count_keys_before(queries.end) - count_keys_before(queries.first)


STAGES_SHOWN = 8


def _regions_shown(plan: Plan) -> list[str]:
    """Return the regions of a plan that its description shows: all but a core that is as attention."""
    regions = plan.region_layouts
    return [r for r in regions if r != "core" or regions[r] != regions["attention"]]


def describe(plan: Plan) -> str:
    """Return the short description of a plan that a run prints first: a table of layouts by region, and lines of
    totals."""
    regions = _regions_shown(plan)
    split = dict.fromkeys((*DIMS, *(d for r in regions for d in plan.scheme.regions[r])))
    dims = [d for d in split if d in plan.sizes and any(plan.scheme.regions[r][d] for r in regions)]
    rows = [["region", *dims]] + [[r, *("+".join(plan.scheme.regions[r][d]) or "-" for d in dims)] for r in regions]
    head, *rest = rows
    if zero := "+".join(plan.scheme.sub_grid_zero_axes):
        rows = [[*head, "only at"], *([*row, f"{zero}=0" if plan.scheme.regions[row[0]].only else "-"] for row in rest)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    title, parameters, step, moved = _lines_of_totals(plan)
    lines = [
        title,
        *(table if dims or zero else []),
        parameters,
        *(f"  {stage:<16}{units}" for stage, units in _stage_lines(plan)),
        *(f"  attention       {n} in kernel {kernel}" for kernel, n in count_kernels(plan).items() if kernel != AUTO),
        step,
        moved,
        *_format_attention_balance(plan),
        *(
            f"  {f'at length {length}':<16}{_describe_shorter_steps(shorter)}"
            for length, shorter in plan.shorter.items()
        ),
        *(f"  warning         {w}" for w in plan.warnings),
    ]
    return "\n".join(lines)


def _lines_of_totals(plan: Plan) -> tuple[str, str, str, str]:
    """Return the lines of a plan's description on its mesh, its parameters, its step and its communication."""
    moved, zero = communication(plan), "+".join(plan.scheme.sub_grid_zero_axes)
    largest = sorted(moved.items(), key=lambda kv: -kv[1])[:4]
    traffic = ", ".join(f"{k} {format_number(v)}B" for k, v in largest) or "none"
    more = f", and {len(moved) - 4} more" if len(moved) > 4 else ""
    most = "at most " if any(c.rows for o in plan.operations.values() for c in o.collectives) else ""
    elsewhere = ""
    if off := plan.coordinates_off_sub_grid:
        elsewhere = f", {plan.count_parameters_of_rank(off):,} where {zero}>0"
    return (
        f"plan  {format_count(plan.mesh.world_size, 'worker')} = {plan.mesh}; tensor "
        f"scheme {plan.scheme.name}; {plan.precision}{_describe_scaled_products(plan)}",
        f"  parameters      {plan.parameter_count:,} ({plan.local_parameter_count:,} per worker{elsewhere})"
        + _describe_sharding(plan)
        + _describe_quantised(plan),
        f"  step            {plan.tokens_per_step:,} tokens in {format_count(plan.microbatches, 'microbatch')}"
        f"{_describe_padding(plan)}; {format_number(plan.flops_per_token * plan.tokens_per_step)}FLOP",
        f"  communication   {most}{format_number(sum(moved.values()))}B per step: {traffic}{more}",
    )


def head_lines(plan: Plan, most: int) -> list[str]:
    """Return the totals of a plan, and at most so many of its warnings."""
    shown = [f"  warning         {w}" for w in plan.warnings[:most]]
    more = [f"  {format_count(len(plan.warnings) - most, 'warning')} more"] if len(plan.warnings) > most else []
    return [*_lines_of_totals(plan), *shown, *more]


def _format_attention_balance(plan: Plan) -> list[str]:
    """Return the line of a plan's description on how evenly ranks that share sequences divide attention, if any do."""
    if not (share := attention_imbalance(plan)):
        return []
    ranks, pieces = plan.mesh.count_ranks([axis for axis, _ in plan.scheme.context]), 2 * plan.scheme.rounds
    line = f"  work            the busiest of {ranks} ranks: {share:.2f} times the mean of attention's scores"
    return [line if pieces == 2 else f"{line}; {pieces} pieces each"]


def _describe_shorter_steps(plan: Plan) -> str:
    """Return what steps of shorter sequences cost, for the description of a plan: FLOP, and bytes communicated."""
    moved = sum(communication(plan).values())
    return f"{format_number(plan.flops_per_token * plan.tokens_per_step)}FLOP and {format_number(moved)}B per step"


def _stage_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return (stage, units of its chunks as `embedding .. layers.3 | layers.8`) for the description; [] for one stage,
    and of more than STAGES_SHOWN the first two and the last."""

    def shorten_units(units: Sequence[str]) -> str:
        """Return the units of a model chunk as text: the first and the last."""
        return units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]}"

    def stage_line(stage: int) -> tuple[str, str]:
        """Return the line of one stage in a plan's short description."""
        return f"stage {stage}", " | ".join(shorten_units(c.units) for c in plan.chunks if c.stage == stage)

    if plan.num_stages == 1:
        return []
    if plan.num_stages <= STAGES_SHOWN:
        return [stage_line(stage) for stage in range(plan.num_stages)]
    return [stage_line(0), stage_line(1), ("...", f"{plan.num_stages - 3} more"), stage_line(plan.num_stages - 1)]


def _describe_padding(plan: Plan) -> str:
    """Return the words on a step's padding sequences for the description, with its replicas; "" without padding."""
    dealt, replicas = plan.microbatches * plan.sizes["batch"], plan.num_replicas
    over = f" x {replicas} replicas" if replicas > 1 else ""
    return f"{over}, {dealt - plan.sequences} of {dealt} sequences are padding" if dealt > plan.sequences else ""


def _describe_quantised(plan: Plan) -> str:
    """Return the words on weights in 4 bits for the description; "" for none."""
    named = frozenset(plan.quantised)
    elements = sum(prod(plan.global_shape(p)) for p in plan.parameters if p.name in named)
    scales = "" if plan.quantised_kind == NF4 else ", scales in 8"
    return f"; {elements:,} in 4 bits (NF4{scales}), tables, head and vectors as they are" if named else ""


def _describe_scaled_products(plan: Plan) -> str:
    """Return the words on products in 8 bits for the description: how many, their scales, and of which weights not all
    three are; "" for none."""
    scaled = [(o, e) for o in plan.operations.values() for group in o.groups for e in group.einsums if e.scaled]
    if not scaled:
        return ""
    how, (products, parts) = scaled[0][1].scaled.how, (0, set[str]())  # type: ignore[union-attr]
    for o, e in scaled:
        assert e.scaled
        products += len(e.scaled.products)
        if left := [p for p in ROLES if p not in e.scaled.products and not (p == "weight" and e.frozen)]:
            parts.add(f"{' and '.join(left)} of {o.operation.name.split('.', 2)[-1]}")
    but = f"; not {', '.join(sorted(parts))}" if parts else ""
    return f", {products} products of {len(scaled)} weights in 8 bits with {how.title}{but}"


def _describe_gathers(plan: Plan) -> str:
    """Return the words on how ZeRO-3 gathers the weights of products in 8 bits for the description; "" for none."""
    kinds = [plan.find_gathered_tiles(stage) for stage in range(plan.num_stages)]
    others = {name: why for kind in kinds for name, why in kind.others.items()}
    reasons = dict.fromkeys(others.values())
    as_they_are = [
        f"; {common_name([n for n in others if others[n] == why])} gathered as they are: {why}" for why in reasons
    ]
    tiled = format_count(sum(len(kind.tiles) for kind in kinds), "weight")
    how = "in 8 bits" if plan.gathers_tiles else "as they are: quantise.gather"
    return (f"; {tiled} gathered {how}" if any(kind.tiles for kind in kinds) else "") + "".join(as_they_are)


def _describe_sharding(plan: Plan) -> str:
    """Return the words on the sharding of parameters or their updates (ZeRO) for the description; "" for none."""
    if not plan.sharded:
        return ""
    groups = dict.fromkeys("+".join(b.sharded) for b in plan.buckets if b.sharded)
    over = f"chunks over {' or '.join(groups)}"
    if plan.zero == 3:
        return f", kept in {over}{_describe_gathers(plan)}"
    return f", updated in {over} ({plan.count_masters_of_rank(plan.mesh.rank_coordinates(0)):,} per worker)"


def format_number(x: float) -> str:
    """Format a number with three digits and a decimal prefix: 1234567 -> '1.23 M'."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(x) < 999.5:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} Z"


def format_seconds(seconds: float) -> str:
    """Format a duration: "1.23 s", "45.6 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


COMPUTING, BUBBLE, HOST, OPTIMIZER, STREAMING = "computing", "bubble", "host", "optimizer", "streaming"
DATA, SNAPSHOT, REST = "data", "snapshot", "rest"  # measured, and not predicted
STAGE = "stage"


def waiting_part_name(axes: str) -> str:
    """Return the plan's name for the part of a step that waits for collectives along mesh `axes`, joined by "+"."""
    return f"waiting for {axes}"


def fold_into_measured_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return a planned step's parts as clocks have them: computing with `host`, the bubble with waits for `stage`."""
    measured = dict(parts)
    measured[COMPUTING] += measured.pop(HOST)
    measured[BUBBLE] += measured.pop(waiting_part_name(STAGE), 0.0)
    return measured
