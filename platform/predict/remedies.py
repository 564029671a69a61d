"""Plans next to a plan: one part of it changed, on as many workers. Which of them would gain most is estimated for all
in closed form, and the best are planned, measured and priced.

`violation_of_memory` checks that a plan fits the memory of a device; `iterate_fitting_changes` finds the smallest
changes that make it fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import islice, product
from math import gcd, inf
from typing import Any

from platform.boundary.refusals import NEAREST, format_violation
from platform.boundary.terminal import show_phase
from platform.config.fields import Config, choose_quantisation
from platform.config.layout_rules import OPEN_KEYS, forbids_zero
from platform.optimizer.optimizers import list_further_offloads
from platform.plan.generators import ONE_CHUNK
from platform.plan.layout import find_divisors
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_number
from platform.predict.contender_grid import ContenderGrid, Rated
from platform.predict.contenders import (
    CHOOSABLE,
    MLP_CHUNKS,
    MOST_CHUNKS,
    SCHEDULES,
    SCHEMES,
    Contender,
    SearchSpace,
    leaves_stages_even,
)
from platform.predict.hardware import Hardware
from platform.predict.make_plan import plan_quickly
from platform.predict.memory_budget import (
    MemoryForecast,
    device_kind,
    predict_footprints,
    predict_host_bytes,
    predict_peak_bytes,
)
from platform.predict.search import plan_finalist
from platform.predict.step_price import step_price

SHOWN = 3  # changes
DEEP = 32  # layers, beyond which no more plans than are shown are priced: each takes milliseconds for a layer
CLEAR = 0.6  # of the memory: what is estimated to need less fits, and is not measured
LEAST = 0.005  # of a step's seconds: what is worth a change
CHEAP = ("microbatch", "recompute", "zero")  # parts of a plan that neither its workers nor its layout depend on
ALIKE = ("1d", "1d_sp")  # schemes of one axis, which change places


@dataclass(frozen=True)
class Change:
    """Change of a plan: overrides to be `typed`, the `seconds` of a step with them, and the bytes of the neediest
    worker, None if they are sure to fit."""

    typed: tuple[str, ...]
    seconds: float
    memory: int | None


def find_best_changes(config: Config, seconds: float, needed: float, memory: float, hardware: Hardware) -> list[Change]:
    """Return the changes of a configuration by which its plan would gain most, the best first: to fit `memory` bytes of
    a worker, if it needs more, else to take less than its `seconds` of a step on a hardware. If no change of one
    part makes it fit, changes of several CHEAP parts are tried, and the one with the least memory is returned if all
    fail."""
    if config.pipeline.kind not in SCHEDULES or config.plan.search:
        return []
    space = SearchSpace(_open_keys(config))
    current = space.read_contender()
    field = ContenderGrid(space, current.num_workers * space.branch_workers, memory, hardware)
    near = {c: None for c in _iterate_neighbours(current, space) if c != current and c.data % c.experts == 0}
    current_rated, *rated = field.estimate_choices([current, *near])
    least = current_rated.seconds if current_rated and needed <= memory else inf
    promising = sorted(one for one in rated if one and one.memory <= memory and one.seconds < least)
    most = SHOWN if config.model.layers > DEEP else 2 * SHOWN
    sure = CLEAR * memory if needed <= memory else 0.0

    def price_best(promising: Sequence[Rated]) -> list[Change]:
        """Plan and price the first contenders; return the changes that lead to them and have a legal plan."""
        planned = [(one, plan_finalist(space, one.choice, hardware)) for one in promising[:most]]
        changes = [
            Change(
                _list_overrides(current, f.choice, space), f.price.seconds, f.peak_memory if one.memory > sure else None
            )
            for one, f in planned
            if f
        ]
        return sorted(changes, key=lambda change: change.seconds)

    least = (1 - LEAST) * seconds if needed <= memory else inf
    gains = [c for c in price_best(promising) if (c.memory or 0) <= memory and c.seconds < least]
    if gains or needed <= memory:
        return gains[:SHOWN]
    cheap = filter(None, field.estimate_choices([*_iterate_cheap_changes(current, space)]))
    by_memory = sorted(cheap, key=lambda one: one.memory)
    fewest = sorted(
        by_memory, key=lambda one: (one.memory > memory, len(_list_overrides(current, one.choice, space)), one)
    )
    tried = price_best(fewest)
    fitting = [c for c in tried if (c.memory or 0) <= memory][:SHOWN]
    return fitting or _price_offload_changes(config, memory, hardware) or price_best(by_memory[:1])


def _price_offload_changes(config: Config, memory: float, hardware: Hardware) -> list[Change]:
    """Return the changes to optimizer.offload by which a plan fits `memory` bytes of a worker, the quickest first."""
    changes = []
    for typed, changed, _ in _iterate_offload_changes(config):
        plan = plan_quickly(changed)
        if plan and (needed := predict_peak_bytes(changed, plan)) <= memory:
            changes.append(Change((*typed.split(),), step_price(changed, plan, hardware).seconds, needed))
    return sorted(changes, key=lambda change: change.seconds)[:SHOWN]


def _open_keys(config: Config) -> Config:
    """Return the configuration with all keys open that a change may set."""
    opened = deepcopy(config)
    opened.plan.search = [key for key in OPEN_KEYS if key != "tensor" or config.tensor.scheme in SCHEMES]
    return opened


def _iterate_neighbours(current: Contender, space: SearchSpace) -> Iterator[Contender]:
    """Yield the contenders that differ in one part: in a key's value, or in a number moved by 2 from axis to axis."""
    for part, row in CHOOSABLE.items():
        yield from (replace(current, **{part: value}) for value in row.list_near(space, current))
    if current.scheme in ALIKE:
        yield replace(current, scheme=next(scheme for scheme in ALIKE if scheme != current.scheme))
    yield from _other_schedules(current, space.config.model.layers)
    yield from _iterate_axis_shifts(current, space.config)


