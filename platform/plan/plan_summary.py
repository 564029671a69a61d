"""The short description of a plan: a table of layouts per region and a few lines of totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from platform.plan.layout import DIMS, Stretch, count_of
from platform.plan.model_types import AUTO
from platform.plan.operation_plan import PlannedOperation
from platform.plan.plan import Plan
from platform.plan.step_collectives import communication, kernels_of

# Work of attention on each rank that shares sequences: how many keys its queries see, by causality and windows.
# Documents and padding are not known to a plan.


def attention_work(plan: Plan) -> list[int]:
    """Return how many scores each rank of a context computes per head of a sequence, in mesh order; [] without."""
    attentions = [o for o in plan.attentions if "length" in o.operation.outputs[0].dims]
    return [sum(_keys_seen(plan, o, at) for o in attentions) for at in ranks_of_context(plan)]


def ranks_of_context(plan: Plan) -> list[dict[str, int]]:
    """Return the mesh coordinates of the ranks that share the plan's first sequences, in mesh order; [] without."""
    sizes, first = dict(plan.scheme.context), plan.mesh.coordinates(0)
    places = (dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values())))
    return [{**first, **at} for at in places] if sizes else []


def unevenness(plan: Plan) -> float:
    """Return the work of attention of the busiest rank of a context, in terms of the mean; 0 without contexts."""
    work = attention_work(plan)
    return max(work) * len(work) / sum(work) if sum(work) else 0.0


def _keys_seen(plan: Plan, o: PlannedOperation, at: dict[str, int]) -> int:
    """Return how many keys all queries of an attention see on the rank at mesh coordinates `at`."""
    queries = plan.stretches(o.operation.outputs[0], "length", at)
    keys = o.operation.inputs[0 if o.operation.kind == "softmax" else 1]
    sizes = plan.planner.sizes_of(keys)
    if not o.operation["causal"]:
        return sum(q.size for q in queries) * sizes["memory_length" if "memory_length" in keys.dims else "length"]
    return sum(seen_by(q, o.operation["window"]) for q in queries)


def seen_by(queries: Stretch, window: int = 0) -> int:
    """Return how many keys causal queries at consecutive positions see, at most `window` each if not 0."""

    def until(end: int) -> int:
        """Return how many keys the queries before position `end` see."""
        growing = min(end, window) if window else end
        return growing * (growing + 1) // 2 + (end - growing) * window

    return until(queries.end) - until(queries.first)


STAGES_SHOWN = 8


def _regions(plan: Plan) -> list[str]:
    """Return the regions of a plan that its description shows: all but a core that is as attention."""
    regions = plan.regions
    return [r for r in regions if r != "core" or regions[r] != regions["attention"]]


