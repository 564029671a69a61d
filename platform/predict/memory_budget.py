"""Memory that a configuration's plan needs per worker, in training and in answering.

`answer_bytes`: keys and values, passes of generation, and their logits, as a run scores its model by them between steps
(eval.tasks). Nothing of a training step is there meanwhile but parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from platform.config.fields import Config
from platform.config.ramps import fix_sequence_length
from platform.model import build_model
from platform.optimizer import optimizers
from platform.optimizer.optimizers import OptimizerUpdate, count_states_per_element, iterate_updated_parts
from platform.plan import generation_passes
from platform.plan.chunks import Chunk, RecordableModel
from platform.plan.generation_passes import HEAD, PIECE, SCORED, PassShape, PlannedPass, batch_rows, plan_pass
from platform.plan.operations.attention import KeyValueCache
from platform.plan.operations.op import Value
from platform.plan.plan import Plan
from platform.plan.schedule import Action, count_in_flight
from platform.plan.simulate import lower_schedule
from platform.plan.step_collectives import count_communicators, may_compile, resolve_auto_kernels
from platform.predict.choose_schedule import build_generation_model, build_short_schedule
from platform.predict.footprint import (
    Footprint,
    Measured,
    offloaded_bytes,
    overhead_bytes,
    predict_footprint,
    weight_bytes,
)
from platform.predict.meter import MemoryMeter
from platform.predict.recorded_passes import list_recorded_microbatches, reason_against_graphs


def scoring_shape(plan: Plan, length: int, source: int) -> PassShape:
    """Return the shape of the passes whose memory is predicted, which score texts of `length` tokens, as many as a pass
    of training has sequences. `source`: tokens that an encoder reads, 0 without."""
    tokens = min(SCORED, length)
    capacity = generation_passes.pad_cache_length(plan, length + 1)
    return PassShape(tokens, batch_rows(plan), capacity, tokens, reads=source > 0)


def answer_bytes(plan: Plan, model: RecordableModel, shape: PassShape, stage: int, device: str) -> int:
    """Return the peak bytes of generation passes of a `shape`, their key-value cache included, on a stage's worker that
    has a block of every tensor. `model`: the run's model, as passes of generation run it."""
    planned_pass, at = plan_pass(plan, model, shape, stage), {**plan.mesh.rank_coordinates(0), "stage": stage}
    meter = _build_meter(planned_pass.body, at, device, KeyValueCache(shape.capacity))
    for chunk in planned_pass.body.chunks:
        _count_pass(meter, model, planned_pass, chunk, chunk.number == plan.chunks[-1].number)
    return meter.ledger.peak


def _build_meter(plan: Plan, at: Mapping[str, int], device: str, cache: KeyValueCache | None = None) -> MemoryMeter:
    """Construct the memory meter of passes of generation on the worker at `at`, whose keys and values `cache` keeps."""
    meter = MemoryMeter(resolve_auto_kernels(plan, device, 0.0), 0.0, at, device, ahead=False)
    meter.grad, meter.cache = False, cache
    return meter