def _iterate_cheap_changes(current: Contender, space: SearchSpace) -> Iterator[Contender]:
    """Yield the contenders that differ in CHEAP parts, one or several of them."""
    near = {part: [getattr(current, part), *CHOOSABLE[part].list_near(space, current)] for part in CHEAP}
    near["microbatch"] = [n for n in (current.microbatch, current.microbatch // 2, 1) if n]
    for values in product(*(dict.fromkeys(choices) for choices in near.values())):
        yield replace(current, **dict(zip(near, values, strict=True)))


def _other_schedules(current: Contender, layers: int) -> Iterator[Contender]:
    """Yield the contenders with other schedules of their stages, or other numbers of chunks."""
    if current.stages == 1:
        return
    most = min(MOST_CHUNKS, layers // current.stages)
    numbers = [n for n in range(1, most + 1) if leaves_stages_even(layers, current.stages, n)]
    for kind in SCHEDULES[1:]:
        chunks = [n for n in numbers if (n == 1) == (kind in ONE_CHUNK)]
        if kind == "zb_h1":
            chunks = [n for n in numbers if n in (1, current.chunks)]
        yield from (replace(current, kind=kind, chunks=n) for n in chunks)


def _iterate_axis_shifts(current: Contender, config: Config) -> Iterator[Contender]:
    """Yield the contenders that split one axis into half as many ranks and another one into twice as many."""
    names = [*range(len(current.axes)), "stages", "data", *(["context"] if current.context > 1 else [])]
    for less in names:
        halved = _scale_axis(current, less, 0.5)
        for more in names:
            if halved and more != less and (shifted := _scale_axis(halved, more, 2)):
                yield _adapt_schedule(shifted, config.model.layers)


def _scale_axis(choice: Contender, name: int | str, factor: float) -> Contender | None:
    """Return the contender with `factor` times as many ranks along one axis, None if it has no whole number of them."""
    n = choice.axes[name] if isinstance(name, int) else getattr(choice, name)
    if n * factor != int(n * factor):
        return None
    if isinstance(name, int):
        return replace(choice, axes=(*choice.axes[:name], int(n * factor), *choice.axes[name + 1 :]))
    scaled: dict[str, Any] = {name: int(n * factor)}
    return replace(choice, **scaled)


def _adapt_schedule(choice: Contender, layers: int) -> Contender:
    """Return the contender with a schedule that its number of stages takes."""
    if choice.stages == 1:
        return replace(choice, kind="none", chunks=1)
    kind = "1f1b" if choice.kind == "none" else choice.kind
    most = min(choice.chunks, layers // choice.stages)
    chunks = max((n for n in range(1, most + 1) if leaves_stages_even(layers, choice.stages, n)), default=1)
    return replace(choice, kind="1f1b" if kind == "interleaved" and chunks == 1 else kind, chunks=chunks)


def _list_overrides(current: Contender, other: Contender, space: SearchSpace) -> tuple[str, ...]:
    """Return the overrides by which one contender becomes another."""
    current_values, other_values = space.key_values(current), space.key_values(other)
    return tuple(f"{key}={value}" for key, value in other_values.items() if current_values.get(key) != value)


REMEDIES_SHOWN = 2  # fitting changes named to the user
LESS = 0.9  # of the memory that was not there
BEYOND = 1.25  # times the memory: what is forecast to need more does not fit, whatever the forecast is worth
LARGER = "take a smaller model=NAME, or more machines; `python -m platform.plan ... cluster.gpu=NAME` plans for GPUs"


@dataclass(frozen=True)
class Device:
    """Device that a worker computes on (a GPU, or a share of a host): its `memory` in bytes, and its `name` as the
    subject of messages."""

    memory: float
    name: str


def violation_of_memory(config: Config, plan: Plan, device: Device) -> str:
    """Return a line for the user if some worker of the plan needs more memory than the device has, naming the smallest
    changes of the configuration that fit (each one planned); else "". Pure."""
    stage_footprints = predict_footprints(config, plan)
    stage, most = max(enumerate(stage_footprints), key=lambda pair: pair[1].total_bytes)
    if most.total_bytes <= device.memory:
        return ""
    parts = {
        "parameters": most.parameters,
        "optimizer": most.optimizer,
        "gradients": most.gradients,
        f"activations of {most.in_flight} passes in flight": most.activations,
        "working": most.working,
        **({"beside recorded passes": most.recorded} if most.recorded else {}),
        **({"reserved": most.reserved} if most.reserved else {}),
    }
    shares = ", ".join(f"{name} {n / 1e9:.3g}" for name, n in parts.items())
    where = f"of stage {stage} " if plan.num_stages > 1 else ""
    reason = (
        f"a worker {where}needs {most.total_bytes / 1e9:.4g} GB ({shares}), "
        f"{device.name} has {device.memory / 1e9:.4g} GB"
    )
    weights = most.parameters + most.optimizer + most.gradients
    with show_phase("looking for changes that fit the memory"):
        fitting = _format_changes(iterate_fitting_changes(config, device.memory, weights))
    if not fitting and most.total_bytes > BEYOND * device.memory:
        reason += f"; no single change suffices: {LARGER}"
    legal = fitting or ([] if reason.endswith(LARGER) else ["warn"])
    return format_violation("cluster.memory", config.cluster.memory, reason, legal)


def violation_of_host_memory(config: Config, plan: Plan, node: Device, workers: int) -> str:
    """Return a refusal line for the user if a node has less host memory than so many workers of the plan are predicted
    to keep activations, states and masters in; else "". Pure."""
    needed = workers * predict_host_bytes(config, plan)
    if needed <= node.memory:
        return ""
    reason = f"{workers} workers keep {needed / 1e9:.4g} GB in host memory, {node.name} has {node.memory / 1e9:.4g} GB"
    if (word := plan.stored.offload) != "none":
        return format_violation("optimizer.offload", word, reason, ["none", *["states"] * (word != "states")])
    return format_violation("recompute_offload", True, reason, [False])


def describe_memory_remedies(config: Config, plan: Plan) -> str:
    """Return the end of a line for the user whose worker has no memory left under the plan: what it needs by our count,
    and the smallest changes of the configuration that need LESS of it. Pure."""
    needed = predict_peak_bytes(config, plan)
    fitting = ", ".join(_format_changes(iterate_fitting_changes(config, LESS * needed)))
    return f"; the plan needs {format_number(needed)}B of a worker by our count{NEAREST if fitting else ''}{fitting}"


def _format_changes(changes: Iterable[tuple[str, int]]) -> list[str]:
    """Format the first SHOWN of the configuration changes that fit the memory, with the neediest worker's bytes."""
    return [f"{change} ({format_number(n)}B)" for change, n in islice(changes, REMEDIES_SHOWN)]


def iterate_fitting_changes(config: Config, memory: float, weights: int = 0) -> Iterator[tuple[str, int]]:
    """Yield (change as the user types it, bytes that the neediest worker then needs) for changes of the configuration
    whose plan fits `memory` bytes per worker, from the cheapest changes to changes that take more workers. `weights`:
    bytes of parameters, gradients and optimizer state of a worker now; where these alone are too much, only changes
    that lessen them are tried."""
    for change, changed, for_weights in _iterate_changes(config):
        if weights > memory and not for_weights:
            continue  # weights alone are too much, and this change leaves them as they are
        plan = plan_quickly(changed)
        if plan and not (needs := MemoryForecast(changed, plan)).exceeds_memory(memory):
            yield change, needs.peak_bytes


def _iterate_changes(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield (change as the user types it, changed configuration, True if it lessens the bytes of weights) for changes
    that lessen a worker's memory, from the cheapest to changes that take more workers."""
    if (half := c.train.microbatch // 2) and c.pipeline.kind != "file":
        yield f"train.microbatch={half}", _replace_config_group(c, "train", microbatch=half), False
    if c.tensor.scheme == "1d":
        regions = {**c.tensor.regions, "stream": {"length": ["t"]}}
        yield "tensor=1d_sp", _replace_config_group(c, "tensor", scheme="1d_sp", regions=regions), False
    if c.parallel.data > 1 and not c.parallel.zero and not forbids_zero(c):
        yield "parallel.zero=1", _replace_config_group(c, "parallel", zero=1), True
    if c.tensor.gathered == "keep":
        yield "tensor.gathered=again", _replace_config_group(c, "tensor", gathered="again"), False
    yield from _iterate_recomputations(c)
    if half > 1 and c.pipeline.kind != "file":
        yield "train.microbatch=1", _replace_config_group(c, "train", microbatch=1), False
    if c.recompute != "full" and half and c.pipeline.kind != "file":
        yield (
            "train.microbatch=1 recompute=full",
            replace(_replace_config_group(c, "train", microbatch=1), recompute="full"),
            False,
        )
    if c.parallel.data > 1 and c.parallel.zero != 3 and not forbids_zero(c):
        yield "parallel.zero=3", (sharded := _replace_config_group(c, "parallel", zero=3)), True
        if c.pipeline.kind != "file":
            least = replace(_replace_config_group(sharded, "train", microbatch=1), recompute="full")
            yield "parallel.zero=3 train.microbatch=1 recompute=full", least, True
    yield from _iterate_offload_changes(c)
    yield from _iterate_expert_changes(c)
    for axis, n in c.tensor.axes.items():
        yield (
            f"tensor.axes.{axis}={2 * n}",
            _replace_config_group(c, "tensor", axes={**c.tensor.axes, axis: 2 * n}),
            True,
        )
    if c.parallel.context > 1 and c.parallel.context_kind in ("auto", "gather"):
        yield "parallel.context_kind=ring", _replace_config_group(c, "parallel", context_kind="ring"), False
    if c.parallel.context > 1 and c.parallel.context_kind == "nested":
        yield (
            "parallel.context_kind=nested_ring",
            _replace_config_group(c, "parallel", context_kind="nested_ring"),
            False,
        )
    for ranks in (n * c.parallel.context for n in (2, 4)):
        if c.model.length % ranks == 0:
            yield f"parallel.context={ranks}", _replace_config_group(c, "parallel", context=ranks), True
    for times in (2, 4):
        stages = times * c.pipeline.stages
        if c.pipeline.kind not in ("none", "file"):
            yield f"pipeline.stages={stages}", _replace_config_group(c, "pipeline", stages=stages), True
        elif c.pipeline.kind == "none":
            yield (
                f"pipeline=1f1b pipeline.stages={stages}",
                _replace_config_group(c, "pipeline", kind="1f1b", stages=stages),
                True,
            )


def _iterate_recomputations(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield changes, as `_iterate_changes` does, by which fewer activations are kept on the device."""
    if c.recompute == "none":
        yield "recompute=selective", replace(c, recompute="selective"), False
    if c.train.mlp_chunks == 1 and not choose_quantisation(c):
        yield f"train.mlp_chunks={MLP_CHUNKS}", _replace_config_group(c, "train", mlp_chunks=MLP_CHUNKS), False
    if c.recompute != "full":
        yield "recompute=full", replace(c, recompute="full"), False
    elif not c.recompute_offload and device_kind(c) == "cuda":
        yield "recompute_offload=true", replace(c, recompute_offload=True), False


def _iterate_offload_changes(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield changes, as `_iterate_changes` does, by which optimizer states or masters too lie in host memory."""
    for word in list_further_offloads(c) if device_kind(c) == "cuda" else ():
        offloading = _replace_config_group(c, "optimizer", offload=word)
        yield f"optimizer.offload={word}", offloading, True
        if c.recompute != "full" and c.pipeline.kind != "file":
            least = replace(_replace_config_group(offloading, "train", microbatch=1), recompute="full")
            yield f"optimizer.offload={word} train.microbatch=1 recompute=full", least, True


def _iterate_expert_changes(c: Config) -> Iterator[tuple[str, Config, bool]]:
    """Yield changes, as `_iterate_changes` does, that lessen the rows of experts in the worst routing."""
    if c.model.experts and not c.model.capacity_factor:
        shared = [n for n in find_divisors(gcd(c.model.experts, c.parallel.data)) if n > c.parallel.experts]
        if shared:
            yield f"parallel.experts={shared[0]}", _replace_config_group(c, "parallel", experts=shared[0]), True
        yield "model.capacity_factor=1.25", _replace_config_group(c, "model", capacity_factor=1.25), False


def _replace_config_group(config: Config, group: str, **values: Any) -> Config:
    """Return a changed configuration, a remedy for a plan that lacks memory: other `values` of keys in one `group`."""
    return replace(config, **{group: replace(getattr(config, group), **values)})
