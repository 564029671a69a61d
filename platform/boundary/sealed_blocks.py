"""Blocks of files, which hashes seal: several threads read and hash them, as one SHA-256 is slower than a disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from platform.boundary.storage import Reader, Storage

LARGEST_BLOCK = 16 << 20  # bytes: the largest block that is written, which one thread hashes
THREADS = min(4, os.cpu_count() or 1)  # for hashing blocks, and for reading them
AT_ONCE = 256 << 10  # bytes read, then hashed: they stay in a core's cache in between


class FileRange(NamedTuple):
    """Block of a file of a storage: `size` bytes from `at` on."""

    file: str
    at: int
    size: int


def hash_blocks(
    storage: Storage, spans: Sequence[FileRange], into: Sequence[memoryview] = (), threads: int = THREADS
) -> Generator[str]:
    """Yield the SHA-256 of each of the blocks `spans` of files on a storage, in order, of fewer bytes if a file ends
    before. `into`: memory that the blocks are read into, one for each, or none. Adjacent blocks, up to LARGEST_BLOCK
    bytes, take one request to the storage, and at most `threads` x LARGEST_BLOCK are in memory. Raises OSError."""
    memories = iter(into)
    runs = [(run, [next(memories) for _ in run] if into else []) for run in _group_adjacent_blocks(spans)]
    pool = ThreadPoolExecutor(threads, "hash")
    try:
        for hashes in pool.map(lambda run: _hash_run(storage, *run), runs):
            yield from hashes
    finally:
        pool.shutdown(cancel_futures=True)


def _group_adjacent_blocks(spans: Sequence[FileRange]) -> Iterator[list[FileRange]]:
    """Group blocks that follow each other in a file of a storage, up to LARGEST_BLOCK bytes a group, for one read
    each."""
    run: list[FileRange] = []
    for span in spans:
        follows = run and (span.file, span.at) == (run[-1].file, run[-1].at + run[-1].size)
        if run and not (follows and span.at + span.size - run[0].at <= LARGEST_BLOCK):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _hash_run(storage: Storage, run: Sequence[FileRange], into: Sequence[memoryview]) -> list[str]:
    """Return the SHA-256 of adjacent ranges of a storage's file, read by one request; `into`: memory each, or none."""
    spare = memoryview(bytearray(0 if into else AT_ONCE))
    with storage.open(run[0].file, run[0].at, run[-1].at + run[-1].size) as source:
        return [_hash_next_block(source, span.size, memory, spare) for span, memory in zip_longest(run, into)]


def _hash_next_block(source: Reader, size: int, memory: memoryview | None, spare: memoryview) -> str:
    """Read the next `size` bytes of a storage's file into `memory`, or through `spare` if that is None, and return
    their SHA-256, of fewer bytes if the file ends before. Reading and hashing take turns, AT_ONCE bytes each."""
    digest, offset = hashlib.sha256(), 0
    while offset < size:
        window = (spare if memory is None else memory[offset:])[: min(AT_ONCE, size - offset)]
        if not (count := source.readinto(window)):
            break
        digest.update(window[:count])
        offset += count
    return digest.hexdigest()
