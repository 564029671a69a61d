"""Collectives as one opaque operator, so that `torch.compile(fullgraph=True)` traces through a block.

While tracing, `Communicator.launch` emits this operator; the compiled graph then launches and waits through the same
communicator, counters and log included.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

COMMUNICATORS: WeakValueDictionary[int, object] = WeakValueDictionary()  # graphs name a communicator by its number


@torch.library.custom_op("platform::collective", mutates_args=())
def collective(
    x: Tensor, communicator: int, op: str, axes: str, members: int, dim: int, joined: int, reduce: str
) -> Tensor:
    """`Communicator.launch(...).wait()`; `members`: the size of the group, for the shape of the result."""
    launch = COMMUNICATORS[communicator].launch  # type: ignore[attr-defined]
    return launch(op, x, axes.split("+"), dim, joined, reduce=reduce).wait()


@collective.register_fake
def _(x, communicator, op, axes, members, dim, joined, reduce):
    shape = list(x.shape)
    if op in ("reduce_scatter", "all_to_all"):
        shape[dim] //= members
    if op == "all_gather":
        shape[dim] *= members
    if op == "all_to_all":
        shape[joined] *= members
    return x.new_empty(shape)


class Arrived:
    """The handle of a collective that the compiled graph has waited for."""

    def __init__(self, result: Tensor):
        self._result = result

    def wait(self) -> Tensor:
        return self._result
