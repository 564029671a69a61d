"""Plans next to a plan: one part of it changed, on as many workers. Which of them would gain most is estimated for all
in closed form, and the best are planned, measured and priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd, inf
from typing import Any

from platform.boundary.refusals import NEAREST, ConfigError, violation
from platform.config.fields import Compose, Config
from platform.config.layout_rules import OPEN, axes_of
from platform.plan.generators import ONE_CHUNK
from platform.plan.layout import divisors
from platform.plan.plan import Plan
from platform.plan.plan_summary import human
from platform.plan.scheme import TENSOR_EXPERTS
from platform.predict.contenders import (
    MOST_CHUNKS,
    MOST_SEQUENCES,
    RECOMPUTE,
    SCHEDULES,
    SCHEMES,
    ZERO,
    Contender,
    Space,
)
from platform.predict.hardware import Hardware
from platform.predict.make_plan import plan_quickly
from platform.predict.memory_budget import MemoryForecast, device_kind, footprints, host_bytes, needed_bytes
from platform.predict.search import Field
from platform.predict.step_price import step_price

SHOWN = 3  # changes
DEEP = 32  # layers, beyond which no more plans than are shown are priced: each takes milliseconds for a layer
CLEAR = 0.6  # of the memory: what is estimated to need less fits, and is not measured
LEAST = 0.005  # of a step's seconds: what is worth a change
ALIKE = ("1d", "1d_sp")  # schemes of one axis, which change places


@dataclass(frozen=True)
class Change:
    """Change of a plan: overrides to be `typed`, the `seconds` of a step with them, and the bytes of the neediest
    worker, None if they are sure to fit."""

    typed: tuple[str, ...]
    seconds: float
    memory: int | None


def best_changes(
    config: Config, composed: Compose, seconds: float, needed: float, memory: float, hardware: Hardware
) -> list[Change]:
    """Return the changes of a configuration by which its plan would gain most, the best first: to fit `memory` bytes of
    a worker, if it needs more, else to take less than its `seconds` of a step on a hardware. `composed`: gives the
    configuration with a change."""
    if config.pipeline.kind not in SCHEDULES or config.plan.search:
        return []
    space, own = Space(_left_open(config)), _contender_of(config)
    field = Field(space, own.workers * space.branches, memory, hardware)
    near = [one for one in dict.fromkeys(_near_ones(own, config)) if one != own and one.data % one.experts == 0]
    here, *rated = field.estimated([own, *near])
    least = here.seconds if here and needed <= memory else inf
    wanted = sorted(one for one in rated if one and one.memory <= memory and one.seconds < least)
    most = SHOWN if config.model.layers > DEEP else 2 * SHOWN
    sure = CLEAR * memory if needed <= memory else 0.0
    changes = ((_overrides(own, one.choice, space), one.memory > sure) for one in wanted[:most])
    tried = (_tried(composed, config, typed, hardware, measured) for typed, measured in changes)
    least = (1 - LEAST) * seconds if needed <= memory else inf
    gains = [c for c in tried if c and (c.memory or 0) <= memory and c.seconds < least]
    return sorted(gains, key=lambda c: c.seconds)[:SHOWN]


def _tried(
    composed: Compose, config: Config, typed: tuple[str, ...], hardware: Hardware, measured: bool
) -> Change | None:
    """Plan and price a configuration with a change, `measured` if its memory is in doubt; None if it is refused."""
    try:
        changed = composed(typed)
    except ConfigError:
        return None
    changed.parallel.data = config.parallel.data if changed.parallel.data == -1 else changed.parallel.data
    if (plan := plan_quickly(changed)) is None:
        return None
    memory = needed_bytes(changed, plan) if measured else None
    return Change(typed, step_price(changed, plan, hardware).seconds, memory)


def _left_open(config: Config) -> Config:
    """Return the configuration with all keys open that a change may set."""
    found = deepcopy(config)
    whole = config.tensor.scheme in SCHEMES
    found.plan.search = [key for key in OPEN if key != "tensor" or whole]
    return found


def _contender_of(config: Config) -> Contender:
    """Return the contender that a configuration is."""
    t, p, q = config.tensor, config.pipeline, config.parallel
    axes = tuple(t.axes.get(axis, 1) for axis in axes_of(t))
    return Contender(
        t.scheme, axes, p.kind, p.stages, p.chunks, q.data, q.context, q.experts, config.train.microbatch,
        config.recompute, q.zero, q.tensor_experts,
    )  # fmt: skip


def _near_ones(own: Contender, config: Config) -> Iterator[Contender]:
    """Yield the contenders that differ in one part: a number doubled or halved, or moved by 2 from axis to axis."""
    for n in (own.microbatch // 2, own.microbatch * 2):
        if 1 <= n <= MOST_SEQUENCES:
            yield own._replace(microbatch=n)
    yield from (own._replace(recompute=kind) for kind in RECOMPUTE)
    yield from (own._replace(zero=stage) for stage in ZERO if own.data * own.context > 1 and not config.branch.only)
    if own.scheme in ALIKE:
        yield own._replace(scheme=next(scheme for scheme in ALIKE if scheme != own.scheme))
    yield from _other_schedules(own, config.model.layers)
    for n in (own.experts // 2, own.experts * 2):
        if n and config.model.experts and own.data % n == 0 and config.model.experts % n == 0:
            yield own._replace(experts=n)
    if config.model.experts:
        yield from (own._replace(tensor_experts=way) for way in TENSOR_EXPERTS)
    yield from _shifted(own, config)


def _other_schedules(own: Contender, layers: int) -> Iterator[Contender]:
    """Yield the contenders with other schedules of their stages, or other numbers of chunks."""
    if own.stages == 1:
        return
    numbers = [n for n in range(1, MOST_CHUNKS + 1) if layers % (own.stages * n) == 0]
    for kind in SCHEDULES[1:]:
        chunks = [n for n in numbers if (n == 1) == (kind in ONE_CHUNK)]
        if kind == "zb_h1":
            chunks = [n for n in numbers if n in (1, own.chunks)]
        yield from (own._replace(kind=kind, chunks=n) for n in chunks)


def _shifted(own: Contender, config: Config) -> Iterator[Contender]:
    """Yield the contenders that split one axis into half as many ranks and another one into twice as many."""
    names = [*range(len(own.axes)), "stages", "data", *(["context"] if own.context > 1 else [])]
    for less in names:
        halved = _scaled(own, less, 0.5)
        for more in names:
            if halved and more != less and (found := _scaled(halved, more, 2)):
                yield _with_schedule(found, config.model.layers)


def _scaled(choice: Contender, name: int | str, factor: float) -> Contender | None:
    """Return the contender with `factor` times as many ranks along one axis, None if it has no whole number of them."""
    n = choice.axes[name] if isinstance(name, int) else getattr(choice, name)
    if n * factor != int(n * factor):
        return None
    if isinstance(name, int):
        return choice._replace(axes=(*choice.axes[:name], int(n * factor), *choice.axes[name + 1 :]))
    return Contender(**{**choice._asdict(), name: int(n * factor)})


def _with_schedule(choice: Contender, layers: int) -> Contender:
    """Return the contender with a schedule that its number of stages takes."""
    if choice.stages == 1:
        return choice._replace(kind="none", chunks=1)
    kind = "1f1b" if choice.kind == "none" else choice.kind
    even = [n for n in range(1, choice.chunks + 1) if layers % (choice.stages * n) == 0]
    chunks = max(even, default=1)
    return choice._replace(kind="1f1b" if kind == "interleaved" and chunks == 1 else kind, chunks=chunks)


def _overrides(own: Contender, other: Contender, space: Space) -> tuple[str, ...]:
    """Return the overrides by which one contender becomes another."""
    here, there = space.keys(own), space.keys(other)
    return tuple(f"{key}={value}" for key, value in there.items() if here.get(key) != value)


# Check that a plan fits the memory of a device, and the smallest configuration changes that make it fit.

REMEDIES_SHOWN = 2  # fitting changes named to the user
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
    return [f"{change} ({human(n)}B)" for change, n in islice(changes, REMEDIES_SHOWN)]


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