def _count_pass(
    meter: MemoryMeter, model: RecordableModel, planned_pass: PlannedPass, chunk: Chunk, last: bool
) -> None:
    """Count the memory of one chunk in a pass of generation and, if it is the `last`, of the head and of the
    probabilities of its logits."""
    flow = {name: meter.block(spec) for name, spec in chunk.receives}
    tokens = meter.allocate_data(chunk)
    inputs = {name: name for name in (*model.inputs, "positions", "begins")}
    meter.begin_forward(chunk)
    outputs = model.part(meter, inputs, {**planned_pass.missing, **flow}, chunk.units)
    if last:
        head = _build_meter(planned_pass.head, meter.at, meter.device)
        head.ledger = meter.ledger
        stream = meter.relayout_forward(outputs["stream"], planned_pass.joins)
        read, asked = (part.sizes["length"] for part in (planned_pass.body, planned_pass.head))
        flow = {"memory": None, "stream": Value(stream.storage, stream.elements // read * asked)}  # type: ignore[dict-item]
        _meter_probabilities(head, planned_pass, model.part(head, {}, flow, (HEAD,))["logits"])
    meter.end_pass()
    del tokens


def _meter_probabilities(meter: MemoryMeter, planned_pass: PlannedPass, logits: Value) -> None:
    """Count the memory of turning logits into probabilities, in the type of statistics, for which vocab is gathered."""
    gathered = meter.relayout_forward(logits, planned_pass.gathers)
    n = prod(planned_pass.head.local_shape(planned_pass.logits)) and gathered.elements
    wide = meter.widened(gathered.storage, n)
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
    def training_forecast(self) -> TrainingForecast:
        """Return the forecast of training steps alone."""
        return TrainingForecast(self.config, self.plan)

    @cached_property
    def _communicators_by_stage(self) -> list[tuple[int, int]]:
        """Return by stage the process groups and lines that its workers are in."""
        return count_communicators(self.plan)

    def predict_stage(self, stage: int) -> Footprint:
        """Return the predicted memory of one worker of a stage."""
        if stage not in self._found:
            stage_footprint = self.training_forecast.predict_stage(stage)
            if self.config.eval.tasks:
                answering = _predict_stage_while_scoring(self.config, self.plan, stage, stage_footprint)
                stage_footprint = max(stage_footprint, answering, key=lambda f: f.total_bytes)
            if self.training_forecast.device == "cuda":
                reserved = overhead_bytes(*self._communicators_by_stage[stage], stage_footprint.total_bytes)
                stage_footprint = replace(stage_footprint, reserved=reserved)
            self._found[stage] = stage_footprint
        return self._found[stage]

    @property
    def stage_footprints(self) -> list[Footprint]:
        """Return the predicted memory of one worker of every stage, in stage order."""
        return [self.predict_stage(stage) for stage in range(self.plan.num_stages)]

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that the worker takes that needs most."""
        return max(f.total_bytes for f in self.stage_footprints)

    @property
    def known_peak_bytes(self) -> int:
        """Return the bytes that the neediest worker takes of the stages that were asked for."""
        return max((f.total_bytes for f in self._found.values()), default=0)

    def exceeds_memory(self, memory: float) -> bool:
        """Return True if some worker needs more than so many bytes; the outer stages, which need most, come first."""
        last = self.plan.num_stages - 1
        stages = sorted(range(last + 1), key=lambda stage: stage not in (0, last))
        return any(self.predict_stage(stage).total_bytes > memory for stage in stages)


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
    def _schedule_rows(self) -> tuple[tuple[Action, ...], ...]:
        """Return by stage what it does in a step of fewer microbatches that takes as much."""
        return lower_schedule(
            build_short_schedule(self.config, self.config.parallel.data, self.plan.microbatches, self.plan.pairs_passes)
        )

    @cached_property
    def _plans_by_length(self) -> list[tuple[Plan, RecordableModel, str, Measured]]:
        """Return by length and `compiles` the plan as its device runs it, the model, and measured passes."""
        dropout, lengths = self.config.model.dropout, self.plan.plans_of_lengths
        configs = (fix_sequence_length(self.config, length_plan.sizes["length"]) for length_plan in lengths)
        plans = [resolve_auto_kernels(length_plan, self.device, dropout) for length_plan in lengths]
        models = (build_model(config.model) for config in configs)
        pairs, compiled = zip(plans, models, strict=True), list_compiled(self.config)
        return [(*pair, compiles, {}) for pair in pairs for compiles in compiled]

    def predict_stage(self, stage: int) -> Footprint:
        """Return the predicted memory of one worker of a stage."""
        moments, dropout = count_states_per_element(self.config), self.config.model.dropout
        how = dropout, self.device, _count_scratch_bytes(self.config, self.plan, stage)
        row = self._schedule_rows[stage]
        stage_footprints = (
            predict_footprint(length_plan, model, row, stage, moments, *how, measured, compiles)
            for length_plan, model, compiles, measured in self._plans_by_length
        )
        needed = max(stage_footprints, key=lambda f: f.total_bytes)
        if self.config.train.graphs != "on" or reason_against_graphs(self.config, self.plan, self.device):
            return needed
        return self._add_recorded_passes(needed, stage, how[-1])

    def _add_recorded_passes(self, needed: Footprint, stage: int, scratch: int) -> Footprint:
        """Return the memory `needed` by a stage's worker, with what each slot of recorded passes in flight needs for
        itself, and what updates or other passes take beside them."""
        c, count, slots = self.config, self.plan.microbatches, count_in_flight(self._schedule_rows[stage])
        sums = weight_bytes(self.plan, 0, {**self.plan.mesh.rank_coordinates(0), "stage": stage})["gradients"]
        in_flight, part = sum(slots.values()), self.plan.stage_part(stage)
        others = count - len(list_recorded_microbatches(part, c.parallel.overlap, count))
        activations = needed.activations * min(in_flight, max(1, others) * len(slots)) // in_flight
        passes = activations + needed.working + (needed.gradients if count == 1 else 0)
        beside = passes if others or c.eval.every or c.monitor.layers else scratch
        return replace(needed, gradients=sums, recorded=beside + (in_flight - 1) * needed.working)


def has_room_for_graphs(config: Config, plan: Plan, memory: float) -> bool:
    """Return True if a GPU of `memory` bytes has room for recorded passes, whose memory nothing else uses."""
    asks = replace(config, train=replace(config.train, graphs="on"), cluster=replace(config.cluster, device="cuda"))
    return not MemoryForecast(asks, plan).exceeds_memory(memory)


def predict_peak_bytes(config: Config, plan: Plan) -> int:
    """Return the predicted peak memory, in bytes, of the worker that needs most under a configuration's plan."""
    return MemoryForecast(config, plan).peak_bytes


def predict_host_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes that the worker that has most in host memory keeps there under the plan: activations, states."""
    offloads = plan.recompute.offload or plan.stored.offloads_states
    return max(f.host for f in predict_footprints(config, plan)) if offloads else 0


def predict_footprints(config: Config, plan: Plan) -> list[Footprint]:
    """Return the predicted memory of one worker of every pipeline stage under a plan, in stage order."""
    return MemoryForecast(config, plan).stage_footprints


def _predict_stage_while_scoring(config: Config, plan: Plan, stage: int, training: Footprint) -> Footprint:
    """Return the predicted memory of one worker of a stage while tasks score the run's model: parameters and optimizer
    state as in `training`, the prediction for a training step, and the bytes of passes of generation."""
    device = device_kind(config)
    plan = resolve_auto_kernels(plan, device, config.model.dropout)
    m = config.model
    source = (m.source_length or m.length) if m.kind == "encoder_decoder" else 0
    model, scored = build_generation_model(config, source), scoring_shape(plan, m.length, source)
    reading = replace(scored, tokens=min(PIECE, m.length), asked=1)  # a prompt, as many at a time
    most = max(answer_bytes(plan, model, shape, stage, device) for shape in (scored, reading))
    stays = training.host if device == "cpu" else 0
    return replace(training, gradients=0, in_flight=0, activations=stays, working=most)


def _count_scratch_bytes(config: Config, plan: Plan, stage: int) -> int:
    """Predict the temporary bytes of an optimizer update on a plan's stage, for a worker with all its blocks."""
    o, at = config.optimizer, {**plan.mesh.rank_coordinates(0), "stage": stage}
    update = OptimizerUpdate(plan.stage_part(stage), at, dict(iterate_updated_parts(plan, at)))
    return optimizers.scratch_bytes(o, update, device_kind(config))


def device_kind(config: Config) -> str:
    """Return the kind of device (cpu, cuda) to plan for: GPUs if the run asks for them, or names their type."""
    cluster = config.cluster
    return cluster.device if cluster.device != "auto" else "cuda" if cluster.gpu else "cpu"


def list_compiled(config: Config) -> list[str]:
    """Return every `compiles` of a MemoryMeter that steps of a configuration have, that of most steps first."""
    compiles = may_compile(config.train.compile, device_kind(config))
    # steps that follow activations run no block as one function
    return ["blocks", *["functions"] * (config.monitor.layers > 0)] if compiles else [""]


def weight_bytes_by_stage(config: Config, plan: Plan) -> list[int]:
    """Return a plan's bytes of parameters, gradients and optimizer state, by stage, on a device with all blocks."""
    moments, first = count_states_per_element(config), plan.mesh.rank_coordinates(0)
    places, beside = [{**first, "stage": stage} for stage in range(plan.num_stages)], device_kind(config) != "cpu"
    away = [sum(offloaded_bytes(plan, moments, at).values()) * beside for at in places]
    return [sum(weight_bytes(plan, moments, at).values()) - n for at, n in zip(places, away, strict=True)]
