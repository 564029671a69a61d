"""What workers of a given memory have room for."""

from __future__ import annotations

from math import inf, prod

from platform.config import Config
from platform.model import build as build_model
from platform.plan.memory import saved_for_backward, weight_bytes
from platform.plan.plan import Plan
from platform.plan.simulate import simulate
from platform.train.optimizers import OPTIMIZERS
from platform.train.pipeline import schedule_of
from platform.train.plan import make_plan


class Room:
    """`memory`: bytes of a worker; inf: not known, not asked. What the plan of `config` needs has room in any case: the
    run was started with it, and the count is a model."""

    def __init__(self, config: Config, memory: float):
        self.memory = memory
        if memory < inf:
            plan = make_plan(config)
            self.memory = max(memory, needed_bytes(config, plan))
            self._moments = OPTIMIZERS[config.optimizer.kind].moments
            self._count, self._itemsize = plan.parameter_count, plan.itemsize

    def may_hold(self, config: Config) -> bool:
        """Whether there is room for an even share of parameters, gradients and the optimizer's state: needs no plan."""
        if self.memory == inf:
            return True
        split = prod((*config.tensor.axes.values(), *config.branch.axes.values(), config.pipeline.stages))
        zero, data = config.parallel.zero, config.parallel.data
        master, compute = self._itemsize["master"], self._itemsize["compute"]
        updated = master * (1 + self._moments) / (data if zero else 1)
        used = (master + (compute if compute != master else 0)) / (data if zero == 3 else 1)
        return self._count * (updated + used) / split <= self.memory

    def holds(self, config: Config, plan: Plan) -> bool:
        if self.memory == inf:
            return True
        return max(_weights(config, plan)) <= self.memory and needed_bytes(config, plan) <= self.memory


def needed_bytes(config: Config, plan: Plan) -> float:
    """The most that a worker of the plan needs at once for parameters, gradients, the optimizer's state and what the
    schedule's live forward passes keep; buffers of collectives and of operations come on top."""
    model = build_model(config.model)
    live = simulate(schedule_of(config, config.parallel.data)).peak_live
    most = 0.0
    for stage, weights in enumerate(_weights(config, plan)):
        at = {**plan.mesh.coordinates(0), "stage": stage}
        saved = saved_for_backward(plan, model, config.model.dropout, at).total * plan.itemsize["compute"]
        most = max(most, weights + saved * live[stage] / len(plan.at(stage).chunks))
    return most


def _weights(config: Config, plan: Plan) -> list[int]:
    """By stage, of the worker that has a block of every tensor."""
    moments, first = OPTIMIZERS[config.optimizer.kind].moments, plan.mesh.coordinates(0)
    return [sum(weight_bytes(plan, moments, {**first, "stage": stage}).values()) for stage in range(plan.stages)]
