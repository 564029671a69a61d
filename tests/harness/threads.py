"""Communicators of ranks that are threads of one process: every scheme, counted and compared, without a cluster."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from platform.plan.layout import Mesh
from platform.runtime.communicator import Communicator


class ThreadInModes(ThreadPoolExecutor):
    """A thread whose calls are under the dispatch modes of the thread that gives them, which are a thread's own."""

    def submit(self, function, *arguments):
        modes = _get_current_dispatch_mode_stack()

        def call():
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return function(*arguments)

        return super().submit(call)


class _Meeting:
    """One collective of one group of threads."""

    def __init__(self, kind: tuple):
        self.kind = kind
        self.blocks: dict[int, Tensor] = {}
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
        self.turn = threading.Lock()

    def wait(self, event: threading.Event) -> bool:
        """Wait for another rank, which gets the turn meanwhile. Return False if it has not come when the time is over
        and no rank has the turn: then all wait for one another. One that traces a large block has it for longer."""
        if event.is_set():
            return True
        self.turn.release()
        try:
            while not (came := event.wait(self.timeout)) and self.turn.locked():
                pass
            return came
        finally:
            self.turn.acquire()

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

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        key = (group, self._calls[group])
        self._calls[group] += 1
        kind = (op, reduce, root, tuple((out if op == "scatter" else x).shape), x.dtype)
        world = self._world
        with world.lock:
            meeting = world.meetings.setdefault(key, _Meeting(kind))
            if meeting.kind != kind:
                raise RuntimeError(f"rank {self.rank} calls {kind} where its group {group} calls {meeting.kind}")
            # A copy: once this rank has waited, it may change what it gave, read or not by the others. Gradients do:
            # where the local batch is one sequence, a position table's gradient is a view of its activation's.
            meeting.blocks[self.rank] = x.clone()
            if world.failure or len(meeting.blocks) == len(group):
                meeting.complete.set()

        def wait() -> None:
            if not world.wait(meeting.complete):
                raise TimeoutError(f"rank {self.rank} waits for {set(group) - set(meeting.blocks)} in {kind}")
            if world.failure:
                raise RuntimeError("another rank failed") from world.failure
            with world.lock:
                parts = [meeting.blocks[r] for r in group]
                meeting.left += 1
                if meeting.left == len(group):
                    del world.meetings[key]
            me = group.index(self.rank)
            if op == "all_gather":
                torch.stack(parts, out=out)
            elif op == "reduce_scatter":
                out.copy_(summed([p[me] for p in parts]))
            elif op == "all_to_all":
                torch.stack([p[me] for p in parts], out=out)
            elif op == "rotate":
                out.copy_(parts[me - 1])
            elif op == "broadcast":
                if me != root:
                    out.copy_(parts[root])
            elif op == "scatter":
                out.copy_(parts[root][me])
            elif op == "gather":
                if me == root:
                    torch.stack(parts, out=out)
            elif op == "all_reduce" or me == root:
                out.copy_(torch.stack(parts).amax(0) if reduce == "max" else summed(parts))

        return wait

    def _start_all_to_allv(self, x, out, sent, received, axes):
        group = self.mesh.group_of_rank(self.rank, axes)
        parts = dict(zip(group, x.split(list(sent)), strict=True))
        places = dict(zip(group, out.split(list(received)), strict=True))
        places.pop(self.rank).copy_(parts.pop(self.rank))
        for peer, part in parts.items():
            self._start_send(part, peer)
        waits = [self._start_receive(place, peer) for peer, place in places.items()]
        return lambda: [wait() for wait in waits]

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

    def _start_send(self, x, peer):
        _, letter = self._letter(self.rank, peer)
        letter.content = x.detach().clone()
        letter.complete.set()
        return lambda: None

    def _start_receive(self, out, peer):
        key, letter = self._letter(peer, self.rank)

        def wait() -> None:
            if not self._world.wait(letter.complete):
                raise TimeoutError(f"rank {self.rank} waits for what rank {peer} sends")
            if letter.content is None:
                raise RuntimeError("another rank failed") from self._world.failure
            if letter.content.shape != out.shape:
                raise RuntimeError(f"rank {self.rank} waits for {out.shape} of {letter.content.shape} from rank {peer}")
            out.copy_(letter.content)
            with self._world.lock:
                del self._world.letters[key]

        return wait

    def all_gather_texts(self, text):
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8)
        others = [peer for peer in range(self.mesh.world_size) if peer != self.rank]
        sizes = {peer: torch.tensor(0) for peer in others}
        self.transfer([(peer, torch.tensor(len(encoded))) for peer in others], list(sizes.items()))
        texts = {peer: encoded.new_empty(int(n)) for peer, n in sizes.items()}
        self.transfer([(peer, encoded) for peer in others], list(texts.items()))
        return [bytes({**texts, self.rank: encoded}[peer].tolist()).decode() for peer in range(self.mesh.world_size)]

    def transfer(self, sent, received):
        for peer, x in sent:
            self._start_send(x, peer)
        for peer, out in received:
            self._start_receive(out, peer)()

    exchange = transfer

    def collect_numbers(self, numbers):
        if self.rank:
            self._start_send(numbers, 0)
            return None
        rows = [numbers, *(torch.empty_like(numbers) for _ in range(1, self.mesh.world_size))]
        for peer in range(1, self.mesh.world_size):
            self._start_receive(rows[peer], peer)()
        return torch.stack(rows)

    def broadcast_text(self, text=None):
        return self.all_gather_texts(text or "")[0]


def summed(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, added in their order."""
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
    results: list[Any] = [None] * mesh.world_size

    def main(rank: int) -> None:
        try:
            with world.turn:
                results[rank] = work(ThreadGroups(mesh, rank, world))
        except BaseException as error:
            world.fail(error)

    threads = [threading.Thread(target=main, args=(r,), name=f"rank{r}") for r in range(mesh.world_size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if world.failure:
        raise world.failure
    return results
