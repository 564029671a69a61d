"""Opaque collective operator that lets `torch.compile(fullgraph=True)` trace through a block.

While tracing, `Communicator.launch` emits this operator; the compiled graph later launches and waits through the same
communicator, including its counters and log.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor

from platform.plan.communication.rule import APPEAR, VANISH, Step

COMMUNICATORS: WeakValueDictionary[int, object] = WeakValueDictionary()  # number in compiled graphs -> communicator


@torch.library.custom_op("platform::collective", mutates_args=())
def collective(
    x: Tensor, communicator: int, op: str, axes: str, members: int, dim: int, joined: int, reduce: str
) -> Tensor:
    """Run a collective from inside a compiled graph, as `Communicator.launch(...).wait()` would. `communicator`: its
    number in COMMUNICATORS; `axes`: joined by "+"; `members`: size of the group, which gives the shape of the result;
    the rest as in `launch`."""
    launch = COMMUNICATORS[communicator].launch  # type: ignore[attr-defined]
    if op in APPEAR:  # these write to their input and return it
        x = x.clone()
    return launch(op, x, axes.split("+"), dim, joined, reduce=reduce).wait()


@collective.register_fake
def _(x, communicator, op, axes, members, dim, joined, reduce):
    """Return an empty tensor of the shape that `collective` returns on this rank, for the tracing of a graph."""
    is_root = COMMUNICATORS[int(communicator)].index(axes.split("+")) == 0  # type: ignore[attr-defined]
    if op in VANISH and not is_root:
        return x.new_empty(0)
    step = Step(op, tuple(axes.split("+")), dim, joined)
    return x.new_empty(x.shape if op in APPEAR and not is_root else step.after(x.shape, members))


class Arrived:
    """Handle of a collective that needs no waiting, as a compiled graph has waited for it, or other ranks alone take
    part: `wait` returns the result."""

    def __init__(self, result: Tensor):
        """Wrap the result of a collective that is done, where a Handle of one in progress is expected."""
        self._result = result

    def wait(self) -> Tensor:
        """Return the collective's result, without waiting."""
        return self._result
