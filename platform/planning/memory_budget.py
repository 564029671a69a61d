"""Memory that a configuration's plan needs per worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from platform.plan.memory.measured_passes import Measured
from platform.plan.memory.metered_pass import answer_bytes, reading_shape, scoring_shape
from platform.plan.memory.worker_bytes import weight_bytes
from platform.plan.schedule.lowering import lower
from platform.planning.answering import answering_model
from platform.planning.choose_schedule import short_schedule


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
    return [replace(f, reserved=reserved_bytes(*n, f.total)) for f, n in zip(found, communicators(plan), strict=True)]


def training(config: Config, plan: Plan) -> list[Footprint]:
    """Predict the memory of one worker of every pipeline stage in a training step of a plan, in stage order: of the
    length of sequences that takes most, if they grow."""
    moments, lowered, dropout = (
        kept_numbers(config),
        lower(short_schedule(config, config.parallel.data, plan.microbatches)),
        config.model.dropout,
    )
    device, found = device_kind(config), []
    scratch = [_scratch(config, plan, stage) for stage in range(plan.stages)]
    for of_length in plan.of_lengths:
        model = build_model(at_length(config, of_length.sizes["length"]).model)
        made = settled(of_length, device, dropout)
        measured: Measured = {}
        rows = enumerate(lowered)
        found.append(
            [footprint(made, model, row, i, moments, dropout, device, scratch[i], measured) for i, row in rows]
        )
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


def weights(config: Config, plan: Plan) -> list[int]:
    """Return a plan's bytes of parameters, gradients and optimizer state, by stage, on a worker with all blocks."""
    moments, first = kept_numbers(config), plan.mesh.coordinates(0)
    return [sum(weight_bytes(plan, moments, {**first, "stage": stage}).values()) for stage in range(plan.stages)]
