"""A worker's file of a checkpoint: made in host memory, then hashed and written at once."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from platform.checkpoint.box import Box
from platform.checkpoint.state import DTYPES, PIECE, Block, Share
from platform.checkpoint.storage import Storage

THREADS = min(4, os.cpu_count() or 1)  # hashing, and reading ahead


class Image:
    """The bytes of one worker's block file, copied from the live tensors by `fill`: all that a step waits for.

    The buffer is kept between saves, pinned where the tensors are on a GPU. Every stored block follows the one before
    it without a gap, larger element types first, so that each is aligned.
    """

    def __init__(self, rank: int, parts: Sequence[Share], pinned: bool = False):
        assert sys.byteorder == "little", "blocks are stored little-endian"
        self.file = f"blocks-{rank:05d}.bin"
        self._parts: list[tuple[Share, int, int]] = []
        at = 0
        for part in sorted(parts, key=lambda p: -p.tensor.itemsize):
            end = at + part.box.size * part.tensor.itemsize
            self._parts.append((part, at, end))
            at = end
        self._pinned = pinned
        self._buffer = torch.zeros(at, dtype=torch.uint8, pin_memory=pinned)

    @torch.no_grad()
    def fill(self, blocks: Sequence[Block]) -> None:
        """Copies this rank's blocks; they may change when it returns. `blocks` holds every share."""
        found: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for name, box, tensor in blocks:
            found[name].append((box, tensor))
        for (held, box), at, end in self._parts:
            outer, tensor = next((b, t) for b, t in found[held.name] if b.overlap(box) == box)
            copy = self._buffer[at:end].view(DTYPES[held.dtype]).view(box.extent)
            copy.copy_(tensor[box.within(outer)], non_blocking=True)
        if self._pinned:
            torch.cuda.synchronize()

    def write(self, storage: Storage, directory: str) -> dict[str, Any]:
        """Writes the file and hashes it meanwhile; returns the report for the driver, plain data.

        {file, bytes, blocks: [[name, dtype, shape, offset, extent, at, sha256], ...]}. Raises OSError.
        """
        view = memoryview(self._buffer.numpy().data)
        with ThreadPoolExecutor(THREADS, "checkpoint-hash") as pool:
            hashes = [pool.submit(_sha256, view[at:end]) for _, at, end in self._parts]
            try:
                storage.write(f"{directory}/{self.file}", (view[i : i + PIECE] for i in range(0, len(view), PIECE)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            blocks = [
                [held.name, held.dtype, list(held.shape), list(box.offset), list(box.extent), at, digest.result()]
                for ((held, box), at, _), digest in zip(self._parts, hashes, strict=True)
            ]
        return {"file": self.file, "bytes": len(view), "blocks": blocks}


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
