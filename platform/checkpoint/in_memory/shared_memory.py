"""Memory of one process that other processes of its machine can map, and keep when that one has died."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Hashable, Sequence
from typing import Any

PAGE = max(mmap.ALLOCATIONGRANULARITY, mmap.PAGESIZE)


class SharedMemory:
    """File without a name, in host memory, that processes of one user and machine can map. It lasts until the last of
    them that has opened it has ended, so that nothing is left behind."""

    def __init__(self, file: int):
        """Wrap the descriptor of an open file without a name, which holds snapshots in host memory."""
        self._file = os.fdopen(file, "rb+", buffering=0)

    @classmethod
    def create(cls) -> SharedMemory:
        """Create an empty shared memory for snapshots, a file without a name that only this user can open."""
        if not hasattr(os, "memfd_create"):
            return cls(os.dup(tempfile.TemporaryFile().fileno()))  # no Linux: other processes will not find it
        memory = cls(os.memfd_create("snapshots"))
        os.fchmod(memory._file.fileno(), 0o600)
        return memory

    @property
    def address(self) -> list[int]:
        """Return where other processes find the snapshots' memory: [process id, file descriptor, device, inode]."""
        found = os.fstat(self._file.fileno())
        return [os.getpid(), self._file.fileno(), found.st_dev, found.st_ino]

    @classmethod
    def find(cls, address: Sequence[int]) -> SharedMemory | None:
        """Open the snapshots' shared memory of another process at its `address`; None if it is not to be found from
        here, as where the two see other processes, or belong to other users."""
        process, number, device, inode = map(int, address)
        path = f"/proc/{process}/fd/{number}"
        try:
            before = os.stat(path)  # another process may have this number here: nothing of it is opened
            if (before.st_dev, before.st_ino) != (device, inode):
                return None
            memory = cls(os.open(path, os.O_RDWR))
        except OSError:
            return None
        return memory if memory.address[2:] == [device, inode] else None

    def grow(self, count: int) -> None:
        """Make this memory for snapshots `count` bytes long, zeros at first; pages are taken when they are written."""
        if os.fstat(self._file.fileno()).st_size < count:
            os.truncate(self._file.fileno(), count)

    def map(self, at: int, count: int) -> mmap.mmap:
        """Map `count` bytes (at least 1) of the snapshots' memory into the process, from `at`, a multiple of PAGE."""
        return mmap.mmap(self._file.fileno(), count, offset=at)

    def free(self, at: int, count: int) -> None:
        """Give `count` bytes of the snapshots' memory back to the system, from `at`, a multiple of PAGE; now zeros."""
        if hasattr(mmap, "MADV_REMOVE") and count:
            with self.map(at, count) as here:
                here.madvise(mmap.MADV_REMOVE)


def open_node(
    memory: SharedMemory, nodes: Sequence[Hashable], rank: int, all_gather: Callable[[Any], list[Any]]
) -> dict[int, SharedMemory] | None:
    """Open the memories of snapshots of all ranks of this rank's node: rank -> memory, its own included; None if any
    rank of the job cannot open its node's. All ranks call it together. `nodes`: every rank's node; `all_gather`:
    gathers one value of every rank on all."""
    addresses = all_gather(memory.address)
    found = {
        mate: memory if mate == rank else SharedMemory.find(addresses[mate])
        for mate, node in enumerate(nodes)
        if node == nodes[rank]
    }
    opened = {mate: there for mate, there in found.items() if there}
    return opened if all(all_gather(len(opened) == len(found))) else None
