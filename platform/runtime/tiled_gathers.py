"""Gathers of weights in 8 bits (ZeRO-3): a byte for each number, of shards that may end anywhere in a tile.

After each update the ranks that share a bucket take the largest number of each tile together. So every rank knows the
scales of all tiles, and makes of the bytes that arrive the numbers to which products in 8 bits would round whole
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.quantisation import WeightTiles
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle
from platform.runtime.eight_bits import FORMS, choose_factors, find_tile_maxima, round_tiles
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.statistics import widen_dtype

DTYPE = FORMS["e4m3"]  # of weights


class _OwnRows(NamedTuple):
    """Rows of a weight in 8 bits, in its `tiles`, of which a shard has elements: `length`, which begin at `place` of
    it, `before` many behind the begin of a row. `tile_rows`: the row of tiles that each row is in, counted over all
    matrices of the weight, which is number `weight` of its bucket."""

    weight: int
    tiles: WeightTiles
    length: int
    place: int
    before: int
    tile_rows: Tensor

    def pad_to_rows(self, shard: Tensor) -> Tensor:
        """Return these rows of a flat `shard`, with zeros for what lies in others, to be scaled to 8 bits."""
        own, columns = shard.narrow(0, self.place, self.length), self.tiles.columns
        end = -(self.before + self.length) % columns
        return (F.pad(own, (self.before, end)) if self.before or end else own).view(-1, columns)


def _number_tile_rows(tiles: WeightTiles, first: int, last: int, device: torch.device) -> Tensor:
    """Return the row of tiles in 8 bits that each row of a weight's matrices from `first` to `last` is in."""
    rows = torch.arange(first, last + 1, device=device)
    matrices = rows.div(tiles.rows, rounding_mode="floor")
    return matrices * tiles.shape[1] + (rows % tiles.rows).div(tiles.block, rounding_mode="floor")


def scale_values(values: Tensor, scales: Tensor, into: Tensor) -> Tensor:
    """Write values in 8 bits times their scales to `into`."""
    return into.copy_(values).mul_(scales)


