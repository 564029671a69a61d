"""Check that a plan fits the memory of a device, and the smallest configuration changes that make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd
from typing import Any

from platform.boundary.refusals import NEAREST, violation
from platform.config.fields import Config
from platform.plan.core.plan import Plan
from platform.plan.language.numbers import divisors
from platform.plan.reports.describe import human
from platform.planning.make_plan import plan_quickly
from platform.planning.memory_budget import MemoryForecast, device_kind, footprints, host_bytes, needed_bytes

SHOWN = 2  # fitting changes named to the user
LESS = 0.9  # of the memory that was not there


@dataclass(frozen=True)
class Device:
    """Device that a worker computes on (a GPU, or a share of a host): its `memory` in bytes, and its `name` as the
    subject of messages."""

    memory: float
    name: str


def lack_of_memory(config: Config, plan: Plan, device: Device) -> str:
    """Return a line for the user if some worker of the plan needs more memory than the device has, naming the smallest
    changes of the configuration that fit (each one planned); else "". Pure."""
    found = footprints(config, plan)
    stage, most = max(enumerate(found), key=lambda pair: pair[1].total)
    if most.total <= device.memory:
        return ""
    parts = {
        "parameters": most.parameters,
        "optimizer": most.optimizer,
        "gradients": most.gradients,
        f"activations of {most.in_flight} passes in flight": most.activations,
        "working": most.working,
        **({"reserved": most.reserved} if most.reserved else {}),
    }
    shares = ", ".join(f"{name} {n / 1e9:.3g}" for name, n in parts.items())
    where = f"of stage {stage} " if plan.stages > 1 else ""
    reason = (
        f"a worker {where}needs {most.total / 1e9:.4g} GB ({shares}), {device.name} has {device.memory / 1e9:.4g} GB"
    )
    weights = most.parameters + most.optimizer + most.gradients
    fitting = _shown(fitting_changes(config, device.memory, weights))
    legal = [*fitting, *(["warn"] if not fitting else [])]
    return violation("cluster.memory", config.cluster.memory, reason, legal)


def lack_of_host_memory(config: Config, plan: Plan, node: Device, workers: int) -> str:
    """Return a refusal line for the user if a node with so many workers of the plan does not have the host memory that
    they keep activations in; else "". Pure."""
    needed = workers * host_bytes(config, plan)
    if needed <= node.memory:
        return ""
    reason = f"{workers} workers keep {needed / 1e9:.4g} GB in host memory, {node.name} has {node.memory / 1e9:.4g} GB"
    return violation("recompute_offload", True, reason, [False])


def more_room(config: Config, plan: Plan) -> str:
    """Return the end of a line for the user whose worker has no memory left under the plan: what it needs by our count,
    and the smallest changes of the configuration that need LESS of it. Pure."""
    needed = needed_bytes(config, plan)
    fitting = ", ".join(_shown(fitting_changes(config, LESS * needed)))
    return f"; the plan needs {human(needed)}B of a worker by our count{NEAREST if fitting else ''}{fitting}"


def _shown(changes: Iterable[tuple[str, int]]) -> list[str]:
    """Format the first SHOWN of the configuration changes that fit the memory, with the neediest worker's bytes."""
    return [f"{change} ({human(n)}B)" for change, n in islice(changes, SHOWN)]


def fitting_changes(config: Config, memory: float, weights: int = 0) -> Iterator[tuple[str, int]]:
    """Yield (change as the user types it, bytes that the neediest worker then needs) for changes of the configuration
    whose plan fits `memory` bytes per worker, from the cheapest changes to changes that take more workers. `weights`:
    bytes of parameters, gradients and optimizer state of a worker now; where these alone are too much, only changes
    that lessen them are tried."""
    for change, changed, for_weights in _changes(config):
        if weights > memory and not for_weights:
            continue  # weights alone are too much, and this change leaves them as they are
        plan = plan_quickly(changed)
        if plan and not (needs := MemoryForecast(changed, plan)).exceeds(memory):
            yield change, needs.needed


def _changes(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield (change as the user types it, changed configuration, True if it lessens the bytes of weights) for changes
    that lessen a worker's memory, from the cheapest to changes that take more workers."""
    if (half := c.train.microbatch // 2) and c.pipeline.kind != "file":
        yield f"train.microbatch={half}", _with(c, "train", microbatch=half), False
    if c.tensor.scheme == "1d":
        regions = {**c.tensor.regions, "stream": {"length": ["t"]}}
        yield "tensor=1d_sp", _with(c, "tensor", scheme="1d_sp", regions=regions), False
    if c.parallel.data > 1 and not c.parallel.zero and not c.branch.only:
        yield "parallel.zero=1", _with(c, "parallel", zero=1), True
    if c.tensor.gathered == "keep":
        yield "tensor.gathered=again", _with(c, "tensor", gathered="again"), False
    if c.recompute == "none":
        yield "recompute=selective", replace(c, recompute="selective"), False
    if c.recompute != "full":
        yield "recompute=full", replace(c, recompute="full"), False
    if c.recompute == "full" and not c.recompute_offload and device_kind(c) == "cuda":
        yield "recompute_offload=true", replace(c, recompute_offload=True), False
    if half > 1 and c.pipeline.kind != "file":
        yield "train.microbatch=1", _with(c, "train", microbatch=1), False
    if c.recompute != "full" and half and c.pipeline.kind != "file":
        yield "train.microbatch=1 recompute=full", replace(_with(c, "train", microbatch=1), recompute="full"), False
    if c.parallel.data > 1 and c.parallel.zero != 3 and not c.branch.only:
        yield "parallel.zero=3", _with(c, "parallel", zero=3), True
    yield from _fewer_rows(c)
    for axis, n in c.tensor.axes.items():
        yield f"tensor.axes.{axis}={2 * n}", _with(c, "tensor", axes={**c.tensor.axes, axis: 2 * n}), True
    if c.parallel.context > 1 and c.parallel.context_kind in ("auto", "gather"):
        yield "parallel.context_kind=ring", _with(c, "parallel", context_kind="ring"), False
    if c.parallel.context > 1 and c.parallel.context_kind == "nested":
        yield "parallel.context_kind=nested_ring", _with(c, "parallel", context_kind="nested_ring"), False
    for ranks in (n * c.parallel.context for n in (2, 4)):
        if c.model.length % ranks == 0:
            yield f"parallel.context={ranks}", _with(c, "parallel", context=ranks), True
    for times in (2, 4):
        stages = times * c.pipeline.stages
        if c.pipeline.kind not in ("none", "file"):
            yield f"pipeline.stages={stages}", _with(c, "pipeline", stages=stages), True
        elif c.pipeline.kind == "none":
            yield f"pipeline=1f1b pipeline.stages={stages}", _with(c, "pipeline", kind="1f1b", stages=stages), True


def _fewer_rows(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield changes, as `_changes` does, that lessen the rows of experts in the worst routing."""
    if c.model.experts and not c.model.capacity_factor:
        shared = [n for n in divisors(gcd(c.model.experts, c.parallel.data)) if n > c.parallel.experts]
        if shared:
            yield f"parallel.experts={shared[0]}", _with(c, "parallel", experts=shared[0]), True
        yield "model.capacity_factor=1.25", _with(c, "model", capacity_factor=1.25), False


def _with(config: Config, group: str, **values: Any) -> Config:
    """Return a changed configuration, a remedy for a plan that lacks memory: other `values` of keys in one `group`."""
    return replace(config, **{group: replace(getattr(config, group), **values)})
