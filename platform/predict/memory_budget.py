"""Memory that a configuration's plan needs per worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm, prod

from platform.config.fields import Config
from platform.config.ramps import at_length
from platform.model import build_model
from platform.optimizer.optimizers import OPTIMIZERS, Update, kept_numbers, parts_of
from platform.plan.accelerators import reserved_bytes
from platform.plan.chunks import Chunk, RecordableModel
from platform.plan.generation_passes import (
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
from platform.plan.layout import Layout, padded
from platform.plan.operations.attention import KeyValueCache
from platform.plan.operations.op import Value
from platform.plan.plan import Plan
from platform.plan.rule import Conversion, relayout_steps
from platform.plan.schedule import Action
from platform.plan.simulate import lower
from platform.plan.step_collectives import communicators, settled
from platform.predict.choose_schedule import answering_model, short_schedule
from platform.predict.footprint import Footprint, Measured, footprint, weight_bytes
from platform.predict.meter import Meter

# Memory of answering on one worker: keys and values, passes of generation, and their logits, as a run scores its model
# by them between steps (eval.tasks). Nothing of a training step is there meanwhile but parameters and optimizer state.


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


@dataclass
class MemoryForecast:
    """Forecast of the memory that the workers of a `plan` need under its `config`, of one worker of every stage: in a
    training step, or while tasks score its model, where that takes more; on a GPU with what its libraries reserve. A
    stage's is made when it is asked for, so that whether all fit is often known after the first."""

    config: Config
    plan: Plan
    _found: dict[int, Footprint] = field(default_factory=dict)

    @cached_property
    def training(self) -> TrainingForecast:
        """Return the forecast of training steps alone."""
        return TrainingForecast(self.config, self.plan)

    @cached_property
    def _communicators(self) -> list[tuple[int, int]]:
        """Return by stage the process groups and lines that its workers are in."""
        return communicators(self.plan)

    def at(self, stage: int) -> Footprint:
        """Return the predicted memory of one worker of a stage."""
        if stage not in self._found:
            found = self.training.at(stage)
            if self.config.eval.tasks:
                found = max(found, _answering_at(self.config, self.plan, stage, found), key=lambda f: f.total)
            if self.training.device == "cuda":
                found = replace(found, reserved=reserved_bytes(*self._communicators[stage], found.total))
            self._found[stage] = found
        return self._found[stage]

    @property
    def footprints(self) -> list[Footprint]:
        """Return the predicted memory of one worker of every stage, in stage order."""
        return [self.at(stage) for stage in range(self.plan.stages)]

    @property
    def needed(self) -> int:
        """Return the bytes that the worker takes that needs most."""
        return max(f.total for f in self.footprints)

    def exceeds(self, memory: float) -> bool:
        """Return True if some worker needs more than so many bytes; the outer stages, which need most, come first."""
        stages = range(self.plan.stages)
        return any(self.at(stage).total > memory for stage in sorted(stages, key=lambda s: s not in (0, stages[-1])))


@dataclass
class TrainingForecast:
    """Forecast of the memory of one worker of every stage of a `plan` in a training step: of the length of sequences
    that takes most, if they grow."""

    config: Config
    plan: Plan

    @cached_property
    def device(self) -> str:
        """Return the kind of device that is planned for."""
        return device_kind(self.config)

    @cached_property
    def _rows(self) -> tuple[tuple[Action, ...], ...]:
        """Return by stage what it does in a step of fewer microbatches that takes as much."""
        return lower(short_schedule(self.config, self.config.parallel.data, self.plan.microbatches))

    @cached_property
    def _lengths(self) -> list[tuple[Plan, RecordableModel, Measured]]:
        """Return for each length the plan as its device runs it, the model, and the passes that were measured."""
        dropout, lengths = self.config.model.dropout, self.plan.of_lengths
        models = (build_model(at_length(self.config, of_length.sizes["length"]).model) for of_length in lengths)
        return [(settled(one, self.device, dropout), model, {}) for one, model in zip(lengths, models, strict=True)]

    def at(self, stage: int) -> Footprint:
        """Return the predicted memory of one worker of a stage."""
        moments, dropout = kept_numbers(self.config), self.config.model.dropout
        scratch = _scratch(self.config, self.plan, stage)
        found = (
            footprint(made, model, self._rows[stage], stage, moments, dropout, self.device, scratch, measured)
            for made, model, measured in self._lengths
        )
        return max(found, key=lambda f: f.total)


def needed_bytes(config: Config, plan: Plan) -> int:
    """Return the predicted peak memory, in bytes, of the worker that needs most under a configuration's plan."""
    return MemoryForecast(config, plan).needed


def host_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes of host memory in which the worker that has most there keeps activations under the plan."""
    return max(f.host for f in footprints(config, plan)) if plan.recompute.offload else 0


def footprints(config: Config, plan: Plan) -> list[Footprint]:
    """Return the predicted memory of one worker of every pipeline stage under a plan, in stage order."""
    return MemoryForecast(config, plan).footprints


def training(config: Config, plan: Plan) -> list[Footprint]:
    """Predict the memory of one worker of every pipeline stage in a training step of a plan, in stage order."""
    found = TrainingForecast(config, plan)
    return [found.at(stage) for stage in range(plan.stages)]


def answering_memory(config: Config, plan: Plan, training: Sequence[Footprint]) -> list[Footprint]:
    """Return the predicted memory of one worker of every stage while tasks score the run's model (eval.tasks)."""
    return [_answering_at(config, plan, stage, found) for stage, found in enumerate(training)]


def _answering_at(config: Config, plan: Plan, stage: int, training: Footprint) -> Footprint:
    """Return the predicted memory of one worker of a stage while tasks score the run's model: parameters and optimizer
    state as in `training`, the prediction for a training step, and the bytes of passes of generation."""
    device = device_kind(config)
    plan = settled(plan, device, config.model.dropout)
    m = config.model
    source = (m.source_length or m.length) if m.kind == "encoder_decoder" else 0
    model, scored = answering_model(config, source), scoring_shape(plan, m.length, source)
    shapes = (scored, reading_shape(scored, m.length))
    most = max(answer_bytes(plan, model, shape, stage, device) for shape in shapes)
    stays = training.host if device == "cpu" else 0
    return replace(training, gradients=0, in_flight=0, activations=stays, working=most)


def _scratch(config: Config, plan: Plan, stage: int) -> int:
    """Predict the temporary bytes of an optimizer update on a plan's stage, for a worker with all its blocks."""
    o, at = config.optimizer, {**plan.mesh.coordinates(0), "stage": stage}
    return OPTIMIZERS[o.kind].scratch(o, Update(plan.at(stage), at, dict(parts_of(plan, at))))


def device_kind(config: Config) -> str:
    """Return the kind of device (cpu, cuda) to plan for: GPUs if the run asks for them, or names their type."""
    cluster = config.cluster
    return cluster.device if cluster.device != "auto" else "cuda" if cluster.gpu else "cpu"


def weights(config: Config, plan: Plan) -> list[int]:
    """Return a plan's bytes of parameters, gradients and optimizer state, by stage, on a worker with all blocks."""
    moments, first = kept_numbers(config), plan.mesh.coordinates(0)
    return [sum(weight_bytes(plan, moments, {**first, "stage": stage}).values()) for stage in range(plan.stages)]
