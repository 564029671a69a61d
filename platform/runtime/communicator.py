"""Communicator interface: one rank's view of the groups along mesh axes. Transport: process_groups.py.

A step's collectives are launched by `platform.runtime.conversion`, the kernels `statistics` and `panels`, and the
trainer's sum of loss and norm. Every launch is counted by `platform.plan.operation_plan` and optionally logged.

`prepare_buffers` gives a collective contiguous buffers with equal room for the blocks of all ranks, even if these
differ (`UnevenBlocks`). While torch.compile traces a block, `Communicator.launch` emits the opaque operator
`run_traced_collective`; the compiled graph later launches and waits through the same communicator, including its
counters and log.
"""

from __future__ import annotations

import itertools
import json
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.layout import Mesh, Parts
from platform.plan.operation_plan import TRAFFIC, collective_label
from platform.plan.rule import APPEAR, EXCHANGES, JOIN, SPLIT, VANISH, RelayoutStep
from platform.plan.scheme import Lent
from platform.runtime.clock import WAITING, Flight, SectionClock
from platform.runtime.turns import PassTurns


def prepare_buffers(
    op: str, x: Tensor, group_size: int, dim: int, joined: int, is_root: bool, owned: bool, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Prepare the collective `op` of `group_size` ranks on `x` (parameters as in `Communicator.launch`; `is_root`: this
    rank is the root): return the contiguous buffer that the transport reads, the one that it fills, and a function of
    the latter that returns the result, with its dims in place."""

    def join_parts(out: Tensor, at: int) -> Tensor:
        """Return the gathered parts `out` [ranks, ...] as one tensor, joined along the dim at position `at`."""
        return out.movedim(0, at).flatten(at, at + 1)

    if op in ("all_gather", "gather"):
        input_buffer, receives = x.contiguous(), op == "all_gather" or is_root
        out = input_buffer.new_empty((group_size, *input_buffer.shape) if receives else 0) if into is None else into
        return input_buffer, out, lambda out: join_parts(out, dim) if receives else out
    if op in ("reduce_scatter", "all_to_all") or (op == "scatter" and is_root):
        input_buffer = x.unflatten(dim, (group_size, x.shape[dim] // group_size)).movedim(dim, 0).contiguous()
        out = input_buffer.new_empty(input_buffer.shape if op == "all_to_all" else input_buffer.shape[1:])
        # in one piece: of dims of one index the join alone is a view with gaps, which each product would copy anew
        return input_buffer, out, lambda out: join_parts(out, joined).contiguous() if op == "all_to_all" else out
    if op in ("broadcast", "scatter", "rotate"):
        input_buffer = x.contiguous()
        out = torch.empty_like(input_buffer) if op == "rotate" else input_buffer
        return input_buffer, out, lambda out: out
    assert op in ("all_reduce", "reduce"), op
    out = x.contiguous() if owned else x.detach().clone(memory_format=torch.contiguous_format)
    return out, out, lambda out: out if op == "all_reduce" or is_root else out.new_empty(0)


@dataclass(frozen=True)
class UnevenBlocks:
    """Collective `op` of blocks that differ along the dim at position `dim`, or along the one that an all_to_all joins,
    `joined`, on member `index` of its group: before it, each block gets the longest one's room; after it, none has."""

    op: str
    index: int
    dim: int
    joined: int
    parts: Parts | None
    joined_parts: Parts | None
    is_root: bool

    def add_room(self, x: Tensor) -> Tensor:
        """Return this rank's tensor x as it is given to the collective: with room for equal blocks."""
        exchanges = self.op == "all_to_all"
        if self.parts and (self.op == "reduce_scatter" or exchanges or (self.op == "scatter" and self.is_root)):
            x = pad_blocks_to_longest(x, self.dim, self.parts)
        elif self.parts:
            x = _pad_zeros(x, self.dim, self.parts.room)
        return _pad_zeros(x, self.joined, self.joined_parts.room) if exchanges and self.joined_parts else x

    def remove_room(self, finish: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
        """Return what `finish` makes of `out`, the collective's result, without the room that blocks do not fill."""
        x = finish(out)
        if self.parts and self.op in SPLIT:
            x = x.narrow(self.dim, 0, self.parts.extents[self.index]).contiguous()
        if self.op == "all_to_all":
            return drop_block_padding(x, self.joined, self.joined_parts) if self.joined_parts else x
        joins = self.op in JOIN and (self.op == "all_gather" or self.is_root)
        return drop_block_padding(x, self.dim, self.parts) if self.parts and joins else x


def pad_blocks_to_longest(x: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return x with its blocks along `dim` apart, so that each begins a stretch of the longest one's length."""
    return torch.cat([_pad_zeros(block, dim, parts.room) for block in x.split(list(parts.extents), dim)], dim)


def drop_block_padding(x: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return x with its blocks along `dim` one after another: the inverse of `pad_blocks_to_longest`."""
    begins = accumulate(parts.extents, lambda at, _: at + parts.room, initial=0)
    return torch.cat([x.narrow(dim, at, n) for at, n in zip(begins, parts.extents, strict=False)], dim)


def multiply_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """Return the product of x [rows.., contracted] and a matrix [contracted, columns], as one of two matrices."""
    return (x.flatten(0, -2) @ matrix).view(*x.shape[:-1], matrix.shape[1])


def _pad_zeros(x: Tensor, dim: int, extent: int) -> Tensor:
    """Return x with zeros behind it along `dim`, up to `extent`."""
    missing = extent - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x


COMMUNICATORS: WeakValueDictionary[int, Communicator] = WeakValueDictionary()  # by number in compiled graphs


@torch.library.custom_op("platform::collective", mutates_args=())
def run_traced_collective(
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
    `parts`, `joined_parts`: the room of each block and their extents, if they differ; the rest as in `launch`."""
    launch = COMMUNICATORS[communicator].launch
    if op in APPEAR:  # these write to their input and return it
        x = x.clone()
    blocks, joined_blocks = _build_block_parts(parts), _build_block_parts(joined_parts)
    handle = launch(op, x, axes.split("+"), dim, joined, reduce=reduce, parts=blocks, joined_parts=joined_blocks)
    return handle.wait()


def _build_block_parts(room_and_extents: Sequence[int]) -> Parts | None:
    """Return the blocks of a dim as `Communicator.launch` takes them, from the room and the extents of each."""
    return Parts(room_and_extents[0], tuple(room_and_extents[1:])) if room_and_extents else None


@run_traced_collective.register_fake
def _(x, communicator, op, axes, members, dim, joined, reduce, parts, joined_parts):
    """Return an empty tensor of the shape that `run_traced_collective` returns on this rank, for the tracing of a
    graph."""
    index = COMMUNICATORS[int(communicator)].group_index(axes.split("+"))
    if op in VANISH and index:
        return x.new_empty(0)
    step = RelayoutStep(op, tuple(axes.split("+")), dim, joined)
    shape = list(x.shape if op in APPEAR and index else step.apply_to_shape(x.shape, members))
    if parts and step.op in SPLIT:
        shape[dim] = parts[1 + index]
    if (joins := joined_parts if op == "all_to_all" else parts) and step.op in JOIN:
        shape[step.dim_joined] = sum(joins[1:])
    return x.new_empty(shape)


class ArrivedCollective:
    """Handle of a collective that needs no waiting, as a compiled graph has waited for it, or other ranks alone take
    part: `wait` returns the result."""

    def __init__(self, result: Tensor):
        """Wrap the result of a collective that is done, where a Handle of one in progress is expected."""
        self._result = result

    def wait(self) -> Tensor:
        """Return the collective's result, without waiting."""
        return self._result


# MKL detects the processor in the first call of its vector math and briefly publishes an intermediate answer: on
# processors with AVX-512, a thread that reads it then uses the least accurate kernel (an error of 5e-13 in a logarithm,
# 7e-9 in a cosine). One call before any threads exist avoids the race.
torch.ones(1, dtype=torch.float64).log()

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Launch:
    """Log entry of one collective or transfer as a rank issued it: operation, axes, global ranks of the group,
    elements; replaying all ranks' entries checks their order."""

    op: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    elements: int


class _Route(NamedTuple):
    """Axes of more than one rank in mesh order, a rank's group along them, the name under which bytes count, and the
    elements that the group moves for each one of a rank's input."""

    axes: tuple[str, ...]
    group: tuple[int, ...]
    label: str
    traffic: int


class Launched(NamedTuple):
    """Collective as a timeline shows it: what it is called, its operation, its axes, the bytes that its group moves, as
    counted, the rank at the other end of a message, and its number among those along the same axes, or of that peer."""

    name: str
    op: str
    axes: tuple[str, ...]
    bytes: int
    peer: int = -1
    number: int = 0


class BoundCollective(NamedTuple):
    """Collective of a compiled block, bound to a rank's groups: the log's `entry`, the last arguments of its start, the
    `shape` of its result (None: a copy of its input), the `bytes` it moves, and under what this rank counts them."""

    entry: Launch
    how: tuple[tuple[str, ...], tuple[int, ...], str, int]
    shape: list[int] | None
    bytes: int
    label: str


class LaunchCounts(NamedTuple):
    """Counters of a communicator over some launches: see `moved`, `launched` and `log` there."""

    moved: Counter[str]
    launched: dict[tuple[str, ...], int]
    log: list[Launch]


class Aborted(RuntimeError):
    """Failure of a rank whose collectives were interrupted (`Communicator.abort`): their results mean nothing."""


class CollectiveHandle:
    """Collective or transfer in progress. `wait` returns its result and may be called once; the time spent waiting is
    booked under the clock section `section`, as `along` these axes, joined by "+". `flight`: the clock's note of the
    collective, if it takes one."""

    def __init__(
        self,
        clock: SectionClock,
        wait: Callable[[], Any],
        finish: Callable[[], Tensor],
        section: str = WAITING,
        flight: Flight | None = None,
        along: str = "",
        what: Launched | None = None,
        turns: PassTurns | None = None,
    ):
        """Wrap a collective in progress: `wait` blocks until it is done, `finish` returns its result tensor, and the
        waiting is booked in the section `section` of `clock`, and there as one `along` axes; heartbeats call it `what`.
        Another pass runs before it is waited for, if there are `turns`.
        """
        self._clock, self._wait, self._finish, self._flight = clock, wait, finish, flight
        self._section, self._along, self._what, self._turns = section, along, what, turns

    def wait(self) -> Tensor:
        """Wait until the collective or message of this handle is done, and return its result tensor."""
        if self._turns:
            self._turns.yield_turn()
        with self._clock.time_section(self._section, True, self._along, self._what):
            self._wait()
        if self._flight:
            self._clock.note_landing(self._flight)
        return self._finish()


class Communicator(ABC):
    """A rank's access to its groups along mesh axes. `moved`: `OP/AXES` -> bytes moved by the groups of which this rank
    is the first member, so that the sum over ranks is the total. `clock` books the time spent waiting for collectives.
    `launched`: axes or peer -> number of collectives or messages so far, alike on all members. `log`: if a list,
    collects every launch. `lent`: layer -> lent experts of this step. `posts_early`: a receive may be posted long
    before its send without holding up anything else. `shared_memory`: axes -> the name of the group along them, whose
    GPUs read each other's memory in asynchronous products."""

    posts_early = False

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str = "cpu"):
        """Prepare the collectives and messages of `rank` of a mesh, uncounted so far, on a device."""
        self.mesh, self.rank, self.device = mesh, rank, torch.device(device)
        self.coordinates = mesh.rank_coordinates(rank)
        self.moved: Counter[str] = Counter()
        self.launched: dict[tuple[str, ...], int] = {}
        self.clock = SectionClock()
        self._routes: dict[tuple[str, ...], _Route] = {}  # by operation and axes
        self.log: list[Launch] | None = None
        self.lent: dict[str, Lent] = {}
        self.bound: dict[str, list[tuple[int, BoundCollective | None]]] = {}  # by the steps of a compiled block's turn
        self.shared_memory: dict[tuple[str, ...], str] = {}
        self.turns: PassTurns | None = None  # of the two passes that run now
        self.trace: Any = None  # of the block that is traced, which records collectives in place of their launch
        self._aborting, self._aborted = threading.Lock(), False
        self._number = next(_NUMBERS)
        COMMUNICATORS[self._number] = self

    def group_index(self, axes: Sequence[str]) -> int:
        """Return this rank's index among the ranks of its group along the mesh axes `axes`."""
        return self.mesh.index_in_group(self.coordinates, axes)

    def launch(
        self,
        op: str,
        x: Tensor,
        axes: Sequence[str],
        dim: int = 0,
        joined: int = 0,
        *,
        reduce: str = "sum",
        owned: bool = False,
        root: int = 0,
        into: Tensor | None = None,
        name: str = "",
        parts: Parts | None = None,
        joined_parts: Parts | None = None,
    ) -> CollectiveHandle | ArrivedCollective:
        """Issue one collective, of the kinds in `platform.plan.rule.RelayoutStep`, over the group of this rank
        along `axes`, without waiting; the handle's `wait` returns this rank's result.

        `x` must not be modified until the result is available. `dim`: position of the dim of `x` that is split or
        joined; `joined`: position of the dim that an all_to_all joins. `reduce`: sum, or max for all_reduce. `owned`:
        reductions may overwrite `x`. `root`: index in the group of the member whose `x` a broadcast sends to all or a
        scatter divides (the others' `x` is overwritten, by a scatter with the part that they receive), and which alone
        gets the result of a reduce or gather (the others get an empty tensor). A rotate gives x to the next member, of
        which the last one's is the first. `into`: contiguous memory [n, ...] for the parts that an all_gather over n
        ranks joins; x may be this rank's part of it. `name`: its name in a timeline, by default its operation. Several
        axes act as one, in mesh order, for all_reduce, broadcast, reduce, and all_gather of unordered statistics.
        `parts`, `joined_parts`: blocks of these dims, if they differ; each has the longest one's room in the buffers.
        """
        if torch.compiler.is_compiling():
            cut = tuple([p.room, *p.extents] if p else [] for p in (parts, joined_parts))
            where = "+".join(axes), self.mesh.count_ranks(axes)
            return ArrivedCollective(run_traced_collective(x, self._number, op, *where, dim, joined, reduce, *cut))
        if self.trace:
            step = RelayoutStep(op, tuple(axes), dim, joined)
            traced: ArrivedCollective = self.trace.launch(x, step, reduce, root, parts, joined_parts)
            return traced
        axes, group, *_ = self._routes.get((op, *axes)) or self._find_route(op, axes)
        n = len(group)
        is_root = group[root] == self.rank
        if parts or joined_parts:
            uneven = UnevenBlocks(op, group.index(self.rank), dim, joined, parts, joined_parts, is_root)
            x = uneven.add_room(x)
        elements = x.numel() // n if op == "scatter" and is_root else x.numel()
        what = self._count_launch(op, axes, elements, x.element_size(), name)
        input_buffer, out, finish = prepare_buffers(op, x, n, dim, joined, is_root, owned, into)
        if parts or joined_parts:
            finish = partial(uneven.remove_room, finish)
        start = partial(self._start_collective, op, input_buffer, out, axes, group, reduce, root)
        return self._issue_collective(what, start, input_buffer, partial(finish, out))

    def bind_collective(
        self,
        op: str,
        axes: Sequence[str],
        reduce: str,
        root: int,
        elements: int,
        itemsize: int,
        shape: list[int] | None,
    ) -> BoundCollective:
        """Return the collective `op` of so many elements along `axes` as a compiled block launches it again and again:
        its result has this `shape`, or is written over a copy of its input (None)."""
        axes, group, label, traffic = self._find_route(op, axes)
        moved = traffic * elements * itemsize
        how, entry = (axes, group, reduce, root), Launch(op, axes, group, elements)
        return BoundCollective(entry, how, shape, moved, label if self.rank == group[0] else "")

    def issue_bound(self, collective: BoundCollective, what: Launched, x: Tensor, out: Tensor) -> Callable[[], Tensor]:
        """Start a bound collective from the buffer x into `out`, as the clock follows each; return what waits."""
        start = partial(self._start_collective, what.op, x, out, *collective.how)
        return self._issue_collective(what, start, x, lambda: out).wait

    def _count_launch(self, op: str, axes: Sequence[str], elements: int, itemsize: int, name: str = "") -> Launched:
        """Count, and log, one collective `op` along `axes` of which a rank's input has so many elements; return it."""
        axes, group, label, traffic = self._routes.get((op, *axes)) or self._find_route(op, axes)
        moved = traffic * elements * itemsize
        if self.rank == group[0]:
            self.moved[label] += moved
        if self.log is not None:
            self.log.append(Launch(op, axes, group, elements))
        self.launched[axes] = number = self.launched.get(axes, 0) + 1
        return Launched(name or op, op, axes, moved, -1, number)

    def gather_and_multiply(
        self, x: Tensor, matrices: Sequence[Tensor], axes: Sequence[str], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return x [rows.., contracted], gathered along position `dim`, and its products with matrices [contracted,
        columns]: one all_gather, whose parts a transport may multiply as they come."""
        if self.trace:
            traced: tuple[Tensor, Sequence[Tensor]] = self.trace.gather_and_multiply(x, matrices, axes, dim)
            return traced
        if tuple(axes) in self.shared_memory:
            gathered, *products = self.multiply_parts("all_gather", x, matrices, axes, dim)
            return gathered, products
        gathered = self.launch("all_gather", x, axes, dim).wait()
        return gathered, [multiply_rows(gathered, matrix) for matrix in matrices]

    def multiply_and_scatter(self, x: Tensor, matrix: Tensor, axes: Sequence[str], dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum of the ranks' products of x and a matrix, by one scatter."""
        if self.trace:
            traced: Tensor = self.trace.multiply_and_scatter(x, matrix, axes, dim)
            return traced
        if tuple(axes) in self.shared_memory:
            return self.multiply_parts("reduce_scatter", x, [matrix], axes, dim)[0]
        return self.launch("reduce_scatter", multiply_rows(x, matrix), axes, dim, owned=True).wait()

    def multiply_parts(
        self, op: str, x: Tensor, matrices: Sequence[Tensor], axes: Sequence[str], dim: int
    ) -> Sequence[Tensor]:
        """Return x gathered by `op` and its products, or the rank's part of one, multiplied as parts come or leave."""
        raise AssertionError("no memory is shared here")

    def _find_route(self, op: str, axes: Sequence[str]) -> _Route:
        """Return, and keep for later launches, where this rank's collectives `op` along `axes` go."""
        ordered = self.mesh.order_axes(axes)
        group = self.mesh.group_of_rank(self.rank, ordered)
        route = _Route(ordered, group, collective_label(op, ordered), TRAFFIC[op](len(group), 1))
        return self._routes.setdefault((op, *axes), route)

    def launch_all_to_allv(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int], axes: Sequence[str], *, name: str = ""
    ) -> CollectiveHandle:
        """Issue an all_to_allv of the rows of x [rows, ...] over the group of this rank along `axes`, without waiting:
        the next `sent[i]` rows go to member i, from which `received[i]` come, this rank's own among them; the handle's
        `wait` returns these, in the order of the members. Each rank counts the bytes that it sends to others."""
        op, input_buffer = "all_to_allv", x.contiguous()
        axes, group, label, _ = self._routes.get((op, *axes)) or self._find_route(op, axes)
        row, rows_sent_away = prod(x.shape[1:]), sum(sent) - sent[group.index(self.rank)]
        moved = rows_sent_away * row * x.element_size()
        self.moved[label] += moved
        if self.log is not None:
            self.log.append(Launch(op, axes, group, row))
        out = input_buffer.new_empty((sum(received), *x.shape[1:]))
        start = partial(self._start_all_to_allv, input_buffer, out, sent, received, axes)
        what = Launched(name or op, op, axes, moved, -1, self._next_launch_number(axes))
        return self._issue_collective(what, start, input_buffer, lambda: out)

    def _issue_collective(
        self, what: Launched, start: Callable[[], Callable[[], Any]], input_buffer: Tensor, finish: Callable[[], Tensor]
    ) -> CollectiveHandle:
        """Start a collective from the buffer `input_buffer`; return its handle, whose result `finish` returns."""
        clock, turns = self.clock, self.turns if what.op in EXCHANGES else None
        if not clock.detailed:
            return CollectiveHandle(clock, start(), finish, along="+".join(what.axes), what=what, turns=turns)
        begin = clock.record_mark()
        with clock.profiler_range(what.name):
            wait = start()
        flight = clock.note_launch(what, begin, wait, input_buffer)
        return CollectiveHandle(clock, wait, finish, flight=flight, along="+".join(what.axes), what=what, turns=turns)

    def _next_launch_number(self, axes_or_peer: tuple[str, ...]) -> int:
        """Count one more launch along axes, or message to or from a peer; return its number, from 1."""
        self.launched[axes_or_peer] = number = self.launched.get(axes_or_peer, 0) + 1
        return number

    @abstractmethod
    def _start_collective(
        self, op: str, x: Tensor, out: Tensor, axes: tuple[str, ...], group: tuple[int, ...], reduce: str, root: int
    ) -> Callable[[], Any]:
        """Start the collective `op` in the transport, from the buffer `x` into the buffer `out`; the
        returned function blocks until it is done. `axes`: the axes, in mesh order, along which the group lies; `group`:
        the global ranks of its n members, in order; `reduce`: sum, or max for all_reduce; `root`: index in `group` of
        the member that broadcasts or scatters, or that alone receives a reduce or gather.

        Shapes `x` -> `out`: all_gather: [...] -> [n, ...]; reduce_scatter: [n, ...] -> [...]; scatter: the
        root's [n, ...] -> [...]; gather: [...] -> the root's [n, ...]; all_to_all, rotate: alike; all_reduce,
        broadcast, reduce: in place.
        """

    def _start_all_to_allv(
        self, x: Tensor, out: Tensor, sent: Sequence[int], received: Sequence[int], axes: tuple[str, ...]
    ):
        """Start `launch_all_to_allv` in the transport, from buffer `x` into buffer `out`; return a function
        that waits."""
        raise AssertionError("no rows are exchanged here")

    def send(self, x: Tensor, stage: int) -> CollectiveHandle:
        """Start sending `x` to the rank of pipeline stage `stage` that has this rank's index along all other axes. `x`
        must not be modified until `wait` returns."""
        x, peer = x.contiguous(), self._stage_peer(stage)
        self.moved[collective_label("send", ("stage",))] += x.nbytes
        self._log_transfer((self.rank, peer), x.numel())
        launched = Launched("", "send", ("stage",), x.nbytes, peer, self._next_launch_number(("to", str(peer))))
        return CollectiveHandle(self.clock, self._start_send(x, peer), lambda: x, "bubble", what=launched)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> CollectiveHandle:
        """Start receiving the next tensor of `shape` and `dtype` that the rank of pipeline stage `stage` with this
        rank's index along all other axes sends here; `wait` returns it."""
        out, peer = torch.empty(tuple(shape), dtype=dtype, device=self.device), self._stage_peer(stage)
        self._log_transfer((peer, self.rank), out.numel())
        launched = Launched("", "receive", ("stage",), out.nbytes, peer, self._next_launch_number(("from", str(peer))))
        return CollectiveHandle(self.clock, self._start_receive(out, peer), lambda: out, "bubble", what=launched)

    def _stage_peer(self, stage: int) -> int:
        """Return the global rank in pipeline stage `stage` that has this rank's index along all other axes."""
        return self.mesh.find_rank({**self.coordinates, "stage": stage})

    def _log_transfer(self, pair: tuple[int, int], elements: int) -> None:
        """Log a message of so many elements between a pair of global ranks, if launches are logged."""
        if self.log is not None:
            self.log.append(Launch("send", ("stage",), pair, elements))

    def _start_send(self, x: Tensor, peer: int) -> Callable[[], Any]:
        """Start sending x to the global rank `peer` by the transport; the returned function waits until it is sent."""
        raise AssertionError("one stage sends nothing")

    def _start_receive(self, out: Tensor, peer: int) -> Callable[[], Any]:
        """Start receiving into `out` from global rank `peer` by the transport; the returned function waits."""
        raise AssertionError("one stage receives nothing")

    def barrier(self) -> None:
        """Wait until every rank of the mesh has reached this call. Not counted, not logged."""
        if axes := self.mesh.order_axes(self.mesh.axes):
            with self.suspend_counting():
                self.launch("all_reduce", torch.zeros(1, device=self.device), axes).wait()

    def is_true_anywhere(self, is_true: bool) -> bool:
        """Return True if `is_true` is true on any rank of the mesh, by an uncounted all-reduce on all ranks."""
        if not (axes := self.mesh.order_axes(self.mesh.axes)):
            return is_true
        with self.suspend_counting():
            flag = torch.full((1,), float(is_true), device=self.device)
            return self.read_numbers(self.launch("all_reduce", flag, axes).wait()) != [0.0]

    def open_stage_connections(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Open the connections between pairs of pipeline stages (`neighbours`, the lower stage first) by exchanging
        their ranks between this rank and its peer in each, in one order on all ranks, before the first send of a step
        needs one. The lower stage sends first and the upper one receives first, since a transport may hold a send back
        until it is received. Not counted. Raises RuntimeError if another rank than the peer is there."""
        own_stage = self.coordinates["stage"]
        with self.suspend_counting():
            for lower, upper in neighbours:
                if own_stage == lower:
                    self._send_rank(upper)
                    self._receive_rank(upper)
                elif own_stage == upper:
                    self._receive_rank(lower)
                    self._send_rank(lower)

    def _send_rank(self, stage: int) -> None:
        """Send this rank's number to its peer in pipeline stage `stage`."""
        self.send(torch.full((1,), float(self.rank), device=self.device), stage).wait()

    def _receive_rank(self, stage: int) -> None:
        """Receive the number of this rank's peer in pipeline stage `stage`. Raises RuntimeError if it is another's."""
        [sender] = self.read_numbers(self.receive((1,), torch.float32, stage).wait())
        if sender != self._stage_peer(stage):
            raise RuntimeError(f"rank {sender:.0f} is where rank {self._stage_peer(stage)} sends to rank {self.rank}")

    def read_numbers(self, x: Tensor) -> list[float]:
        """Read the numbers in `x` [n], a tensor on this rank's device, into host memory: waits for the device, and so
        for the collectives in its stream. A training step synchronises with its device here and nowhere else: at its
        end, and where experts take as many rows as there are (`platform.runtime.expert_rows.count_rows`). Raises
        Aborted if collectives were interrupted, as the numbers then mean nothing."""
        with self.clock.mark_waiting_for_device():
            numbers: list[float] = x.tolist()
        self.confirm_uninterrupted()
        return numbers

    def start_reading(self, x: Tensor) -> Callable[[], list[float]]:
        """Start copying the numbers in `x` [n] to host memory; return a function that reads them as `read_numbers`
        does, and waits for no work that is launched after this call."""
        if x.device.type != "cuda":
            return partial(self.read_numbers, x)
        on_host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)
        copied.record()

        def read_copy() -> list[float]:
            """Wait for the copy of the numbers alone, and return them. Raises Aborted."""
            with self.clock.mark_waiting_for_device():
                copied.synchronize()
            self.confirm_uninterrupted()
            numbers: list[float] = on_host.tolist()
            return numbers

        return read_copy

    @contextmanager
    def keep_turn(self) -> Iterator[None]:
        """Keep the turn of a pass within the context, whose exchanges are too small to be worth another pass's turn."""
        turns, self.turns = self.turns, None
        try:
            yield
        finally:
            self.turns = turns

    @contextmanager
    def suspend_counting(self) -> Iterator[None]:
        """Suspend counting moved bytes and logging launches in the context, for traffic outside of a step."""
        moved, log = self.moved.copy(), self.log
        self.log = None
        yield
        self.moved, self.log = moved, log

    @contextmanager
    def divert_launches(self) -> Iterator[LaunchCounts]:
        """Count the launches in the context in what it yields alone, for `count_launches` at each run of a graph."""
        before = self.moved, self.launched, self.log
        self.moved, self.launched, self.log = counts = LaunchCounts(Counter(), {}, [])
        try:
            yield counts
        finally:
            self.moved, self.launched, self.log = before

    def count_launches(self, counts: LaunchCounts) -> None:
        """Count, and log, launches that a graph of the device has issued once more."""
        self.moved.update(counts.moved)
        for place, number in counts.launched.items():
            self.launched[place] = self.launched.get(place, 0) + number
        if self.log is not None:
            self.log += counts.log

    @abstractmethod
    def all_gather_texts(self, text: str) -> list[str]:
        """Gather a `text` of every rank on all ranks; return them, in rank order. Not counted."""

    @abstractmethod
    def collect_numbers(self, numbers: Tensor) -> Tensor | None:
        """Collect every rank's fp64 numbers [n] on the CPU as one [ranks, n] on rank 0, for the report of a step;
        return None elsewhere. Not counted: reporting on a step is not part of it."""

    @abstractmethod
    def broadcast_text(self, text: str | None = None) -> str:
        """Broadcast the `text` of rank 0, which alone gives one, and return it. Not counted."""

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums of every rank's `numbers`, in the ranks' order, through host memory; all call it together."""
        rows = self.collect_numbers(torch.tensor(numbers, dtype=torch.float64))
        sums: list[float] = json.loads(self.broadcast_text(None if rows is None else json.dumps(rows.sum(0).tolist())))
        return sums

    def abort(self) -> None:
        """Interrupt this communicator's collectives in progress so that they fail, here and at the peers, or end with
        results that mean nothing, which `confirm_uninterrupted` detects. Callable from any thread, repeatedly too."""
        self._aborted = True  # before anything is interrupted: whoever sees results of it finds this set
        with self._aborting:
            self._abort_transport()

    def confirm_uninterrupted(self) -> None:
        """Confirm that no collective was interrupted until now, so that what the device holds is a result. Raises
        Aborted. Called after waiting for the device, before its results are used or acknowledged."""
        if self._aborted:
            raise Aborted("the collectives of this generation were interrupted")

    def _abort_transport(self) -> None:  # noqa: B027  (a default that does nothing)
        """Interrupt the transport's collectives and messages in progress; called by one thread at a time."""

    def connect_peers(self, peers: Collection[int]) -> None:  # noqa: B027  (a default that does nothing)
        """Open the connections of `transfer` to the global ranks `peers`; all ranks do so, even without peers."""

    @abstractmethod
    def transfer(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive bytes whose sizes both sides know, such as snapshots kept at peers: `sent` and `received`
        are pairs (global rank of a peer to which there is a connection, uint8 tensor [bytes] on the CPU), at most one
        per peer and direction, none to itself. Returns when the tensors in `received` are filled. Callable from any
        thread, one at a time, beside collectives of another. Not counted."""

    @abstractmethod
    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive bytes like `transfer`, but between any ranks, over connections for this call alone; all
        ranks call it together, even without anything to send or receive."""

    def close(self) -> None:  # noqa: B027  (a default that does nothing)
        """Leave the process groups along mesh axes, when this rank's mesh is given up; no collective may follow."""


class SingleRank(Communicator):
    """Communicator of a world of one rank: it has no peers and launches no collective."""

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu"):
        """Prepare the communicator of a mesh of one rank, which has no peers."""
        super().__init__(mesh, 0, device)

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        """Raise AssertionError: a mesh of one rank launches no collective."""
        raise AssertionError("a world of one launches no collective")

    def all_gather_texts(self, text):
        """Return the text of this rank, the only one, as a list."""
        return [text]

    def collect_numbers(self, numbers):
        """Return this rank's numbers [n] as [1, n], as it is the only one."""
        return numbers[None]

    def sum_numbers(self, numbers):
        """Return the numbers of this rank, the only one."""
        return [*numbers]

    def broadcast_text(self, text=None):
        """Return the text of this rank, the only one."""
        return text

    def transfer(self, sent, received):
        """Check that there is nothing to send or receive, as the only rank of a mesh has no peers."""
        assert not sent and not received, "there is nobody to talk to"

    exchange = transfer


def all_gather_values(communicator: Communicator, value: Any) -> list[Any]:
    """Gather every rank's plain JSON value on all ranks, which call it together; return the values, by rank."""
    return [json.loads(text) for text in communicator.all_gather_texts(json.dumps(value))]
