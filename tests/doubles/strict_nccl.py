"""A double of torch.distributed for ranks that are threads of one process, as strict as NCCL may be.

A group that is not connected when it is made connects in its first call, which all members must make; the operations of
a group run in the order in which each rank issued them, so that one holds back those behind it; a send ends only when
it is received, and the first one between two ranks of a group holds its host until then; waiting takes no timeout. If
every rank waits and nothing can run, all of them raise `Stuck`. To make a group is a collective of the whole world,
in which all call alike; the ranks of a split that give one colour are in one group; the abort of a group waits while
another group of the rank hangs that is not aborted. Groups of gloo are as lenient as gloo.

A rank's thread is its host and the stream in which it computes. With one connection to the device, what cannot start
yet, as an operation of its group still runs, holds all that the rank launches after it. An operation reads its memory
when it runs, and it runs as late as it may: when all ranks wait, and before its members all wait for it only if nothing
else can run. So an input that is written between issue and wait is read with what was written there; what is freed, or
allocated again, is not a number. In an `early` world it is the other way round: operations read at once, and what they
write is not a number until they have run.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from math import nan
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor

from platform.checkpoint import snapshots
from platform.plan.layout import Mesh
from platform.runtime import host_memory, pipeline, process_groups
from platform.runtime.process_groups import ProcessGroups, join_default_group
from tests.harness.threads import summed

GPU = torch.device("cuda", 0)
CONNECTIONS = 8  # more than a rank has streams
ABORT_SECONDS = 1.0  # for the other threads of a rank to abort what its abort waits for


class Stuck(RuntimeError):
    """All ranks wait, and nothing can run."""


class Operation:
    """What one rank has issued in a group: a collective of the kind `what`, or a message to or from `peer`. `sent`:
    what it reads; `out`: what it writes, which is the `result` of what all members have read and of its index among
    them."""

    def __init__(self, rank: int, what: Any, queues: Queues, sent: Memory, out: Memory, result: Result, peer: int = -1):
        self.rank, self.what, self.queues, self.peer = rank, what, queues, peer
        self.sent, self.out, self.result = sent, out, result
        self.done = False

    @torch.no_grad()
    def begin(self) -> None:
        """Read at once, and leave no number in what is to be written."""
        before, self.sent = self.sent, content(self.sent)
        for out in [self.out] if isinstance(self.out, Tensor) else self.out:
            out.data.copy_(no_number(out))  # unseen by autograd, as is all that happens in the background
        if self.what[0] == "all_gather":  # which reads where it writes, perhaps, and leaves there what it reads
            before.data.copy_(self.sent)

    @property
    def started(self) -> bool:
        """Whether nothing that this rank has issued before it in its group still runs."""
        return self.done or self.queues[self.rank][0] is self


Memory = Tensor | Sequence[Tensor]
Result = Callable[[list[Any], int], Memory]
Queues = dict[int, deque[Operation]]  # of each member of a group


class Group:
    """Members that share one queue each; `strict`: of NCCL."""

    def __init__(self, world: World, members: tuple[int, ...], strict: bool, connected: bool):
        self.world, self.members, self.strict, self.connected = world, members, strict, connected
        self.queues: dict[Any, Queues] = defaultdict(lambda: {m: deque() for m in members})
        self.called: set[int] = set()
        self.opened: set[tuple[int, int]] = set()  # (sender, receiver) that have exchanged a message
        self.options = SimpleNamespace(global_ranks_in_group=[])
        self.group_name = "_".join(map(str, members))  # torch's is a hash of them

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def abort(self) -> None:
        """Abort the group on the rank that this thread belongs to."""
        self.world.abort(self)


class Work:
    def __init__(self, world: World, group: Group, operation: Operation):
        self._world, self._group, self._operation = world, group, operation

    def wait(self, timeout: Any = None) -> None:
        assert timeout is None or not self._group.strict, "NCCL polls on the host if a timeout is given"
        o = self._operation
        self._world.until(lambda: o.done, f"{o.what} in {self._group.members}", o.queues)


class Wait(NamedTuple):
    """What a rank waits for, and the queues of the group that have to move for it, if any."""

    true: Callable[[], bool]
    what: str
    queues: Queues | None


class Messages:
    """A group of gloo of messages alone, which connects the ranks that send to each other, and those only."""

    world: World
    _Options = SimpleNamespace
    create_device = create_default_device = staticmethod(lambda lazy_init, interface="": None)

    def __init__(self, name: str, rank: int, size: int, options: Any):
        self._group = self.world.groups.setdefault(name, Group(self.world, tuple(range(size)), False, True))

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        return self.world.isend(*tensors, peer, self._group)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Work:
        return self.world.irecv(*tensors, peer, self._group)


class World:
    """Where the threads meet; `dist` stands for the module torch.distributed. `connections`: hardware queues between a
    host and its device, one (CUDA_DEVICE_MAX_CONNECTIONS=1) or enough for all streams; `early`: operations begin as
    early as they may, instead of as late."""

    def __init__(self, size: int, connections: int = CONNECTIONS, early: bool = False):
        self.connections, self.early = connections, early
        self.changed, self.here = threading.Condition(), threading.local()
        self.waiting: dict[int, Wait] = {}
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
            P2POp=lambda op, x, peer, group: SimpleNamespace(op=op, x=x, peer=peer, group=group),
            batch_isend_irecv=self.batch_isend_irecv,
            GroupMember=torch.distributed.GroupMember,
            group=self,
            get_backend=lambda: "nccl" if self.here.default.strict else "gloo",
            ProcessGroupNCCL=SimpleNamespace(Options=SimpleNamespace),
            ProcessGroupGloo=type("", (Messages,), {"world": self}),
            PrefixStore=lambda prefix, store: prefix,
            is_initialized=lambda: getattr(self.here, "default", None) is not None,
            destroy_process_group=lambda: setattr(self.here, "default", None),
            distributed_c10d=SimpleNamespace(
                _world=SimpleNamespace(group_count=0),
                _set_pg_timeout=lambda *_: None,
                _abort_process_group=self.abort_all,
                _get_default_store=lambda: None,
            ),
        )

    @property
    def WORLD(self) -> Group:
        return self.here.default

    def threads_of_rank(self, count: int, prefix: str = "") -> ThreadPoolExecutor:
        """Return threads that belong to the rank of this one."""
        rank, default = self.here.rank, self.here.default

        def belong() -> None:
            self.here.rank, self.here.default = rank, default

        return ThreadPoolExecutor(count, prefix, belong)

    # the engine

    def until(self, true: Callable[[], bool], what: str, queues: Queues | None = None) -> None:
        """Hold this rank until `true()`, for which operations in `queues` may have to run. Raises Stuck if that can
        never be."""
        with self.changed:
            self.waiting[self.here.rank] = Wait(true, what, queues)
            self._look()
            while not true():
                if self.failure:
                    raise Stuck(str(self.failure)) from self.failure
                self.changed.wait(30.0)
            del self.waiting[self.here.rank]

    def _look(self) -> None:
        """Run what has to run for one of the ranks to go on, if all of them wait; fail if nothing can."""
        if not self.live or not self.live <= self.waiting.keys():
            return
        while not self.failure and not any(wait.true() for wait in self.waiting.values()):
            if latest := self._latest():
                self._run(latest)
            else:
                self.fail(Stuck("; ".join(f"rank {r}: {w.what}" for r, w in sorted(self.waiting.items()))))
        self.changed.notify_all()

    def _latest(self) -> list[Operation]:
        """Return operations that can run together and that a rank waits for; if possible, those that all their ranks
        wait for."""
        ready = []
        for rank in sorted(self.waiting):
            if (queues := self.waiting[rank].queues) and (runnable := ready_in(queues)):
                if all(o.rank in self.waiting and self.waiting[o.rank].queues is queues for o in runnable):
                    return runnable
                ready.append(runnable)
        return ready[0] if ready else []

    @torch.no_grad()
    def _run(self, operations: Sequence[Operation]) -> None:
        kinds = {o.what for o in operations if o.peer < 0}
        if len(kinds) > 1:
            return self.fail(RuntimeError(f"{[o.rank for o in operations]} call {kinds}"))
        read = [content(o.sent) for o in operations]
        for i, o in enumerate(operations):
            write(o.out, o.result(read, i))
        for o in operations:
            o.done = True
            o.queues[o.rank].popleft()

    def fail(self, cause: BaseException) -> None:
        self.failure = self.failure or cause
        self.changed.notify_all()

    def ends(self, rank: int, cause: BaseException | None) -> None:
        with self.changed:
            self.live.discard(rank)
            if cause:
                self.fail(cause)
            self._look()

    def _issue(self, group: Group | None, what: Any, sent: Memory, out: Memory, result: Result, peer: int = -1) -> Work:
        group, rank = group or self.here.default, self.here.rank
        if not group.connected and not self._connect(group, rank, peer):
            group = self._pair(group, rank, peer)
        pair = (rank, peer) if what == "send" else (peer, rank)
        key = ("messages", *pair) if peer >= 0 and not group.strict else "all"
        with self.changed:
            queues = group.queues[key]
            queues[rank].append(operation := Operation(rank, what, queues, sent, out, result, peer))
            if self.early:
                operation.begin()
        if peer >= 0 and group.strict and pair not in group.opened:
            self.until(lambda: operation.done, f"the first {what} of {pair}", queues)
            group.opened.add(pair)
        if group.strict and self.connections == 1:
            self.until(lambda: operation.started, f"{what} in {group.members} to start, and so its queue", queues)
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

    # torch.distributed

    def init_process_group(self, backend, *, store, rank, world_size, timeout, device_id=None, pg_options=None):
        with self.changed:
            strict = backend == "nccl"
            world = self.groups.setdefault(
                "world", Group(self, tuple(range(world_size)), strict, device_id == GPU or not strict)
            )
        self.here.default = world

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
        groups = [self.new_group(ranks) for ranks in lists]
        return next((g for g in groups if g), None), groups

    def split_group(self, parent_pg=None, split_ranks=None, timeout=None):
        """Like torch's: one collective of the parent for all groups; None for a rank in none of them."""
        rank, default = self.here.rank, self.here.default
        assert default.strict and default.connected, "only a connected group of NCCL can be split"
        named = default.options.global_ranks_in_group
        assert named == list(default.members), "torch crashes in all but a process's first world (pytorch#192109)"
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
            left = (queues for g in others if g not in self.aborted[rank] for queues in g.queues.values())
            return all(ready_in(queues) or not queues[rank] for queues in left)

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
        return self._issue(group, "send", x.detach(), [], lambda read, me: [], peer)

    def irecv(self, out, peer, group=None):
        return self._issue(group, "receive", [], out, lambda read, me: read[0], peer)  # the send stands first

    def batch_isend_irecv(self, ops):
        """Like torch's with one message there and one here, on every rank of a group: one operation, in one queue."""
        sending, receiving = ops
        assert (sending.op, receiving.op) == (self.isend, self.irecv)
        at = (sending.group or self.here.default).members.index(receiving.peer)
        return [self._issue(sending.group, "batch", sending.x.detach(), receiving.x, lambda read, me: read[at])]

    def _collective(self, group, what, sent, out, result, async_op):
        handle = self._issue(group, what, sent, out, result)
        return handle if async_op else handle.wait()

    def all_gather(self, out, sent, group=None, async_op=False):
        what = "all_gather", sent.numel()
        return self._collective(group, what, sent, out, lambda read, me: torch.cat(read), async_op)

    def reduce_scatter(self, out, sent, group=None, async_op=False):
        n = out.numel()
        result = lambda read, me: summed([x[me * n :][:n] for x in read])  # noqa: E731
        return self._collective(group, ("reduce_scatter", n), sent, out, result, async_op)

    def all_to_all_single(self, out, sent, outs=None, ins=None, group=None, async_op=False):
        parts = sent.split(ins or sent.numel() // len((group or self.here.default).members))
        result = lambda read, me: torch.cat([x[me] for x in read])  # noqa: E731
        return self._collective(group, "all_to_all", parts, out, result, async_op)

    def broadcast(self, out, root, group=None, async_op=False):
        at = (group or self.here.default).members.index(root)
        sent, written = (out, []) if self.here.rank == root else ([], out)
        result = lambda read, me: read[at] if me != at else []  # noqa: E731
        return self._collective(group, ("broadcast", root), sent, written, result, async_op)

    def scatter(self, out, parts, root, group=None, async_op=False):
        at = (group or self.here.default).members.index(root)
        what = "scatter", root
        return self._collective(group, what, parts or [], out, lambda read, me: read[at][me], async_op)

    def gather(self, sent, parts, root=0, group=None, async_op=False):
        return self._collective(group, ("gather", root), sent, parts or [], lambda read, me: read, async_op)

    def reduce(self, out, root, group=None, async_op=False):
        written = out if self.here.rank == root else []
        return self._collective(group, ("reduce", root), out, written, lambda read, me: summed(read), async_op)

    def all_reduce(self, out, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        largest = op == torch.distributed.ReduceOp.MAX
        result = lambda read, me: torch.stack(read).amax(0) if largest else summed(read)  # noqa: E731
        return self._collective(group, ("all_reduce", str(op), out.numel()), out, out, result, async_op)


class NamesOfRanks:
    """A set of names for each rank, as each has a process of its own."""

    def __init__(self, world: World):
        self._world, self._names = world, defaultdict[int, set[str]](set)

    def __len__(self) -> int:
        return len(self._names[self._world.here.rank])

    def add(self, name: str) -> None:
        self._names[self._world.here.rank].add(name)


class SymmetricMemory:
    """torch.ops.symm_mem of a world: products in a rank's own stream, which wait there for the peers' parts. Memory is
    known by the name of its group, for ever: `lost` names are of meshes that are gone."""

    def __init__(self, world: World, lost: Sequence[str] = ()):
        self._world, self._lost, self.calls = world, lost, Counter[str]()

    def _group(self, what: str, name: str) -> Group:
        assert name not in self._lost, "torch has the memory of another mesh by this name"
        with self._world.changed:
            self.calls[what] += 1
            members = tuple(map(int, name.split("_")))
            return self._world.groups.setdefault(("symmetric", name), Group(self._world, members, True, True))

    def fused_all_gather_matmul(self, x, matrices, dim, name):
        group = self._group("gather", name)
        parts = x.new_empty(len(group.members), *x.shape)
        self._world.all_gather(parts.view(-1), x.detach().reshape(-1), group)
        gathered = parts.movedim(0, dim).flatten(dim, dim + 1)
        return gathered, [gathered @ matrix for matrix in matrices]

    def fused_matmul_reduce_scatter(self, x, matrix, reduce, dim, name):
        assert reduce == "sum"
        group, n = self._group("scatter", name), len(name.split("_"))
        product = (x @ matrix).unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).contiguous()
        out = torch.empty_like(product[0])
        self._world.reduce_scatter(out.view(-1), product.detach().view(-1), group)
        return out


def ready_in(queues: Queues) -> list[Operation]:
    """Return the operations at the heads of a group's queues that can run together: a collective of all members, or a
    message; [] if there are none."""
    heads = {member: queue[0] for member, queue in queues.items() if queue}
    if len(heads) == len(queues) and all(head.peer < 0 for head in heads.values()):
        return [*heads.values()]
    for send in heads.values():
        receive = heads.get(send.peer)
        if send.what == "send" and receive and receive.what == "receive" and receive.peer == send.rank:
            return [send, receive]
    return []


def is_freed(x: Tensor) -> bool:
    return x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.itemsize


def content(memory: Memory) -> Any:
    """Return what is in memory now, which is not a number where it was freed."""
    if not isinstance(memory, Tensor):
        return [content(x) for x in memory]
    return no_number(memory) if is_freed(memory) else memory.clone()


def no_number(x: Memory) -> Any:
    """Return new memory of these shapes without a number, or with the least one where numbers are whole."""
    if not isinstance(x, Tensor):
        return [no_number(y) for y in x]
    return torch.full_like(x, nan if x.is_floating_point() else torch.iinfo(x.dtype).min)


def write(out: Memory, x: Memory) -> None:
    """Fill `out`, one tensor or several. Raises AssertionError where there is no memory any more, or of other sizes."""
    if not isinstance(out, Tensor):
        for part, y in zip(out, x, strict=False):
            write(part, y)
        return
    assert not is_freed(out), "what an operation writes to was freed before it ran"
    assert isinstance(x, Tensor) and (x.shape, x.dtype) == (out.shape, out.dtype)
    out.copy_(x)


_resize = torch.UntypedStorage.resize_


def resize_to_no_number(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
    """Resize a storage like torch, whose new memory has any content: here bytes that are not a number."""
    return _resize(storage, nbytes).fill_(255)


def run_strictly(
    monkeypatch: pytest.MonkeyPatch,
    mesh: Mesh,
    work: Callable[[ProcessGroups], Any],
    axes: Sequence[Sequence[str]] = (),
    neighbours: Sequence[tuple[int, int]] = (),
    device: torch.device = GPU,
    connections: int = CONNECTIONS,
    early: bool = False,
) -> tuple[World, list[Any]]:
    """Run `work` on every rank of `mesh`, each a thread, on groups that were joined as on `device`: of NCCL, but with
    tensors on the CPU. Return the world and the results by rank. Raises the first failure of any rank."""
    world = World(mesh.world_size, connections, early)
    world.symmetric = SymmetricMemory(world)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_to_no_number)
    for module in (host_memory, process_groups):
        monkeypatch.setattr(module, "dist", world.dist)
    monkeypatch.setattr(process_groups, "_SHARED_BEFORE", NamesOfRanks(world))
    monkeypatch.setattr(process_groups, "_fused_operations", lambda: world.symmetric)
    monkeypatch.setattr(process_groups, "_all_gather", world.all_gather)
    monkeypatch.setattr(process_groups, "_reduce_scatter", world.reduce_scatter)
    for module in (process_groups, pipeline):
        monkeypatch.setattr(module, "ThreadPoolExecutor", world.threads_of_rank)
    monkeypatch.setattr(
        snapshots, "futures", SimpleNamespace(**vars(futures) | {"ThreadPoolExecutor": world.threads_of_rank})
    )
    results: list[Any] = [None] * mesh.world_size

    def main(rank: int) -> None:
        world.here.rank, cause = rank, None
        try:
            join_default_group(None, rank, mesh.world_size, device)  # type: ignore[arg-type]
            groups = ProcessGroups(mesh, rank, axes, neighbours=neighbours)
            groups.open_stage_connections(neighbours)
            results[rank] = work(groups)
        except BaseException as error:
            cause = error
        world.ends(rank, cause)

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank{rank}") for rank in range(mesh.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure:
        raise world.failure
    return world, results
