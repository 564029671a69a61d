"""Frozen weights in 4 bits, as QLoRA keeps them (Dettmers et al. 2023): NF4, the values that parts of equal weight of a
normal distribution have in the middle.

A weight is flattened, and NF4_BYTES bytes are kept of each block of NF4_BLOCK elements in a row: its scale, the largest
absolute value, in fp32, and a code for each element, the number of the nearest of the 16 NORMAL_FLOATS once it is
divided by the scale, two in a byte, the first in its upper half. An element becomes this value times the scale, a
product in fp32, in the compute type. So the numbers are bitsandbytes' own. Blocks are of the global weight, and no rank
has a part of one (`Plan.cuts_blocks`): they are the same under every plan.

Double quantisation (there, section 3) keeps NF4_DOUBLE elements together: scales of 256 blocks less the mean of all of
the weight, in 8 bits, the nearest of SCALE_VALUES once they are divided by the largest; this; and the mean, both fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from platform.plan.model_types import NF4_BLOCK, NF4_DOUBLE, NF4_PIECE, NF4_UNITS
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


@lru_cache(maxsize=8)
def _build_scale_values(device: torch.device) -> Tensor:
    """Return the values, fp32 [256], that a byte stands for: a dynamic tree (Dettmers et al. 2022, section 2.3)."""
    ends = [torch.linspace(0.1, 1, 2**bits + 1, device="cpu") for bits in range(7)]
    values = torch.cat([10 ** (bits - 6) * ((x[:-1] + x[1:]) / 2) for bits, x in enumerate(ends)])
    return torch.cat((-values, torch.arange(2.0, device="cpu"), values)).sort().values.to(device)


_WHOLE = 2.0**149  # times an fp32 number: no fraction


def sum_scales(weights: Tensor) -> int:
    """Return the sum of the scales of weights, whole blocks of them, exactly: times 2^149; 0 if they are no numbers."""
    blocks = weights.detach().reshape(-1, NF4_BLOCK).float()
    sums = blocks.abs().amax(1).double().view(-1, min(len(blocks), NF4_DOUBLE // NF4_BLOCK) or 1).sum(1)
    return sum(int(x * _WHOLE) for x in sums.tolist() if math.isfinite(x))


def average_scales(sums: Iterable[int], elements: int) -> float:
    """Return the mean, in fp32, of the scales of so many elements, of which parts have the `sums` (`sum_scales`)."""
    mean = sum(sums) / (max(1, elements // NF4_BLOCK) << 149)
    return float(np.float32(mean))


def _encode_scales(scales: Tensor, offset: float) -> Tensor:
    """Return scales of blocks, fp32, in 8 bits: uint8 [NF4_DOUBLE elements, 8 + 256]."""
    apart = scales.view(-1, NF4_DOUBLE // NF4_BLOCK) - offset
    largest, values = apart.abs().amax(1, keepdim=True), _build_scale_values(apart.device)
    codes = torch.bucketize((apart * largest.reciprocal()).nan_to_num_(), (values[1:] + values[:-1]) / 2)
    wide = torch.cat((largest, torch.full_like(largest, offset)), 1)
    return torch.cat((wide.view(torch.uint8), codes.to(torch.uint8)), 1)


def _decode_scales(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks, fp32 [blocks, 1], and the codes of weights `stored` in 4 bits."""
    if stored.shape[1] != NF4_UNITS[NF4_DOUBLE]:
        return stored[:, :4].contiguous().view(torch.float32), stored[:, 4:]
    wide, last = stored[:, :8].contiguous().view(torch.float32), 8 + NF4_DOUBLE // NF4_BLOCK
    values = _build_scale_values(stored.device)[stored[:, 8:last].int()]
    return (values * wide[:, :1] + wide[:, 1:]).view(-1, 1), stored[:, last:]


