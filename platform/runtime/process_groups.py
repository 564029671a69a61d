"""Communicator on torch.distributed, where every rank is a process (`ProcessGroups`), and how its groups connect.

NCCL differs from gloo in what its users must do themselves: a group connects in its first call, which all its members
must make together; a send ends only when it is received; and the operations of a group run on the device in the order
in which they were issued. So groups are connected while a generation forms, and what one stage sends another has a
group of its own per direction: a send that is not received yet holds back nothing but later sends of the same pair. To
make a group is a collective of the whole world, of which all groups that share no rank take one (`_create_groups`).

`GlooMessages` builds the collectives of gloo from its messages between two ranks. `connect_process_groups` meets all
ranks in the TCPStore of the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from platform.plan.layout import Mesh
from platform.plan.rule import JOIN
from platform.runtime.communicator import Launched
from platform.runtime.host_memory import TIMEOUT, HostMemory, connect_timeout
from platform.runtime.progress import PROGRESS, open_sockets

# All-gather, reduce-scatter and all-to-all of gloo, built from its messages between two ranks: 2 to 3 times as fast as
# gloo's own (`benchmarks/RESULTS.md`), with as many bytes; and rotation, which gloo lacks.
#
# gloo's all-to-all sends to a peer before or after it receives from the same one: two ranks use half of their link.

TAGS = 1 << 30  # after so many collectives of a group, tags begin anew
T = TypeVar("T")
Lines = dict[tuple[int, int], dist.ProcessGroup | None]  # (sending, receiving stage) -> this rank's group, if any


class GlooMessages:
    """Collectives among the members of one gloo group. Every rank calls them in one order; each has a tag of its own,
    so that it does not matter in which order they are waited for. `timeout`: limit of the wait for one message."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta):
        """Prepare collectives made of messages within a gloo `group`, each of which may take `timeout`."""
        self._group, self._timeout = group, timeout
        self._me, self._size = group.rank(), group.size()
        self._number = count()

    def _next_tag(self) -> int:
        """Return the tag of the messages of the next collective; messages between stages have the tag 0."""
        return 1 + next(self._number) % TAGS

    def _exchange_tensors(self, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> list[dist.Work]:
        """Start sending the tensor `sent(peer)` to every other group member and receiving `received(peer)` from it,
        both contiguous; return the messages in progress, of which empty ones are none. Each member starts with the next
        in order, so that none is first for all."""
        tag = self._next_tag()
        peers = [(self._me + i) % self._size for i in range(1, self._size)]
        outgoing, incoming = ([(peer, part(peer)) for peer in peers] for part in (sent, received))
        works = [self._group.recv([x], peer, tag) for peer, x in reversed(incoming) if x.numel()]
        return works + [self._group.send([x], peer, tag) for peer, x in outgoing if x.numel()]

    def _wait_for_works(self, works: list[dist.Work]) -> None:
        """Wait for the messages (sends and receives over gloo) of which one collective is made."""
        for work in works:
            work.wait(self._timeout)

    def all_gather(self, input_buffer: Tensor, out: Tensor) -> Callable[[], None]:
        """Start gathering, by messages, every group member's `input_buffer` into `out` [members, ...]; `input_buffer`
        may be this rank's part of it. Returns the function that waits."""
        mine = out[self._me]
        works = self._exchange_tensors(lambda peer: input_buffer, lambda peer: out[peer])
        if mine.data_ptr() != input_buffer.data_ptr():
            mine.copy_(input_buffer)
        return lambda: self._wait_for_works(works)

    def all_to_all(self, input_parts: Sequence[Tensor] | Tensor, out: Sequence[Tensor] | Tensor) -> Callable[[], None]:
        """Start giving part i of `input_parts` to member i, for part i of `out` from it; return what waits."""
        works = self._exchange_tensors(lambda peer: input_parts[peer], lambda peer: out[peer])
        out[self._me].copy_(input_parts[self._me])
        return lambda: self._wait_for_works(works)

    def rotate(self, input_buffer: Tensor, out: Tensor) -> Callable[[], None]:
        """Start giving `input_buffer` to the next group member for `out` from the one before; return what waits."""
        tag = self._next_tag()
        works = [self._group.recv([out], (self._me - 1) % self._size, tag)]
        works.append(self._group.send([input_buffer], (self._me + 1) % self._size, tag))
        return lambda: self._wait_for_works(works)

    def reduce_scatter(self, input_buffer: Tensor, out: Tensor) -> Callable[[], None]:
        """Start summing, by messages, every group member's `input_buffer` [members, ...], of which each gets the part
        of its index in `out`. The sum is made, in the members' order, by the function that waits, which is returned."""
        parts = [input_buffer[i] if i == self._me else torch.empty_like(out) for i in range(self._size)]
        works = self._exchange_tensors(lambda peer: input_buffer[peer], lambda peer: parts[peer])

        def wait_and_sum() -> None:
            """Wait for the parts of all members, and sum them in the members' order into `out`."""
            self._wait_for_works(works)
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

        return wait_and_sum


OF_MESSAGES = ("all_gather", "reduce_scatter", "all_to_all", "rotate")  # over gloo
ABORTED = timedelta(seconds=0.25)  # for a collective to end once it is aborted
# before torch 2.13: all_gather_into_tensor, reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_SHARED_BEFORE = set[str]()  # names of groups by which this process has shared memory of its GPU with others


@cache
def _fused_operations() -> Any:
    """Return torch's operations that are products and collectives at once, loaded by those alone who run them."""
    import torch.distributed._symmetric_memory  # noqa: F401  (registers them)

    return torch.ops.symm_mem


def join_default_group(store: dist.Store, rank: int, size: int, device: torch.device | str) -> None:
    """Join the default group of torch.distributed as `rank` of `size`, by NCCL on a CUDA device, where it connects at
    once, else by gloo. All ranks call it together. `store`: a store for this mesh alone."""
    leave_default_group()
    device, timeout = torch.device(device), connect_timeout(size)
    if device.type == "cuda":
        # Collectives first, and in streams that nothing else takes; groups that are split off inherit it.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=timeout, device_id=device, pg_options=options
        )
        # torch's split_group reads the ranks of the world here, and leaves them out in all but a process's first world:
        # it would crash (pytorch#192109).
        world: Any = dist.group.WORLD
        world._get_backend(device).options.global_ranks_in_group = list(range(size))
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def leave_default_group() -> None:
    """End the default group of torch.distributed, if this process has joined one, and reset torch's count of groups. It
    names groups in the store by that count, which it resets only when a default group ends: after a join that failed,
    ranks that took part would wait for the others under other names, for ever."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0


class ProcessGroups(HostMemory):
    """Communicator over torch.distributed groups: NCCL on CUDA, gloo on CPU and for tensors in host memory. Needs the
    default group that `join_default_group` makes.

    `axes_of_groups`: the tuples of axes, in mesh order, along which collectives will run; one group is made of each, in
    the same order on every rank, unless one with the same members is there. `neighbours`: the pairs of pipeline stages
    that send to each other. `connections`: with gloo alone also the sockets of the world and of the groups along axes,
    added by the caller.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        axes_of_groups: Iterable[Sequence[str]],
        device: str = "cpu",
        neighbours: Iterable[tuple[int, int]] = (),
    ):
        """Create the process groups of the mesh along `axes_of_groups` and between neighbouring stages; all ranks do
        so."""
        super().__init__(mesh, rank, dist.distributed_c10d._get_default_store(), device)
        self._stuck = False  # an aborted collective of gloo has no end
        self._nccl = dist.get_backend() == "nccl"
        self.posts_early = not self._nccl
        groups_by_members = {tuple(mesh.list_groups(mesh.order_axes(mesh.axes))): dist.group.WORLD}
        self._groups: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        for axes in axes_of_groups:  # in one order on every rank: creating groups is collective
            members = tuple(mesh.list_groups(axes))
            if members not in groups_by_members:
                groups_by_members[members] = self._create_groups(members)
            self._groups[tuple(axes)] = groups_by_members[members]
        self._messages: dict[dist.ProcessGroup, GlooMessages] = {}
        self._lines: Lines = {}
        self._lines |= (
            self._create_nccl_stage_groups(neighbours) if self._nccl else self._find_gloo_stage_groups(list(neighbours))
        )
        for group in self._own_groups():
            dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)

    def _own_groups(self) -> set[dist.ProcessGroup]:
        """Return the torch.distributed process groups in which this rank is a member."""
        all_groups = dist.group.WORLD, *self._groups.values(), *self._lines.values()
        return {group for group in all_groups if group is not None}

    def _create_groups(self, groups: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make a process group of each of the disjoint `groups`, on all ranks together; return this rank's, if any."""
        listed, timeout = [list(group) for group in groups], connect_timeout(self.mesh.world_size)
        if self._nccl:  # each new_group would be a split of the whole world, one after the other
            return dist.split_group(split_ranks=listed, timeout=timeout)
        return dist.new_subgroups_by_enumeration(listed, timeout=timeout)[0]

    def _create_nccl_stage_groups(self, neighbours: Iterable[tuple[int, int]]) -> Lines:
        """Make an NCCL group for messages from each pipeline stage to its neighbour, one per direction: (sending,
        receiving stage) -> this rank's group, if any. Pairs that share no stage are made together."""
        lines: Lines = {}
        own_stage = self.coordinates["stage"]
        for pairs in divide_disjoint_pairs(neighbours):
            for ways in (pairs, [pair[::-1] for pair in pairs]):
                group = self._create_groups([ends for way in ways for ends in _line_ranks(self.mesh, *way)])
                lines |= {way: group if own_stage in way else None for way in ways}
        return lines

    def _find_gloo_stage_groups(self, neighbours: Sequence[tuple[int, int]]) -> Lines:
        """Return the gloo group for messages from one pipeline stage to its neighbour: (sending, receiving stage) ->
        group, None for the default one. Messages up the stages go in the default group; messages down in one along the
        axis `stage`, since a thread of gloo that finds a connection in use by a sender spins until it is free."""
        if not neighbours:
            return {}
        down = self._groups.get(("stage",))
        if down in (None, dist.group.WORLD):
            down = self._create_groups(self.mesh.list_groups(("stage",)))
        return {way: None if way[0] < way[1] else down for pair in neighbours for way in (pair, pair[::-1])}

    def open_stage_connections(self, neighbours):
        """Open the connections of NCCL's groups along axes too. Raises RuntimeError if one has too many ranks."""
        with self.suspend_counting():
            # NCCL makes one group of all ranks of a split that give one colour, and torch's colours are hashes.
            for axes, group in self._groups.items() if self._nccl else ():
                asked = torch.ones(2, device=self.device)
                asked[1] = len(_SHARED_BEFORE)
                size, shared = self.read_numbers(self.launch("all_reduce", asked, axes).wait())
                # torch names shared memory by its group, and numbers it in each process: no rank of a group may have
                # shared any in an earlier mesh, and all decide by the same sum
                if group and not shared:
                    self.shared_memory[axes] = group.group_name
                if size != (ranks := self.mesh.count_ranks(axes)):
                    raise RuntimeError(f"{size:.0f} ranks are in the group along {axes} of {ranks}")
        super().open_stage_connections(neighbours)

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        """Start the collective in the group along `axes`; over gloo, as messages for OF_MESSAGES."""
        g = self._groups[axes]
        if not self._nccl and g and op in OF_MESSAGES:
            return getattr(self._group_messages(g), op)(x, out)
        if op == "rotate":
            return _start_nccl_rotation(x, out, group, group.index(self.rank), g)
        if op == "all_gather":
            work = _all_gather(out.view(-1), x.view(-1), group=g, async_op=True)
        elif op == "reduce_scatter":
            work = _reduce_scatter(out.view(-1), x.view(-1), group=g, async_op=True)
        elif op == "all_to_all":
            work = dist.all_to_all_single(out.view(-1), x.view(-1), group=g, async_op=True)
        elif op == "broadcast":
            work = dist.broadcast(out, group[root], group=g, async_op=True)
        elif op == "scatter":
            parts = list(x.unbind()) if self.rank == group[root] else None
            work = dist.scatter(out, parts, group[root], group=g, async_op=True)
        elif op == "gather":
            parts = list(out.unbind()) if self.rank == group[root] else None
            work = dist.gather(x, parts, group[root], group=g, async_op=True)
        elif op == "reduce":
            work = dist.reduce(out, group[root], group=g, async_op=True)
        else:
            work = dist.all_reduce(out, dist.ReduceOp.MAX if reduce == "max" else dist.ReduceOp.SUM, g, async_op=True)
        return work.wait if self._nccl else partial(self._wait_unless_aborted, work)

    def multiply_parts(self, op, x, matrices, axes, dim):
        """Multiply by torch's fused operation, in the stream that computes, counted as `launch` counts a collective."""
        x, fused, name, is_gather = x.contiguous(), _fused_operations(), self.shared_memory[tuple(axes)], op in JOIN
        if is_gather:
            columns, run = x.shape[-1], partial(fused.fused_all_gather_matmul, x, list(matrices), dim, name)
        else:
            [matrix] = matrices
            columns, run = matrix.shape[1], partial(fused.fused_matmul_reduce_scatter, x, matrix, "sum", dim, name)
        _SHARED_BEFORE.add(name)
        what = self._count_launch(op, axes, x.numel() // x.shape[-1] * columns, x.element_size())
        results = self._time_product(what, x, run) if self.clock.detailed else run()
        return [*map(Tensor.contiguous, (results[0], *results[1]) if is_gather else (results,))]

    def _time_product(self, what: Launched, x: Tensor, run: Callable[[], T]) -> T:
        """Return what `run` does, a product of x that is one with the collective `what`, whose time the clock notes."""
        results = list[T]()

        def start() -> Callable[[], None]:
            """Launch the operation in the stream that computes; return a function that has a stream wait for it."""
            results.append(run())
            return torch.cuda.current_stream().record_event().wait if x.is_cuda else lambda: None

        self._issue_collective(what, start, x, lambda: x).wait()
        return results[0]

    def _start_all_to_allv(self, x, out, sent, received, axes):
        """Start an exchange of rows in the group along `axes`."""
        g = self._groups[axes]
        if not self._nccl and g:
            return self._group_messages(g).all_to_all(x.split(list(sent)), out.split(list(received)))
        work = dist.all_to_all_single(out, x, list(received), list(sent), group=g, async_op=True)
        return work.wait

    def _group_messages(self, group: dist.ProcessGroup) -> GlooMessages:
        """Return what makes collectives of messages in a group of gloo."""
        if group not in self._messages:
            self._messages[group] = GlooMessages(group, TIMEOUT)
        return self._messages[group]

    def _wait_unless_aborted(self, work: dist.Work) -> None:
        """Wait for a gloo collective, but after an abort no longer than about ABORTED: an abort fails every wait,
        except for a message that gloo queues at the moment in which its connection ends."""
        aborted = False
        while not work.is_completed():
            try:
                work.wait(ABORTED)
            except RuntimeError:  # its own, or it was not done in time
                if aborted and not work.is_completed():
                    self._stuck = True
                    raise
                aborted = self._aborted
        work.wait()  # raises its own error

    def _start_send(self, x, peer):
        return self._wait_function(dist.isend(x, peer, group=self._find_stage_group(self.rank, peer)))

    def _start_receive(self, out, peer):
        return self._wait_function(dist.irecv(out, peer, group=self._find_stage_group(peer, self.rank)))

    def _find_stage_group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """Return the process group for messages from rank `sender` to rank `receiver`; None: the default one."""
        stages = self.mesh.rank_coordinates(sender)["stage"], self.mesh.rank_coordinates(receiver)["stage"]
        return self._lines[stages] if self._nccl else self._lines.get(stages)

    def _wait_function(self, work: dist.Work | None) -> Callable[[], Any]:
        """Return the function that waits for a message between pipeline stages. NCCL's wait with a timeout would hold
        the host until the message is there, instead of only the device's stream."""
        assert work is not None
        return work.wait if self._nccl else partial(work.wait, TIMEOUT)

    def _abort_transport(self) -> None:
        """Interrupt NCCL's groups, all at the same time, and shut down the sockets of gloo's groups."""
        if self._nccl and dist.is_initialized():
            # Each from a thread of its own, all at the same time: an abort waits for the device, which the hung kernel
            # of another group holds until that one is aborted too.
            groups = self._own_groups()
            with ThreadPoolExecutor(len(groups)) as threads:
                for _ in threads.map(lambda group: group.abort(), groups):
                    pass
            dist.distributed_c10d._abort_process_group()  # forgets them
        super()._abort_transport()

    def close(self) -> None:
        """End this rank's process groups and the default one, when its mesh is given up."""
        if self._stuck:  # the end of a group waits for its threads, and one of these waits for ever: it never ends
            for group in self._own_groups():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        super().close()
        leave_default_group()


def _start_nccl_rotation(
    x: Tensor, out: Tensor, members: Sequence[int], own_index: int, group: Any
) -> Callable[[], None]:
    """Start sending `x` to the next of the `members` of an NCCL `group`, of which this rank is number `own_index`, and
    receiving `out` from the one before, as one operation: two would each wait for a peer that has begun with the same.
    Returns the function that waits."""
    send_op = dist.P2POp(dist.isend, x, members[(own_index + 1) % len(members)], group)
    receive_op = dist.P2POp(dist.irecv, out, members[own_index - 1], group)
    works = dist.batch_isend_irecv([send_op, receive_op])

    def wait_for_both() -> None:
        """Wait for both messages of the rotation."""
        for work in works:
            work.wait()

    return wait_for_both


def divide_disjoint_pairs(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Divide pairs of neighbouring pipeline stages into few lists in which no number is in two pairs: two lists for a
    chain or an even ring, three for an odd ring.

    >>> divide_disjoint_pairs([(0, 1), (1, 2), (0, 2)])
    [[(0, 1)], [(1, 2)], [(0, 2)]]
    """
    lists: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = (candidate for candidate in lists if not any({*pair} & {*other} for other in candidate))
        if (chosen := next(free, None)) is None:
            lists.append(chosen := [])
        chosen.append(pair)
    return lists


def _line_ranks(mesh: Mesh, sender: int, receiver: int) -> list[tuple[int, int]]:
    """Return the pairs of global ranks that a process group connects for messages from stage `sender` to `receiver`."""
    return [(ranks[sender], ranks[receiver]) for ranks in mesh.list_groups(("stage",))]


JOIN_SECONDS = 600.0  # for all ranks to join; the driver ends the wait earlier by closing the store


def meet_ranks(size: int, address: tuple[str, int], name: int | str) -> dist.Store:
    """Wait for all ranks of a mesh in the driver's TCPStore (host, port); return its part `name`, theirs alone."""
    store = dist.PrefixStore(f"generation/{name}", dist.TCPStore(*address, is_master=False))
    if store.add("there", 1) == size:
        store.set("all", "")
    store.wait(["all"], timedelta(seconds=JOIN_SECONDS))
    return store


def connect_process_groups(
    mesh: Mesh,
    rank: int,
    address: tuple[str, int],
    name: int | str,
    axes: Iterable[Sequence[str]],
    device: str,
    neighbours: Iterable[tuple[int, int]] = (),
) -> ProcessGroups:
    """Meet the other ranks of `mesh` and join the default process group of torch.distributed; return the process groups
    along `axes` and between the pairs of stages `neighbours`, with the connections of all of them open."""
    with PROGRESS.mark_waiting("form"):
        before, neighbours = open_sockets(), list(neighbours)
        join_default_group(meet_ranks(mesh.world_size, address, name), rank, mesh.world_size, device)
        groups = ProcessGroups(mesh, rank, axes, device, neighbours)
        groups.open_stage_connections(neighbours)
        if torch.device(device).type != "cuda":
            groups.connections = dict(open_sockets().items() - before.items())
    return groups
