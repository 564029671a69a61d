"""Collectives inside a block that is compiled whole: operators of torch that launch one and that wait for it.

A graph names no communicator: who runs it says whose collectives it launches, so that generations share it; while one
is traced or compiled, nothing is sent. Each operator reads the result of the one before it, so their order stays.
Operations of the graph make buffers ready and put results in order. Before it is compiled, launches and waits with
nothing to compute between them become one operator, since each call costs the host more than what it does.
`read_again` is for what a backward pass computes again.
"""

from __future__ import annotations

import itertools
import json
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import prod
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from platform.plan.layout import Parts
from platform.plan.rule import APPEAR, EXCHANGES, RelayoutStep
from platform.runtime.clock import WAITING
from platform.runtime.communicator import (
    ArrivedCollective,
    BoundCollective,
    Communicator,
    Launched,
    UnevenBlocks,
    prepare_buffers,
)
from platform.runtime.progress import PROGRESS

_LIBRARY = torch.library.Library("platform", "FRAGMENT")
_LIBRARY.define("launch(Tensor x, Tensor after, int number, str what, int[] shape) -> Tensor")
_LIBRARY.define("wait(Tensor x, Tensor after, int number, int[] shape) -> Tensor")
_LIBRARY.define("take_turn(Tensor[] xs, Tensor after, str steps) -> Tensor[]")
_LIBRARY.define(
    "gather_and_multiply(Tensor x, Tensor[] matrices, Tensor after, str steps, str axes, int dim) -> Tensor[]"
)
_LIBRARY.define(
    "multiply_and_scatter(Tensor x, Tensor matrix, Tensor after, str steps, str axes, int dim, int members) -> Tensor"
)
_LIBRARY.define("border(Tensor after, Tensor[] before) -> Tensor")
_LIBRARY.define("operand(Tensor x) -> Tensor")
_LIBRARY.define("copy_after(Tensor x, Tensor after) -> Tensor")


class _Running(threading.local):
    """Communicator whose collectives this thread's compiled block launches, whether its clock follows each, and the
    stream of its times; collectives under way, by number: what waits for each, its result, what it is; waits so far:
    begin, end, axes."""

    communicator: Communicator | None = None
    is_followed = False
    stream: torch.cuda.Stream | None = None
    flights: dict[int, tuple[Callable[[], Any], Tensor, Launched]]
    waits: list[tuple[Any, Any, str]]


_RUNNING = _Running()


@contextmanager
def launch_collectives_of(communicator: Communicator | None) -> Iterator[None]:
    """Launch, within the context, the collectives of compiled graphs in the groups of `communicator`; none if None."""
    before, running = _RUNNING.__dict__.copy(), _RUNNING.__dict__
    running.update(communicator=communicator, flights={}, waits=[])
    if communicator:
        running.update(is_followed=communicator.clock.is_followed, stream=communicator.clock.stream)
    try:
        yield
    finally:
        if communicator:
            _note_waits(communicator)
        running.clear()
        running.update(before)


def _note_waits(communicator: Communicator) -> None:
    """Note the running block's waits so far in its clock, before any that the clock notes by itself."""
    communicator.clock.note_waits(_RUNNING.waits)
    _RUNNING.waits.clear()


def _launch(x, after, number, what, shape):
    """Return a tensor of no content, in the place of a launch on x until `join_turns`."""
    return x.new_empty(1, dtype=torch.uint8)


def _wait(x, after, number, shape):
    """Return zeros of the shape of what a collective on x brings, in the place of a wait until `join_turns`."""
    # zeros where nothing is sent: weights of experts by which no token goes beyond their slots
    return x.new_zeros(shape)


def _take_turn(xs, after, steps):
    """Launch the running block's collectives on some of the tensors xs, and wait for those on the others, in the order
    of `steps`; return the results of the latter, and a tensor of no content."""
    running, results = _RUNNING, []
    if (communicator := running.communicator) is None:
        waits = [(x, step[1]) for x, step in zip(xs, json.loads(steps), strict=True) if len(step) == 2]
        return [*(x.new_zeros(shape) for x, shape in waits), after.new_empty(1, dtype=torch.uint8)]
    bound = communicator.bound.get(steps) or communicator.bound.setdefault(steps, _bind_steps(communicator, steps))
    flights, stream, before = running.flights, running.stream, PROGRESS.now
    # no function of ours but the transport's is called per collective
    for x, (number, collective) in zip(xs, bound, strict=True):
        if collective is None:
            wait, out, what = flights.pop(number)
            if communicator.turns and what.op in EXCHANGES and not running.is_followed:
                _note_waits(communicator)
                communicator.turns.yield_turn()
            PROGRESS.now = WAITING, True, False, what, monotonic()
            begin = perf_counter() if stream is None else stream.record_event(torch.cuda.Event(enable_timing=True))
            wait()
            end = perf_counter() if stream is None else stream.record_event(torch.cuda.Event(enable_timing=True))
            if not running.is_followed:  # whose handles note it themselves
                running.waits.append((begin, end, "+".join(what.axes)))
            results.append(out)
            continue
        entry, how, shape, moved, label = collective
        if label:
            communicator.moved[label] += moved
        if communicator.log is not None:
            communicator.log.append(entry)
        communicator.launched[entry.axes] = count = communicator.launched.get(entry.axes, 0) + 1
        what = Launched(entry.op, entry.op, entry.axes, moved, -1, count)
        out = x.clone(memory_format=torch.contiguous_format) if shape is None else x.new_empty(shape)
        x = out if shape is None else x.contiguous()
        if running.is_followed:
            flights[number] = communicator.issue_bound(collective, what, x, out), out, what
        else:
            flights[number] = communicator._start_collective(entry.op, x, out, *how), out, what
    PROGRESS.now = before
    return [*results, after.new_empty(1, dtype=torch.uint8)]


