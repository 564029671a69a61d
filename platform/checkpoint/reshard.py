"""Restoring blocks under any plan: every stored byte is read once per job, by one worker, and passed to whoever holds
a part of it.

Who reads what is computed alike on all ranks: the stored blocks, in the order of the files, are cut into n equal
stretches. So reads are long, contiguous and whole blocks, which is what their SHA-256 covers; how the tensors were
split when they were saved, and how they are now, changes only what is passed along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from platform.checkpoint.box import Box
from platform.checkpoint.manifest import Corrupt, Manifest, check_against
from platform.checkpoint.read import Unit, read, units
from platform.checkpoint.state import DTYPES, PIECE, Block, Held
from platform.checkpoint.storage import Storage

BUDGET = 256 << 20  # bytes that a worker gets at a time, on average
OK, CORRUPT, FAILED = 0, 1, 2  # the first byte of every message
HEADER = 8  # bytes before the rest of it, which is thereby aligned

Holders = dict[str, list[tuple[Box, tuple[int, ...]]]]  # tensor -> its blocks in order, and who holds each
Exchange = Callable[[list[Tensor]], list[Tensor]]
"""An all-to-all among the job's ranks: takes one uint8 tensor per receiver, returns one per sender;
sizes differ."""


def alone(messages: list[Tensor]) -> list[Tensor]:
    """The exchange of a job of one process."""
    return messages


def restore(
    storage: Storage,
    directory: str,
    manifest: Manifest,
    state: Sequence[Held],
    blocks: Sequence[Block],
    *,
    rank: int = 0,
    world_size: int = 1,
    exchange: Exchange = alone,
    budget: int = BUDGET,
) -> None:
    """Fills this rank's `blocks`; all ranks call it together. What a block has beyond the global tensor becomes zero.

    `state`: every tensor that is wanted and who holds its blocks now, equal on all ranks; its types need not be those
    of the checkpoint, values are converted. Raises, on every rank alike, Refused where the checkpoint has no such
    tensors, Corrupt or OSError where some rank cannot read what was written: the blocks are then undefined.
    """
    check_against(manifest, {t.name: t.shape for t in state})
    holders = {t.name: sorted(t.holders.items()) for t in state}
    mine: dict[str, list[Block]] = defaultdict(list)
    for block in sorted(blocks, key=lambda b: b.box):
        mine[block.name].append(block)
        if block.box.overlap(Box.whole(manifest.tensors[block.name].shape)) != block.box:
            block.tensor.detach().zero_()
    wanted = units(manifest, holders)
    placed = sum(box.size * len(ranks) * manifest.tensors[n].itemsize for n in holders for box, ranks in holders[n])
    for readers in rounds(wanted, world_size, max(PIECE, budget * world_size * size(wanted) // max(placed, 1))):
        received = exchange(_messages(storage, directory, readers[rank], holders, world_size))
        _raise_failures(received)
        for message, source in zip(received, readers, strict=True):
            _unpack(message, source, mine)


def read_tensor(storage: Storage, directory: str, manifest: Manifest, name: str, box: Box | None = None) -> Tensor:
    """One tensor, or a block of it, in this process and in the stored type. Raises as `restore`."""
    tensor = manifest.tensors[name]
    box = box or Box.whole(tensor.shape)
    out = torch.empty(box.extent, dtype=DTYPES[tensor.dtype])
    wanted = [u for u in units(manifest, [name]) if u.block.box.overlap(box)]
    for readers in rounds(wanted, 1, BUDGET):
        [message] = _messages(storage, directory, readers[0], {name: [(box, (0,))]}, 1)
        _raise_failures([message])
        _unpack(message, readers[0], {name: [Block(name, box, out)]})
    return out


def size(wanted: Sequence[Unit]) -> int:
    """Bytes."""
    return sum(u.end - u.at for u in wanted)


def rounds(wanted: Sequence[Unit], world_size: int, window: int) -> list[list[list[Unit]]]:
    """Per round, what every rank reads: together about `window` bytes, each an equal stretch of them."""
    total = size(wanted)
    count = -(-total // window)
    out: list[list[list[Unit]]] = [[[] for _ in range(world_size)] for _ in range(count)]
    position = 0
    for unit in wanted:
        whole, part = divmod(position * count, total)
        out[whole][part * world_size // total].append(unit)
        position += unit.end - unit.at
    return out


def _messages(
    storage: Storage,
    directory: str,
    readable: Sequence[Unit],
    holders: Holders,
    world_size: int,
) -> list[Tensor]:
    """To every rank: OK and what it holds of the units, one part after the other; or why there is nothing."""
    try:
        found = read(storage, directory, readable)
    except (Corrupt, OSError) as error:
        flag = CORRUPT if isinstance(error, Corrupt) else FAILED
        return [_message(flag, [torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)])] * world_size
    parts: list[list[Tensor]] = [[] for _ in range(world_size)]
    for unit, data in zip(readable, found, strict=True):
        box = unit.block.box
        stored = torch.frombuffer(data, dtype=torch.uint8).view(*box.extent, unit.tensor.itemsize)
        for held, ranks in holders[unit.name]:
            if part := box.overlap(held):
                flat = stored[part.within(box)].reshape(-1)
                for rank in ranks:
                    parts[rank].append(flat)
    messages = {tuple(map(id, p)): p for p in parts}  # replicas get one and the same
    built = {key: _message(OK, p) for key, p in messages.items()}
    return [built[tuple(map(id, p))] for p in parts]


def _message(flag: int, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.tensor([flag] + [0] * (HEADER - 1), dtype=torch.uint8), *parts])


def _raise_failures(received: Sequence[Tensor]) -> None:
    for message in received:
        if message[0] != OK:
            reason = bytes(message[HEADER:].tolist()).decode()
            raise Corrupt(reason) if message[0] == CORRUPT else OSError(reason)


def _unpack(message: Tensor, source: Sequence[Unit], mine: dict[str, list[Block]]) -> None:
    """The parts follow each other as the sender packed them: by unit, then by block of this rank, in order."""
    at = HEADER
    for unit in source:
        dtype, box = DTYPES[unit.tensor.dtype], unit.block.box
        for _, outer, tensor in mine.get(unit.name, ()):
            if part := box.overlap(outer):
                end = at + part.size * dtype.itemsize
                raw = message[at:end]
                if raw.storage_offset() % dtype.itemsize:
                    raw = raw.clone()  # at an address that fits the type
                values = raw.view(dtype).view(part.extent)
                tensor.detach()[part.within(outer)].copy_(values)
                at = end
    assert at == len(message), "sender and receiver agree on who holds what"
