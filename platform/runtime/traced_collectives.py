"""Collectives inside a block that is compiled whole: operators of torch that launch one and that wait for it.

A graph names no communicator: who runs it says whose collectives it launches, so that generations share it; while one
is traced or compiled, nothing is sent. Each operator reads the result of the one before it, so their order stays.
`read_again` is for what a backward pass computes again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from platform.plan.layout import Parts
from platform.plan.rule import APPEAR, JOIN, SPLIT, VANISH, RelayoutStep
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle, Communicator

_LIBRARY = torch.library.Library("platform", "FRAGMENT")
_LIBRARY.define(
    "launch(Tensor x, Tensor after, int number, str op, str axes, int dim, int joined, str reduce, int root, "
    "int[] parts, int[] joined_parts) -> Tensor"
)
_LIBRARY.define("wait(Tensor x, Tensor after, int number, int[] shape) -> Tensor")
_LIBRARY.define("border(Tensor after, Tensor[] before) -> Tensor")
_LIBRARY.define("operand(Tensor x) -> Tensor")
_LIBRARY.define("copy_after(Tensor x, Tensor after) -> Tensor")


class _Running(threading.local):
    """Communicator whose collectives this thread's compiled block launches, and those under way, by their number."""

    communicator: Communicator | None = None
    handles: dict[int, CollectiveHandle | ArrivedCollective] = {}  # noqa: RUF012  (replaced by each block)


_RUNNING = _Running()


@contextmanager
def launch_collectives_of(communicator: Communicator | None) -> Iterator[None]:
    """Launch, within the context, the collectives of compiled graphs in the groups of `communicator`; none if None."""
    before = _RUNNING.communicator, _RUNNING.handles
    _RUNNING.communicator, _RUNNING.handles = communicator, {}
    try:
        yield
    finally:
        _RUNNING.communicator, _RUNNING.handles = before


def _launch(x, after, number, op, axes, dim, joined, reduce, root, parts, joined_parts):
    """Launch a collective on x in the running block's groups, as its handle `number`; return a tensor of no content."""
    if communicator := _RUNNING.communicator:
        _RUNNING.handles[number] = communicator.launch(
            op,
            x.clone() if op in APPEAR else x,  # these write to their input
            axes.split("+"),
            dim,
            joined,
            reduce=reduce,
            root=root,
            parts=_build_block_parts(parts) if parts else None,
            joined_parts=_build_block_parts(joined_parts) if joined_parts else None,
        )
    return x.new_empty(1, dtype=torch.uint8)


def _wait(x, after, number, shape):
    """Wait for the collective `number` of the running block, which read x; return its result, of this shape."""
    # zeros where nothing is sent: weights of experts by which no token goes beyond their slots
    return _RUNNING.handles.pop(number).wait().contiguous() if _RUNNING.communicator else x.new_zeros(shape)


def _border(after, before):
    """Return a tensor of no content between what a block computes early, `before`, and what it launches later."""
    return after.new_empty(1, dtype=torch.uint8)


def _copy_after(x, after):
    """Return a copy of x, which is made after the tensor `after`."""
    return x.clone()


def _operand(x):
    """Return a copy of a product's operand x, which marks in a trace where its rounding to 8 bits begins."""
    return x.clone()


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "launch": _launch,
    "wait": _wait,
    "border": _border,
    "copy_after": _copy_after,
    "operand": _operand,
}
for _name, _function in _FUNCTIONS.items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"platform::{_name}", _function, lib=_LIBRARY)


def read_again(x: Tensor, after: Tensor) -> Tensor:
    """Return x, of which a backward pass computes again what its forward pass has, behind the tensor `after`."""
    # in new memory where a block is traced: the compiler would take both results for one, and keep it
    return x if get_proxy_mode() is None else torch.ops.platform.copy_after(x, after)


def launches_collectives(graph: GraphModule) -> bool:
    """Return True if a traced graph launches collectives."""
    return bool(graph.graph.find_nodes(op="call_function", target=torch.ops.platform.launch.default))


def _build_block_parts(room_and_extents: Sequence[int]) -> Parts:
    """Return the blocks of a dim as `Communicator.launch` takes them, from the room and the extents of each."""
    return Parts(room_and_extents[0], tuple(room_and_extents[1:]))


class CollectiveTrace:
    """Trace of the collectives of a block of the rank of `communicator`: records their operators, one after the other.
    `last`: the result of the last one, or the tensor that all of them come after; `launches`: their number."""

    def __init__(self, communicator: Communicator, first: Tensor):
        """Begin the trace of a block's collectives, all of which come after the tensor `first`."""
        self._communicator, self.last, self.launches = communicator, first, 0

    def launch(
        self, x: Tensor, step: RelayoutStep, reduce: str, root: int, *parts_of_dims: Parts | None
    ) -> _TracedHandle:
        """Record the launch of the collective of a `step` on x; the others are parameters of `Communicator.launch`."""
        number, self.launches = self.launches, self.launches + 1
        shape = self._result_shape(step, x.shape, root, *parts_of_dims)
        cuts = [[parts.room, *parts.extents] if parts else [] for parts in parts_of_dims]
        options = (step.op, "+".join(step.axes), step.dim, step.dim_joined, reduce, root, *cuts)
        self.last = torch.ops.platform.launch(x, self.last, number, *options)
        return _TracedHandle(self, x, number, shape)

    def _result_shape(
        self, step: RelayoutStep, shape: Sequence[int], root: int, parts: Parts | None, joined_parts: Parts | None
    ) -> list[int]:
        """Return the shape of what this rank gets from the collective of a `step` on a tensor of `shape`."""
        members, index = self._communicator.mesh.count_ranks(step.axes), self._communicator.group_index(step.axes)
        if step.op in VANISH and index != root:
            return [0]
        out = list(shape if step.op in APPEAR and index != root else step.apply_to_shape(shape, members))
        if parts and step.op in SPLIT:
            out[step.dim] = parts.extents[index]
        if (joins := joined_parts if step.op == "all_to_all" else parts) and step.op in JOIN:
            out[step.dim_joined] = sum(joins.extents)
        return out


class _TracedHandle(ArrivedCollective):
    """Handle of a collective whose launch a trace has recorded."""

    def __init__(self, trace: CollectiveTrace, x: Tensor, number: int, shape: list[int]):
        """Hold what the operator that waits for the collective is called with."""
        self._trace, self._x, self._arguments = trace, x, (number, shape)

    def wait(self) -> Tensor:
        """Record the wait for the collective; return its result."""
        self._trace.last = torch.ops.platform.wait(self._x, self._trace.last, *self._arguments)
        return self._trace.last
