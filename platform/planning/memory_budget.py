"""Memory that a configuration's plan needs per worker, and whether workers of a given memory can hold it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from platform.config.fields import Config
from platform.config.ramps.length_ramp import at_length
from platform.model import build_model
from platform.optimizer.optimizers import OPTIMIZERS, kept_numbers
from platform.optimizer.scratch import Update, parts_of
from platform.plan.core.fused import settled
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import communicators
from platform.plan.memory.footprint import Footprint, footprint
from platform.plan.memory.hardware import reserved_bytes
from platform.plan.memory.metered_pass import answer_bytes, reading_shape, scoring_shape
from platform.plan.memory.worker_bytes import state_elements, weight_bytes
from platform.plan.schedule.generators import generate, representative_microbatches
from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import Schedule
from platform.planning.answering import answering_model
from platform.planning.choose_schedule import generator_of, schedule_of
from platform.planning.make_plan import make_plan


class MemoryBudget:
    """Memory budget of a worker, to check which candidate configurations fit. `memory`: bytes of a worker; inf:
    unknown, everything fits. The budget is at least what the plan of `config`, with which the run was started, needs by
    our count: the run fits, and the count is an estimate."""

    def __init__(self, config: Config, memory: float):
        """Set the budget to `memory` bytes per worker or, if more, what the plan of the run's own `config` needs."""
        self.memory = memory
        if memory < inf:
            plan = make_plan(config)
            self.memory = max(memory, needed_bytes(config, plan))
            self._state = state_elements(plan, kept_numbers(config))
            self._count, self._itemsize = plan.parameter_count, plan.itemsize

    def may_hold(self, config: Config) -> bool:
        """Return True if an even share of the candidate's parameters, gradients and optimizer state fits the budget of
        a worker; quick, as it makes no plan."""
        if self.memory == inf:
            return True
        split = prod((*config.tensor.axes.values(), *config.branch.axes.values(), config.pipeline.stages))
        zero, data = config.parallel.zero, config.parallel.data * config.parallel.context
        experts = config.parallel.experts  # divides at most all parameters
        master, compute = self._itemsize["master"], self._itemsize["compute"]
        updated = master * (self._count + self._state) / (data if zero else experts)
        used = master / (data if zero >= 2 else experts)
        used += (compute if compute != master else 0) / (data if zero == 3 else experts)
        return (updated + self._count * used) / split <= self.memory

    def holds(self, config: Config, plan: Plan) -> bool:
        """Return True if the predicted peak memory of every worker under a candidate's plan fits the budget."""
        if self.memory == inf:
            return True
        return max(_weights(config, plan)) <= self.memory and needed_bytes(config, plan) <= self.memory


def needed_bytes(config: Config, plan: Plan) -> int:
    """Return the predicted peak memory, in bytes, of the worker that needs most under a configuration's plan."""
    return max(footprints(config, plan), key=lambda f: f.total).total


def host_bytes(config: Config, plan: Plan) -> int:
    """Return the bytes of host memory in which the worker that has most there keeps activations under the plan."""
    return max(f.host for f in footprints(config, plan)) if plan.recompute.offload else 0


def footprints(config: Config, plan: Plan) -> list[Footprint]:
    """Return the predicted memory (`Footprint`) of one worker of every pipeline stage under the plan, in stage order:
    in a training step, or while tasks score its model, where that takes more; on a GPU with what its libraries
    reserve."""
    found = training(config, plan)
    if config.eval.tasks:
        pairs = zip(found, answering_memory(config, plan, found), strict=True)
        found = [max(pair, key=lambda f: f.total) for pair in pairs]
    if device_kind(config) != "cuda":
        return found
    return [replace(f, reserved=reserved_bytes(*communicators(plan, i), f.total)) for i, f in enumerate(found)]


def training(config: Config, plan: Plan) -> list[Footprint]:
    """Predict the memory of one worker of every pipeline stage in a training step of a plan, in stage order: of the
    length of sequences that takes most, if they grow."""
    moments, lowered, dropout = kept_numbers(config), lower(_schedule(config, plan)), config.model.dropout
    device, found = device_kind(config), []
    scratch = [_scratch(config, plan, stage) for stage in range(plan.stages)]
    for of_length in plan.of_lengths:
        model = build_model(at_length(config, of_length.sizes["length"]).model)
        made = settled(of_length, device, dropout)
        rows = enumerate(lowered)
        found.append([footprint(made, model, row, i, moments, dropout, device, scratch[i]) for i, row in rows])
    return [max(of_stage, key=lambda f: f.total) for of_stage in zip(*found, strict=True)]


def answering_memory(config: Config, plan: Plan, training: Sequence[Footprint]) -> list[Footprint]:
    """Return the predicted memory of one worker of every pipeline stage, in stage order, while tasks score the run's
    model (eval.tasks): parameters and optimizer state as in `training`, the prediction for a training step, and the
    bytes of passes of generation."""
    device = device_kind(config)
    plan = settled(plan, device, config.model.dropout)
    m = config.model
    source = (m.source_length or m.length) if m.kind == "encoder_decoder" else 0
    model, scored = answering_model(config, source), scoring_shape(plan, m.length, source)
    shapes = (scored, reading_shape(scored, m.length))
    most = [max(answer_bytes(plan, model, shape, stage, device) for shape in shapes) for stage in range(plan.stages)]
    there = {"gradients": 0, "in_flight": 0}
    stays = [f.host if device == "cpu" else 0 for f in training]
    return [replace(f, **there, activations=h, working=n) for f, h, n in zip(training, stays, most, strict=True)]


def _scratch(config: Config, plan: Plan, stage: int) -> int:
    """Predict the temporary bytes of an optimizer update on a plan's stage, for a worker with all its blocks."""
    o, at = config.optimizer, {**plan.mesh.coordinates(0), "stage": stage}
    return OPTIMIZERS[o.kind].scratch(o, Update(plan.at(stage), at, dict(parts_of(plan, at))))


def device_kind(config: Config) -> str:
    """Return the kind of device (cpu, cuda) to plan for: GPUs if the run asks for them, or names their type."""
    cluster = config.cluster
    return cluster.device if cluster.device != "auto" else "cuda" if cluster.gpu else "cpu"


def _schedule(config: Config, plan: Plan) -> Schedule:
    """Return the pipeline schedule of a plan whose memory is predicted, or a shorter one of the same peak memory."""
    pipeline = config.pipeline
    if pipeline.kind == "file":
        return schedule_of(config, config.parallel.data)
    kind = "1f1b" if pipeline.kind == "none" else pipeline.kind
    few = representative_microbatches(kind, pipeline.stages, pipeline.chunks, plan.microbatches)
    return generate(kind, pipeline.stages, pipeline.chunks, few, generator_of(pipeline))


def _weights(config: Config, plan: Plan) -> list[int]:
    """Return a plan's bytes of parameters, gradients and optimizer state, by stage, on a worker with all blocks."""
    moments, first = kept_numbers(config), plan.mesh.coordinates(0)
    return [sum(weight_bytes(plan, moments, {**first, "stage": stage}).values()) for stage in range(plan.stages)]
