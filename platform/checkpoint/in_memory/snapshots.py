"""Snapshots of a rank's last two steps in host memory, with copies of blocks that only other failure domains hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint.blocks.buffer import Buffer
from platform.checkpoint.blocks.placement import Block, HeldTensor, Share, group_by_holders
from platform.checkpoint.in_memory.copies import Copy, copies

Transfer = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], None]
"""Sends and receives bytes, (peer, uint8 tensor) each; returns when all that is to be received is there."""


class CopyRoute:
    """Parts of blocks that one rank sends to its peers (`sent`: receiver -> parts) and keeps for them (`kept`: sender
    -> parts), taken from a list of copies: in the same order on both sides."""

    def __init__(self, passed: Sequence[Copy], rank: int):
        self.sent: dict[int, list[Share]] = defaultdict(list)
        self.kept: dict[int, list[Share]] = defaultdict(list)
        for part, sender, receiver in passed:
            if sender == rank:
                self.sent[receiver].append(part)
            if receiver == rank:
                self.kept[sender].append(part)

    def buffer(self) -> Buffer:
        """Return an empty buffer of host memory for all parts that this rank receives from peers."""
        return Buffer([part for parts in self.kept.values() for part in parts])

    def outgoing(self, snapshot: Snapshot) -> list[tuple[int, list[Tensor]]]:
        """Return (peer, the parts that it keeps) for every peer, as views of this rank's `snapshot`."""
        return [(peer, [snapshot.read(part) for part in parts]) for peer, parts in self.sent.items()]

    def follow(self, outgoing: Sequence[tuple[int, list[Tensor]]], buffer: Buffer, transfer: Transfer) -> None:
        """Send the parts that peers keep (a result of `outgoing`), and receive those that this rank keeps for them into
        `buffer`, made by `CopyRoute.buffer`; all ranks call it together."""
        sent = [(peer, _together(parts)) for peer, parts in outgoing]
        sizes = [sum(part.nbytes for part in parts) for parts in self.kept.values()]
        transfer(sent, list(zip(self.kept, buffer.data.split(sizes), strict=True)) if sizes else [])


class Snapshot:
    """Training state at one step in a rank's host memory: its `own` blocks, the `copies` that it keeps for peers, and
    what is no tensor (`values`, plain data). `step` is None unless the snapshot is complete. `handed`: parts from ranks
    that leave before the next generation. `outgoing`: what it sends to peers. `pinned`: `own` is page-locked."""

    def __init__(self, own: Sequence[Share], route: CopyRoute, pinned: bool):
        self.own, self.copies, self.handed = Buffer.aligned(own, pinned), route.buffer(), Buffer([])
        self.outgoing = route.outgoing(self)
        self.step: int | None = None
        self.values: dict[str, Any] = {}

    def read(self, part: Share) -> Tensor:
        """Return the bytes of a part of a global tensor that this rank holds: in its own blocks, as a copy for a peer,
        or handed over to it. uint8 [*extent, bytes of an element]."""
        for buffer in (self.own, self.copies, self.handed):
            if (found := buffer.read(part)) is not None:
                return found
        raise AssertionError(f"{part.tensor.name} {part.box} is not in this rank's memory")

    def take_over(self, passed: Sequence[Copy], rank: int, transfer: Transfer) -> None:
        """Send the parts in `passed` (a result of `handed_over`) that this rank is the sender of, and receive those
        meant for it into `handed`; all ranks call it together, before a generation in which some survivors have no
        seat."""
        route = CopyRoute(passed, rank)
        handed = route.buffer()
        route.follow(route.outgoing(self), handed, transfer)
        self.handed = handed


class RankSnapshots:
    """Snapshots of one rank in one generation; they outlive its process groups and its model.

    Once `hold` has been called twice, they take 2 x the rank's own state and 2 x its copies of host memory
    (`platform.checkpoint.in_memory.copies.kept_bytes`). `pinned`: own state is in pinned memory, for state on a GPU.
    """

    def __init__(self, state: Sequence[HeldTensor], domains: Sequence[Hashable], rank: int, pinned: bool = False):
        """Derive which parts this rank sends to peers and keeps for them. `state` (who holds which blocks) and
        `domains` (the node of every rank) are equal on all ranks."""
        self._own = [block for blocks in group_by_holders(state, rank).values() for block in blocks]
        self._route = CopyRoute(copies(state, domains), rank)
        self._pinned = pinned
        self._snapshots: list[Snapshot] = []  # oldest first
        self._finish: Callable[[Transfer], None] | None = None  # the rest of what `begin` has begun

    @property
    def steps(self) -> list[int]:
        """Return the steps of which this rank has a complete snapshot, in the order in which they were taken."""
        return [snapshot.step for snapshot in self._snapshots if snapshot.step is not None]

    def at(self, step: int) -> Snapshot:
        return next(snapshot for snapshot in self._snapshots if snapshot.step == step)

    def keep_only(self, step: int) -> None:
        """Free every snapshot of this rank but that of `step`."""
        self._snapshots = [self.at(step)]

    def hold(self, step: int, blocks: Sequence[Block], values: dict[str, Any], transfer: Transfer) -> None:
        """Take a snapshot of the training state after `step`: copy this rank's `blocks` and `values` into
        host memory, and exchange with peers the parts that they keep for each other; all ranks call it together. The
        previous snapshot stays intact even if this fails."""
        self.begin(step, blocks, lambda: values)
        self.finish(transfer)

    def begin(self, step: int, blocks: Sequence[Block], values: Callable[[], dict[str, Any]]) -> None:
        """Begin to take a snapshot of the training state after `step`, as `hold` does, without waiting for the copies:
        neither `blocks` nor what `values` returns may change before `finish`."""
        snapshot = self._free()
        snapshot.step = None
        copied = snapshot.own.start(blocks)

        def finish(transfer: Transfer) -> None:
            copied()
            self._route.follow(snapshot.outgoing, snapshot.copies, transfer)
            snapshot.values = values()
            snapshot.step = step

        self._finish = finish

    def finish(self, transfer: Transfer) -> None:
        """Finish the snapshot that `begin` has begun, if there is one; all ranks call it together."""
        finish, self._finish = self._finish, None
        if finish:
            finish(transfer)

    @property
    def begun(self) -> bool:
        """Return True if `begin` has begun a snapshot that is not finished."""
        return self._finish is not None

    def abandon(self) -> None:
        """Give up the snapshot that `begin` has begun, if there is one, and what it refers to."""
        self._finish = None

    def _free(self) -> Snapshot:
        """Return the snapshot that `hold` may overwrite, moved to the end of the list: an incomplete one, a new one if
        there are fewer than two, or the older of the two."""
        torn = [snapshot for snapshot in self._snapshots if snapshot.step is None]
        if not torn and len(self._snapshots) < 2:
            torn = [Snapshot(self._own, self._route, self._pinned)]
        snapshot = (torn or self._snapshots)[0]
        self._snapshots = [s for s in self._snapshots if s is not snapshot] + [snapshot]
        return snapshot


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join the bytes of a snapshot's parts for one peer into a flat uint8 message: a view if they are adjacent in
    memory, as they are unless types or senders alternate, else a copy."""
    flat = [part.reshape(-1) for part in parts]
    for part, after in zip(flat, flat[1:], strict=False):
        if part.data_ptr() + part.numel() != after.data_ptr():
            return torch.cat(flat)
    return flat[0].as_strided((sum(part.numel() for part in flat),), (1,))
