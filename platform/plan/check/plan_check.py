"""Static check of a plan: `unsound` says, without running it, what of it would compute another number or hang.

Every tensor is followed through the steps of every operation, forward and backward, as a spread over the ranks: whole,
split or partial along each mesh axis (`platform.plan.check.spreads`). At the end of a training step each gradient must
have been summed once over each axis that left it partial, and each token's loss counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from math import prod

from platform.plan.check.operations_check import Walk, title_of
from platform.plan.check.spreads import WHOLE, Spread, Unsound, after, difference, plus
from platform.plan.core.buckets import Bucket
from platform.plan.core.plan import Plan
from platform.plan.language.ops import LOSSES, Parameter, Spec


def unsound(plan: Plan) -> list[str]:
    """List what of a plan would compute another number than one process, or hang: a line each, which names the
    operation, the tensor and the axis; [] for a sound plan, which has all stages."""
    lines = [f"at {n} tokens: {line}" for n, shorter in plan.shorter.items() for line in unsound(shorter)]
    lines += [line for check in (_tensors, _losses, _parameters, _buckets, _flows) for line in check(plan)]
    walk = Walk(plan)
    for chunk in plan.chunks:
        for (kind, name), planned in chunk.operations.items():
            try:
                walk.check(planned)
            except Unsound as error:
                lines.append(f"{kind} {name}: {error}")
    return lines


def _tensors(plan: Plan) -> Iterator[str]:
    """Yield a line per tensor with a dim that its axes do not divide, or an axis that splits two dims."""
    operations = (o.operation for chunk in plan.chunks for o in chunk.operations.values())
    tensors: dict[Spec | Parameter, None] = dict.fromkeys(t for o in operations for t in (*o.inputs, *o.outputs))
    for tensor in tensors:
        layout, sizes = plan.layout(tensor), plan.planner.sizes_of(tensor)
        for axis, times in Counter((*layout.axes, *layout.only)).items():
            if times > 1:
                yield f"{title_of(tensor)}: {axis} splits more than one dim"
        for dim, axes in layout.items():
            blocks = plan.mesh.extent(axes)
            if sizes[dim] < blocks or (sizes[dim] % blocks and not plan.planner.uneven(dim)):
                yield f"{title_of(tensor)}: {dim} of size {sizes[dim]} is split over {plan.mesh.extent(axes)} ranks"


def _losses(plan: Plan) -> Iterator[str]:
    """Yield a line per loss that is computed several times, or not summed over the ranks that have parts of it."""
    found = [(f"{kind} {name}", o) for c in plan.chunks for (kind, name), o in c.operations.items() if kind in LOSSES]
    for name, times in Counter(name for name, _ in found).items():
        if times > 1:
            yield f"{name}: the loss is computed in {times} chunks, so that it counts {times} times"
    counted = set(plan.loss_layout.axes)
    for name, o in found:
        for axis in sorted(set(o.tokens.axes) ^ counted):
            parts = "has parts" if axis in o.tokens.axes else "is whole"
            yield f"{name}: the loss {parts} along {axis}, unlike the loss that is summed over the ranks"
    held = plan.microbatches * plan.sizes["batch"]
    if held < plan.sequences:
        yield f"{plan.microbatches} microbatches have {held} sequences, and the loss is a mean over {plan.sequences}"


def _parameters(plan: Plan) -> Iterator[str]:
    """Yield a line per parameter that is held, gathered or summed elsewhere than the operations use it."""
    using: dict[str, set[int]] = defaultdict(set)
    for chunk in plan.chunks:
        for name in chunk.parameters:
            using[name].add(chunk.stage)
        for name in sorted(chunk.parameters.difference(*chunk.spans)):
            yield f"{name}: no span of chunk {chunk.number} has it, so that nothing gathers it there"
    for p in plan.parameters:
        if sorted(using[p.name]) != sorted(stages := plan.stages_of[p.name]):
            yield f"{p.name}: used in stages {sorted(using[p.name])}, its gradient is summed over {sorted(stages)}"
        for axis, times in Counter(plan.reductions[p.name]).items():
            if times > 1:
                yield f"{p.name}: its gradient is summed {times} times over {axis}"


def _buckets(plan: Plan) -> Iterator[str]:
    """Yield a line per parameter whose bucket sums its gradient otherwise than planned, or shards it otherwise."""
    times = Counter(p.name for bucket in plan.buckets for p in bucket.parameters)
    for p in plan.parameters:
        if times[p.name] != 1:
            yield f"{p.name}: its gradient lies in {times[p.name]} buckets"
    for bucket in plan.buckets:
        try:
            split = _reduced(plan, bucket)
        except Unsound as error:
            yield f"bucket of {bucket.name}: {error}"
            continue
        for p, size in zip(bucket.parameters, bucket.sizes, strict=True):
            layout = plan.layout(p)
            if set(bucket.axes) != set(plan.reductions[p.name]) or set(bucket.only) != set(layout.only):
                partial = plan.reductions[p.name]
                yield f"{p.name}: its bucket sums over {plus(bucket.axes)}, and it is partial over {plus(partial)}"
            if size != prod(plan.local_shape(p)):
                yield f"{p.name}: its block has {prod(plan.local_shape(p))} elements, its place in the bucket {size}"
            if sorted(plan.split_over(p)) != sorted((*layout.axes, *split)):
                counted, there = plus(plan.split_over(p)), plus((*layout.axes, *split))
                yield f"{p.name}: the norm counts it as split over {counted}, and it is over {there}"


def _reduced(plan: Plan, bucket: Bucket) -> tuple[str, ...]:
    """Return the axes that split a bucket's gradients after all their sums. Raises Unsound unless these are complete
    then, and the gathers of ZeRO join them again."""
    gradient = Spread({"elements": ()}, frozenset(bucket.axes), frozenset(bucket.only))
    each, last = plan.reduction(bucket)
    for step in (*each, *last):
        gradient = after(gradient, step)
    sharded = Spread({"elements": bucket.sharded}, frozenset(), gradient.only)
    if wrong := difference(gradient, sharded):
        raise Unsound(f"the gradient {wrong}")
    for step in plan.gathering(bucket):
        gradient = after(gradient, step)
    if wrong := difference(gradient, sharded._replace(split={"elements": ()})):
        raise Unsound(f"the gathered parameters: {wrong}")
    ranks = plan.mesh.extent(bucket.sharded)
    if bucket.shards != ranks or bucket.elements % ranks or bucket.elements < sum(bucket.sizes):
        raise Unsound(f"{bucket.elements} elements do not hold {sum(bucket.sizes)} in {ranks} equal shards")
    return sharded.split["elements"]


def _flows(plan: Plan) -> Iterator[str]:
    """Yield a line per activation that a chunk does not get as the one before sends it, or that ranks take for equal
    and it is not; and per matrix that is not whole for its update."""
    for before, chunk in pairwise(plan.chunks):
        if before.sends != chunk.receives:
            yield f"chunk {chunk.number} receives {chunk.receives}, and {before.sends} is sent"
    shared = [(spec, plan.shared_axes(spec)) for c in plan.chunks for _, spec in c.sends]
    shared += [(spec, plan.kept_axes(spec)) for c in plan.chunks for spec in c.kept]
    for spec, axes in dict.fromkeys(shared):
        spread = Spread.lying(spec.dims, plan.layout(spec))
        for axis in axes:
            if spread.along(axis) != WHOLE:
                yield f"{spec}: each rank along {axis} has a part of it for all, and it is {spread.said(axis)} there"
    for p in plan.parameters if plan.matrices else ():
        if p.name in plan.matrices:
            yield from _joined(plan, p)


def _joined(plan: Plan, p: Parameter) -> Iterator[str]:
    """Yield a line if a parameter that is updated as a whole matrix is not whole then."""
    spread = Spread.lying(p.dims, plan.layout(p))
    try:
        for step in plan.joining(p):
            spread = after(spread, step)
    except Unsound as error:
        yield f"{p.name}: {error}"
        return
    if wrong := difference(spread, Spread.lying(p.dims, plan.joined(p))):
        yield f"{p.name}: the matrix that is updated {wrong}"
