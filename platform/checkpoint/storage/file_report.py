"""Report of a worker on the file of a checkpoint that it has written. Imports no torch, because the driver reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from platform.checkpoint.blocks.box import Box


class BlockReport(NamedTuple):
    """Block `box` of the global tensor `name`: its bytes begin at `at` of the file and have the hash `sha256`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    at: int
    sha256: str


@dataclass(frozen=True)
class FileReport:
    """Content of one worker's block file, of `bytes` bytes."""

    file: str
    bytes: int
    blocks: list[BlockReport]
