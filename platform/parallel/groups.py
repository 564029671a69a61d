"""Communicators: one rank's view of the groups along mesh axes, on torch.distributed or on threads of one process.

Only `platform.parallel.convert` and the statistics of `platform.parallel.ops` launch through them. Every launch is
counted by the contract's rule and, on request, logged.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from platform.parallel.clock import Clock
from platform.parallel.traced import COMMUNICATORS, Arrived, collective
from platform.plan.cost import TRAFFIC, label
from platform.plan.mesh import Mesh

_NUMBERS = itertools.count()
PIECE = 64 << 20  # bytes of host memory that `transfer` sends over a GPU's memory at a time
# named *_into_tensor, *_tensor before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Launch:
    """One collective as a rank issued it: what the replay of all ranks' logs checks."""

    op: str
    axes: tuple[str, ...]
    group: tuple[int, ...]
    elements: int


class Handle:
    """A collective or transfer under way. `wait` gives its result and may be called once; the time that it takes is
    booked under `section`."""

    def __init__(
        self, clock: Clock, wait: Callable[[], Any], finish: Callable[[], Tensor], section: str = "exposed_comm"
    ):
        self._clock, self._wait, self._finish, self._section = clock, wait, finish, section

    def wait(self) -> Tensor:
        with self._clock.section(self._section):
            self._wait()
        return self._finish()


