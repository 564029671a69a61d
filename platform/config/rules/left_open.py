"""Keys that the planner chooses, where a configuration has `auto` or -1: they are noted in `plan.search`, and have
legal values until a plan is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from platform.boundary.refusals import closest, violation
from platform.config.bounds import set_value
from platform.config.fields import Config
from platform.config.layout_map import axes_of

AUTO, ALL = "auto", "all"
# key that may be left open -> what stands there until the planner has chosen
OPEN = {
    "tensor": "serial",
    "tensor.axes": 1,
    "pipeline": "none",
    "pipeline.stages": 1,
    "pipeline.chunks": 1,
    "parallel.data": -1,
    "parallel.context": 1,
    "parallel.experts": 1,
    "parallel.zero": 0,
    "parallel.tensor_experts": "split",
    "train.microbatch": 1,
    "recompute": "none",
}


def is_open(config: Config, key: str) -> bool:
    """Return True if the planner chooses a configuration's key of OPEN, or the size `tensor.axes.NAME` of an axis."""
    named = config.plan.search
    group = key.rpartition(".")[0]
    return ALL in named or key in named or group == "tensor.axes" and bool({"tensor", group} & {*named})


def leave_open(config: Config, typed: Collection[str] = ()) -> None:
    """Note in `plan.search` which keys a composed configuration leaves to the planner, and give them legal values. With
    pipeline=auto stages and chunks are open too, unless they are among the keys that the user has `typed`.
    parallel.data=-1, by itself as many replicas as the workers give, is open beside another open key."""
    named = dict.fromkeys(config.plan.search)
    tensor, pipeline, parallel = config.tensor, config.pipeline, config.parallel
    if tensor.scheme == AUTO:
        named["tensor"] = None
        tensor.scheme = "serial"
    for axis in dict.fromkeys([*axes_of(tensor), *(tensor.axes if tensor.scheme == "layout" else ())]):
        if tensor.axes.get(axis) == -1:
            named[f"tensor.axes.{axis}"] = None
            tensor.axes[axis] = 1
    if pipeline.kind == AUTO or (pipeline.kind == "none" and pipeline.stages == -1):
        named["pipeline"] = None
    for name in ("stages", "chunks"):
        if pipeline.kind == AUTO and f"pipeline.{name}" not in typed:
            setattr(pipeline, name, -1)
    found = {
        "pipeline.stages": pipeline.stages, "pipeline.chunks": pipeline.chunks, "parallel.context": parallel.context,
        "parallel.experts": parallel.experts, "parallel.zero": parallel.zero,
        "train.microbatch": config.train.microbatch,
    }  # fmt: skip
    for key in (key for key, value in found.items() if value == -1):
        named[key] = None
        set_value(config, key, OPEN[key])
    if config.recompute == AUTO:
        named["recompute"] = None
        config.recompute = "none"
    if parallel.tensor_experts == AUTO:
        named["parallel.tensor_experts"] = None
        parallel.tensor_experts = "split"
    if pipeline.kind == AUTO:
        stages = "none" if pipeline.stages == 1 else "1f1b"
        pipeline.kind = stages if pipeline.chunks == 1 else "interleaved"
    if named and parallel.data == -1:
        named["parallel.data"] = None
    config.plan.search = [*named]


def violations_of_search(config: Config) -> Iterator[str]:
    """Yield a refusal line for each name in `plan.search` that is no key which may be left to the planner."""
    for name in config.plan.search:
        if name not in (ALL, *OPEN) and not name.startswith("tensor.axes."):
            yield violation("plan.search", name, "no key that the planner chooses", closest(name, (*OPEN, ALL))[:3])
