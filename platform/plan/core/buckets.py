"""Buckets: parameters whose blocks lie one after another in one flat buffer, to be gathered, reduced and updated
together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from platform.plan.language.layout import padded
from platform.plan.language.ops import Parameter

_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.)|[^.]*")  # a parameter's name up to the layer's number, else its first word
SQUARED_AT_ONCE = 1 << 16  # elements of a reduced bucket that a CPU squares at once in fp64: what fits its cache
# Elements of which shards of at least that many times as many are multiples, so that each begins where the kernels of
# NCCL and of fused updates read it by whole vectors, whatever number of ranks divides the buffer.
SHARD_UNIT = 128
# kind of device -> a product of matrices in 16 bits is added to a sum in fp32 as it is computed (torch has such kernels
# for CUDA alone); else it is rounded to 16 bits first, and added in another pass over both
ADDS_WIDE = {"cpu": False, "cuda": True}
BUCKET_MIB = 25  # size of buckets where nothing is known of the links: the size of torch's DDP


@dataclass(frozen=True)
class Bucket:
    """Parameters whose local blocks lie one after another in one flat buffer on every rank that has them.

    Their gradients are summed over the mesh axes `axes`, by the ranks at index 0 of the axes `only`; the ranks along
    `sharded`, some of these axes, divide the buffer into `shards` equal ones at stage `zero` of ZeRO (0: one shard).
    `sizes`: elements of each block; `elements`: size of the buffer in elements, with zeros at its end so that shards
    are equal, large ones in multiples of SHARD_UNIT. `held`: elements that a rank has of each block, if it has less and
    zeros behind them.
    """

    axes: tuple[str, ...]
    only: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    sizes: tuple[int, ...]
    elements: int
    sharded: tuple[str, ...] = ()
    shards: int = 1
    zero: int = 0
    held: tuple[int, ...] = ()

    @cached_property
    def name(self) -> str:
        """Return the bucket's display name: the layers of its parameters, such as `layers.0 ... layers.3`."""
        return common_name([p.name for p in self.parameters])

    @cached_property
    def alike(self) -> tuple:
        """Return what of the bucket's parameters decides which blocks of them a rank has."""
        return tuple((p.dims, p.role, p.sizes) for p in self.parameters)

    @property
    def stored(self) -> bool:
        """Return True if ranks keep a shard of this bucket's compute copies, and gather them span by span (ZeRO-3)."""
        return self.zero == 3

    @property
    def shard_elements(self) -> int:
        """Return the elements of one of this bucket's equal shards."""
        return self.elements // self.shards

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """Map the name of each parameter of this bucket to (start, stop) of its block in the flat buffer."""
        begins = accumulate(self.sizes, initial=0)
        triples = zip(self.parameters, begins, self.held or self.sizes, strict=False)
        return {p.name: (begin, begin + size) for p, begin, size in triples}

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Return the stretches (start, stop) of the flat buffer in which no parameter's block lies."""
        ends = [0, *(stop for _, stop in self.ranges.values())]
        begins = [*(start for start, _ in self.ranges.values()), self.elements]
        return [(start, stop) for start, stop in zip(ends, begins, strict=True) if start < stop]

    def stretch(self, names: Sequence[str]) -> tuple[int, int] | None:
        """Return (start, stop) in the flat buffer of the blocks of `names`; None if not adjacent in this order."""
        found = [self.ranges.get(name, (-1, -1)) for name in names]
        adjacent = all(stop == start for (_, stop), (start, _) in pairwise(found))
        return (found[0][0], found[-1][1]) if adjacent and found[0][0] >= 0 else None

    def shard(self, name: str, index: int) -> tuple[int, int]:
        """Return (start, stop) within the flattened block of the parameter `name` of its elements in this bucket's
        shard number `index`; equal numbers if there is none."""
        start, stop = self.ranges[name]
        first, last = (min(max(self.shard_elements * i, start), stop) - start for i in (index, index + 1))
        return first, last