class TiledBucket(FlatBucket):
    """Bucket of weights whose shards are gathered in 8 bits, but for passes that read them as they are.
    `compile_function` as in `QuantisedBucket`."""

    compile_function: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None
    _maxima: CollectiveHandle | ArrivedCollective | None = None  # of all tiles, under way
    _factors: Tensor  # by which the numbers of all tiles are multiplied, flat
    _sent: Tensor | None = None  # this rank's shard in 8 bits, under way
    _arriving: Tensor | None = None  # the ranks' shards in 8 bits, under way or there: [shards, elements of a shard]

    @torch.no_grad()
    def refresh_compute_copies(self) -> None:
        """Update this rank's shard from the master copies, and start taking the maxima of all tiles."""
        super().refresh_compute_copies()
        self.start_maxima()

    @torch.no_grad()
    def start_maxima(self) -> None:
        """Start taking the largest number of each tile in 8 bits over the ranks that have parts of this bucket."""
        if not self.here:
            return
        maxima = widen_dtype(self.part.new_zeros(self.bucket.tile_count))
        of_weights = self._split_tiles(maxima)
        for own in self._own_rows:
            largest = find_tile_maxima(own.pad_to_rows(self.part), (1, own.tiles.block))
            places = own.tile_rows.unsqueeze(1).expand(largest.shape)
            of_weights[own.weight].flatten(0, 1).scatter_reduce_(0, places, largest, "amax")
        axes, name = self.bucket.sharded, f"maxima of {self.bucket.name}"
        self._maxima = self._communicator.launch("all_reduce", maxima, axes, reduce="max", owned=True, name=name)

    @torch.no_grad()
    def prefetch_parameters(self, as_they_are: bool = False) -> None:
        """Start the all-gather of this bucket's shards in 8 bits, unless it is under way; `as_they_are`: not so."""
        if as_they_are or not self.here:
            super().prefetch_parameters()
        elif not (self.resident or self._gathering):
            self._sent = self._round_shard()
            self._arriving = self._sent.new_empty(self.bucket.shards, len(self._sent))
            name = f"gather {self.bucket.name}"
            self._gathering = self._communicator.launch(
                "all_gather", self._sent, self.bucket.sharded, into=self._arriving, name=name
            )

    @torch.no_grad()
    def gather_parameters(self, as_they_are: bool = False) -> None:
        """Wait for the all-gather of this bucket's shards, starting it if need be, and make numbers of 8 bits."""
        self.prefetch_parameters(as_they_are)
        if (arriving := self._arriving) is None:
            return super().gather_parameters(as_they_are)
        assert self._gathering
        self._gathering.wait()
        self._take_memory()
        self._decode(arriving.view(-1).view(DTYPE))
        self._gathering, self._sent, self._arriving, self.resident = None, None, None, True
        return None

    def _round_shard(self) -> Tensor:
        """Return this rank's shard in 8 bits, as uint8, scaled by the maxima of all ranks."""
        codes, factors = self.part.new_zeros(len(self.part), dtype=torch.uint8), self._split_tiles(self._wait_factors())
        for own in self._own_rows:
            of_rows = factors[own.weight].flatten(0, 1)[own.tile_rows]
            values = round_tiles(own.pad_to_rows(self.part), (1, own.tiles.block), of_rows, DTYPE)
            bytes_of_rows = values.view(torch.uint8).reshape(-1)
            codes[own.place : own.place + own.length] = bytes_of_rows[own.before : own.before + own.length]
        return codes

    def _decode(self, values: Tensor) -> None:
        """Write the numbers that `values` of the whole bucket in 8 bits stand for to the compute copies."""
        written, scales_of_weights = self._written.view(-1), self._split_tiles(1 / self._wait_factors())
        ranges = self.bucket.parameter_ranges.values()
        make = self.compile_function(scale_values) if self.compile_function else scale_values
        for (start, stop), tiles, scales in zip(ranges, self.bucket.tiles, scales_of_weights, strict=True):
            block, whole = tiles.block, tiles.rows // tiles.block
            wide = scales.repeat_interleave(block, 2)[..., : tiles.columns]
            pair = [x[start:stop].view(tiles.matrices, tiles.rows, tiles.columns) for x in (values, written)]
            if whole:
                numbers, into = (x[:, : whole * block].unflatten(1, (whole, block)) for x in pair)
                make(numbers, wide[:, :whole].unsqueeze(2), into)
            if tiles.rows % block:
                numbers, into = (x[:, whole * block :] for x in pair)
                make(numbers, wide[:, whole:], into)

    @cached_property
    def _own_rows(self) -> list[_OwnRows]:
        """Return the rows of the weights in 8 bits of which this rank's shard has elements."""
        own, first = list[_OwnRows](), self._index * self.bucket.shard_elements
        for number, (name, (begin, _)) in enumerate(self.bucket.parameter_ranges.items()):
            tiles, (start, stop) = self.bucket.tiles[number], self.bucket.range_in_shard(name, self._index)
            if start < stop:
                ends = start // tiles.columns, (stop - 1) // tiles.columns
                tile_rows = _number_tile_rows(tiles, *ends, self.part.device)
                place, before = begin + start - first, start % tiles.columns
                own.append(_OwnRows(number, tiles, stop - start, place, before, tile_rows))
        return own

    def _wait_factors(self) -> Tensor:
        """Return what the numbers of all tiles in 8 bits are multiplied by, flat, once their maxima are there."""
        if self._maxima:
            self._factors = choose_factors(self._maxima.wait(), torch.finfo(DTYPE).max, True)
            self._maxima = None
        return self._factors

    def _split_tiles(self, numbers: Tensor) -> list[Tensor]:
        """Return views by weight [matrices, along rows, along columns] of numbers of all tiles in 8 bits, flat."""
        shapes = [tiles.shape for tiles in self.bucket.tiles]
        return [x.view(shape) for x, shape in zip(numbers.split([*map(prod, shapes)]), shapes, strict=True)]
