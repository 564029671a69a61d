"""A worker's file of a checkpoint: copied into host memory, then hashed while it is written."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from platform.boundary.files.file_storage import Storage
from platform.boundary.files.sealed import LARGEST_BLOCK, THREADS
from platform.checkpoint.blocks.buffer import Buffer
from platform.checkpoint.blocks.placement import Block, Share
from platform.checkpoint.storage.file_report import BlockReport, FileReport


class Image:
    """Bytes of one worker's block file, copied from the live tensors by `fill`, which is all that a step waits for.

    The buffer is reused from save to save. Stored blocks follow each other without a gap.
    """

    def __init__(self, rank: int, parts: Sequence[Share], pinned: bool = False):
        """Allocate memory for the block file of `rank` in checkpoints; `pinned`: page-locked, for copies from a GPU."""
        assert sys.byteorder == "little", "blocks are stored little-endian"
        self.file = f"blocks-{rank:05d}.bin"
        self._buffer = Buffer.aligned(parts, pinned)

    def fill(self, blocks: Sequence[Block]) -> None:
        """Copy this rank's part of a checkpoint out of its live tensors `blocks`, which may change afterwards."""
        self._buffer.fill(blocks)

    def write(self, storage: Storage, directory: str) -> FileReport:
        """Write this rank's block file into the checkpoint's `directory`, hashing it meanwhile; return the report for
        the driver. Raises OSError."""
        view = memoryview(self._buffer.data.numpy().data)
        with ThreadPoolExecutor(THREADS, "checkpoint-hash") as pool:
            hashes = [pool.submit(hashlib.sha256, view[at:end]) for _, at, end in self._buffer.places]
            try:
                storage.write(
                    f"{directory}/{self.file}",
                    (view[i : i + LARGEST_BLOCK] for i in range(0, len(view), LARGEST_BLOCK)),
                )
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
            blocks = [
                BlockReport(held.name, held.dtype, held.shape, box, at, digest.result().hexdigest())
                for ((held, box), at, _), digest in zip(self._buffer.places, hashes, strict=True)
            ]
        return FileReport(self.file, len(view), blocks)
