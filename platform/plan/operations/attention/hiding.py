"""Attributes and data of an attention that hide scores: causality, a window, padding, the borders of documents."""

from __future__ import annotations

from typing import Any

from platform.plan.communication.planner import Planner
from platform.plan.language.layout import Layout
from platform.plan.language.mistakes import ModelMistake
from platform.plan.language.ops import Operation, Parameter, Spec
from platform.plan.operations.op import reading


def hides(name: str, causal: bool, window: int, mask: str | None, begins: str | None) -> dict[str, Any]:
    """Return the attributes of the attention `name` on its mask. Raises ModelMistake for a window or
    beginnings without causality, and for two data tensors."""
    if (window or begins) and not causal:
        raise ModelMistake(name, "a window, or where documents begin, hides what lies behind: with causal=True")
    if mask and begins:
        raise ModelMistake(name, "an attention reads one data tensor: a mask, or where documents begin")
    return {"causal": causal, "window": window, "begins": begins is not None}


def reads_of(
    planner: Planner, operation: Operation, layout: Layout, memory: Spec | Parameter, length: str
) -> dict[str, Any]:
    """Return the fields `tokens` and `token_count` for the plan of an attention that computes in `layout`, by the data
    tensor that it reads: where the documents of its queries begin, or a mask of the keys, whose length is split as
    memory_length, and which is as long as dim `length` of `memory`."""
    if operation["begins"]:
        return reading(planner, operation.outputs[0], layout.restrict(("length", "batch")))
    mask = Layout.of({"batch": layout["batch"], "length": layout["memory_length"]}, layout.only)
    return reading(planner, memory, mask, length)
