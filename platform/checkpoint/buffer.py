"""Buffer of host memory that holds parts of global tensors, and a worker's file of a checkpoint (`FileImage`): copied
into such a buffer, then hashed while it is written."""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from platform.boundary.sealed_blocks import LARGEST_BLOCK, THREADS
from platform.boundary.storage import Storage
from platform.checkpoint.blocks import ITEMSIZE, Block, Box, Share
from platform.checkpoint.manifest import BlockReport, FileReport
from platform.runtime.pinned_memory import allocate_pinned_bytes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}

Messages = Sequence[tuple[int, Tensor]]  # what ranks send each other: (peer, uint8 [bytes]) each
Places = list[tuple[Share, int, int]]  # parts of global tensors, and where each begins and ends in a buffer


class LiveStretch(NamedTuple):
    """Stretch of live memory, and where its copy begins and ends in a buffer."""

    live: Tensor
    at: int
    end: int

    def join_next(self, following: LiveStretch) -> LiveStretch | None:
        """Return this stretch with the `following` one, where this goes on in both memories; None where not."""
        x, y = self.live, following.live
        goes_on = x.untyped_storage()._cdata == y.untyped_storage()._cdata and self.end == following.at
        goes_on &= x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
        if not goes_on or x.storage_offset() + x.numel() != y.storage_offset():
            return None
        both = x.as_strided((x.numel() + y.numel(),), (1,), x.storage_offset())
        return LiveStretch(both, self.at, following.end)


class LiveBlocks(list[Block]):
    """Blocks of a process's live tensors that buffers are filled from again and again, while they are these tensors."""

    def __init__(self, blocks: Iterable[Block]):
        """Collect the blocks of a process's live tensors, of which checkpoints and snapshots are filled."""
        super().__init__(blocks)
        self._known: list[tuple[Places, list[LiveStretch]]] = []

    def view_stretches(self, places: Places) -> list[LiveStretch]:
        """Return the live memory of the parts of global tensors in a buffer, listed as `places` (part, first byte,
        last): parts that lie one after another in both memories as one stretch. They are looked up only at the first
        call for these very `places`."""
        if (stretches := next((known for asked, known in self._known if asked is places), None)) is None:
            blocks_by_name: dict[str, list[tuple[Box, Tensor]]] = defaultdict(list)
            for name, box, tensor in self:
                blocks_by_name[name].append((box, tensor))
            stretches = []
            for (held, box), at, end in places:
                outer, tensor = next((b, t) for b, t in blocks_by_name[held.name] if b.intersect_box(box) == box)
                stretch = LiveStretch(tensor[box.relative_slices(outer)].detach(), at, end)
                joined = stretches[-1].join_next(stretch) if stretches else None
                stretches[-1:] = [joined] if joined else [*stretches[-1:], stretch]
            self._known.append((places, stretches))
        return stretches


