"""Search for a layout, `tensor.layout=auto`: dims that each mesh axis splits, by the price of a step. It is the future
work of Shazeer et al. 2018.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import combinations, product

from platform.config.fields import Config
from platform.config.layout_rules import KNOWN_DIMS, parse_layout
from platform.plan.plan import Plan
from platform.predict.make_plan import list_refusals, make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.step_price import (
    choose_pricing_hardware,
    memory_of_worker,
    set_hardware_device,
    step_price,
    violations_of_hardware,
)

FOLLOWING = {"kv_heads", "memory_length", "experts", "slots"}  # dims that are split as another is, or by another key


def choose_layout(config: Config) -> str | None:
    """Return the layout over tensor.axes with the quickest predicted step, one that fits the memory if any does; "" if
    none splits anything; None if other keys are illegal."""
    if violations_of_hardware(config) or list_refusals(base := _lay_out(config, "")):
        return None
    plan, hardware = make_plan(base), choose_pricing_hardware(config)
    priced = []
    for layout in iterate_layouts(plan, config.tensor.axes):
        candidate = _lay_out(config, layout)
        if layout and not list_refusals(candidate):
            laid_out = make_plan(candidate)
            fits = predict_peak_bytes(candidate, laid_out) <= memory_of_worker(config, 0, hardware)
            priced.append((not fits, step_price(candidate, laid_out, hardware).seconds, layout))
    return min(priced, default=(False, 0.0, ""))[2]


def iterate_layouts(plan: Plan, axes: Mapping[str, int]) -> Iterator[str]:
    """Yield layouts of a plan's dims over axes, given by their sizes: each axis splits a largest set of dims that it
    divides and no two of which one tensor has, or none."""
    planned = (p.operation for p in plan.operations.values())
    tensors = [set(t.dims) for o in planned for t in (*o.inputs, *o.outputs)] + [set(p.dims) for p in plan.parameters]
    free = [dim for dim in KNOWN_DIMS if dim not in FOLLOWING and any(dim in tensor for tensor in tensors)]
    sets_by_axis = []
    for size in axes.values():
        dims = [dim for dim in free if plan.sizes[dim] % size == 0]
        apart = [
            set(some)
            for count in range(len(dims), 0, -1)
            for some in combinations(dims, count)
            if all(len(tensor & set(some)) < 2 for tensor in tensors)
        ]
        sets_by_axis.append([*(s for s in apart if not any(s < other for other in apart)), set[str]()])
    for chosen in product(*sets_by_axis):
        names = {dim: [axis for axis, dims in zip(axes, chosen, strict=True) if dim in dims] for dim in KNOWN_DIMS}
        yield ";".join(f"{dim}:{'+'.join(split)}" for dim, split in names.items() if split)


def _lay_out(config: Config, layout: str) -> Config:
    """Return a copy of a configuration with a layout, of one replica where their number is open."""
    copied = deepcopy(config)
    copied.tensor.layout, copied.tensor.order = layout, list(config.tensor.axes)
    copied.tensor.regions, copied.tensor.parameters = parse_layout(layout, config.tensor.axes) if layout else ({}, {})
    copied.parallel.data = max(1, config.parallel.data)
    set_hardware_device(copied)
    return copied
