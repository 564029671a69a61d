"""Reading stored blocks, each verified by its SHA-256, in large contiguous ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.placement import PIECE
from platform.checkpoint.storage.image import THREADS
from platform.checkpoint.storage.manifest import NAME, Corrupt, Manifest, Refused, Stored, StoredTensor
from platform.checkpoint.storage.storage import Storage


class Unit(NamedTuple):
    """Stored block, which is read as a whole, and the place [at, end) of its bytes in its file."""

    name: str
    tensor: StoredTensor
    block: Stored
    at: int
    end: int

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def box(self) -> Box:
        return self.block.box

    @property
    def had(self) -> tuple[int, ...]:
        return ()  # no rank has it before it is read


def units(manifest: Manifest, names: Iterable[str] | None = None) -> list[Unit]:
    """Return the stored blocks of these tensors (default: of all), ordered by file and by place in it."""
    chosen = manifest.tensors if names is None else names
    found = [Unit(n, t, b, b.at, b.at + t.nbytes(b)) for n in chosen for t in [manifest.tensors[n]] for b in t.blocks]
    return sorted(found, key=lambda u: (u.block.file, u.at, u.end))


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
        last = out[-1] if out else None
        if (
            last
            and last[-1].block.file == unit.block.file
            and last[-1].end == unit.at
            and unit.end - last[0].at <= PIECE
        ):
            last.append(unit)
        else:
            out.append([unit])
    return out


def _read(storage: Storage, directory: str, run: Sequence[Unit]) -> list[memoryview]:
    file, start = run[0].block.file, run[0].at
    try:
        data = memoryview(storage.read(f"{directory}/{file}", start, run[-1].end))
    except FileNotFoundError:
        if NAME not in storage.list(directory):
            raise Refused("it was deleted while it was read") from None
        raise Corrupt(f"{file} is missing") from None
    out = [data[u.at - start : u.end - start] for u in run]
    for unit, part in zip(run, out, strict=True):
        if hashlib.sha256(part).hexdigest() != unit.block.sha256:
            raise Corrupt(f"{file}: bytes {unit.at} to {unit.end} ({unit.name} {unit.box}) are not what was written")
    return out
