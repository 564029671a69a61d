"""Collectives of one training step: of operations, between stages, of gradient reductions and parameter updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from platform.plan.communication.planned import Collective
from platform.plan.communication.traffic import label
from platform.plan.core.buckets import Bucket, moves
from platform.plan.core.chunks import Chunk
from platform.plan.core.factored import factor_collectives
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter, Spec

# fp64 numbers summed over the world once a step: loss and squared gradient norm, besides the loads of balanced experts
WORLD_SUMS = 2


def step_collectives(plan: Plan) -> list[tuple[str, Collective, int]]:
    """List every collective of one training step under a plan as (place, collective, launches per rank); the place
    names the operation, the pair of stages, or the part of the update.

    Only the ranks of one stage launch the collectives of an operation, of gradients and of updates, or a send.
    """
    return [(place, c, launches) for place, c, launches, _ in staged_collectives(plan)]


def staged_collectives(plan: Plan) -> Iterator[tuple[str, Collective, int, tuple[int, ...]]]:
    """Yield (place, collective, launches per rank, stages) for every collective of one training step under a plan, as
    `step_collectives` lists them, with the pipeline stages whose ranks launch it: for a send, the sending and the
    receiving stage."""
    for chunk in plan.chunks:
        here = (chunk.stage,)
        for (kind, name), o in chunk.operations.items():
            again = Counter(o.again)
            for c in o.collectives:
                twice = again[c] > 0
                again[c] -= twice
                yield f"{kind} {name}", c, plan.microbatches * (2 if twice else 1), here
        for spec, c in kept_gathers(plan, chunk):
            yield f"kept {spec}", c, plan.microbatches, here
    yield from _between_chunks(plan)


def _between_chunks(plan: Plan) -> Iterator[tuple[str, Collective, int, tuple[int, ...]]]:
    """Yield the collectives of `staged_collectives` between stages, and those once a step."""
    for before, after in zip(plan.chunks, plan.chunks[1:], strict=False):
        if before.stage != after.stage:
            for name, spec in before.sends:
                where = f"stage {before.stage} to {after.stage} {name}"
                for c, stages in transfer(plan, spec, before.stage, after.stage):
                    yield where, c, plan.microbatches, stages
    for stage in dict.fromkeys(c.stage for c in plan.chunks):
        for found in bucket_collectives(plan.at(stage)):
            yield found.place, found.collective, found.launches, (stage,)
        for c in factor_collectives(plan.at(stage)):
            yield "factors", c, 1, (stage,)
    for name, (owner, *others) in plan.tied.items():
        bucket = plan.at(owner).bucket_of[name]
        c = Collective("send", ("stage",), bucket.shard_elements, "accumulate", "reduce", bucket.only)
        for other in others:
            for stages in ((other, owner), (owner, other)):
                yield f"tied {name}", c, 1, stages
    if world := plan.mesh.ordered(plan.mesh.axes):
        loads = len(plan.balanced) * plan.sizes.get("experts", 0)
        c = Collective("all_reduce", world, WORLD_SUMS + loads, "metrics", "reduce")
        yield "loss and norm", c, 1, tuple(range(plan.stages))


def kept_gathers(plan: Plan, chunk: Chunk) -> Iterator[tuple[Spec, Collective]]:
    """Yield the gathers of inputs that a chunk's ranks have kept in parts, for recomputation, each with its type."""
    for spec in chunk.kept:
        if axes := plan.kept_axes(spec):
            n = plan.shared_elements(spec, axes)
            yield spec, Collective("all_gather", axes, n, "compute", "backward", plan.layout(spec).only)


class BucketCollective(NamedTuple):
    """Collective of a stage's parameters, its launches per rank, and the `parameters` of `bucket` that it moves."""

    place: str
    collective: Collective
    launches: int
    bucket: Bucket
    parameters: Sequence[Parameter]


