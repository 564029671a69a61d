"""Restoring a checkpoint under any plan: every stored byte is read once per job, by one worker, and passed to all ranks
that hold a part of it.

All ranks compute alike which rank reads which blocks: the stored blocks, in the order of the files, are divided into n
equal stretches. So reads are long, contiguous and of whole blocks, each covered by a SHA-256; the split of the tensors
at saving and the present one only change the messages between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from platform.boundary.files.file_storage import Storage
from platform.boundary.files.sealed import LARGEST_BLOCK
from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.buffer import DTYPES
from platform.checkpoint.blocks.placement import ITEMSIZE, Block, HeldTensor, Piece, S
from platform.checkpoint.moves.passing import (
    BUDGET,
    Exchange,
    Fetch,
    clear_padding,
    divide,
    exchange_alone,
    pass_on,
)
from platform.checkpoint.storage.manifest import Manifest, StoredBlock, check_against
from platform.checkpoint.storage.read import read_pieces, stored_pieces


def restore(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    state: Sequence[HeldTensor],
    blocks: Sequence[Block],
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = exchange_alone,
    budget: int = BUDGET,
) -> None:
    """Fill this rank's `blocks` from a checkpoint that any plan saved; all ranks call it together. Padding, beyond the
    global tensor, becomes zero.

    `state`: every tensor to restore and who holds its blocks now, equal on all ranks; values are converted if the
    checkpoint has another element type. `budget`: bytes that a rank receives per `exchange`, on average. Raises, on
    every rank alike, Refused if the checkpoint lacks such a tensor, Corrupt or OSError if any rank cannot read the
    stored bytes: the blocks are then undefined.
    """
    check_against(manifest, {t.name: t.shape for t in state})
    world: dict[str, Any] = {"rank": rank, "world_size": world_size, "exchange": exchange, "budget": budget}
    fill_blocks(
        stored_pieces(manifest, [t.name for t in state]), stored_fetch(storage, directory), state, blocks, **world
    )


def fill_blocks(
    wanted: Sequence[Piece[S]],
    fetch: Fetch[S],
    state: Sequence[HeldTensor],
    blocks: Sequence[Block],
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = exchange_alone,
    budget: int = BUDGET,
) -> None:
    """Fill this rank's `blocks` with the pieces `wanted`, which tile the tensors of `state` and are `fetch`ed once per
    job, each by one rank; all ranks call it together. Further as `restore`."""
    itemsize = {piece.name: ITEMSIZE[piece.dtype] for piece in wanted}
    placed = sum(box.size * len(ranks) * itemsize[t.name] for t in state for box, ranks in t.holders.items())
    total = sum(piece.nbytes for piece in wanted)
    turns = divide(wanted, -(-total // max(LARGEST_BLOCK, budget * world_size * total // max(placed, 1))))
    clear_padding(state, blocks)
    readers = (divide(turn, world_size) for turn in turns)
    pass_on(readers, fetch, state, blocks, rank, exchange)


def read_tensor(storage: Storage, directory: str, manifest: Manifest, name: str) -> Tensor:
    """Read one whole global tensor of a checkpoint into memory, in its stored type. Raises Refused or OSError."""
    stored = manifest.tensors[name]
    box = Box.whole(stored.shape)
    out = torch.empty(box.extent, dtype=DTYPES[stored.dtype])
    held = HeldTensor(name, stored.dtype, stored.shape, {box: (0,)})
    restore(storage, directory, manifest, [held], [Block(name, box, out)])
    return out


def stored_fetch(storage: Storage, directory: str) -> Fetch[StoredBlock]:
    """Return what fetches stored blocks of a checkpoint, see `platform.checkpoint.storage.read.read_pieces`."""

    def fetch(wanted: Sequence[Piece[StoredBlock]], into: Sequence[Tensor]) -> None:
        read_pieces(storage, directory, wanted, [memory.numpy().data for memory in into])

    return fetch
