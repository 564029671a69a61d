"""A double of torch.distributed for ranks that are threads of one process, as strict as NCCL may be.

A group that is not connected when it is made connects in its first call, which all members must make; the operations of
a group run in the order in which each rank issued them, so that one holds back those behind it; a send ends only when
it is received, and the first one between two ranks of a group holds its host until then; waiting takes no timeout. If
every rank waits and nothing can run, all of them raise `Stuck`. To make a group is a collective of the whole world,
in which all call alike; the ranks of a split that give one colour are in one group; the abort of a group waits while
another group of the rank hangs that is not aborted. Groups of gloo are as lenient as gloo.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from platform.parallel.communicator import torch_distributed
from platform.parallel.communicator.torch_distributed import ProcessGroups, join
from platform.plan.language.mesh import Mesh
from tests.harness.threads import summed

GPU = torch.device("cuda", 0)
ABORT_SECONDS = 1.0  # for the other threads of a rank to abort what its abort waits for


class Stuck(RuntimeError):
    """All ranks wait, and nothing can run."""


class Operation:
    """What one rank has issued in a group: a collective of the kind `what`, or a message to or from `peer`. `work`:
    what the collective does, given the tensors of all members, by rank."""

    def __init__(self, rank: int, what: Any, tensors: Any, work: Callable[..., None] | None = None, peer: int = -1):
        self.rank, self.what, self.tensors, self.work, self.peer = rank, what, tensors, work, peer
        self.done = False


class Group:
    """Members that share one queue each; `strict`: of NCCL."""

    def __init__(self, world: World, members: tuple[int, ...], strict: bool, connected: bool):
        self.world, self.members, self.strict, self.connected = world, members, strict, connected
        self.queues: dict[Any, dict[int, deque[Operation]]] = defaultdict(lambda: {m: deque() for m in members})
        self.called: set[int] = set()
        self.opened: set[tuple[int, int]] = set()  # (sender, receiver) that have exchanged a message

    def abort(self) -> None:
        """Abort the group on the rank that this thread belongs to."""
        self.world.abort(self)


class Work:
    def __init__(self, world: World, group: Group, operation: Operation):
        self._world, self._group, self._operation = world, group, operation

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None or not self._group.strict, "NCCL polls on the host if a timeout is given"
        self._world.until(lambda: self._operation.done, f"{self._operation.what} in {self._group.members}")


class Beside:
    """A group of gloo of messages alone, which connects the ranks that send to each other, and those only."""

    world: World
    _Options, create_default_device = SimpleNamespace, staticmethod(lambda lazy_init: None)

    def __init__(self, name: str, rank: int, size: int, options: Any):
        self._group = self.world.groups.setdefault(name, Group(self.world, tuple(range(size)), False, True))

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        return self.world.isend(*tensors, peer, self._group)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        return self.world.irecv(*tensors, peer, self._group)


class World:
    """Where the threads meet; `dist` stands for the module torch.distributed."""

    def __init__(self, size: int):
        self.changed, self.here = threading.Condition(), threading.local()
        self.waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self.live, self.size, self.failure = set(range(size)), size, None
        self.groups: dict[Any, Group] = {}
        self.aborted: dict[int, set[Group]] = defaultdict(set)  # of each rank
        self.calls: dict[str, int] = defaultdict(int)  # collectives of the whole world, by what they make
        self.calling: dict[int, dict[int, Any]] = defaultdict(dict)  # the ranks in each of them, with what they ask for
        self.color = lambda ranks: tuple(ranks)  # of the ranks of a split's group
        self.issued: dict[tuple[int, Any], int] = defaultdict(int)
        names = ("all_gather reduce_scatter all_to_all_single broadcast scatter gather reduce all_reduce isend irecv "
                 "new_group new_subgroups_by_enumeration split_group init_process_group").split()  # fmt: skip
        self.dist = SimpleNamespace(
            **{name: getattr(self, name) for name in names},
            ReduceOp=torch.distributed.ReduceOp,
            GroupMember=torch.distributed.GroupMember,
            group=self,
            get_backend=lambda: "nccl" if self.here.default.strict else "gloo",
            ProcessGroupNCCL=SimpleNamespace(Options=SimpleNamespace),
            ProcessGroupGloo=type("", (Beside,), {"world": self}),
            PrefixStore=lambda prefix, store: prefix,
            is_initialized=lambda: self.here.default is not None,
            destroy_process_group=lambda: setattr(self.here, "default", None),
            distributed_c10d=SimpleNamespace(
                _set_pg_timeout=lambda *_: None, _abort_process_group=self.abort_all, _get_default_store=lambda: None
            ),
        )

    @property
    def WORLD(self) -> Group:
        return self.here.default

    def threads_of_rank(self, count: int) -> ThreadPoolExecutor:
        """Return threads that belong to the rank of this one."""
        rank, default = self.here.rank, self.here.default

        def belong() -> None:
            self.here.rank, self.here.default = rank, default

        return ThreadPoolExecutor(count, initializer=belong)

    # the engine

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Hold this rank until `true()`. Raises Stuck if that can never be."""
        with self.changed:
            self.waiting[self.here.rank] = true, what
            while not true():
                self._look()
                if self.failure:
                    raise Stuck(str(self.failure)) from self.failure
                self.changed.wait(30.0)
            del self.waiting[self.here.rank]

    def _look(self) -> None:
        if self.live and self.live <= self.waiting.keys() and not any(t() for t, _ in self.waiting.values()):
            self.fail(Stuck("; ".join(f"rank {r}: {what}" for r, (_, what) in sorted(self.waiting.items()))))

    def fail(self, cause: BaseException) -> None:
        self.failure = self.failure or cause
        self.changed.notify_all()

    def ends(self, rank: int, cause: BaseException | None) -> None:
        with self.changed:
            self.live.discard(rank)
            if cause:
                self.fail(cause)
            self._look()

    def _issue(self, group: Group | None, what: Any, tensors: Any, work: Any = None, peer: int = -1) -> Work:
        group, rank = group or self.here.default, self.here.rank
        operation = Operation(rank, what, tensors, work, peer)
        if not group.connected and not self._connect(group, rank, peer):
            group = self._pair(group, rank, peer)
        pair = (rank, peer) if what == "send" else (peer, rank)
        with self.changed:
            key = ("messages", *pair) if peer >= 0 and not group.strict else "all"
            group.queues[key][rank].append(operation)
            self._run(group, group.queues[key])
            self.changed.notify_all()
        if peer >= 0 and group.strict and pair not in group.opened:
            self.until(lambda: operation.done, f"the first {what} of {pair}")
            group.opened.add(pair)
        return Work(self, group, operation)

    def _connect(self, group: Group, rank: int, peer: int) -> bool:
        """Connect a group in its first collective; False for a message, which connects two of its ranks alone."""
        if peer < 0:
            group.called.add(rank)
            self.until(lambda: len(group.called) == len(group.members), f"{group.members} to connect")
            group.connected = True
        return peer < 0

    def _pair(self, group: Group, rank: int, peer: int) -> Group:
        with self.changed:
            members = min(rank, peer), max(rank, peer)
            return self.groups.setdefault(("pair", id(group), members), Group(self, members, group.strict, True))

    def _run(self, group: Group, queues: dict[int, deque[Operation]]) -> None:
        """Run whatever is at the head of the queues of all whom it concerns."""
        moved = True
        while moved:
            moved = False
            heads = {m: queues[m][0] for m in group.members if queues[m]}
            if len(heads) == len(group.members) and all(head.peer < 0 for head in heads.values()):
                kinds = {head.what for head in heads.values()}
                if len(kinds) > 1:
                    return self.fail(RuntimeError(f"{group.members} call {kinds}"))
                given = [heads[m].tensors for m in group.members]
                for head in heads.values():
                    head.work(given, group.members.index(head.rank))
                moved = self._end(queues, *heads.values())
                continue
            for send in heads.values():
                receive = heads.get(send.peer)
                if send.what == "send" and receive and receive.what == "receive" and receive.peer == send.rank:
                    assert receive.tensors.shape == send.tensors.shape and receive.tensors.dtype == send.tensors.dtype
                    receive.tensors.copy_(send.tensors)
                    moved = self._end(queues, send, receive)
                    break

    @staticmethod
    def _end(queues: dict[int, deque[Operation]], *operations: Operation) -> bool:
        for operation in operations:
            operation.done = True
            queues[operation.rank].popleft()
        return True

    # torch.distributed

    def init_process_group(self, backend, *, store, rank, world_size, timeout, device_id=None, pg_options=None):
        with self.changed:
            strict = backend == "nccl"
            made = self.groups.setdefault(
                "world", Group(self, tuple(range(world_size)), strict, device_id == GPU or not strict)
            )
        self.here.default = made

    def _together(self, what: str, asked: Any) -> int:
        """Hold this rank until the whole world has called this collective with the same arguments; return the number of
        the call."""
        rank, default = self.here.rank, self.here.default
        number = self.issued[rank, "made"] = self.issued[rank, "made"] + 1
        with self.changed:
            asking = self.calling[number]
            asking[rank] = what, asked
            if any(other != asking[rank] for other in asking.values()):
                self.fail(RuntimeError(f"ranks make other groups: {asking}"))
            self.calls[what] += len(asking) == 1
            self.changed.notify_all()
        if default.strict and default.connected:
            self.until(lambda: len(asking) == self.size, f"all ranks in {what} number {number}")
        return number

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None, timeout: Any = None) -> Any:
        """Like torch's: created by all ranks alike, and connected at once if the default group is."""
        default = self.here.default
        members = tuple(ranks if ranks is not None else default.members)
        strict = default.strict if backend is None else backend == "nccl"
        count = self._together("new_group", members)
        with self.changed:
            connected = default.connected or not strict
            group = self.groups.setdefault((count, members), Group(self, members, strict, connected))
        return group if self.here.rank in members else None

    def new_subgroups_by_enumeration(self, lists, timeout=None):
        made = [self.new_group(ranks) for ranks in lists]
        return next((g for g in made if g), None), made

    def split_group(self, parent_pg=None, split_ranks=None, timeout=None):
        """Like torch's: one collective of the parent for all groups; None for a rank in none of them."""
        rank, default = self.here.rank, self.here.default
        assert default.strict and default.connected, "only a connected group of NCCL can be split"
        assert len({r for ranks in split_ranks for r in ranks}) == sum(map(len, split_ranks)), "groups overlap"
        count = self._together("split_group", tuple(map(tuple, split_ranks)))
        mine = next((tuple(sorted(ranks)) for ranks in split_ranks if rank in ranks), None)
        if mine is None:
            return None
        alike = [r for ranks in split_ranks if self.color(sorted(ranks)) == self.color(mine) for r in ranks]
        with self.changed:
            members = tuple(sorted(alike))
            return self.groups.setdefault((count, members), Group(self, members, True, True))

    def abort(self, group: Group) -> None:
        """Abort a group on this rank; wait until no other group of this rank hangs that is not aborted."""
        rank = self.here.rank
        others = [g for g in {*self.groups.values()} if g.strict and g is not group and rank in g.members]

        def free() -> bool:
            return not any(queue[rank] for g in others if g not in self.aborted[rank] for queue in g.queues.values())

        with self.changed:
            self.aborted[rank].add(group)
            self.changed.notify_all()
            if group.strict and not self.changed.wait_for(free, ABORT_SECONDS):
                raise Stuck(f"rank {rank}: the abort of {group.members} waits for another group")

    def abort_all(self) -> None:
        """Abort all groups of this rank, one after the other, and forget them."""
        for group in [g for g in {*self.groups.values()} if self.here.rank in g.members]:
            self.abort(group)
        self.here.default = None

    def isend(self, x, peer, group=None):
        return self._issue(group, "send", x.detach().clone(), peer=peer)

    def irecv(self, out, peer, group=None):
        return self._issue(group, "receive", out, peer=peer)

    def _collective(self, group, what, tensors, work, async_op):
        handle = self._issue(group, what, tensors, work)
        return handle if async_op else handle.wait()

    def all_gather(self, out, given, group=None, async_op=False):
        work = lambda all_, me: all_[me][1].copy_(torch.cat([x for x, _ in all_]))  # noqa: E731
        return self._collective(group, ("all_gather", given.numel()), (given.clone(), out), work, async_op)

    def reduce_scatter(self, out, given, group=None, async_op=False):
        n = out.numel()
        work = lambda all_, me: all_[me][1].copy_(summed([x[me * n :][:n] for x, _ in all_]))  # noqa: E731
        return self._collective(group, ("reduce_scatter", n), (given.clone(), out), work, async_op)

    def all_to_all_single(self, out, given, outs=None, ins=None, group=None, async_op=False):
        def work(all_, me):
            parts = [x.split(ins_ or x.numel() // len(all_))[me] for x, _, ins_ in all_]
            all_[me][1].copy_(torch.cat(parts))

        return self._collective(group, "all_to_all", (given.clone(), out, ins), work, async_op)

    def broadcast(self, out, root, group=None, async_op=False):
        at = (group or self.here.default).members.index(root)
        work = lambda all_, me: me == at or all_[me][1].copy_(all_[at][0])  # noqa: E731
        return self._collective(group, ("broadcast", root), (out.clone(), out), work, async_op)

    def scatter(self, out, parts, root, group=None, async_op=False):
        at = (group or self.here.default).members.index(root)
        work = lambda all_, me: all_[me][1].copy_(all_[at][0][me])  # noqa: E731
        return self._collective(group, ("scatter", root), (parts and [p.clone() for p in parts], out), work, async_op)

    def gather(self, given, parts, root=0, group=None, async_op=False):
        def work(all_, me):
            for part, (x, _) in zip(all_[me][1] or (), all_, strict=False):
                part.copy_(x)

        return self._collective(group, ("gather", root), (given.clone(), parts), work, async_op)

    def reduce(self, out, root, group=None, async_op=False):
        at = (group or self.here.default).members.index(root)
        work = lambda all_, me: me == at and all_[me][1].copy_(summed([x for x, _ in all_]))  # noqa: E731
        return self._collective(group, ("reduce", root), (out.clone(), out), work, async_op)

    def all_reduce(self, out, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        largest = op == torch.distributed.ReduceOp.MAX

        def work(all_, me):
            parts = [x for x, _ in all_]
            all_[me][1].copy_(torch.stack(parts).amax(0) if largest else summed(parts))

        return self._collective(group, ("all_reduce", str(op), out.numel()), (out.clone(), out), work, async_op)


def run_strictly(
    monkeypatch: pytest.MonkeyPatch,
    mesh: Mesh,
    work: Callable[[ProcessGroups], Any],
    axes: Sequence[Sequence[str]] = (),
    neighbours: Sequence[tuple[int, int]] = (),
    device: torch.device = GPU,
) -> tuple[World, list[Any]]:
    """Run `work` on every rank of `mesh`, each a thread, on groups that were joined as on `device`: of NCCL, but with
    tensors on the CPU. Return the world and the results by rank. Raises the first failure of any rank."""
    world = World(mesh.size)
    monkeypatch.setattr(torch_distributed, "dist", world.dist)
    monkeypatch.setattr(torch_distributed, "_all_gather", world.all_gather)
    monkeypatch.setattr(torch_distributed, "_reduce_scatter", world.reduce_scatter)
    monkeypatch.setattr(torch_distributed, "ThreadPoolExecutor", world.threads_of_rank)
    results: list[Any] = [None] * mesh.size

    def main(rank: int) -> None:
        world.here.rank, cause = rank, None
        try:
            join(None, rank, mesh.size, device)  # type: ignore[arg-type]
            groups = ProcessGroups(mesh, rank, axes, neighbours=neighbours)
            groups.meet(neighbours)
            results[rank] = work(groups)
        except BaseException as error:
            cause = error
        world.ends(rank, cause)

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank{rank}") for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure:
        raise world.failure
    return world, results
