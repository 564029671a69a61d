"""Plans next to a plan: one part of it changed, on as many workers. Which of them would gain most is estimated for all
in closed form, and the best are planned, measured and priced."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import inf

from platform.boundary.refusals import ConfigError
from platform.config.fields import Compose, Config
from platform.config.layout_map import axes_of
from platform.config.rules.left_open import OPEN
from platform.costs.machine import Hardware
from platform.plan.language.scheme import TENSOR_EXPERTS
from platform.plan.schedule.generators import ONE_CHUNK
from platform.planning.make_plan import plan_quickly
from platform.planning.memory_budget import needed_bytes
from platform.planning.search.best import Field
from platform.planning.search.choice import (
    MOST_CHUNKS,
    MOST_SEQUENCES,
    RECOMPUTE,
    SCHEDULES,
    SCHEMES,
    ZERO,
    Contender,
    Space,
)
from platform.planning.step_price import step_price

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