class Communicator(ABC):
    """`moved`: `OP/AXES` -> bytes moved by the groups in which this rank is the first member, so that the sum over all
    ranks is the total. `clock` books what is waited for collectives. `log`: every launch, where it is a list."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device | str = "cpu"):
        self.mesh, self.rank, self.device = mesh, rank, torch.device(device)
        self.coordinates = mesh.coordinates(rank)
        self.moved: Counter[str] = Counter()
        self.clock = Clock()
        self.log: list[Launch] | None = None
        self._number = next(_NUMBERS)
        COMMUNICATORS[self._number] = self

    def index(self, axes: Sequence[str]) -> int:
        return self.mesh.index(self.coordinates, axes)

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
    ) -> Handle | Arrived:
        """Issues one collective of `platform.plan.rule.Step` over `axes` without waiting.

        `x` must not be modified until the result is there. `reduce`: sum, or max for all_reduce. `owned`: reductions
        may work in `x`. `root`: index in the group of the member whose `x` a broadcast gives to all, or a scatter
        shares out (the others' `x` is overwritten, for a scatter by the part that they get), and which alone gets the
        result of a reduce or gather (the others': empty). Several axes act together in mesh order: all_reduce,
        broadcast, reduce, and all_gather of unordered statistics.
        """
        if torch.compiler.is_compiling():
            members = self.mesh.extent(axes)
            return Arrived(collective(x, self._number, op, "+".join(axes), members, dim, joined, reduce))
        axes = self.mesh.ordered(axes)
        group = self.mesh.group(self.rank, axes)
        n = len(group)
        is_root = group[root] == self.rank
        elements = x.numel() // n if op == "scatter" and is_root else x.numel()
        if self.rank == group[0]:
            moved = TRAFFIC[op](n, elements) * x.element_size()
            self.moved[label(op, axes)] += moved
        if self.log is not None:
            self.log.append(Launch(op, axes, group, elements))
        if op == "all_gather":
            given = x.contiguous()
            out = given.new_empty((n, *given.shape))
            finish = lambda: out.movedim(0, dim).flatten(dim, dim + 1)  # noqa: E731
        elif op == "reduce_scatter":
            given = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()
            out = given.new_empty(given.shape[1:])
            finish = lambda: out  # noqa: E731
        elif op == "all_to_all":
            given = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()
            out = torch.empty_like(given)
            finish = lambda: out.movedim(0, joined).flatten(joined, joined + 1)  # noqa: E731
        elif op == "scatter" and is_root:
            given = x.unflatten(dim, (n, -1)).movedim(dim, 0).contiguous()
            out = given.new_empty(given.shape[1:])
            finish = lambda: out  # noqa: E731
        elif op == "gather":
            given = x.contiguous()
            out = given.new_empty((n, *given.shape) if is_root else 0)
            finish = lambda: out.movedim(0, dim).flatten(dim, dim + 1) if is_root else out  # noqa: E731
        elif op in ("broadcast", "scatter"):
            given = out = x.contiguous()
            finish = lambda: out  # noqa: E731
        else:
            assert op in ("all_reduce", "reduce"), op
            given = x.contiguous() if owned else x.detach().clone(memory_format=torch.contiguous_format)
            out = given
            finish = lambda: out if op == "all_reduce" or is_root else out.new_empty(0)  # noqa: E731
        return Handle(self.clock, self._start(op, given, out, axes, group, reduce, root), finish)

    @abstractmethod
    def _start(
        self,
        op: str,
        given: Tensor,
        out: Tensor,
        axes: tuple[str, ...],
        group: tuple[int, ...],
        reduce: str,
        root: int,
    ) -> Callable[[], Any]:
        """Begins the collective into `out`; the result blocks until it is there.

        all_gather: [...] -> [n, ...]; reduce_scatter: [n, ...] -> [...]; all_to_all: [n, ...] -> [n, ...];
        scatter: the root's [n, ...] -> [...]; gather: [...] -> the root's [n, ...]; all_reduce, broadcast, reduce: in
        place.
        """

    def send(self, x: Tensor, stage: int) -> Handle:
        """Begins to send `x` to this rank's place in another stage. It must not be modified until `wait` returns."""
        x, peer = x.contiguous(), self._peer(stage)
        self.moved[label("send", ("stage",))] += x.nbytes
        self._log_transfer((self.rank, peer), x.numel())
        return Handle(self.clock, self._send(x, peer), lambda: x, "bubble")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Handle:
        """Begins to receive what this rank's place in another stage sends next."""
        out, peer = torch.empty(tuple(shape), dtype=dtype, device=self.device), self._peer(stage)
        self._log_transfer((peer, self.rank), out.numel())
        return Handle(self.clock, self._receive(out, peer), lambda: out, "bubble")

    def _peer(self, stage: int) -> int:
        return self.mesh.rank({**self.coordinates, "stage": stage})

    def _log_transfer(self, pair: tuple[int, int], elements: int) -> None:
        if self.log is not None:
            self.log.append(Launch("send", ("stage",), pair, elements))

    def _send(self, x: Tensor, peer: int) -> Callable[[], Any]:
        raise AssertionError("one stage sends nothing")

    def _receive(self, out: Tensor, peer: int) -> Callable[[], Any]:
        raise AssertionError("one stage receives nothing")

    def barrier(self) -> None:
        """Waits for every rank of the mesh."""
        if axes := self.mesh.ordered(self.mesh.axes):
            moved, log = self.moved.copy(), self.log
            self.log = None
            self.launch("all_reduce", torch.zeros(1, device=self.device), axes).wait()
            self.moved, self.log = moved, log

    def meet(self, neighbours: Iterable[tuple[int, int]]) -> None:
        """Opens the connections between pairs of stages, lower first, in one order, before a first send needs one."""
        moved, log, here = self.moved.copy(), self.log, self.coordinates["stage"]
        self.log = None
        for pair in neighbours:
            if here in pair:
                (there,) = set(pair) - {here}
                sending = self.send(torch.zeros(1, device=self.device), there)
                self.receive((1,), torch.float32, there).wait()
                sending.wait()
        self.moved, self.log = moved, log

    @abstractmethod
    def exchange(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """An all-to-all of bytes among all ranks of the mesh: takes one uint8 tensor [bytes] on the CPU per receiver,
        returns one per sender, in rank order. Sizes differ, and nothing is counted: no step does it."""

    @abstractmethod
    def transfer(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Bytes between ranks that know what they get: (peer, uint8 tensor [bytes] on the CPU) each, at most one of a
        pair and direction, none to itself. Returns when `received` are filled; nothing is counted."""

    def close(self) -> None:  # noqa: B027  (most have nothing to leave)
        """Leaves the groups."""


class Alone(Communicator):
    """A world of one: there is nobody to talk to."""

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu"):
        super().__init__(mesh, 0, device)

    def _start(self, op, given, out, axes, group, reduce, root):
        raise AssertionError("a world of one launches no collective")

    def exchange(self, messages):
        return list(messages)

    def transfer(self, sent, received):
        assert not sent and not received, "there is nobody to talk to"


class ProcessGroups(Communicator):
    """Groups of torch.distributed: NCCL on CUDA, gloo on CPU. The default process group must be initialised."""

    def __init__(self, mesh: Mesh, rank: int, axes_of_groups: Iterable[Sequence[str]], device: str = "cpu"):
        super().__init__(mesh, rank, device)
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        for axes in axes_of_groups:  # in one order on every rank: creating a group is collective
            mine, _ = dist.new_subgroups_by_enumeration([list(g) for g in mesh.groups(axes)])
            assert mine is not None
            self._groups[tuple(axes)] = mine

    def _start(self, op, given, out, axes, group, reduce, root):
        g = self._groups[axes]
        if op == "all_gather":
            work = _all_gather(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "reduce_scatter":
            work = _reduce_scatter(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "all_to_all":
            work = dist.all_to_all_single(out.view(-1), given.view(-1), group=g, async_op=True)
        elif op == "broadcast":
            work = dist.broadcast(out, group[root], group=g, async_op=True)
        elif op == "scatter":
            parts = list(given.unbind()) if self.rank == group[root] else None
            work = dist.scatter(out, parts, group[root], group=g, async_op=True)
        elif op == "gather":
            parts = list(out.unbind()) if self.rank == group[root] else None
            work = dist.gather(given, parts, group[root], group=g, async_op=True)
        elif op == "reduce":
            work = dist.reduce(out, group[root], group=g, async_op=True)
        else:
            work = dist.all_reduce(out, dist.ReduceOp.MAX if reduce == "max" else dist.ReduceOp.SUM, g, async_op=True)
        return work.wait

    def _send(self, x, peer):
        work = dist.isend(x, peer)
        assert work is not None
        return work.wait

    def _receive(self, out, peer):
        work = dist.irecv(out, peer)
        assert work is not None
        return work.wait

    def exchange(self, messages):
        sent = torch.tensor([m.numel() for m in messages], device=self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        given = torch.cat(list(messages)).to(self.device)
        sizes = received.tolist()
        out = given.new_empty(sum(sizes))
        dist.all_to_all_single(out, given, sizes, sent.tolist())
        return list(out.cpu().split(sizes))

    def transfer(self, sent, received):
        largest = max((x.numel() for _, x in (*sent, *received)), default=0)
        step = PIECE if self.device.type == "cuda" else max(largest, 1)  # what passes through a GPU's memory at a time
        for at in range(0, largest, step):
            given = [(peer, x[at : at + step].to(self.device)) for peer, x in sent if at < x.numel()]
            wanted = [(peer, x[at : at + step]) for peer, x in received if at < x.numel()]
            got = [x if x.device == self.device else torch.empty_like(x, device=self.device) for _, x in wanted]
            works = [dist.P2POp(dist.isend, x, peer) for peer, x in given]
            works += [dist.P2POp(dist.irecv, x, peer) for x, (peer, _) in zip(got, wanted, strict=True)]
            for work in dist.batch_isend_irecv(works):
                work.wait()
            for x, (_, out) in zip(got, wanted, strict=True):
                if x is not out:
                    out.copy_(x)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Meeting:
    """One collective of one group of threads."""

    def __init__(self, kind: tuple):
        self.kind = kind
        self.given: dict[int, Tensor] = {}
        self.complete = threading.Event()
        self.left = 0


class _Letter:
    """What one thread sends another."""

    def __init__(self) -> None:
        self.content: Tensor | None = None
        self.complete = threading.Event()


class ThreadWorld:
    """Where the ranks of one process meet. `fail` releases everybody who waits."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)):
        self.lock = threading.Lock()
        self.letters: dict[tuple[int, int, int], _Letter] = defaultdict(_Letter)  # sender, receiver, number
        self.meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self.failure: BaseException | None = None
        self.timeout = timeout.total_seconds()

    def fail(self, cause: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or cause
            for meeting in self.meetings.values():
                meeting.complete.set()
            for letter in self.letters.values():
                letter.complete.set()


class ThreadGroups(Communicator):
    """Ranks as threads of one process: the same collectives and counters, summed in rank order."""

    def __init__(self, mesh: Mesh, rank: int, world: ThreadWorld):
        super().__init__(mesh, rank)
        self._world = world
        self._calls: Counter[tuple[int, ...]] = Counter()

    def _start(self, op, given, out, axes, group, reduce, root):
        key = (group, self._calls[group])
        self._calls[group] += 1
        kind = (op, reduce, root, tuple((out if op == "scatter" else given).shape), given.dtype)
        world = self._world
        with world.lock:
            meeting = world.meetings.setdefault(key, _Meeting(kind))
            if meeting.kind != kind:
                raise RuntimeError(f"rank {self.rank} calls {kind} where its group {group} calls {meeting.kind}")
            # A copy: once this rank has waited, it may change what it gave, read or not by the others. Gradients do:
            # where the local batch is one sequence, a position table's gradient is a view of its activation's.
            meeting.given[self.rank] = given.clone()
            if world.failure or len(meeting.given) == len(group):
                meeting.complete.set()

        def wait() -> None:
            if not meeting.complete.wait(world.timeout):
                raise TimeoutError(f"rank {self.rank} waits for {set(group) - set(meeting.given)} in {kind}")
            if world.failure:
                raise RuntimeError("another rank failed") from world.failure
            with world.lock:
                parts = [meeting.given[r] for r in group]
                meeting.left += 1
                if meeting.left == len(group):
                    del world.meetings[key]
            me = group.index(self.rank)
            if op == "all_gather":
                torch.stack(parts, out=out)
            elif op == "reduce_scatter":
                out.copy_(_sum([p[me] for p in parts]))
            elif op == "all_to_all":
                torch.stack([p[me] for p in parts], out=out)
            elif op == "broadcast":
                if me != root:
                    out.copy_(parts[root])
            elif op == "scatter":
                out.copy_(parts[root][me])
            elif op == "gather":
                if me == root:
                    torch.stack(parts, out=out)
            elif op == "all_reduce" or me == root:
                out.copy_(torch.stack(parts).amax(0) if reduce == "max" else _sum(parts))

        return wait

    def _letter(self, sender: int, receiver: int) -> tuple[tuple[int, int, int], _Letter]:
        """The next one of a pair: receives match sends in the order in which both were begun."""
        pair = (sender, receiver)
        key = (*pair, self._calls[pair])
        self._calls[pair] += 1
        with self._world.lock:
            letter = self._world.letters[key]
            if self._world.failure:
                letter.complete.set()
        return key, letter

    def _send(self, x, peer):
        _, letter = self._letter(self.rank, peer)
        letter.content = x.detach().clone()
        letter.complete.set()
        return lambda: None

    def _receive(self, out, peer):
        key, letter = self._letter(peer, self.rank)

        def wait() -> None:
            if not letter.complete.wait(self._world.timeout):
                raise TimeoutError(f"rank {self.rank} waits for what rank {peer} sends")
            if letter.content is None:
                raise RuntimeError("another rank failed") from self._world.failure
            out.copy_(letter.content)
            with self._world.lock:
                del self._world.letters[key]

        return wait

    def exchange(self, messages):
        def pass_on(parts, outs):
            others = [peer for peer in range(self.mesh.size) if peer != self.rank]
            for peer in others:
                self._send(parts[peer], peer)
            for peer in others:
                self._receive(outs[peer], peer)()
            outs[self.rank].copy_(parts[self.rank])
            return outs

        sizes = pass_on([torch.tensor(m.numel()) for m in messages], [torch.tensor(0) for _ in messages])
        return pass_on(messages, [torch.empty(int(n), dtype=torch.uint8) for n in sizes])

    def transfer(self, sent, received):
        for peer, x in sent:
            self._send(x, peer)
        for peer, out in received:
            self._receive(out, peer)()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run_threads(
    mesh: Mesh, work: Callable[[ThreadGroups], Any], timeout: timedelta = timedelta(seconds=60)
) -> list[Any]:
    """Runs `work(communicator)` on every rank of `mesh`, each a thread; returns the results by rank.

    Raises the first failure of any rank; the others are released.
    """
    world = ThreadWorld(timeout)
    results: list[Any] = [None] * mesh.size

    def main(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroups(mesh, rank, world))
        except BaseException as error:
            world.fail(error)

    threads = [threading.Thread(target=main, args=(r,), name=f"rank{r}") for r in range(mesh.size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if world.failure:
        raise world.failure
    return results