def describe(plan: Plan) -> str:
    """Return the short description of a plan that a run prints first: a table of layouts by region, and lines of
    totals."""
    regions = _regions(plan)
    split = dict.fromkeys((*DIMS, *(d for r in regions for d in plan.scheme.regions[r])))
    dims = [d for d in split if d in plan.sizes and any(plan.scheme.regions[r][d] for r in regions)]
    head, *rest = rows = [["region", *dims]] + [
        [r, *("+".join(plan.scheme.regions[r][d]) or "-" for d in dims)] for r in regions
    ]
    if zero := "+".join(plan.scheme.sub_grid_zero):
        rows = [[*head, "only at"], *([*row, f"{zero}=0" if plan.scheme.regions[row[0]].only else "-"] for row in rest)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    title, parameters, step, moved = _totals(plan)
    lines = [
        title,
        *(table if dims or zero else []),
        parameters,
        *(f"  {stage:<16}{units}" for stage, units in _stages(plan)),
        *(f"  attention       {n} in kernel {kernel}" for kernel, n in kernels_of(plan).items() if kernel != AUTO),
        step,
        moved,
        *_evenness_of_work(plan),
        *(f"  {f'at length {length}':<16}{_cost_of_step(shorter)}" for length, shorter in plan.shorter.items()),
        *(f"  warning         {w}" for w in plan.warnings),
    ]
    return "\n".join(lines)


def _totals(plan: Plan) -> tuple[str, str, str, str]:
    """Return the lines of a plan's description on its mesh, its parameters, its step and its communication."""
    moved, zero = communication(plan), "+".join(plan.scheme.sub_grid_zero)
    traffic = ", ".join(f"{k} {human(v)}B" for k, v in sorted(moved.items(), key=lambda kv: -kv[1])[:4]) or "none"
    more = f", and {len(moved) - 4} more" if len(moved) > 4 else ""
    most = "at most " if any(c.rows for o in plan.operations.values() for c in o.collectives) else ""
    elsewhere = f", {plan.parameters_at(plan.elsewhere):,} where {zero}>0" if plan.elsewhere else ""
    return (
        f"plan  {count_of(plan.mesh.size, 'worker')} = {plan.mesh}; tensor scheme {plan.scheme.name}; {plan.precision}",
        f"  parameters      {plan.parameter_count:,} ({plan.local_parameter_count:,} per worker{elsewhere})"
        + _sharding(plan),
        f"  step            {plan.tokens_per_step:,} tokens in {count_of(plan.microbatches, 'microbatch')}"
        f"{_padding(plan)}; {human(plan.flops_per_token * plan.tokens_per_step)}FLOP",
        f"  communication   {most}{human(sum(moved.values()))}B per step: {traffic}{more}",
    )


def head_lines(plan: Plan, most: int) -> list[str]:
    """Return the totals of a plan, and at most so many of its warnings."""
    shown = [f"  warning         {w}" for w in plan.warnings[:most]]
    more = [f"  {count_of(len(plan.warnings) - most, 'warning')} more"] if len(plan.warnings) > most else []
    return [*_totals(plan), *shown, *more]


def _evenness_of_work(plan: Plan) -> list[str]:
    """Return the line of a plan's description on how evenly ranks that share sequences divide attention, if any do."""
    if not (share := unevenness(plan)):
        return []
    ranks, pieces = plan.mesh.extent([axis for axis, _ in plan.scheme.context]), 2 * plan.scheme.rounds
    line = f"  work            the busiest of {ranks} ranks: {share:.2f} times the mean of attention's scores"
    return [line if pieces == 2 else f"{line}; {pieces} pieces each"]


def _cost_of_step(plan: Plan) -> str:
    """Return what steps of shorter sequences cost, for the description of a plan: FLOP, and bytes communicated."""
    moved = sum(communication(plan).values())
    return f"{human(plan.flops_per_token * plan.tokens_per_step)}FLOP and {human(moved)}B per step"


def _stages(plan: Plan) -> list[tuple[str, str]]:
    """Return (stage, units of its chunks as `embedding .. layers.3 | layers.8`) for the description; [] for one stage,
    and of more than STAGES_SHOWN the first two and the last."""

    def shown(units: Sequence[str]) -> str:
        """Return the units of a model chunk as text: the first and the last."""
        return units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]}"

    def line(stage: int) -> tuple[str, str]:
        """Return the line of one stage."""
        return f"stage {stage}", " | ".join(shown(c.units) for c in plan.chunks if c.stage == stage)

    if plan.stages == 1:
        return []
    if plan.stages <= STAGES_SHOWN:
        return [line(stage) for stage in range(plan.stages)]
    return [line(0), line(1), ("...", f"{plan.stages - 3} more"), line(plan.stages - 1)]


def _padding(plan: Plan) -> str:
    """Return the words on a step's padding sequences for the description, with its replicas; "" without padding."""
    dealt, replicas = plan.microbatches * plan.sizes["batch"], plan.replicas
    over = f" x {replicas} replicas" if replicas > 1 else ""
    return f"{over}, {dealt - plan.sequences} of {dealt} sequences are padding" if dealt > plan.sequences else ""


def _sharding(plan: Plan) -> str:
    """Return the words on the sharding of parameters or their updates (ZeRO) for the description; "" for none."""
    if not plan.sharded:
        return ""
    groups = dict.fromkeys("+".join(b.sharded) for b in plan.buckets if b.sharded)
    over = f"chunks over {' or '.join(groups)}"
    return (
        f", kept in {over}"
        if plan.zero == 3
        else f", updated in {over} ({plan.masters_at(plan.mesh.coordinates(0)):,} per worker)"
    )


def human(x: float) -> str:
    """Format a number with three digits and a decimal prefix: 1234567 -> '1.23 M'."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(x) < 999.5:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} Z"


def shown_seconds(seconds: float) -> str:
    """Format a duration: "1.23 s", "45.6 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# The parts of a training step by name, as one predicts them and as clocks measure them.

COMPUTING, BUBBLE, HOST, OPTIMIZER = "computing", "bubble", "host", "optimizer"
DATA, SNAPSHOT, REST = "data", "snapshot", "rest"  # measured, and not predicted
STAGE = "stage"


def waiting_for(axes: str) -> str:
    """Return the name of the part of a step in which a rank waits for collectives along `axes`, joined by "+"."""
    return f"waiting for {axes}"


def measurable(parts: Mapping[str, float]) -> dict[str, float]:
    """Return predicted parts of a step as measured ones: computing includes `host`, the bubble waiting for `stage`."""
    found = dict(parts)
    found[COMPUTING] += found.pop(HOST)
    found[BUBBLE] += found.pop(waiting_for(STAGE), 0.0)
    return found
