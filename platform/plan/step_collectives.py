"""Collectives of one training step: of operations, between stages, of gradient reductions and parameter updates; and
the kernels of its fused attentions.

- Counting: of ranks that have the same numbers, one counts them in sums over all ranks (`counts_at`).
- Factored second moments (Adafactor): sums over ranks of squares by row and by column (`factor_collectives`).
- Fused attentions: which kernels can compute them, and which ones torch chooses itself (`resolve_auto_kernels`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from platform.plan.chunks import Bucket, Chunk, buckets_to_gather
from platform.plan.model_types import NF4_BLOCK, NF4_PIECE, AttentionTraits, Parameter, Spec, resolve_auto_kernel
from platform.plan.operation_plan import Collective, PlannedOperation, collective_label
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan import Plan

Coordinates = Mapping[str, int]  # a rank's place: mesh axis -> index


def counts_at(at: Coordinates, axes: Iterable[str]) -> bool:
    """Return True if the rank at mesh coordinates `at` counts its part in a sum over all ranks (loss, gradient norm) of
    a quantity split over `axes` and replicated over all other axes of its stage: of the replicas, the one at index 0
    counts."""
    split = {"stage", *axes}
    return all(i == 0 for axis, i in at.items() if axis not in split)


def counts_gradient(plan: Plan, at: Coordinates, p: Parameter) -> bool:
    """Return True if the rank at mesh coordinates `at` counts its part of the gradient of `p` in a sum over all ranks:
    one of the ranks that replicate it does, in the owner stage if it is tied; none does if it is frozen. `plan`: the
    plan of the rank's stage."""
    is_owner = plan.stages_of[p.name][0] == at["stage"] and p.name not in plan.frozen
    return is_owner and counts_at(at, plan.master_split_axes(p))


def grad_norm_slices(plan: Plan, at: Coordinates) -> dict[str, list[slice]]:
    """Return, by the name of each bucket's first parameter, the slices of the rank's flat gradients (one shard of the
    bucket's buffer) that the rank at mesh coordinates `at` counts in the gradient norm (`counts_gradient`); adjacent
    slices are joined. `plan`: the plan of the rank's stage."""
    slices: dict[str, list[slice]] = {}
    for bucket in (plan.bucket_of_rank(bucket, at) for bucket in plan.buckets):
        before = plan.mesh.index_in_group(at, bucket.sharded) * bucket.shard_elements  # elements of other shards
        stretches = slices.setdefault(bucket.parameters[0].name, [])
        for p in bucket.parameters:
            start, stop = (bucket.parameter_ranges[p.name][0] + i - before for i in plan.shard_range(p, at))
            if start < stop and counts_gradient(plan, at, p):
                follows = stretches and stretches[-1].stop == start
                stretches.append(slice(stretches.pop().start if follows else start, stop))
    return slices


def factor_sum_sizes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return, by name of each trained parameter of a stage's plan, the sizes of the sums over ranks for an Adafactor
    update: one sum of squared weights, (1,); in `Plan.factored` also squared gradients by row and column of all its
    matrices, (rows, columns, 1)."""
    trained = [p for p in plan.parameters if p.name not in plan.frozen]
    return {p.name: (*matrix_sides(plan, p), 1) if p.name in plan.factored else (1,) for p in trained}


def matrix_sides(plan: Plan, p: Parameter) -> tuple[int, int]:
    """Return how many rows, and how many columns, the plan has of all matrices of a parameter together."""
    number, rows, columns = p.shape_as_matrices(plan.global_shape(p))
    return number * rows, number * columns


def summing_axes(plan: Plan) -> tuple[str, ...]:
    """Return the mesh axes over which the plan sums for Adafactor: all but `stage` that have more than one rank."""
    return plan.mesh.order_axes(a for a, n in plan.mesh.axes.items() if n > 1 and a != "stage")


def factor_collectives(plan: Plan) -> list[Collective]:
    """List the collectives of a stage's Adafactor update, none without `Plan.factored`: an all-reduce of the sums of
    `factor_sum_sizes`, and one of the sums of squares of each parameter's update."""
    axes, sizes = summing_axes(plan), factor_sum_sizes(plan)
    if not (plan.factored and axes and sizes):
        return []
    elements = sum(map(sum, sizes.values())), len(sizes)
    return [Collective("all_reduce", axes, n, "accumulate", "update") for n in elements]


def count_factors_of_rank(plan: Plan, at: Mapping[str, int]) -> int:
    """Return how many row and column second moments the worker at mesh coordinates `at` keeps for `Plan.factored`."""
    factored = [p for p in plan.stage_part(at["stage"]).parameters if p.name in plan.factored and plan.has_block(p, at)]
    ranges = [(p, *plan.shard_range(p, at)) for p in factored]
    return sum(sum(matrix_sides(plan, p)) for p, start, stop in ranges if start < stop)


