"""Restoring a checkpoint whose states lie there in another form than here: moments in 8 bits are two tensors, codes and
the scales of their blocks (`optimizer.moments`).

The rank that reads a stored pair makes wide numbers of it, so that nothing depends on how the tensors are cut here;
pairs of this rank are made of wide numbers once these are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from platform.boundary.storage import Storage
from platform.checkpoint.blocks import Block, Box, HeldTensor, Piece, State, scale_box
from platform.checkpoint.buffer import DTYPES
from platform.checkpoint.catalogue import list_stored_pieces
from platform.checkpoint.manifest import Manifest, Refused, StoredBlock, check_tensors
from platform.checkpoint.moves import Fetch, World, build_block_fetch, fill_blocks, read_tensor
from platform.optimizer.optimizers import SCALES, UNSIGNED
from platform.optimizer.stored_states import decode_numbers, encode_blocks
from platform.plan.model_types import SCALE_BLOCK


def restore_states(
    storage: Storage, directory: str, manifest: Manifest, state: State, blocks: Sequence[Block], world: World, wide: str
) -> None:
    """Fill this rank's `blocks` of the training `state` from a checkpoint, as
    `platform.checkpoint.moves.restore_checkpoint` does, but for tensors that are kept there or here in another form.
    `wide`: element type of what a pair stands for. Raises what that raises."""
    names = {h.name for h in state}
    decoded = {h.name: h for h in state if _is_pair(manifest, h.name) and _partner_of(h.name) not in names}
    encoded = {n for n in names if _partner_of(n) in names and not _is_pair(manifest, n)}
    left_out = {_partner_of(name) for name in encoded}
    kept = [replace(h, dtype=wide) if h.name in encoded else h for h in state if h.name not in left_out]
    of_scales = {_partner_of(name): _scales_shape(h) for name, h in decoded.items()}
    check_tensors(manifest, {h.name: h.shape for h in kept} | of_scales)
    wide_blocks = [
        b._replace(tensor=torch.zeros(b.box.extent, dtype=DTYPES[wide])) if b.name in encoded else b
        for b in blocks
        if b.name not in left_out
    ]
    stored = list_stored_pieces(manifest, [h.name for h in kept])
    pieces = [piece._replace(dtype=wide) if piece.name in decoded else piece for piece in stored]
    fetch = build_block_fetch(storage, directory)
    if decoded:
        fetch = _build_decoding_fetch(storage, directory, manifest, decoded, fetch)
    fill_blocks(pieces, fetch, kept, wide_blocks, world)
    for name in encoded & {b.name for b in blocks}:
        flat = torch.cat([b.tensor.reshape(-1) for b in wide_blocks if b.name == name])
        pair = encode_blocks(flat, name.partition(".")[0] not in UNSIGNED)
        for part, numbers in zip((name, _partner_of(name)), pair, strict=True):
            _fill_in_order([b.tensor for b in blocks if b.name == part], numbers)


def _partner_of(name: str) -> str:
    """Return the name of the other tensor, if it were a pair, of which a stored moment's codes are the first."""
    kind, _, parameter = name.partition(".")
    return f"{kind}{SCALES}.{parameter}"


def _is_pair(manifest: Manifest, name: str) -> bool:
    """Return True if a checkpoint stores a tensor as a pair. Raises Refused for one without the other."""
    is_coded = name in manifest.tensors and manifest.tensors[name].dtype == "uint8"
    if is_coded and _partner_of(name) not in manifest.tensors:
        raise Refused(f"has no {_partner_of(name)}")
    return is_coded


def _scales_shape(held: HeldTensor) -> tuple[int, ...]:
    """Return the shape of the scales of a moment that is stored in 8 bits."""
    return scale_box(Box.whole_tensor(held.shape), held.shape, SCALE_BLOCK).extent


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
        scales: dict[str, Tensor] = {}
        for (piece, _, memory), codes in zip(pairs, buffers, strict=True):
            if piece.name in decoded:
                partner = _partner_of(piece.name)
                if partner not in scales:
                    scales = {partner: read_tensor(storage, directory, manifest, partner).view(-1)}
                places = _flat_places(piece.box, decoded[piece.name].shape) // SCALE_BLOCK
                signed = piece.name.partition(".")[0] not in UNSIGNED
                numbers = decode_numbers(codes, scales[partner][places.view(-1)], signed, DTYPES[piece.dtype])
                memory.copy_(numbers.view(torch.uint8))

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
