"""Frozen weights in 4 bits, as QLoRA keeps them (Dettmers et al. 2023): NF4, the values that parts of equal weight of a
normal distribution have in the middle.

A weight is flattened, and NF4_BYTES bytes are kept of each block of NF4_BLOCK elements in a row: its scale, the largest
absolute value, in fp32, and a code for each element, the number of the nearest of the 16 NORMAL_FLOATS once it is
divided by the scale, two in a byte, the first in its upper half. An element becomes this value times the scale, a
product in fp32, in the compute type. So the numbers are bitsandbytes' own. Blocks are of the global weight, and no rank
has a part of one (`Plan.cuts_blocks`): they are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from platform.plan.model_types import NF4_BLOCK, NF4_BYTES, NF4_PIECE
from platform.runtime.flat_buffers import FlatBucket

NORMAL_FLOATS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@lru_cache(maxsize=8)
def _build_value_pairs(device: torch.device) -> Tensor:
    """Return the two values, fp32 [256, 2], that each byte stands for."""
    values = torch.tensor(NORMAL_FLOATS, dtype=torch.float32, device=device)
    return torch.cartesian_prod(values, values)


def encode_weights(weights: Tensor) -> Tensor:
    """Return weights, whole blocks of them, in 4 bits: uint8 [blocks, NF4_BYTES]."""
    blocks = weights.detach().reshape(-1, NF4_BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True)
    values = _build_value_pairs(blocks.device)[:16, 1]
    # times the inverse, as bitsandbytes does; a block of zeros has none
    codes = torch.bucketize((blocks * scales.reciprocal()).nan_to_num_(), (values[1:] + values[:-1]) / 2)
    pairs = codes.to(torch.uint8).view(-1, NF4_BLOCK // 2, 2)
    return torch.cat((scales.view(torch.uint8), pairs[..., 0] * 16 + pairs[..., 1]), 1)


def make_numbers(codes: Tensor, scales: Tensor, pairs: Tensor, into: Tensor) -> Tensor:
    """Write values of `codes`, by the `pairs` of a byte, times `scales` [blocks, 1] to `into` [blocks, NF4_BLOCK]."""
    return torch.mul(torch.embedding(pairs, codes.int()).view(into.shape), scales, out=into)


def decode_weights(stored: Tensor, into: Tensor, make: Callable[..., Tensor] = make_numbers) -> Tensor:
    """Write weights `stored` in 4 bits, uint8 [blocks, NF4_BYTES], to the flat tensor `into`; return it."""
    pairs = _build_value_pairs(stored.device)
    piece = NF4_PIECE.get(stored.device.type, NF4_PIECE["cuda"]) // NF4_BLOCK
    for blocks, numbers in zip(stored.split(piece), into.view(-1, NF4_BLOCK).split(piece), strict=True):
        make(blocks[:, 4:], blocks[:, :4].contiguous().view(torch.float32), pairs, numbers)
    return into


def round_to_normal_floats(weights: Tensor) -> Tensor:
    """Return what weights, whole blocks of them, are once they have been kept in 4 bits, in their type and shape."""
    return decode_weights(encode_weights(weights), torch.empty_like(weights).view(-1)).view(weights.shape)


class QuantisedBucket(FlatBucket):
    """Bucket of frozen parameters that a rank keeps in 4 bits: `masters` is its shard, or all, uint8 [blocks,
    NF4_BYTES], of which `master` has views. `gather_parameters` gathers the ranks' shards, if these divide it (ZeRO-3),
    and makes numbers of them, which are there up to `release_parameters`. `compile_function`, if set, gives what
    does so compiled by torch, if this rank compiles."""

    compile_function: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    _arriving: Tensor | None = None  # the ranks' shards, under way or there: [shards, blocks, NF4_BYTES]

    def _allocate_masters(self, elements: int) -> Tensor:
        """Return the memory of so many elements in 4 bits, whole blocks of them."""
        return self._allocate_flat(elements // NF4_BLOCK * NF4_BYTES, torch.uint8).view(-1, NF4_BYTES)

    def _master_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return parameter name -> view of its blocks in `flat`, laid out as `masters`."""
        if not self.here:
            return {name: flat.new_empty(0) for name in self._shapes}
        before, views = self._index * self.bucket.shard_elements, {}
        for name, (start, _) in self.bucket.parameter_ranges.items():
            first, last = (start + at for at in self.bucket.range_in_shard(name, self._index))
            places = (first - before) // NF4_BLOCK, (last - before) // NF4_BLOCK
            views[name] = flat[slice(*places)] if first < last else flat.new_empty(0)
        return views

    @torch.no_grad()
    def fill_parameter(self, name: str, block: Tensor) -> None:
        """Keep a parameter in 4 bits, whose initial values in this rank's block are the tensor `block`."""
        self.store_weights(name, self.cut_own_master_part(name, block))

    @torch.no_grad()
    def store_weights(self, name: str, weights: Tensor) -> None:
        """Keep in 4 bits what of a parameter lies in this rank's shard: its `weights` there."""
        if weights.numel():
            self.master[name].copy_(encode_weights(weights))

    def gather_fresh_copies(self) -> Mapping[str, Tensor]:
        """Return no copies: none stays to be checked."""
        return {}

    def prefetch_parameters(self) -> None:
        """Start the all-gather of this bucket's shards in 4 bits, if ranks divide it, unless it is under way."""
        if not self.resident and self._arriving is None and self.here and self.bucket.sharded:
            self._arriving = self.masters.new_empty(self.bucket.shards, *self.masters.shape)
            self._gathering = self._launch_gather(self._arriving)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Wait for the all-gather of this bucket's shards, starting it if need be, and make numbers of them."""
        if self.resident:
            return
        self.prefetch_parameters()
        if self._gathering:
            self._gathering.wait()
        stored = self.masters if self._arriving is None else self._arriving.view(-1, NF4_BYTES)
        self._take_memory()
        make = self.compile_function(make_numbers) if self.compile_function else make_numbers
        decode_weights(stored, self._written.view(-1), make)
        self._gathering, self._arriving, self.resident = None, None, True