class HostBuffer:
    """Host memory that holds the bytes of `parts` of global tensors, one after the other without a gap: `places` says
    where each begins and ends in `data` (uint8 [bytes]). `pinned`: page-locked, for asynchronous copies from tensors on
    a GPU. Its memory is new, zeros, unless it is given as `data`, which may be longer."""

    def __init__(self, parts: Iterable[Share], pinned: bool = False, data: Tensor | None = None):
        """Place `parts` of global tensors, of a checkpoint or a snapshot, one after the other in host memory: new
        zeros, or `data` (uint8 [bytes] or more). `pinned`: page-locked, for copies from a GPU."""
        self.places: Places = []
        self._at: dict[str, list[tuple[Box, int, int]]] = defaultdict(list)
        at = 0
        for part in parts:
            end = at + part.nbytes
            self.places.append((part, at, end))
            self._at[part.tensor.name].append((part.box, at, end))
            at = end
        self._pinned = pinned
        if data is None:
            data = allocate_pinned_bytes(at) if pinned else torch.zeros(at, dtype=torch.uint8)
        self.data = data

    @classmethod
    def build_aligned(cls, parts: Sequence[Share], pinned: bool = False, data: Tensor | None = None) -> HostBuffer:
        """Make a checkpoint's buffer of parts sorted by element type, largest first, so that each is aligned."""
        return cls(sorted(parts, key=lambda part: -part.tensor.itemsize), pinned, data)

    def fill_parts(self, blocks: Sequence[Block]) -> None:
        """Copy every part of this checkpoint's buffer out of the live tensors `blocks`, which may change afterwards."""
        self.start_copy(blocks)()

    def start_copy(self, blocks: Sequence[Block], after: torch.cuda.Event | None = None) -> Callable[[], None]:
        """Start copying every part of this checkpoint's or snapshot's buffer out of the live tensors `blocks`, which
        must not change before the returned function has been called: it waits until all is copied. Out of tensors on a
        GPU the copies run in a stream of their own, after the work that ends with `after`, by default all queued by
        now, and beside later work, and a thread copies tensors in host memory behind them; several threads may wait."""
        live = blocks if isinstance(blocks, LiveBlocks) else LiveBlocks(blocks)
        stretches = live.view_stretches(self.places) if self.places else []
        if not self._pinned:
            self._copy_stretches(stretches)
            return lambda: None
        stream = _stream_of_copies()
        if after:
            stream.wait_event(after)
        else:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy_stretches([s for s in stretches if s.live.device.type != "cpu"])
        copied = stream.record_event(torch.cuda.Event(blocking=True))
        if not (on_host := [s for s in stretches if s.live.device.type == "cpu"]):
            return copied.synchronize  # who waits leaves the core to others

        def copy_on_host() -> None:
            """Copy what lies in host memory, where it is when all work queued before is done."""
            copied.synchronize()
            self._copy_stretches(on_host)

        thread = futures.ThreadPoolExecutor(1, "copy")
        done = thread.submit(copy_on_host)
        thread.shutdown(wait=False)
        return done.result

    @torch.no_grad()
    def _copy_stretches(self, stretches: Sequence[LiveStretch]) -> None:
        """Copy stretches of live memory to their places in the buffer; without waiting from a GPU if it is pinned."""
        if stretches:
            targets = [self.data[at:end].view(live.dtype).view(live.shape) for live, at, end in stretches]
            torch._foreach_copy_(targets, [live for live, _, _ in stretches], non_blocking=self._pinned)

    def view_part(self, part: Share) -> Tensor | None:
        """Return a view of the bytes of a tensor's `part` in this checkpoint's buffer, uint8 [*extent, bytes of an
        element]; None if no one part contains it."""
        for outer, at, end in self._at.get(part.tensor.name, ()):
            if part.box.intersect_box(outer) == part.box:
                return self.data[at:end].view(*outer.extent, part.tensor.itemsize)[part.box.relative_slices(outer)]
        return None


@cache
def _stream_of_copies() -> torch.cuda.Stream:
    """Return this process's CUDA stream in which buffers of checkpoints and snapshots are filled."""
    return torch.cuda.Stream()  # torch hands out 32 in turn: of many, some would be the streams of collectives


class FileImage:
    """Bytes of one worker's block file, copied from the live tensors by `fill_parts`, which is all that a step waits
    for.

    The buffer is reused from save to save. Stored blocks follow each other without a gap.
    """

    def __init__(self, rank: int, parts: Sequence[Share], pinned: bool = False):
        """Allocate memory for the block file of `rank` in checkpoints; `pinned`: page-locked, for copies from a GPU."""
        assert sys.byteorder == "little", "blocks are stored little-endian"
        self.file = f"blocks-{rank:05d}.bin"
        self._buffer = HostBuffer.build_aligned(parts, pinned)

    def fill_parts(self, blocks: Sequence[Block]) -> None:
        """Copy this rank's part of a checkpoint out of its live tensors `blocks`, which may change afterwards."""
        self._buffer.fill_parts(blocks)

    def write_file(self, storage: Storage, directory: str) -> FileReport:
        """Write this rank's block file into the checkpoint's `directory`, hashing it meanwhile; return the report for
        the driver. Raises OSError."""
        view = memoryview(self._buffer.data.numpy().data)
        with futures.ThreadPoolExecutor(THREADS, "checkpoint-hash") as pool:
            hashes = [pool.submit(hashlib.sha256, view[at:end]) for _, at, end in self._buffer.places]
            try:
                parts = (view[i : i + LARGEST_BLOCK] for i in range(0, len(view), LARGEST_BLOCK))
                storage.write(f"{directory}/{self.file}", parts)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            blocks = [
                BlockReport(held.name, held.dtype, held.shape, box, at, digest.result().hexdigest())
                for ((held, box), at, _), digest in zip(self._buffer.places, hashes, strict=True)
            ]
        return FileReport(self.file, len(view), blocks)
