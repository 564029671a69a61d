"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from platform.checkpoint.blocks.placement import LARGEST_BLOCK, THREADS, Piece
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused, StoredBlock
from platform.checkpoint.storage.storage import Reader, Storage

AT_ONCE = 256 << 10  # bytes read, then hashed: they stay in a core's cache in between


def stored_pieces(manifest: Manifest, names: Iterable[str] | None = None) -> list[Piece[StoredBlock]]:
    """Return the stored blocks of the tensors `names` of a checkpoint (default: of all) as pieces to read, each as a
    whole, ordered by file and by place in it."""
    chosen = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    found = [Piece(t.name, t.dtype, block.box, block) for t in chosen for block in t.blocks]
    return sorted(found, key=lambda piece: (piece.source.file, piece.source.at, piece.nbytes))


def read_pieces(
    storage: Storage, directory: str, wanted: Sequence[Piece[StoredBlock]], into: Sequence[memoryview]
) -> None:
    """Read stored blocks of a checkpoint into the memory given for each of `wanted`, several files at once. Raises
    Corrupt if they are not the written bytes, Refused if the checkpoint is deleted meanwhile, OSError if the storage
    fails; the memory is then undefined."""
    memories = iter(into)
    runs = [(run, [next(memories) for _ in run]) for run in _runs(wanted)]
    with ThreadPoolExecutor(THREADS, "checkpoint-read") as pool:
        for _ in pool.map(lambda given: _read(storage, directory, *given), runs):
            pass


def verify_pieces(storage: Storage, directory: str, wanted: Sequence[Piece[StoredBlock]]) -> None:
    """Verify stored blocks of a checkpoint by their SHA-256, raising as `read_pieces`, but keep nothing: at most
    THREADS x LARGEST_BLOCK are in memory."""
    with ThreadPoolExecutor(THREADS, "checkpoint-verify") as pool:
        for _ in pool.map(lambda run: _read(storage, directory, run), _runs(wanted)):
            pass


def _runs(wanted: Sequence[Piece[StoredBlock]]) -> list[list[Piece[StoredBlock]]]:
    """Group stored blocks that are adjacent in a file of a checkpoint, up to LARGEST_BLOCK bytes a group, so that each
    group takes one request to the storage. `wanted`: ordered by file and place."""
    out: list[list[Piece[StoredBlock]]] = []
    file, start, end = "", 0, 0
    for piece in wanted:
        place = piece.source
        if (place.file, place.at) == (file, end) and end + piece.nbytes - start <= LARGEST_BLOCK:
            out[-1].append(piece)
        else:
            out.append([piece])
            file, start = place.file, place.at
        end = place.at + piece.nbytes
    return out


def _read(storage: Storage, directory: str, run: Sequence[Piece[StoredBlock]], into: Sequence[memoryview] = ()) -> None:
    """Read a run of stored blocks that are adjacent in one file by a single request, each into its memory if there is
    any, and verify each by its SHA-256. Raises as `read_pieces`."""
    file, start, end = run[0].source.file, run[0].source.at, run[-1].source.at + run[-1].nbytes
    try:
        with storage.open(f"{directory}/{file}", start, end) as source:
            spare = memoryview(bytearray(0 if into else AT_ONCE))
            for piece, memory in zip_longest(run, into):
                if _take(source, piece.nbytes, memory, spare) != piece.source.sha256:
                    place = f"bytes {piece.source.at} to {piece.source.at + piece.nbytes}"
                    raise Corrupt(f"{file}: {place} ({piece.name} {piece.box}) are not what was written")
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{file} is missing") from None


def _take(source: Reader, size: int, memory: memoryview | None, spare: memoryview) -> str:
    """Read the next `size` bytes of a file into `memory`, or through `spare` if that is None, and return their SHA-256,
    of fewer bytes if the file ends before. Reading and hashing take turns, AT_ONCE bytes each."""
    digest, at = hashlib.sha256(), 0
    while at < size:
        part = (spare if memory is None else memory[at:])[: min(AT_ONCE, size - at)]
        if not (count := source.readinto(part)):
            break
        digest.update(part[:count])
        at += count
    return digest.hexdigest()
