"""Opaque collective operator that lets `torch.compile(fullgraph=True)` trace through a block.

While tracing, `Communicator.launch` emits this operator; the compiled graph later launches and waits through the same
communicator, including its counters and log.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from platform.plan.communication.rule import APPEAR, JOIN, SPLIT, VANISH, Step
from platform.plan.language.layout import Parts

COMMUNICATORS: WeakValueDictionary[int, object] = WeakValueDictionary()  # number in compiled graphs -> communicator


@torch.library.custom_op("platform::collective", mutates_args=())
def collective(
    x: Tensor,
    communicator: int,
    op: str,
    axes: str,
    members: int,
    dim: int,
    joined: int,
    reduce: str,
    parts: Sequence[int],
    joined_parts: Sequence[int],
) -> Tensor:
    """Run a collective from inside a compiled graph, as `Communicator.launch(...).wait()` would. `communicator`: its
    number in COMMUNICATORS; `axes`: joined by "+"; `members`: size of the group, which gives the shape of the result;
    `parts`, `joined_parts`: the room of each block and
    their extents, if they differ; the rest as in `launch`."""
    launch = COMMUNICATORS[communicator].launch  # type: ignore[attr-defined]
    if op in APPEAR:  # these write to their input and return it
        x = x.clone()
    cut = {"parts": _parts(parts), "joined_parts": _parts(joined_parts)}
    return launch(op, x, axes.split("+"), dim, joined, reduce=reduce, **cut).wait()


def _parts(given: Sequence[int]) -> Parts | None:
    """Return the blocks of a dim as `Communicator.launch` takes them, from the room and the extents of each."""
    return Parts(given[0], tuple(given[1:])) if given else None


@collective.register_fake
def _(x, communicator, op, axes, members, dim, joined, reduce, parts, joined_parts):
    """Return an empty tensor of the shape that `collective` returns on this rank, for the tracing of a graph."""
    index = COMMUNICATORS[int(communicator)].index(axes.split("+"))  # type: ignore[attr-defined]
    if op in VANISH and index:
        return x.new_empty(0)
    step = Step(op, tuple(axes.split("+")), dim, joined)
    shape = list(x.shape if op in APPEAR and index else step.after(x.shape, members))
    if parts and step.op in SPLIT:
        shape[dim] = parts[1 + index]
    if (joins := joined_parts if op == "all_to_all" else parts) and step.op in JOIN:
        shape[step.joins] = sum(joins[1:])
    return x.new_empty(shape)


class Arrived:
    """Handle of a collective that needs no waiting, as a compiled graph has waited for it, or other ranks alone take
    part: `wait` returns the result."""

    def __init__(self, result: Tensor):
        """Wrap the result of a collective that is done, where a Handle of one in progress is expected."""
        self._result = result

    def wait(self) -> Tensor:
        """Return the collective's result, without waiting."""
        return self._result
