"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import LARGEST_BLOCK
from platform.checkpoint.storage.image import THREADS
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused
from platform.checkpoint.storage.storage import Storage


class StoredPiece(NamedTuple):
    """Stored block, which is read as a whole: its bytes are [at, end) of `file`. `had`: no rank has it before."""

    name: str
    dtype: str
    box: Box
    file: str
    at: int
    end: int
    sha256: str
    had: tuple[int, ...] = ()


def stored_pieces(manifest: Manifest, names: Iterable[str] | None = None) -> list[StoredPiece]:
    """Return the stored blocks of these tensors (default: of all), ordered by file and by place in it."""
    chosen = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    blocks = ((t, b) for t in chosen for b in t.blocks)
    found = [StoredPiece(t.name, t.dtype, b.box, b.file, b.at, b.at + t.nbytes(b), b.sha256) for t, b in blocks]
    return sorted(found, key=lambda piece: (piece.file, piece.at, piece.end))


def read_pieces(storage: Storage, directory: str, wanted: Sequence[StoredPiece]) -> list[memoryview]:
    """Read the bytes of every piece. Raises Corrupt if they differ from what was written, Refused if the checkpoint is
    deleted meanwhile, OSError if the storage fails."""
    with ThreadPoolExecutor(THREADS, "checkpoint-read") as pool:
        parts = pool.map(lambda run: _read(storage, directory, run), _runs(wanted))
        return [data for part in parts for data in part]


def verify_pieces(storage: Storage, directory: str, wanted: Sequence[StoredPiece]) -> None:
    """Verify every piece as `read_pieces` does, but keep nothing: at most THREADS x LARGEST_BLOCK are in memory."""
    with ThreadPoolExecutor(THREADS, "checkpoint-verify") as pool:
        for _ in pool.map(lambda run: bool(_read(storage, directory, run)), _runs(wanted)):
            pass


def _runs(wanted: Sequence[StoredPiece]) -> list[list[StoredPiece]]:
    """Group pieces that are adjacent in a file, up to LARGEST_BLOCK bytes a group: one request each."""
    out: list[list[StoredPiece]] = []
    for piece in wanted:
        run = out[-1] if out else [piece]
        if (run[-1].file, run[-1].end) == (piece.file, piece.at) and piece.end - run[0].at <= LARGEST_BLOCK:
            run.append(piece)
        else:
            out.append([piece])
    return out


def _read(storage: Storage, directory: str, run: Sequence[StoredPiece]) -> list[memoryview]:
    file, start = run[0].file, run[0].at
    try:
        data = memoryview(storage.read(f"{directory}/{file}", start, run[-1].end))
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{file} is missing") from None
    out = [data[piece.at - start : piece.end - start] for piece in run]
    for piece, part in zip(run, out, strict=True):
        if hashlib.sha256(part).hexdigest() != piece.sha256:
            raise Corrupt(
                f"{file}: bytes {piece.at} to {piece.end} ({piece.name} {piece.box}) are not what was written"
            )
    return out
