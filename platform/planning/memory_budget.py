"""Memory that a configuration's plan needs per worker, and whether workers of a given memory can hold it."""

from __future__ import annotations

from math import inf, prod

from platform.config.fields import Config
from platform.model import build_model
from platform.optimizer.optimizers import kept_numbers
from platform.plan.core.fused import settled
from platform.plan.core.plan import Plan
from platform.plan.memory.footprint import Footprint, footprint
from platform.plan.memory.worker_bytes import weight_bytes
from platform.plan.schedule.generators import generate, representative_microbatches
from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import Schedule
from platform.planning.choose_schedule import schedule_of
from platform.planning.make_plan import make_plan


class MemoryBudget:
    """Memory budget of a worker: tells which candidate configurations fit. `memory`: bytes of a worker; inf: unknown,
    everything fits. The budget is at least what the plan of `config`, with which the run was started, needs by our
    count: the run fits, and the count is an estimate."""

    def __init__(self, config: Config, memory: float):
        self.memory = memory
        if memory < inf:
            plan = make_plan(config)
            self.memory = max(memory, needed_bytes(config, plan))
            self._moments = kept_numbers(config)
            self._count, self._itemsize = plan.parameter_count, plan.itemsize

    def may_hold(self, config: Config) -> bool:
        """Return True if an even share of the candidate's parameters, gradients and optimizer state fits the budget of
        a worker; quick, as it makes no plan."""
        if self.memory == inf:
            return True
        split = prod((*config.tensor.axes.values(), *config.branch.axes.values(), config.pipeline.stages))
        zero, data = config.parallel.zero, config.parallel.data
        master, compute = self._itemsize["master"], self._itemsize["compute"]
        updated = master * (1 + self._moments) / (data if zero else 1)
        used = master / (data if zero >= 2 else 1)
        used += (compute if compute != master else 0) / (data if zero == 3 else 1)
        return self._count * (updated + used) / split <= self.memory

    def holds(self, config: Config, plan: Plan) -> bool:
        """Return True if every worker's predicted peak under the candidate's plan fits the budget; weights alone are
        tried first."""
        if self.memory == inf:
            return True
        return max(_weights(config, plan)) <= self.memory and needed_bytes(config, plan) <= self.memory


def needed_bytes(config: Config, plan: Plan) -> int:
    """Return the predicted peak memory, in bytes, of the worker of the plan that needs most."""
    return max(footprints(config, plan), key=lambda f: f.total).total


def footprints(config: Config, plan: Plan) -> list[Footprint]:
    """Return the predicted memory (`Footprint`) of one worker of every pipeline stage under the plan, in stage
    order."""
    model, moments = build_model(config.model), kept_numbers(config)
    lowered, dropout = lower(_schedule(config, plan)), config.model.dropout
    device = device_kind(config)
    plan = settled(plan, device, dropout)
    return [footprint(plan, model, row, stage, moments, dropout, device) for stage, row in enumerate(lowered)]


def device_kind(config: Config) -> str:
    """Return the kind of device (cpu, cuda) for which a configuration is planned: GPUs if it asks for them, or names
    their type."""
    cluster = config.cluster
    return cluster.device if cluster.device != "auto" else "cuda" if cluster.gpu else "cpu"


def _schedule(config: Config, plan: Plan) -> Schedule:
    """Return the run's pipeline schedule, or one of fewer microbatches with the same peak memory, which is quicker to
    lower."""
    pipeline = config.pipeline
    if pipeline.kind == "file":
        return schedule_of(config, config.parallel.data)
    kind = "1f1b" if pipeline.kind == "none" else pipeline.kind
    few = representative_microbatches(kind, pipeline.stages, pipeline.chunks, plan.microbatches)
    return generate(kind, pipeline.stages, pipeline.chunks, few)


def _weights(config: Config, plan: Plan) -> list[int]:
    """Return, by pipeline stage, the bytes of parameters, gradients and optimizer state on the stage's worker that has
    a block of every tensor."""
    moments, first = kept_numbers(config), plan.mesh.coordinates(0)
    return [sum(weight_bytes(plan, moments, {**first, "stage": stage}).values()) for stage in range(plan.stages)]