def _bind_steps(communicator: Communicator, steps: str) -> list[tuple[int, BoundCollective | None]]:
    """Return the number of the collective in each of a turn's steps, bound where it is launched, None where awaited."""
    return [
        (number, communicator.bind_collective(*json.loads(more[0])) if len(more) == 2 else None)
        for number, *more in json.loads(steps)
    ]


def _gather_and_multiply(x, matrices, after, steps, axes, dim):
    """Return what `Communicator.gather_and_multiply` does, of the running block's ranks: x and its products; gathered
    by the launch and the wait of `steps` where the transport multiplies no parts."""
    if (communicator := _RUNNING.communicator) and (axes,) in communicator.shared_memory:
        return communicator.multiply_parts("all_gather", x, matrices, (axes,), dim)
    parts, _ = _take_turn((x, x), after, steps)
    gathered = parts.movedim(0, dim).flatten(dim, dim + 1)
    rows, results = gathered.flatten(0, -2), [gathered]
    for matrix in matrices:
        results.append((rows @ matrix).view(*gathered.shape[:-1], -1))
    return results


def _multiply_and_scatter(x, matrix, after, steps, axes, dim, members):
    """Return what `Communicator.multiply_and_scatter` does, of the running block's ranks: a part of their sum."""
    if (communicator := _RUNNING.communicator) and (axes,) in communicator.shared_memory:
        return communicator.multiply_parts("reduce_scatter", x, [matrix], (axes,), dim)[0]
    rows = (x.flatten(0, -2) @ matrix).view(*x.shape[:-1], -1)
    parts = rows.unflatten(dim, (members, -1)).movedim(dim, 0)
    return _take_turn((parts, parts), after, steps)[0]


def _border(after, before):
    """Return a tensor of no content between what a block computes early, `before`, and what it launches later."""
    return after.new_empty(1, dtype=torch.uint8)


def _copy_after(x, after):
    """Return a copy of x, which is made after the tensor `after`."""
    return x.clone()


def _operand(x):
    """Return a copy of a product's operand x, which marks in a trace where its rounding to 8 bits begins."""
    return x.clone()


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "launch": _launch,
    "wait": _wait,
    "take_turn": _take_turn,
    "gather_and_multiply": _gather_and_multiply,
    "multiply_and_scatter": _multiply_and_scatter,
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


_LAUNCH, _WAIT, _TAKE_TURN, *_ASYNC_PRODUCTS = (
    getattr(torch.ops.platform, name).default
    for name in ("launch", "wait", "take_turn", "gather_and_multiply", "multiply_and_scatter")
)
_COPIES = {getattr(torch.ops.aten, name).default for name in ("clone", "copy", "slice_scatter")}
_FREE = {operator.getitem, torch.ops.aten.empty.memory_format}  # beside views: no kernel of a device


def launches_collectives(graph: GraphModule) -> bool:
    """Return True if a traced graph launches collectives."""
    launching = {_LAUNCH, _TAKE_TURN, *_ASYNC_PRODUCTS}
    return any(node.target in launching for node in graph.graph.nodes)


def join_turns(graph: GraphModule) -> GraphModule:
    """Return a traced graph whose launches and waits run: those with nothing computed between them as one operator."""
    graph = deepcopy(graph)
    turn, behind = list[Node](), dict[Node, None]()  # launches and waits; what reads their results
    is_late = False  # a copy is made between two launches

    def end_turn() -> None:
        """Replace the launches and waits so far by one operator."""
        if turn:
            before_last = itertools.takewhile(partial(operator.is_not, turn[-1]), behind)
            _replace_turn(graph, turn, [node for node in before_last if node not in turn])
        turn.clear()
        behind.clear()

    for node in list(graph.graph.nodes):
        is_step, copies = node.target in (_LAUNCH, _WAIT), node.target in _COPIES
        if is_step and (node.args[0] in behind or (is_late and node.target is _WAIT)):
            end_turn()
        if is_step:
            turn.append(node)
            behind[node], is_late = None, False
        elif not turn or node.op == "placeholder":
            continue
        elif not (copies or node.target in _FREE or getattr(node.target, "is_view", False)):
            end_turn()
        elif not behind.keys().isdisjoint(node.all_input_nodes):
            behind[node] = None
        elif copies:
            is_late = True
            if turn[-1].target is _WAIT:
                end_turn()
    end_turn()
    graph.recompile()
    return graph


