"""Restoring a checkpoint whose states lie there in another form than here: moments in 8 bits are two tensors, codes and
the scales of their blocks (`optimizer.moments`); split masters are two halves (`optimizer.masters`).

The rank that reads a stored pair makes wide numbers of it, so that nothing depends on how the tensors are cut here;
pairs of this rank are made of wide numbers once these are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from platform.boundary.storage import Storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, Piece, S, State, find_unit, scale_box
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import list_stored_pieces
from platform.checkpoint.manifest import Manifest, Refused, StoredBlock, check_tensors
from platform.checkpoint.moves import Fetch, World, build_block_fetch, fill_blocks, read_tensor
from platform.optimizer.optimizers import UNSIGNED
from platform.optimizer.stored_states import decode_numbers, encode_blocks
from platform.plan.model_types import LOW, SCALE_BLOCK, SCALES
from platform.runtime.flat_buffers import join_halves, split_halves

Types = Mapping[str, str]  # name of the first tensor of a pair -> element type of the numbers that it stands for


def restore_states(
    storage: Storage, directory: str, manifest: Manifest, state: State, blocks: Sequence[Block], world: World, wide: str
) -> None:
    """Fill this rank's `blocks` of the training `state` from a checkpoint, as
    `platform.checkpoint.moves.restore_checkpoint` does, but for tensors that are kept there or here in another form.
    `wide`: element type of moments as numbers. Raises what that raises."""
    names = {h.name for h in state}
    decoded = {h.name: h for h in state if _is_pair(manifest, h.name) and _partner_of(h.name) not in names}
    encoded = {n for n in names if _partner_of(n) in names and not _is_pair(manifest, n)}
    types = {name: "float32" if name.startswith("model.") else wide for name in {*decoded, *encoded}}
    left_out = {_partner_of(name) for name in encoded}
    kept = {h.name: h.shape for h in state if h.name not in left_out}
    seconds = {_partner_of(name): h.shape for name, h in decoded.items()}
    scales = {n: scale_box(Box.whole_tensor(shape), shape, find_unit(n)).extent for n, shape in seconds.items()}
    check_tensors(manifest, kept | scales)
    pieces = [p._replace(dtype=types[p.name]) if p.name in decoded else p for p in list_stored_pieces(manifest, kept)]
    fetch = _build_decoding_fetch(storage, directory, manifest, decoded)
    fill_wide(pieces, fetch, state, blocks, world, {name: types[name] for name in encoded})


def fill_wide(
    pieces: Sequence[Piece[S]], fetch: Fetch[S], state: State, blocks: Sequence[Block], world: World, wide: Types
) -> None:
    """Fill this rank's `blocks` from stored pieces, as `platform.checkpoint.moves.fill_blocks` does, but pairs of the
    `state` from pieces of wide numbers, without their second tensors: the pairs in `wide`."""
    left_out = {_partner_of(name) for name in wide}
    kept = [replace(h, dtype=wide.get(h.name, h.dtype)) for h in state if h.name not in left_out]
    room = [b._replace(tensor=torch.zeros(b.box.extent, dtype=DTYPES[wide[b.name]])) for b in blocks if b.name in wide]
    staged = [*room, *(b for b in blocks if b.name not in left_out and b.name not in wide)]
    fill_blocks(pieces, fetch, kept, staged, world)
    for name in {b.name for b in blocks} & wide.keys():
        flat = torch.cat([b.tensor.reshape(-1) for b in room if b.name == name])
        for part, numbers in zip((name, _partner_of(name)), _encode_pair(name, flat), strict=True):
            targets = [b.tensor for b in blocks if b.name == part]
            for target, values in zip(targets, numbers.split([x.numel() for x in targets]), strict=True):
                target.copy_(values.view(target.shape))


def _encode_pair(name: str, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two tensors, flat, that stand for the `flat` numbers of a tensor of training state."""
    kind = name.partition(".")[0]
    if kind != "model":
        return encode_blocks(flat, kind not in UNSIGNED)
    halves = torch.empty_like(flat, dtype=torch.bfloat16), torch.empty_like(flat, dtype=torch.int16)
    split_halves(flat, *halves)
    return halves


def _partner_of(name: str) -> str:
    """Return the name of the other tensor of a pair, if this one is its first: codes of a moment, high halves."""
    kind, _, parameter = name.partition(".")
    return f"{LOW}.{parameter}" if kind == "model" else f"{kind}{SCALES}.{parameter}"


def _is_pair(manifest: Manifest, name: str) -> bool:
    """Return True if a checkpoint stores a tensor as a pair. Raises Refused for one without the other."""
    dtype = manifest.tensors[name].dtype if name in manifest.tensors else ""
    if dtype == "uint8" and _partner_of(name) not in manifest.tensors:
        raise Refused(f"has no {_partner_of(name)}")
    return dtype == "uint8" or (dtype == "bfloat16" and _partner_of(name) in manifest.tensors)


def _build_decoding_fetch(
    storage: Storage, directory: str, manifest: Manifest, decoded: Mapping[str, HeldTensor]
) -> Fetch[StoredBlock]:
    """Return the function that reads stored blocks and verifies them, of the pairs `decoded` as wide numbers."""
    fetch = build_block_fetch(storage, directory)

    @lru_cache(maxsize=1)
    def read_scales(name: str) -> Tensor:
        """Read all scales of a moment, flat."""
        return read_tensor(storage, directory, manifest, _partner_of(name)).view(-1)

    def decode_piece(piece: Piece[StoredBlock], first: Tensor) -> Tensor:
        """Return the numbers, flat, of a piece of a pair, of whose first tensor the bytes are there."""
        if piece.name.startswith("model."):
            low = read_tensor(storage, directory, manifest, _partner_of(piece.name), piece.box)
            return join_halves(first.view(torch.bfloat16), low.view(-1))
        blocks = _flat_places(piece.box, decoded[piece.name].shape).view(-1) // SCALE_BLOCK
        signed = piece.name.partition(".")[0] not in UNSIGNED
        return decode_numbers(first, read_scales(piece.name)[blocks], signed, DTYPES[piece.dtype])

    def fetch_numbers(pieces: Sequence[Piece[StoredBlock]], into: Sequence[Tensor]) -> None:
        """Read stored blocks of the checkpoint into the memory given for each."""
        raw = [p._replace(dtype=manifest.tensors[p.name].dtype) for p in pieces]
        pairs = list(zip(raw, into, strict=True))
        buffers = [torch.empty(r.nbytes, dtype=torch.uint8) if r.name in decoded else m for r, m in pairs]
        fetch(raw, buffers)
        for piece, memory, first in zip(pieces, into, buffers, strict=True):
            if piece.name in decoded:
                memory.copy_(decode_piece(piece, first).view(torch.uint8))

    return fetch_numbers


def _flat_places(box: Box, shape: Sequence[int]) -> Tensor:
    """Return the place of each element of a block in the flattened tensor of this `shape`, int64 [*extent]."""
    places = torch.zeros(box.extent, dtype=torch.int64)
    for d, (start, size) in enumerate(zip(*box, strict=True)):
        stride = torch.Size(shape[d + 1 :]).numel()
        places += (torch.arange(start, start + size) * stride).view(-1, *[1] * (len(shape) - d - 1))
    return places
