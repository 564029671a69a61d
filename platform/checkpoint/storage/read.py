"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import PIECE
from platform.checkpoint.storage.image import THREADS
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused
from platform.checkpoint.storage.storage import Storage


class Unit(NamedTuple):
    """Stored block, which is read as a whole: its bytes are [at, end) of `file`. `had`: no rank has it before."""

    name: str
    dtype: str
    box: Box
    file: str
    at: int
    end: int
    sha256: str
    had: tuple[int, ...] = ()


def units(manifest: Manifest, names: Iterable[str] | None = None) -> list[Unit]:
    """Return the stored blocks of these tensors (default: of all), ordered by file and by place in it."""
    chosen = [manifest.tensors[name] for name in (manifest.tensors if names is None else names)]
    found = [Unit(t.name, t.dtype, b.box, b.file, b.at, b.at + t.nbytes(b), b.sha256) for t in chosen for b in t.blocks]
    return sorted(found, key=lambda u: (u.file, u.at, u.end))


def read(storage: Storage, directory: str, wanted: Sequence[Unit]) -> list[memoryview]:
    """Read the bytes of every unit. Raises Corrupt if they differ from what was written, Refused if the checkpoint is
    deleted meanwhile, OSError if the storage fails."""
    with ThreadPoolExecutor(THREADS, "checkpoint-read") as pool:
        parts = pool.map(lambda run: _read(storage, directory, run), _runs(wanted))
        return [data for part in parts for data in part]


def verify_units(storage: Storage, directory: str, wanted: Sequence[Unit]) -> None:
    """Verify every unit as `read` does, but keep nothing: at most THREADS x PIECE bytes are in memory at once."""
    with ThreadPoolExecutor(THREADS, "checkpoint-verify") as pool:
        for _ in pool.map(lambda run: bool(_read(storage, directory, run)), _runs(wanted)):
            pass


def _runs(wanted: Sequence[Unit]) -> list[list[Unit]]:
    """Group units that are adjacent in a file, up to PIECE bytes a group: one request each."""
    out: list[list[Unit]] = []
    for unit in wanted:
        run = out[-1] if out else [unit]
        if (run[-1].file, run[-1].end) == (unit.file, unit.at) and unit.end - run[0].at <= PIECE:
            run.append(unit)
        else:
            out.append([unit])
    return out


def _read(storage: Storage, directory: str, run: Sequence[Unit]) -> list[memoryview]:
    file, start = run[0].file, run[0].at
    try:
        data = memoryview(storage.read(f"{directory}/{file}", start, run[-1].end))
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{file} is missing") from None
    out = [data[u.at - start : u.end - start] for u in run]
    for unit, part in zip(run, out, strict=True):
        if hashlib.sha256(part).hexdigest() != unit.sha256:
            raise Corrupt(f"{file}: bytes {unit.at} to {unit.end} ({unit.name} {unit.box}) are not what was written")
    return out
