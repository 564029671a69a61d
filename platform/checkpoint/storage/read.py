"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from platform.checkpoint.blocks.placement import LARGEST_BLOCK, THREADS, Piece
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused, StoredBlock
from platform.checkpoint.storage.storage import Storage


def stored_pieces(manifest: Manifest, names: Iterable[str] | None = None) -> list[Piece[StoredBlock]]:
    """Return the stored blocks of the tensors `names` of a checkpoint (default: of all) as pieces to read, each as a
    whole, ordered by file and by place in it."""
    chosen = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    found = [Piece(t.name, t.dtype, block.box, block) for t in chosen for block in t.blocks]
    return sorted(found, key=lambda piece: (piece.source.file, piece.source.at, piece.nbytes))


def read_pieces(storage: Storage, directory: str, wanted: Sequence[Piece[StoredBlock]]) -> list[memoryview]:
    """Read the bytes of stored blocks of a checkpoint, in the order of `wanted`, several files at once. Raises Corrupt
    if they differ from what was written, Refused if the checkpoint is deleted meanwhile, OSError if the storage
    fails."""
    with ThreadPoolExecutor(THREADS, "checkpoint-read") as pool:
        parts = pool.map(lambda run: _read(storage, directory, run), _runs(wanted))
        return [data for part in parts for data in part]


def verify_pieces(storage: Storage, directory: str, wanted: Sequence[Piece[StoredBlock]]) -> None:
    """Verify stored blocks of a checkpoint by their SHA-256, raising as `read_pieces`, but keep nothing: at most
    THREADS x LARGEST_BLOCK are in memory."""
    with ThreadPoolExecutor(THREADS, "checkpoint-verify") as pool:
        for _ in pool.map(lambda run: bool(_read(storage, directory, run)), _runs(wanted)):
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


def _read(storage: Storage, directory: str, run: Sequence[Piece[StoredBlock]]) -> list[memoryview]:
    """Read a run of stored blocks that are adjacent in one file by a single request, verify each by its SHA-256, and
    return the bytes of each. Raises as `read_pieces`."""
    file, start = run[0].source.file, run[0].source.at
    try:
        data = memoryview(storage.read(f"{directory}/{file}", start, start + sum(piece.nbytes for piece in run)))
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{file} is missing") from None
    out = []
    for piece in run:
        at, end = piece.source.at, piece.source.at + piece.nbytes
        out.append(data[at - start : end - start])
        if hashlib.sha256(out[-1]).hexdigest() != piece.source.sha256:
            raise Corrupt(f"{file}: bytes {at} to {end} ({piece.name} {piece.box}) are not what was written")
    return out
