"""Passing parts of global tensors, read from storage or memory, to the ranks whose blocks they overlap."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from platform.checkpoint.blocks.box import Box
from platform.checkpoint.blocks.buffer import DTYPES
from platform.checkpoint.blocks.placement import Block, HeldTensor, Piece, S
from platform.checkpoint.storage.manifest import Corrupt, Refused

BUDGET = 256 << 20  # bytes that a worker receives per exchange, on average
FAILURES = (Corrupt, Refused, OSError)  # of which every rank raises the one that any rank met
HEADER_BYTES = 8  # the largest item size, which keeps the payload aligned; the first is 0, or 1 + a failure's index

Fetch = Callable[[Sequence[Piece[S]]], Sequence[Tensor]]
"""The bytes of every piece, uint8 [*extent, bytes of an element]. Raises one of FAILURES."""
Exchange = Callable[[list[Tensor]], list[Tensor]]
"""An all-to-all among the job's ranks: takes one uint8 tensor per receiver, returns one per sender;
sizes differ."""
Holders = dict[str, list[tuple[Box, tuple[int, ...]]]]  # tensor -> (block, its holders) in order


def divide(pieces: Sequence[Piece[S]], count: int) -> list[list[Piece[S]]]:
    """Divide `pieces`, in order, into `count` stretches of about equal bytes, for as many turns or ranks; some may be
    empty."""
    total, at = sum(piece.nbytes for piece in pieces), 0
    out: list[list[Piece[S]]] = [[] for _ in range(count)]
    for piece in pieces:
        out[at * count // total].append(piece)
        at += piece.nbytes
    return out


def exchange_alone(messages: list[Tensor]) -> list[Tensor]:
    """Return `messages` as they are: the all-to-all (`Exchange`) of a job of one process."""
    return messages


def clear_padding(state: Sequence[HeldTensor], blocks: Sequence[Block]) -> None:
    """Set those of this rank's `blocks` to zero that reach beyond their global tensor (a padded vocab), before they are
    filled: padding is never stored. `state`: gives every tensor's shape without padding."""
    shapes = {t.name: t.shape for t in state}
    for name, box, tensor in blocks:
        if box.overlap(Box.whole(shapes[name])) != box:
            tensor.detach().zero_()


def pass_on(
    turns: Iterable[Sequence[Sequence[Piece[S]]]],
    fetch: Fetch[S],
    state: Sequence[HeldTensor],
    blocks: Sequence[Block],
    rank: int,
    exchange: Exchange,
) -> None:
    """Fill this rank's `blocks` with the pieces of global tensors that all ranks fetch and send, one `exchange` per
    turn; all ranks call it together.

    `turns`: per turn and rank, the pieces that it passes on; `fetch`: returns their bytes; `state`: who holds which
    blocks now; `turns` and `state` are equal on all ranks. Raises one of FAILURES on every rank alike if `fetch` does
    on any: the blocks are then undefined.
    """
    holders = {t.name: sorted(t.holders.items()) for t in state}
    mine: dict[str, list[Block]] = defaultdict(list)
    for block in sorted(blocks, key=lambda b: b.box):
        mine[block.name].append(block)
    for senders in turns:
        received = exchange(_messages(senders[rank], fetch, holders, len(senders)))
        _raise_failures(received)
        for message, pieces in zip(received, senders, strict=True):
            _unpack(message, [piece for piece in pieces if rank not in piece.had], mine)


def _messages(pieces: Sequence[Piece[S]], fetch: Fetch[S], holders: Holders, world_size: int) -> list[Tensor]:
    """Return one message (uint8) per receiving rank: the parts of the fetched `pieces` that lie in that rank's blocks,
    or why `fetch` failed: a rank that raised here would leave its peers waiting for its message."""
    try:
        found = fetch(pieces)
    except FAILURES as error:
        kind = next(i for i, failure in enumerate(FAILURES) if isinstance(error, failure))
        return [_message(1 + kind, [torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)])] * world_size
    parts: list[list[Tensor]] = [[] for _ in range(world_size)]
    for piece, data in zip(pieces, found, strict=True):
        for held, ranks in holders.get(piece.name, ()):
            if part := piece.box.overlap(held):
                flat = data[part.within(piece.box)].reshape(-1)
                for rank in ranks:
                    if rank not in piece.had:
                        parts[rank].append(flat)
    messages = {tuple(map(id, p)): p for p in parts}  # replicas get the same message, built once
    built = {key: _message(0, p) for key, p in messages.items()}
    return [built[tuple(map(id, p))] for p in parts]


def _message(status: int, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.tensor([status] + [0] * (HEADER_BYTES - 1), dtype=torch.uint8), *parts])


def _raise_failures(received: Sequence[Tensor]) -> None:
    for message in received:
        if status := int(message[0]):
            raise FAILURES[status - 1](bytes(message[HEADER_BYTES:].tolist()).decode())


def _unpack(message: Tensor, pieces: Sequence[Piece[S]], mine: dict[str, list[Block]]) -> None:
    """Copy the message of one sender into this rank's blocks. `pieces`: the stored pieces that the sender read and this
    rank did not; `mine`: tensor name -> this rank's blocks, sorted. The message holds the overlap of every piece with
    every block of its tensor, by piece, then by block."""
    at = HEADER_BYTES
    for piece in pieces:
        dtype = DTYPES[piece.dtype]
        for _, outer, tensor in mine.get(piece.name, ()):
            if part := piece.box.overlap(outer):
                end = at + part.size * dtype.itemsize
                raw = message[at:end]
                if raw.storage_offset() % dtype.itemsize:
                    raw = raw.clone()  # view() needs an offset aligned to the type
                values = raw.view(dtype).view(part.extent)
                tensor.detach()[part.within(outer)].copy_(values)
                at = end
    assert at == len(message), "sender and receiver agree on who holds what"