# fp64 numbers summed over the world once a step: loss and squared gradient norm, besides losses of multi-token
# prediction and the loads of balanced experts
WORLD_SUMS = 2


def step_collectives(plan: Plan) -> list[tuple[str, Collective, int]]:
    """List every collective of one training step under a plan as (place, collective, launches per rank); the place
    names the operation, the pair of stages, or the part of the update.

    Only the ranks of one stage launch the collectives of an operation, of gradients and of updates, or a send.
    """
    return [(place, c, launches) for place, c, launches, _ in collectives_by_stage(plan)]


def collectives_by_stage(plan: Plan) -> Iterator[tuple[str, Collective, int, tuple[int, ...]]]:
    """Yield (place, collective, launches per rank, stages) for every collective of one training step under a plan, as
    `step_collectives` lists them, with the pipeline stages whose ranks launch it: for a send, the sending and the
    receiving stage."""
    for chunk in plan.chunks:
        stages = (chunk.stage,)
        for (kind, name), o in chunk.operations.items():
            again = Counter(o.collectives_launched_again)
            for c in o.collectives:
                twice = again[c] > 0
                again[c] -= twice
                yield f"{kind} {name}", c, plan.microbatches * (2 if twice else 1), stages
        for spec, c in recompute_gathers(plan, chunk):
            yield f"kept {spec}", c, plan.microbatches, stages
    yield from _collectives_between_chunks(plan)


def _collectives_between_chunks(plan: Plan) -> Iterator[tuple[str, Collective, int, tuple[int, ...]]]:
    """Yield the collectives of `collectives_by_stage` between stages, and those once a step."""
    for before, after in zip(plan.chunks, plan.chunks[1:], strict=False):
        if before.stage != after.stage:
            for name, spec in before.sends:
                where = f"stage {before.stage} to {after.stage} {name}"
                for c, stages in transfer_collectives(plan, spec, before.stage, after.stage):
                    yield where, c, plan.microbatches, stages
    for stage in dict.fromkeys(c.stage for c in plan.chunks):
        for entry in bucket_collectives(plan.stage_part(stage)):
            yield entry.place, entry.collective, entry.launches, (stage,)
        for c in factor_collectives(plan.stage_part(stage)):
            yield "factors", c, 1, (stage,)
    for name, (owner, *others) in plan.stages_of_tied_parameters.items():
        bucket = plan.stage_part(owner).bucket_by_parameter[name]
        c = Collective("send", ("stage",), bucket.shard_elements, "accumulate", "reduce", bucket.only)
        for other in others:
            for stages in ((other, owner), (owner, other)):
                yield f"tied {name}", c, 1, stages
    if world := plan.mesh.order_axes(plan.mesh.axes):
        loads = len(plan.load_dependent_routes) * plan.sizes.get("experts", 0)
        c = Collective("all_reduce", world, WORLD_SUMS + plan.depths_ahead + loads, "metrics", "reduce")
        yield "loss and norm", c, 1, tuple(range(plan.num_stages))


def recompute_gathers(plan: Plan, chunk: Chunk) -> Iterator[tuple[Spec, Collective]]:
    """Yield the gathers of inputs that a chunk's ranks have kept in parts, for recomputation, each with its type."""
    for spec in chunk.kept:
        if axes := plan.recompute_axes(spec):
            n = plan.elements_per_part(spec, axes)
            yield spec, Collective("all_gather", axes, n, "compute", "backward", plan.layout(spec).only)


# Bytes that kernels read and write for each element that they make of 4 bits, beside the number, and their number: its
# code, and if they are not compiled as one half an index of 4 bytes, and the value. Another copies the scales.
DECODED = {True: (0.5 + 3 * 4 / NF4_BLOCK, 2), False: (0.5 + 2 * 2 + 2 * 4 + 3 * 4 / NF4_BLOCK, 4)}


# The same of 8 bits that are gathered, and kernels for each weight: numbers of a shard are multiplied in fp32, cut off,
# rounded and copied, by factors that are laid out; what comes is copied and, if that is not compiled, multiplied in
# place.
ROUNDED, SPREAD = (4 + 2 * 4 + 4 + 3, 5), {True: (1, 2), False: (3, 3)}


