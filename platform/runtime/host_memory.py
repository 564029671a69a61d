"""Messages in host memory, by gloo, beside the collectives of a step.

A group of gloo connects each rank to every other: N - 1 sockets in each process, and N^2 reads of the driver's store.
So the groups here connect lazily: a rank has connections to its `TreeRelatives` in a tree of all ranks, BRANCHES + 1 at
most, along which the collectives run, and to ranks with which it exchanges bytes. All are opened before they are used,
by all ranks at the same time: `abort` has to know them, as nothing else ends a wait in one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from platform.plan.layout import Mesh
from platform.runtime.communicator import Communicator
from platform.runtime.progress import PROGRESS, Sockets, open_sockets, shut_down

BRANCHES = 16  # of a rank: 3 levels below rank 0 for 4,369 ranks


class TreeRelatives(NamedTuple):
    """Relatives of a rank in the tree: its `parent`, None for rank 0, and the `branches` below it, each of consecutive
    ranks that begin with a child. The rank and all below it are consecutive too."""

    parent: int | None
    branches: list[range]

    @property
    def subtree_size(self) -> int:
        """Return how many ranks the part of the tree with this rank at its top has, itself included."""
        return 1 + sum(map(len, self.branches))

    @property
    def child_ranks(self) -> list[int]:
        """Return the ranks directly below this one in the tree along which host-memory collectives run."""
        return [branch[0] for branch in self.branches]

    @property
    def peer_ranks(self) -> list[int]:
        """Return the ranks to which this rank opens connections in the tree: its parent, if any, and its children."""
        return self.child_ranks if self.parent is None else [self.parent, *self.child_ranks]


def find_tree_relatives(rank: int, size: int) -> TreeRelatives:
    """Return the parent and the branches below `rank` in the tree of `size` ranks, for host-memory collectives."""
    parent, ranks = None, range(size)
    while ranks[0] != rank:
        parent, ranks = ranks[0], next(branch for branch in _divide_branches(ranks) if rank in branch)
    return TreeRelatives(parent, _divide_branches(ranks))


def _divide_branches(ranks: range) -> list[range]:
    """Divide the ranks below `ranks[0]` in the tree, all the others of `ranks`, into up to BRANCHES equal stretches."""
    below = ranks[1:]
    each = -(-len(below) // BRANCHES) or 1
    return [below[at : at + each] for at in range(0, len(below), each)]


TIMEOUT = timedelta(minutes=10)  # of one collective or message
CONNECT = timedelta(seconds=4)  # of connecting ranks: one that dies meanwhile leaves the others waiting
CONNECT_OF_EACH = timedelta(seconds=0.02)  # rank more, where they do not begin at the same time
PATIENCE = 5  # times its timeout: how long gloo waits for another rank to connect
_ANNOUNCED = 504  # bytes of an announcement that need no second message
_LENGTH = 8  # bytes that say how long it is


def connect_timeout(size: int) -> timedelta:
    """Return how long connecting a process group may take in a world of `size` ranks that have all joined."""
    return CONNECT + size * CONNECT_OF_EACH


class HostMemory(Communicator):
    """Communicator for tensors and texts in host memory alone. `connections`: the sockets of its groups, which `abort`
    shuts down, and no others; each group adds its own."""

    def __init__(self, mesh: Mesh, rank: int, store: dist.Store, device: torch.device | str = "cpu"):
        """Connect `rank` to its parent and children in the tree of all ranks, over gloo; all ranks do so together.
        `store`: a key-value store of this mesh's own."""
        super().__init__(mesh, rank, device)
        self.connections: Sockets = {}
        self._store, self._exchanges = store, count()
        self._relatives = find_tree_relatives(rank, mesh.world_size)
        self._tree: Any = None
        self._beside: Any = None  # group of what is transferred, beside the collectives of a step
        self._tree = self._connect_group("tree", self._relatives.peer_ranks, connect_timeout(mesh.world_size))

    def _start_collective(self, op, x, out, axes, group, reduce, root):
        """Raise AssertionError: there are no groups along axes."""
        raise AssertionError("no collective along axes runs in host memory")

    def _connect_group(self, name: str, peers: Sequence[int], timeout: timedelta = CONNECT / PATIENCE) -> Any:
        """Make a gloo group, called `name` in the store, with this rank's connections to `peers` (who connect as well)
        open, and add its sockets to `connections`; None without peers. All ranks call it together. Raises RuntimeError
        if a peer does not connect, Aborted if an abort came meanwhile, since it did not know all the sockets."""
        before, group = open_sockets(), self._build_lazy_group(name, timeout) if peers else None
        if self._tree:
            self._broadcast_down_tree(self._gather_up_tree(torch.zeros(1), [1] * self._relatives.subtree_size)[:1])
        sent, received = ([(peer, torch.zeros(1, dtype=torch.uint8)) for peer in peers] for _ in range(2))
        try:
            _send_and_receive_tensors(group, sent, received, PATIENCE * timeout)
        finally:  # replaced as a whole, as the thread that aborts may be reading it
            self.connections = self.connections | dict(open_sockets().items() - before.items())
        self.confirm_uninterrupted()
        return group

    def _build_lazy_group(self, name: str, timeout: timedelta) -> Any:
        """Make a group of gloo of all ranks, called `name` in the store, which connects two in their first message."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        device = partial(gloo.create_device, interface=interface) if interface else gloo.create_default_device
        options._devices, options._timeout = [device(lazy_init=True)], timeout
        return gloo(dist.PrefixStore(name, self._store), self.rank, self.mesh.world_size, options)

    def connect_peers(self, peers):
        """Open the connections of `transfer` in a group of gloo's own, and count them among `connections`."""
        with PROGRESS.mark_waiting("connect"):
            self._beside = self._connect_group("beside", sorted(peers))

    def transfer(self, sent, received):
        """Send and receive bytes of known sizes between ranks, in the group that `connect_peers` has made."""
        _send_and_receive_tensors(self._beside, sent, received, TIMEOUT)

    def exchange(self, sent, received):
        """Send and receive bytes of known sizes in a group for this call alone, whose connections end with it."""
        peers = sorted({peer for peer, _ in (*sent, *received)})
        with PROGRESS.mark_waiting("exchange"):
            _send_and_receive_tensors(
                self._connect_group(f"exchange/{next(self._exchanges)}", peers), sent, received, TIMEOUT
            )

    def collect_numbers(self, numbers):
        """Gather every rank's numbers on rank 0, up the tree; return None elsewhere."""
        with PROGRESS.mark_waiting("collect"):
            rows = self._gather_up_tree(numbers, [len(numbers)] * self._relatives.subtree_size)
        return rows.view(self.mesh.world_size, -1) if self.rank == 0 else None

    def broadcast_text(self, text=None):
        """Broadcast a text with its length in one message down the tree, and the rest of a longer one in a second."""
        encoded = (text or "").encode()
        with PROGRESS.mark_waiting("announce"):
            head = torch.zeros(_LENGTH + _ANNOUNCED, dtype=torch.uint8)
            if self.rank == 0:
                head[:_LENGTH] = _bytes_tensor(len(encoded).to_bytes(_LENGTH, "little"))
                head[_LENGTH : _LENGTH + len(encoded)] = _bytes_tensor(encoded[:_ANNOUNCED])
            head_bytes = self._broadcast_down_tree(head).numpy().tobytes()
            size = int.from_bytes(head_bytes[:_LENGTH], "little")
            remainder = torch.empty(max(0, size - _ANNOUNCED), dtype=torch.uint8)
            remainder = self._broadcast_down_tree(_bytes_tensor(encoded[_ANNOUNCED:]) if self.rank == 0 else remainder)
        return (head_bytes[_LENGTH:][:size] + remainder.numpy().tobytes()).decode()

    def all_gather_texts(self, text):
        """Gather all texts up the tree, after their lengths, and broadcast both down again."""
        mine, size = _bytes_tensor(text.encode()), self.mesh.world_size
        with PROGRESS.mark_waiting("all_gather_texts"):
            lengths = self._gather_up_tree(torch.tensor([len(mine)]), [1] * self._relatives.subtree_size)
            texts = self._gather_up_tree(mine, lengths.tolist())
            lengths = self._broadcast_down_tree(lengths if self.rank == 0 else lengths.new_empty(size))
            texts = self._broadcast_down_tree(texts if self.rank == 0 else texts.new_empty(int(lengths.sum())))
        return [part.numpy().tobytes().decode() for part in texts.split(lengths.tolist())]

    def _gather_up_tree(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gather tensors up the tree of ranks: return this rank's `mine` [sizes[0]] and, behind it, the tensors of all
        ranks below, in rank order, as one tensor [sum of sizes]."""
        parent, branches = self._relatives
        first = self.rank
        below = [sum(sizes[branch.start - first : branch.stop - first]) for branch in branches]
        out = mine.new_empty(sum(sizes))
        own_part, *parts = out.split([len(mine), *below])
        own_part.copy_(mine)
        _send_and_receive_tensors(self._tree, [], list(zip(self._relatives.child_ranks, parts, strict=True)), TIMEOUT)
        _send_and_receive_tensors(self._tree, [] if parent is None else [(parent, out)], [], TIMEOUT)
        return out

    def _broadcast_down_tree(self, x: Tensor) -> Tensor:
        """Broadcast rank 0's tensor x to all ranks, down the tree, into their x; return it."""
        parent = self._relatives.parent
        _send_and_receive_tensors(self._tree, [], [] if parent is None else [(parent, x)], TIMEOUT)
        _send_and_receive_tensors(self._tree, [(child, x) for child in self._relatives.child_ranks], [], TIMEOUT)
        return x

    def _abort_transport(self) -> None:
        """Shut down the sockets of gloo's groups."""
        shut_down(self.connections)

    def close(self) -> None:
        """End the groups in host memory, when this rank's mesh is given up."""
        self._tree = self._beside = None


def _send_and_receive_tensors(
    group: Any, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]], timeout: timedelta
) -> None:
    """Send and receive tensors, as pairs (peer rank, tensor), in a gloo group, each within `timeout`; no empty ones."""
    works = [group.recv([out], peer, 0) for peer, out in received if out.numel()]
    works += [group.send([x], peer, 0) for peer, x in sent if x.numel()]
    for work in works:
        work.wait(timeout)


def _bytes_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, uint8 [bytes]."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