def bucket_collectives(plan: Plan) -> Iterator[BucketCollective]:
    """Yield the collectives of one stage's parameters: the sums of gradients, and the gathers of compute copies, once a
    step (ZeRO-1 and 2) or in every pass (ZeRO-3).

    The collectives of updates made of whole matrices (`Plan.matrices`) are `matrices`. `plan`: the plan of that stage,
    see `Plan.at`.
    """
    launches = plan.planner.launches
    passes = Counter(id(b) for spans in plan.resident.values() for b in {id(b): b for s in spans for b in s}.values())
    for b in plan.buckets:
        each, last = plan.reduction(b)
        shape = (b.shards, b.shard_elements)
        for c in launches(each, shape, "backward", "compute"):
            yield BucketCollective("gradients", c, plan.microbatches * passes[id(b)], b, b.parameters)
        for c in launches(last, (1, shape[1]) if each else shape, "reduce", "accumulate"):
            yield BucketCollective("gradients", c, 1, b, b.parameters)
    for b in plan.buckets:
        matrices = [p for p in b.parameters if p.name in plan.matrices]
        if matrices:
            for c in launches(plan.gathering(b), (b.shard_elements,), "update", "accumulate"):
                yield BucketCollective("matrices", c, 1, b, b.parameters)
        for p in matrices:
            cuts = plan.planner.cuts(p, plan.layout(p))
            for c in launches(plan.joining(p), plan.local_shape(p), "update", "accumulate", cuts=cuts):
                yield BucketCollective("matrices", c, 1, b, [p])
    gathered = [("update", b, 1) for b in plan.buckets if not b.stored]
    for spans in plan.resident.values():
        for phase, buckets in zip(("forward", "backward"), moves(spans, plan.turns), strict=True):
            gathered += [(phase, b, plan.microbatches) for b in buckets if b.stored]
    for phase, b, times in gathered:
        for c in launches(plan.gathering(b), (b.shard_elements,), phase):
            yield BucketCollective("parameters", c, times, b, b.parameters)


def transfer(plan: Plan, spec: Spec, here: int, there: int) -> Iterator[tuple[Collective, tuple[int, ...]]]:
    """Yield the collectives that send one activation of a microbatch from stage `here` to the next, `there`, and its
    gradient back, with the gathers of its parts (scatter/gather optimization); and their stages, as
    `staged_collectives` does."""
    elements, axes, only = plan.sent_elements(spec), plan.shared_axes(spec), plan.layout(spec).only
    cuts = () if axes else plan.planner.cuts_of(spec, plan.layout(spec), spec.dims)  # parts have the longest's room
    for phase, (sender, receiver) in (("forward", (here, there)), ("backward", (there, here))):
        yield Collective("send", ("stage",), elements, "compute", phase, only, 0, cuts), (sender, receiver)
        if axes:
            yield Collective("all_gather", axes, elements, "compute", phase, only), (receiver,)


def communication(plan: Plan) -> dict[str, int]:
    """Return the bytes that all workers together move in one training step of a plan, by `OP/AXES` such as
    `all_reduce/data+t`, exactly as the run's counters will measure them."""
    out: dict[str, int] = defaultdict(int)
    for _, c, launches in step_collectives(plan):
        out[label(c.op, plan.mesh.ordered(c.axes))] += launches * plan.moved_bytes(c)
    return dict(sorted(out.items()))


def communicators(plan: Plan) -> list[tuple[int, int]]:
    """Return by pipeline stage in how many process groups along axes, the world included, and lines to other stages,
    each of one direction, a worker of it is."""
    if plan.mesh.size == 1:
        return [(0, 0)]
    groups = {plan.mesh.ordered(plan.mesh.axes), *process_groups(plan)}
    return [(len(groups), 2 * sum(stage in pair for pair in plan.neighbours)) for stage in range(plan.stages)]


def process_groups(plan: Plan) -> list[tuple[str, ...]]:
    """Return the mesh axes of all process groups of the plan's training steps, in one order on all ranks."""
    every = set[Collective]()
    for of_length in plan.of_lengths:
        planned = {id(o.collectives): o.collectives for chunk in of_length.chunks for o in chunk.operations.values()}
        every.update(c for some in planned.values() for c in some)  # equal layers share them
        every.update(c for chunk in of_length.chunks for _, c in kept_gathers(of_length, chunk))
        every.update(c for _, c, _, _ in _between_chunks(of_length))
    used = {plan.mesh.ordered(c.axes) for c in every if c.op != "send"}
    return sorted(used, key=lambda axes: (len(axes), axes))