def layer_of(name: str) -> str:
    """Return the layer (`layers.3`), or the part of the model outside of layers (`embedding`), that the parameter
    `name` belongs to."""
    return _LAYER.match(name).group()  # type: ignore[union-attr]


def common_name(names: Iterable[str]) -> str:
    """Return one short name for parameters of the given `names`: the layers (`layers.3`), or parts of the model outside
    of layers (`embedding`), that they belong to; of more than two, the first and the last."""
    parts = list(dict.fromkeys(map(layer_of, names)))
    return ", ".join(parts) if len(parts) <= 2 else f"{parts[0]} ... {parts[-1]}"


Uses = Iterable[tuple[tuple[int, int], str]]  # ((chunk, span), name of a parameter), in the order of the forward pass


def spans_of(uses: Uses, tied: Iterable[str]) -> list[tuple[int | str, tuple[str, ...]]]:
    """Group the names of parameters by the span of the model that uses them, in order of first use, each group with
    its chunk; a parameter that several spans use, or that is `tied`, is a group of its own, with its name."""
    spans: dict[str, dict[tuple[int, int], None]] = {}
    for span, name in uses:
        spans.setdefault(name, {})[span] = None
    alone = {*tied, *(name for name, found in spans.items() if len(found) > 1)}
    groups: dict[str | tuple[int, int], list[str]] = {}
    for name, found in spans.items():
        groups.setdefault(name if name in alone else next(iter(found)), []).append(name)
    return [(key if isinstance(key, str) else key[0], tuple(names)) for key, names in groups.items()]


def moves(spans: Sequence[Sequence[Bucket]], kept: bool) -> tuple[list[Bucket], list[Bucket]]:
    """Return the parameter buckets that ZeRO-3 gathers in a model chunk's forward pass, and in its backward pass: each
    on entering a span of layers, unless the span before has it gathered. `spans`: the buckets that each span gathers;
    `kept`: True if the buckets of the last span stay gathered from the forward to the backward pass."""
    forward = [b for before, here in pairwise([(), *spans]) for b in here if b not in before]
    turn = spans[-1] if kept else ()
    backward = [b for before, here in pairwise([turn, *reversed(spans)]) for b in here if b not in before]
    return forward, backward


def make_buckets(
    groups: Iterable[tuple[int | str, Sequence[Parameter]]],
    reductions: Mapping[Parameter, tuple[tuple[str, ...], tuple[str, ...]]],
    sizes: Mapping[Parameter, int],
    shards: Mapping[str, int],
    zero: int,
    most: int,
) -> list[Bucket]:
    """Put groups of parameters, which come in the order of the forward pass, into flat buckets.

    `groups`: (key, parameters); neighbours with one key are put together while they have at most `most` elements.
    `reductions`: (`axes`, `only`) as in Bucket; parameters of different ones go to different buckets. `sizes`: elements
    of the local blocks; `shards`: ranks along each axis over which stage `zero` of ZeRO shards.
    """
    out: list[Bucket] = []
    open_: dict[tuple, list[Parameter]] = {}  # (axes, only) -> parameters of the bucket being filled
    before: int | str | None = None

    def close() -> None:
        """Make the buckets of the parameters collected so far, one for each way of reducing their gradients."""
        for (axes, only), found in open_.items():
            each = tuple(sizes[p] for p in found)
            sharded = tuple(axis for axis in axes if axis in shards)
            ranks = prod(shards[axis] for axis in sharded)
            large = ranks > 1 and sum(each) >= SHARD_UNIT * SHARD_UNIT * ranks
            size = padded(sum(each), ranks * (SHARD_UNIT if large else 1))
            out.append(Bucket(axes, only, tuple(found), each, size, sharded, ranks, zero if sharded else 0))
        open_.clear()

    for key, parameters in groups:
        held = sum(sizes[p] for found in open_.values() for p in found)
        if open_ and (key != before or held + sum(sizes[p] for p in parameters) > most):
            close()
        before = key
        for p in parameters:
            open_.setdefault(reductions[p], []).append(p)
    close()
    return out
