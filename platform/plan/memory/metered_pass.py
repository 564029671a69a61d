"""Memory of answering on one worker: keys and values, passes of generation, and their logits, as a run scores its model
by them between steps (eval.tasks). Nothing of a training step is there meanwhile but parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm, prod

from platform.plan.communication.rule import Conversion, relayout_steps
from platform.plan.core.chunks import Chunk, RecordableModel
from platform.plan.core.fused import settled
from platform.plan.core.passes import (
    HEAD,
    PIECE,
    ROOM,
    SCORED,
    PassShape,
    PlannedPass,
    memory_unit,
    plan_pass,
    rows_at_once,
)
from platform.plan.core.plan import Plan
from platform.plan.language.layout import Layout, padded
from platform.plan.memory.meter import Meter
from platform.plan.operations.attention.cached import KeyValueCache
from platform.plan.operations.storages import Value


def scoring_shape(plan: Plan, length: int, source: int) -> PassShape:
    """Return the shape of the passes that score texts of `length` tokens, as many as a pass of training has sequences.
    `source`: tokens that an encoder reads, 0 without."""
    capacity = padded(length + 1, lcm(ROOM, memory_unit(plan.scheme, plan.mesh)))
    rows = padded(plan.sizes["batch"], rows_at_once(plan.scheme, plan.mesh))
    tokens = min(SCORED, length)
    return PassShape(tokens, rows, capacity, tokens, reads=source > 0)


def reading_shape(scored: PassShape, length: int) -> PassShape:
    """Return the shape of the passes that read prompts, with the batch and capacity of the passes of shape `scored`."""
    return PassShape(min(PIECE, length), scored.batch, scored.capacity, 1, scored.reads)


def answer_bytes(plan: Plan, model: RecordableModel, shape: PassShape, stage: int, device: str) -> int:
    """Return the peak bytes of generation passes of a `shape`, their key-value cache included, on a stage's worker that
    has a block of every tensor. `model`: the run's model, as passes of generation run it."""
    found, at = plan_pass(plan, model, shape, stage), {**plan.mesh.coordinates(0), "stage": stage}
    meter = _meter(found.body, at, device, KeyValueCache(shape.capacity))
    for chunk in found.body.chunks:
        _run(meter, model, found, chunk, chunk.number == plan.chunks[-1].number)
    return meter.ledger.peak


def _meter(plan: Plan, at: Mapping[str, int], device: str, cache: KeyValueCache | None = None) -> Meter:
    """Construct the memory meter of passes of generation on the worker at `at`, whose keys and values `cache` keeps."""
    meter = Meter(settled(plan, device, 0.0), 0.0, at, device, ahead=False)
    meter.grad, meter.cache = False, cache
    return meter


def _run(meter: Meter, model: RecordableModel, found: PlannedPass, chunk: Chunk, last: bool) -> None:
    """Count the memory of one chunk in a pass of generation and, if it is the `last`, of the head and of the
    probabilities of its logits."""
    flow = {name: meter.block(spec) for name, spec in chunk.receives}
    tokens = meter.data(chunk)
    inputs = {name: name for name in (*model.inputs, "positions", "begins")}
    meter.begin(chunk)
    out = model.part(meter, inputs, {**found.missing, **flow}, chunk.units)  # type: ignore[attr-defined]
    if last:
        head = _meter(found.head, meter.at, meter.device)
        head.ledger = meter.ledger
        stream = meter.forward(out["stream"], found.joins)
        asked = Value(stream.storage, stream.elements // found.body.sizes["length"] * found.head.sizes["length"])
        flow = {"memory": None, "stream": asked}  # type: ignore[dict-item]
        _choose(head, found, model.part(head, {}, flow, (HEAD,))["logits"])  # type: ignore[attr-defined]
    meter.end()
    del tokens


def _choose(meter: Meter, found: PlannedPass, logits: Value) -> None:
    """Count the memory of turning logits into probabilities, in the type of statistics, for which vocab is gathered."""
    planner, spec = found.head.planner, found.logits
    layouts = planner.layout(spec), Layout.of({"batch": planner.layout(spec)["batch"]})
    steps = Conversion(relayout_steps(spec.dims, *layouts), ())
    whole = meter.forward(logits, planner.shaped(steps, spec, *layouts))
    n = prod(found.head.local_shape(spec)) and whole.elements
    wide = meter.widened(whole.storage, n)
    del logits
    probabilities = meter.new(n, meter.wide)
    del wide, probabilities
