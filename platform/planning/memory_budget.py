"""Memory that a configuration's plan needs per worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from platform.config.fields import Config
from platform.config.ramps.length_ramp import at_length
from platform.model import build_model
from platform.optimizer.optimizers import OPTIMIZERS, kept_numbers
from platform.optimizer.scratch import Update, parts_of
from platform.plan.core.chunks import RecordableModel
from platform.plan.core.fused import settled
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import communicators
from platform.plan.memory.footprint import Footprint, footprint
from platform.plan.memory.hardware import reserved_bytes
from platform.plan.memory.measured_passes import Measured
from platform.plan.memory.metered_pass import answer_bytes, reading_shape, scoring_shape
from platform.plan.memory.worker_bytes import weight_bytes
from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import Action
from platform.planning.answering import answering_model
from platform.planning.choose_schedule import short_schedule


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