def encode_weights(weights: Tensor, unit: int = NF4_BLOCK, offset: float = 0.0) -> Tensor:
    """Return weights in 4 bits, whole units of NF4_UNITS: uint8 [units, bytes]; `offset`: the mean of all scales."""
    blocks = weights.detach().reshape(-1, NF4_BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True)
    values = _build_value_pairs(blocks.device)[:16, 1]
    # times the inverse, as bitsandbytes does; a block of zeros has none
    codes = torch.bucketize((blocks * scales.reciprocal()).nan_to_num_(), (values[1:] + values[:-1]) / 2)
    pairs = codes.to(torch.uint8).view(-1, NF4_BLOCK // 2, 2)
    stored = scales.view(torch.uint8) if unit == NF4_BLOCK else _encode_scales(scales, offset)
    return torch.cat((stored, (pairs[..., 0] * 16 + pairs[..., 1]).view(-1, unit // 2)), 1)


def make_numbers(codes: Tensor, scales: Tensor, pairs: Tensor, into: Tensor) -> Tensor:
    """Write values of `codes`, by the `pairs` of a byte, times `scales` [blocks, 1] to `into` [blocks, NF4_BLOCK]."""
    return torch.mul(torch.embedding(pairs, codes.int()).view(into.shape), scales, out=into)


def decode_weights(stored: Tensor, into: Tensor, make: Callable[..., Tensor] = make_numbers) -> Tensor:
    """Write weights `stored` in 4 bits, uint8 [units, bytes], to the flat tensor `into`; return it."""
    pairs, unit = _build_value_pairs(stored.device), NF4_BLOCK if stored.shape[1] < NF4_DOUBLE // 2 else NF4_DOUBLE
    piece = NF4_PIECE.get(stored.device.type, NF4_PIECE["cuda"])
    blocks = into.view(-1, NF4_BLOCK).split(piece // NF4_BLOCK)
    for units, numbers in zip(stored.split(max(1, piece // unit)), blocks, strict=True):
        scales, codes = _decode_scales(units)
        make(codes, scales, pairs, numbers)
    return into


def round_to_normal_floats(weights: Tensor, unit: int = NF4_BLOCK) -> Tensor:
    """Return what weights, a parameter or, with plain scales, blocks of one, become once they are kept in 4 bits."""
    offset = average_scales([sum_scales(weights)], weights.numel()) if unit == NF4_DOUBLE else 0.0
    stored = encode_weights(weights, unit, offset)
    return decode_weights(stored, torch.empty_like(weights).view(-1)).view(weights.shape)


class QuantisedBucket(FlatBucket):
    """Bucket of frozen parameters that a rank keeps in 4 bits: `masters` is its shard, or all, uint8 [units, bytes] by
    NF4_UNITS, of which `master` has views; `offsets`: the mean of a parameter's scales, to store it by.
    `gather_parameters` gathers the ranks' shards, if these divide it (ZeRO-3), and makes numbers of them, which are
    there up to `release_parameters`. `compile_function`, if set, gives what does so compiled by torch, if this rank
    compiles."""

    compile_function: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    _arriving: Tensor | None = None  # the ranks' shards, under way or there: [shards, units, bytes]

    @cached_property
    def offsets(self) -> dict[str, float]:
        """Return parameter name -> mean of all its scales, of parameters to be stored."""
        return {}

    def _allocate_masters(self, elements: int) -> Tensor:
        """Return the memory of so many elements in 4 bits, whole units of them."""
        nbytes = NF4_UNITS[self.bucket.quantised]
        return self._allocate_flat(elements // self.bucket.quantised * nbytes, torch.uint8).view(-1, nbytes)

    def _master_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return parameter name -> view of its blocks in `flat`, laid out as `masters`."""
        if not self.here:
            return {name: flat.new_empty(0) for name in self._shapes}
        before, views = self._index * self.bucket.shard_elements, {}
        for name, (start, _) in self.bucket.parameter_ranges.items():
            first, last = (start + at for at in self.bucket.range_in_shard(name, self._index))
            places = ((at - before) // self.bucket.quantised for at in (first, last))
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
            self.master[name].copy_(encode_weights(weights, self.bucket.quantised, self.offsets.get(name, 0.0)))

    def gather_fresh_copies(self) -> Mapping[str, Tensor]:
        """Return no copies: none stays to be checked."""
        return {}

    def prefetch_parameters(self, as_they_are: bool = False) -> None:
        """Start the all-gather of this bucket's shards in 4 bits, if ranks divide it, unless it is under way."""
        if not self.resident and self._arriving is None and self.here and self.bucket.sharded:
            self._arriving = self.masters.new_empty(self.bucket.shards, *self.masters.shape)
            self._gathering = self._launch_gather(self._arriving)

    @torch.no_grad()
    def gather_parameters(self, as_they_are: bool = False) -> None:
        """Wait for the all-gather of this bucket's shards, starting it if need be, and make numbers of them."""
        if self.resident:
            return
        self.prefetch_parameters()
        if self._gathering:
            self._gathering.wait()
        stored = self.masters if self._arriving is None else self._arriving.flatten(0, 1)
        self._take_memory()
        make = self.compile_function(make_numbers) if self.compile_function else make_numbers
        decode_weights(stored, self._written.view(-1), make)
        self._gathering, self._arriving, self.resident = None, None, True
