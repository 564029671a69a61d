"""Restoring a checkpoint whose states lie there in another form than here: moments in 8 bits are two tensors, codes and
the scales of their blocks (`optimizer.moments`); split masters are two halves (`optimizer.masters`).

The rank that reads a stored pair makes wide numbers of it, so that nothing depends on how the tensors are cut here;
pairs of this rank are made of wide numbers once these are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from platform.boundary.storage import Storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, Piece, S, State, scale_box
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import list_stored_pieces
from platform.checkpoint.manifest import Manifest, Refused, StoredBlock, check_tensors
from platform.checkpoint.moves import Fetch, World, build_block_fetch, fill_blocks, read_tensor
from platform.optimizer.optimizers import LOW, SCALES, UNSIGNED
from platform.optimizer.stored_states import decode_numbers, encode_blocks
from platform.plan.model_types import SCALE_BLOCK
from platform.runtime.flat_buffers import join_halves, split_halves


def restore_states(
    storage: Storage, directory: str, manifest: Manifest, state: State, blocks: Sequence[Block], world: World, wide: str
) -> None:
    """Fill this rank's `blocks` of the training `state` from a checkpoint, as
    `platform.checkpoint.moves.restore_checkpoint` does, but for tensors that are kept there or here in another form.
    `wide`: element type of moments as numbers. Raises what that raises."""
    names = {h.name for h in state}
    decoded = {h.name: h for h in state if _is_pair(manifest, h.name) and _partner_of(h.name) not in names}
    encoded = {n for n in names if _partner_of(n) in names and not _is_pair(manifest, n)}
    left_out = {_partner_of(name) for name in encoded}
    kept = {h.name: h.shape for h in state if h.name not in left_out}
    check_tensors(manifest, kept | {_partner_of(name): _partner_shape(h) for name, h in decoded.items()})
    stored = list_stored_pieces(manifest, kept)
    pieces = [p._replace(dtype=_wide_type(p.name, wide)) if p.name in decoded else p for p in stored]
    fetch = build_block_fetch(storage, directory)
    if decoded:
        fetch = _build_decoding_fetch(storage, directory, manifest, decoded, fetch)
    fill_wide(pieces, fetch, state, blocks, world, encoded, wide)


def fill_wide(
    pieces: Sequence[Piece[S]],
    fetch: Fetch[S],
    state: State,
    blocks: Sequence[Block],
    world: World,
    encoded: Collection[str] | None = None,
    wide: str = "float32",
) -> None:
    """Fill this rank's `blocks` from stored pieces, as `platform.checkpoint.moves.fill_blocks` does, but the pairs
    `encoded` of the `state`, by default all, from pieces of `wide` numbers, in which their second tensors are absent.
    """
    names = {h.name for h in state}
    encoded = {name for name in names if _partner_of(name) in names} if encoded is None else encoded
    left_out = {_partner_of(name) for name in encoded}
    types = {name: _wide_type(name, wide) for name in encoded}
    kept = [replace(h, dtype=types.get(h.name, h.dtype)) for h in state if h.name not in left_out]
    wide_blocks = [
        b._replace(tensor=torch.zeros(b.box.extent, dtype=DTYPES[types[b.name]])) if b.name in types else b
        for b in blocks
        if b.name not in left_out
    ]
    fill_blocks(pieces, fetch, kept, wide_blocks, world)
    for name in {b.name for b in blocks} & types.keys():
        flat = torch.cat([b.tensor.reshape(-1) for b in wide_blocks if b.name == name])
        for part, numbers in zip((name, _partner_of(name)), _encode_pair(name, flat), strict=True):
            _fill_in_order([b.tensor for b in blocks if b.name == part], numbers)


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


def _wide_type(name: str, wide: str) -> str:
    """Return the element type of a pair's numbers: fp32 of masters, `wide` of moments."""
    return "float32" if name.startswith("model.") else wide


def _is_pair(manifest: Manifest, name: str) -> bool:
    """Return True if a checkpoint stores a tensor as a pair. Raises Refused for one without the other."""
    dtype = manifest.tensors[name].dtype if name in manifest.tensors else ""
    if dtype == "uint8" and _partner_of(name) not in manifest.tensors:
        raise Refused(f"has no {_partner_of(name)}")
    return dtype == "uint8" or (dtype == "bfloat16" and _partner_of(name) in manifest.tensors)


def _partner_shape(held: HeldTensor) -> tuple[int, ...]:
    """Return the shape of the second tensor of a pair: as many numbers as the first has, or one per block."""
    unit = 1 if held.name.startswith("model.") else SCALE_BLOCK
    return scale_box(Box.whole_tensor(held.shape), held.shape, unit).extent


def _build_decoding_fetch(
    storage: Storage, directory: str, manifest: Manifest, decoded: Mapping[str, HeldTensor], fetch: Fetch[StoredBlock]
) -> Fetch[StoredBlock]:
    """Return a function that reads stored blocks as `fetch` does, of the pairs `decoded` as wide numbers."""

    def fetch_numbers(pieces: Sequence[Piece[StoredBlock]], into: Sequence[Tensor]) -> None:
        """Read stored blocks of the checkpoint into the memory given for each."""
        raw = [p._replace(dtype=manifest.tensors[p.name].dtype) if p.name in decoded else p for p in pieces]
        pairs = list(zip(pieces, raw, into, strict=True))
        buffers = [memory if p is r else torch.empty(r.nbytes, dtype=torch.uint8) for p, r, memory in pairs]
        fetch(raw, buffers)
        for (piece, _, memory), first in zip(pairs, buffers, strict=True):
            if piece.name in decoded:
                numbers = decode_piece(piece, first)
                memory.copy_(numbers.view(torch.uint8))

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

    return fetch_numbers


def _flat_places(box: Box, shape: Sequence[int]) -> Tensor:
    """Return the place of each element of a block in the flattened tensor of this `shape`, int64 [*extent]."""
    places = torch.zeros(box.extent, dtype=torch.int64)
    for d, (start, size) in enumerate(zip(*box, strict=True)):
        stride = torch.Size(shape[d + 1 :]).numel()
        places += (torch.arange(start, start + size) * stride).view(-1, *[1] * (len(shape) - d - 1))
    return places


def _fill_in_order(targets: Sequence[Tensor], numbers: Tensor) -> None:
    """Copy flat numbers to the tensors that together hold them, in order."""
    for target, part in zip(targets, numbers.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))