def list_decodings(plan: Plan, chunk: Chunk, compiles: bool) -> Iterator[tuple[str, float, int]]:
    """Yield (phase, bytes moved, kernels) for each bucket in 4 or 8 bits of which a pass of a chunk makes numbers."""
    spans, (beside, kernels) = plan.buckets_by_chunk_span[chunk.number], DECODED[compiles]
    number = plan.itemsize["compute"]
    for phase, buckets in zip(("forward", "backward"), buckets_to_gather(spans, plan.turns), strict=True):
        for b in (b for b in buckets if b.quantised):
            moved, more = b.elements * (beside + number), 0
            if b.quantised > NF4_BLOCK:  # a scale as a byte, an index, a value, times one, plus one
                moved, more = moved + b.elements * (1 + 2 * 4 + 3 * 2 * 4) / NF4_BLOCK, 4
            yield phase, moved, (kernels + more) * -(-b.elements // NF4_PIECE["cuda"])
        for b in (b for b in buckets if b.tiles):
            times, launches = SPREAD[compiles]
            moved = b.shard_elements * (ROUNDED[0] + number) + b.elements * (1 + times * number)
            yield phase, moved, len(b.tiles) * (ROUNDED[1] + launches)


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
    see `Plan.stage_part`.
    """
    launches = plan.planner.collectives_of_steps
    passes = Counter(n for spans in plan.buckets_by_chunk_span.values() for n in {id(b) for s in spans for b in s})
    for b in plan.buckets:
        microbatch_steps, final_steps = plan.reduction_steps(b)
        shape = (b.shards, b.shard_elements)
        for c in launches(microbatch_steps, shape, "backward", "compute"):
            yield BucketCollective("gradients", c, plan.microbatches * passes[id(b)], b, b.parameters)
        for c in launches(final_steps, (1, shape[1]) if microbatch_steps else shape, "reduce", "accumulate"):
            yield BucketCollective("gradients", c, 1, b, b.parameters)
    for b in plan.buckets:
        matrices = [p for p in b.parameters if p.name in plan.matrices]
        if matrices:
            for c in launches(plan.gather_steps(b), (b.shard_elements,), "update", "accumulate"):
                yield BucketCollective("matrices", c, 1, b, b.parameters)
        for p in matrices:
            cuts = plan.planner.find_cuts(p, plan.layout(p))
            for c in launches(plan.matrix_gather_steps(p), plan.local_shape(p), "update", "accumulate", cuts=cuts):
                yield BucketCollective("matrices", c, 1, b, [p])
    gathered = [("update", b, 1) for b in plan.buckets if not b.frees_weights]
    for spans in plan.buckets_by_chunk_span.values():
        for phase, buckets in zip(("forward", "backward"), buckets_to_gather(spans, plan.turns), strict=True):
            gathered += [(phase, b, plan.microbatches) for b in buckets if b.frees_weights]
    for b in (b for b in plan.buckets if b.tiles):
        maxima = Collective("all_reduce", b.sharded, b.tile_count, "accumulate", "update", b.only)
        yield BucketCollective("parameters", maxima, 1, b, b.parameters)
    for phase, b, times in gathered:
        size, dtype = (b.narrow_shard_bytes, "bytes") if b.has_narrow_gather else (b.shard_elements, "compute")
        for c in launches(plan.gather_steps(b), (size,), phase, dtype):
            yield BucketCollective("parameters", c, times, b, b.parameters)


def transfer_collectives(
    plan: Plan, spec: Spec, source: int, target: int
) -> Iterator[tuple[Collective, tuple[int, ...]]]:
    """Yield the collectives that send one activation of a microbatch from stage `source` to the next, `target`, and its
    gradient back, with the gathers of its parts (scatter/gather optimization); and their stages, as
    `collectives_by_stage` does."""
    elements, axes, only = plan.sent_elements(spec), plan.scatter_axes(spec), plan.layout(spec).only
    # parts have the longest's room
    cuts = () if axes else plan.planner.cuts_among_dims(spec, plan.layout(spec), spec.dims)
    for phase, (sender, receiver) in (("forward", (source, target)), ("backward", (target, source))):
        yield Collective("send", ("stage",), elements, "compute", phase, only, 0, cuts), (sender, receiver)
        if axes:
            yield Collective("all_gather", axes, elements, "compute", phase, only), (receiver,)


def communication(plan: Plan) -> dict[str, int]:
    """Return the bytes that all workers together move in one training step of a plan, by `OP/AXES` such as
    `all_reduce/data+t`, exactly as the run's counters will measure them."""
    bytes_by_label: dict[str, int] = defaultdict(int)
    for _, c, launches in step_collectives(plan):
        bytes_by_label[collective_label(c.op, plan.mesh.order_axes(c.axes))] += launches * plan.traffic_bytes(c)
    return dict(sorted(bytes_by_label.items()))


def count_communicators(plan: Plan) -> list[tuple[int, int]]:
    """Return by pipeline stage in how many process groups along axes, the world included, and lines to other stages,
    each of one direction, a worker of it is."""
    if plan.mesh.world_size == 1:
        return [(0, 0)]
    groups = {plan.mesh.order_axes(plan.mesh.axes), *process_groups(plan)}
    return [(len(groups), 2 * sum(stage in pair for pair in plan.neighbour_stages)) for stage in range(plan.num_stages)]


def process_groups(plan: Plan) -> list[tuple[str, ...]]:
    """Return the mesh axes of all process groups of the plan's training steps, in one order on all ranks."""
    collectives = set[Collective]()
    for of_length in plan.plans_of_lengths:
        planned = {id(o.collectives): o.collectives for chunk in of_length.chunks for o in chunk.operations.values()}
        collectives.update(c for some in planned.values() for c in some)  # equal layers share them
        collectives.update(c for chunk in of_length.chunks for _, c in recompute_gathers(of_length, chunk))
        collectives.update(c for _, c, _, _ in _collectives_between_chunks(of_length))
    used = {plan.mesh.order_axes(c.axes) for c in collectives if c.op != "send"}
    return sorted(used, key=lambda axes: (len(axes), axes))


def find_fused_attentions(plan: Plan) -> Iterator[PlannedOperation]:
    """Yield the planned operations of all attentions that one kernel computes, in model order."""
    return (o for (kind, _), o in plan.operations.items() if OPERATIONS[kind].chooses_kernel)


def count_kernels(plan: Plan) -> dict[str, int]:
    """Count the attentions that one kernel computes, by the name of their kernel."""
    return dict(Counter(o.operation["kernel"] for o in find_fused_attentions(plan)))


def attention_traits(plan: Plan, fused: PlannedOperation, rate: float, deterministic: bool = False) -> AttentionTraits:
    """Return the traits that a plan gives a fused attention, which decide which kernels can compute it. `rate`: the
    model's dropout rate; `deterministic`: sums are to be taken in a fixed order."""
    operation = fused.operation
    query, _, value = operation.inputs[:3]
    d_kv, d_value = (plan.local_shape(t)[t.dims.index("d_kv")] for t in (query, value))
    return AttentionTraits(
        precision=plan.precision,
        d_kv=d_kv,
        bias=operation["biased"],
        mask=bool(operation.reads) or operation["window"] > 0,
        dropout=rate,
        grouped=_has_grouped_heads(plan, operation.name),
        deterministic=deterministic,
        d_value=0 if d_value == d_kv else d_value,
        capped="cap" in dict(operation.attributes),
    )


def _has_grouped_heads(plan: Plan, name: str) -> bool:
    """Return True if the plan gives the kernel of attention `name` fewer heads of K and V than of Q on every rank."""
    if not (expanded := plan.operations.get((Ops.expand_kv.kind, f"{name}.key"))) or not expanded.operation["grouped"]:
        return False
    kv_spec, heads_spec = expanded.operation.inputs[0], expanded.operation.outputs[0]
    assert isinstance(kv_spec, Spec)
    groups = plan.local_shape(kv_spec)[kv_spec.dims.index("kv_heads")]
    heads = plan.local_shape(heads_spec)[heads_spec.dims.index("heads")]
    heads_per_group = plan.planner.count_group_heads(kv_spec)
    return heads_per_group > 1 and heads == groups * heads_per_group


def may_compile(choice: str, device: str) -> bool:
    """Return True if plans for `device` (cpu, cuda) have functions of tensors compiled, by train.compile=`choice`."""
    return choice == "on" or (choice == "auto" and device == "cuda")


def resolve_auto_kernels(plan: Plan, device: str, dropout: float) -> Plan:
    """Return the plan settled for a kind of device (cpu, cuda): each kernel `auto` is the one that torch chooses.
    `dropout`: the model's rate."""

    def settle_kernel(planned: PlannedOperation) -> PlannedOperation:
        """Return the planned operation with the kernel that computes it in the plan, if it is a fused attention."""
        operation = planned.operation
        if not OPERATIONS[operation.kind].chooses_kernel:
            return planned
        kernel = resolve_auto_kernel(operation["kernel"], device, attention_traits(plan, planned, dropout))
        attributes = tuple((name, kernel if name == "kernel" else value) for name, value in operation.attributes)
        return replace(planned, operation=replace(operation, attributes=attributes))

    chunks = (replace(c, operations={k: settle_kernel(o) for k, o in c.operations.items()}) for c in plan.chunks)
    return replace(plan, chunks=tuple(chunks))
