"""A rank's state of the last two steps in host memory, with copies of what only other failure domains have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from platform.checkpoint.blocks.buffer import Buffer
from platform.checkpoint.blocks.placement import Block, Held, Share, alike
from platform.checkpoint.in_memory.copies import Copy, copies

Transfer = Callable[[Sequence[tuple[int, Tensor]], Sequence[tuple[int, Tensor]]], None]
"""Sends and receives bytes, (peer, uint8 tensor) each; returns when all that is to be received is there."""


class Route:
    """What a rank sends and gets of some copies: parts by peer, in one order on both sides."""

    def __init__(self, passed: Sequence[Copy], rank: int):
        self.sent: dict[int, list[Share]] = defaultdict(list)
        self.kept: dict[int, list[Share]] = defaultdict(list)
        for part, sender, receiver in passed:
            if sender == rank:
                self.sent[receiver].append(part)
            if receiver == rank:
                self.kept[sender].append(part)

    def buffer(self) -> Buffer:
        """For what it gets."""
        return Buffer([part for parts in self.kept.values() for part in parts])

    def follow(self, snapshot: Snapshot, buffer: Buffer, transfer: Transfer) -> None:
        """Sends parts of the snapshot, and fills the buffer; all ranks call it together."""
        sent = [(peer, _together([snapshot.read(part) for part in parts])) for peer, parts in self.sent.items()]
        sizes = [sum(part.nbytes for part in parts) for parts in self.kept.values()]
        transfer(sent, list(zip(self.kept, buffer.data.split(sizes), strict=True)) if sizes else [])


class Snapshot:
    """One step: `own` blocks of a rank, the `copies` it keeps for peers, and `values` that are no tensors. `step` is
    None unless it is whole. `handed` is what it gets of ranks that will not be in the next generation."""

    def __init__(self, own: Sequence[Share], route: Route, pinned: bool):
        self.own, self.copies, self.handed = Buffer.aligned(own, pinned), route.buffer(), Buffer([])
        self.step: int | None = None
        self.values: dict[str, Any] = {}

    def read(self, part: Share) -> Tensor:
        """Bytes of a part that this rank has: uint8 [*extent, bytes of an element]."""
        for buffer in (self.own, self.copies, self.handed):
            if (found := buffer.read(part)) is not None:
                return found
        raise AssertionError(f"{part.tensor.name} {part.box} is not in this rank's memory")

    def take_over(self, passed: Sequence[Copy], rank: int, transfer: Transfer) -> None:
        """Sends what other ranks will need, and takes what this one will; all ranks call it together."""
        route = Route(passed, rank)
        handed = route.buffer()
        route.follow(self, handed, transfer)
        self.handed = handed


class Memory:
    """The snapshots of one rank in one generation; they outlive its groups and its model.

    Takes, once `hold` was called twice, 2 x its own state and 2 x the copies of host memory
    (`platform.checkpoint.in_memory.copies.kept_bytes`), the former pinned where the state is on a GPU.
    """

    def __init__(self, state: Sequence[Held], domains: Sequence[Hashable], rank: int, pinned: bool = False):
        """`state` and `domains` (of every rank) are equal on all ranks."""
        self._own = [block for blocks in alike(state, rank).values() for block in blocks]
        self._route = Route(copies(state, domains), rank)
        self._pinned = pinned
        self._snapshots: list[Snapshot] = []  # the newer one last

    @property
    def steps(self) -> list[int]:
        """Those of which this rank has everything, in the order in which they were taken."""
        return [snapshot.step for snapshot in self._snapshots if snapshot.step is not None]

    def at(self, step: int) -> Snapshot:
        return next(snapshot for snapshot in self._snapshots if snapshot.step == step)

    def keep_only(self, step: int) -> None:
        """Gives the other snapshot's memory back."""
        self._snapshots = [self.at(step)]

    def hold(self, step: int, blocks: Sequence[Block], values: dict[str, Any], transfer: Transfer) -> None:
        """Copies this rank's blocks and passes on the parts that peers keep; all ranks call it together. The snapshot
        before stays as it is, also where this fails."""
        snapshot = self._free()
        snapshot.step = None
        snapshot.own.fill(blocks)
        self._route.follow(snapshot, snapshot.copies, transfer)
        snapshot.step, snapshot.values = step, values

    def _free(self) -> Snapshot:
        """The one to write to, moved to the end: one that is not whole, a new one, or the older of the two."""
        torn = [snapshot for snapshot in self._snapshots if snapshot.step is None]
        if not torn and len(self._snapshots) < 2:
            torn = [Snapshot(self._own, self._route, self._pinned)]
        snapshot = (torn or self._snapshots)[0]
        self._snapshots = [s for s in self._snapshots if s is not snapshot] + [snapshot]
        return snapshot


def _together(parts: Sequence[Tensor]) -> Tensor:
    """[bytes] of all: a view where they follow each other in memory, as they do unless types or senders alternate."""
    flat = [part.reshape(-1) for part in parts]
    for part, after in zip(flat, flat[1:], strict=False):
        if part.data_ptr() + part.numel() != after.data_ptr():
            return torch.cat(flat)
    return flat[0].as_strided((sum(part.numel() for part in flat),), (1,))