def _replace_turn(graph: GraphModule, turn: Sequence[Node], behind: Sequence[Node]) -> None:
    """Replace a `turn` of launches and waits by one operator, in the last one's place, `behind` which others come."""
    steps = [[number, *more] for _, _, number, *more in (node.args for node in turn)]
    waits = [node for node in turn if node.target is _WAIT]
    with graph.graph.inserting_after(turn[-1]):
        joined = graph.graph.call_function(
            _TAKE_TURN, ([node.args[0] for node in turn], turn[0].args[1], json.dumps(steps))
        )
    last = joined
    for i, node in enumerate([*waits, turn[-1]]):
        with graph.graph.inserting_after(last):
            last = graph.graph.call_function(operator.getitem, (joined, i))
        last.meta.update(node.meta)
        node.replace_all_uses_with(last, lambda user: user is not joined)
    for node in behind:
        last.append(node)
        last = node
    for node in reversed(turn):
        graph.graph.erase_node(node)


class CollectiveTrace:
    """Trace of the collectives of a block of the rank of `communicator`: records their operators, one after the other.
    `last`: the result of the last one, or the tensor that all of them come after; `launches`: their number."""

    def __init__(self, communicator: Communicator, first: Tensor):
        """Begin the trace of a block's collectives, all of which come after the tensor `first`."""
        self._communicator, self.last, self.launches = communicator, first, 0

    def launch(
        self, x: Tensor, step: RelayoutStep, reduce: str, root: int, parts: Parts | None, joined_parts: Parts | None
    ) -> _TracedHandle:
        """Record the launch of the collective of a `step` on x; the others are parameters of `Communicator.launch`."""
        members, index = self._communicator.mesh.count_ranks(step.axes), self._communicator.group_index(step.axes)
        number, self.launches, is_root = self.launches, self.launches + 1, index == root
        uneven = UnevenBlocks(step.op, index, step.dim, step.joined, parts, joined_parts, is_root)
        x = uneven.add_room(x)
        elements = x.numel() // members if step.op == "scatter" and is_root else x.numel()
        read, out, finish = prepare_buffers(step.op, x, members, step.dim, step.joined, is_root, True)
        is_copied = out is read and (is_root or step.op not in APPEAR)
        how = step.op, step.axes, reduce, root, elements, x.element_size(), None if is_copied else [*out.shape]
        self.last = torch.ops.platform.launch(read, self.last, number, json.dumps(how), out.shape)
        return _TracedHandle(self, read, partial(uneven.remove_room, finish), number, [*out.shape])

    def gather_and_multiply(
        self, x: Tensor, matrices: Sequence[Tensor], axes: Sequence[str], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Record `Communicator.gather_and_multiply`."""
        shape = self._communicator.mesh.count_ranks(axes), *x.shape
        steps = self._describe_turn("all_gather", x, axes, x.numel(), shape)
        self.last, *products = torch.ops.platform.gather_and_multiply(x, list(matrices), self.last, steps, *axes, dim)
        return self.last, products

    def multiply_and_scatter(self, x: Tensor, matrix: Tensor, axes: Sequence[str], dim: int) -> Tensor:
        """Record `Communicator.multiply_and_scatter`."""
        shape, members = [*x.shape[:-1], matrix.shape[1]], self._communicator.mesh.count_ranks(axes)
        elements, shape[dim] = prod(shape), shape[dim] // members
        steps = self._describe_turn("reduce_scatter", x, axes, elements, shape)
        self.last = torch.ops.platform.multiply_and_scatter(x, matrix, self.last, steps, *axes, dim, members)
        return self.last

    def _describe_turn(self, op: str, x: Tensor, axes: Sequence[str], elements: int, shape: Sequence[int]) -> str:
        """Count a launch; return the steps of `take_turn` that launch a product's collective and wait for it."""
        number, self.launches = self.launches, self.launches + 1
        how = json.dumps((op, axes, "sum", 0, elements, x.element_size(), shape))
        return json.dumps([(number, how, shape), (number, shape)])


class _TracedHandle(ArrivedCollective):
    """Handle of a collective whose launch a trace has recorded."""

    def __init__(self, trace: CollectiveTrace, x: Tensor, finish: Callable[[Tensor], Tensor], *arguments: Any):
        """Hold what the operator that waits for the collective on x is called with; `finish`: makes its result."""
        self._trace, self._x, self._finish, self._arguments = trace, x, finish, arguments

    def wait(self) -> Tensor:
        """Record the wait for the collective; return its result."""
        self._trace.last = torch.ops.platform.wait(self._x, self._trace.last, *self._arguments)
        return self._finish(self._trace.last).contiguous()
