"""Seconds of single operations on a hardware: a matrix product by its shape, kernels by their bytes, a collective by
the tier that its group spans; and the buckets of gradients that cost the fewest of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from platform.costs.machine import Hardware
from platform.costs.work import Part, Product
from platform.plan.communication.planned import Collective
from platform.plan.communication.traffic import EVER
from platform.plan.core.buckets import BUCKET_MIB
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import bucket_collectives
from platform.plan.language.mesh import Mesh

Number = Any  # a number, or an array of numbers
Flag = Any  # True or False, or an array of them

MIB = 1 << 20
WHOLE = 1 << 30  # MiB: a stage's gradients in as few buckets as there can be

# Tiles in which libraries compute products, rows by columns in units of the hardware's `tile`, and the share that each
# reaches of the speed of the largest: a smaller one reads more of its operands per product. A product takes the best of
# them, either way around.
TILES = ((1, 1 / 2, 1.0), (1 / 2, 1 / 2, 0.95), (1 / 2, 1 / 4, 0.85), (1 / 4, 1 / 4, 0.7))


@lru_cache(maxsize=1 << 16)
def tiling(rows: int, columns: int, batch: int, processors: int, tile: float = Hardware.tile) -> float:
    """Return the share of the processors' time that goes into elements of a product's result."""
    # tiles at the edges reach beyond it, fewer tiles than processors leave some idle; a last wave is divided further
    best = 0.0
    for tall, wide, share in TILES:
        for height, width in {(tall * tile, wide * tile), (wide * tile, tall * tile)}:
            tiles = ceil(rows / height) * ceil(columns / width) * batch
            best = max(best, share * rows * columns * batch / (max(tiles, processors) * height * width))
    return best


def product_seconds(p: Product, hardware: Hardware, precision: str, itemsize: int) -> float:
    """Return the seconds of a matrix product: of its tiles and the depth of its sums, and of its bytes beside them."""
    if not p.flops:
        return 0.0
    share = tiling(p.rows, p.columns, p.batch, hardware.processors, hardware.tile) * p.inner / (p.inner + hardware.fill)
    computing = p.flops / (hardware.peak(precision) * hardware.reached.products * share)
    return float(with_hidden(computing, bytes_seconds(p.elements * itemsize, hardware), hardware))


def cast_seconds(p: Product, hardware: Hardware) -> float:
    """Return the seconds in which the first operand of a product is written in 8 bits too, by the kernel that makes it.
    Weights are cast once a step, which is not counted."""
    return float(bytes_seconds(p.batch * p.rows * p.inner, hardware))


def with_hidden(computing: Number, other: Number, hardware: Hardware) -> Number:
    """Return the seconds of computing and of something `other`, which is hidden where anything is done beside it."""
    return np.maximum(computing, other) if hardware.ahead else computing + other


def bytes_seconds(count: Number, hardware: Hardware) -> Number:
    """Return the seconds in which kernels read and write so many bytes of memory."""
    return count / (hardware.bandwidth * hardware.reached.memory)


def computing_seconds(part: Part, hardware: Hardware, precision: str, itemsize: int, narrow: str = "") -> float:
    """Return the seconds for which a part of a pass keeps the device busy, without its collectives. `narrow`: the
    precision of 8 bits in which products of layers' weights are computed, if it is another than the plan's."""
    products = 0.0
    for p in part.products:
        if narrow and p.narrows:
            products += product_seconds(p, hardware, narrow, 1) + cast_seconds(p, hardware)
        else:
            products += product_seconds(p, hardware, precision, itemsize)
    fused = part.fused / (hardware.peak(precision) * hardware.reached.attention)
    return products + fused + bytes_seconds(part.bytes, hardware)


def seated_together(mesh: Mesh, axes: Sequence[str], ranks: int) -> tuple[int, int]:
    """Return how many ranks of a group along `axes` share its first one's node, of so many `ranks`, and its size."""
    group = mesh.group(0, tuple(axes))
    return sum(rank < ranks for rank in group), len(group)


def collective_seconds(c: Collective, mesh: Mesh, hardware: Hardware, itemsize: Mapping[str, int]) -> float:
    """Return the seconds of one launch of a collective. Ranks of a node share the links that join it to others, as all
    of its groups along the same axes are under way at once."""
    axes = mesh.ordered(c.axes)
    if not axes:
        return 0.0
    size = c.elements * {**EVER, **itemsize}[c.dtype]
    if c.op == "send":
        return sent_seconds(size, mesh, hardware)
    here, n = seated_together(mesh, axes, hardware.ranks)
    return float(group_seconds(c.op, size, n, here, hardware))


def sent_seconds(size: float, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds in which a stage sends so many bytes to the next."""
    here, _ = seated_together(mesh, ("stage",), hardware.ranks)
    return float(message_seconds(size, here > 1, hardware))


def message_seconds(size: Number, inside: Flag, hardware: Hardware) -> Number:
    """Return the seconds of a message of `size` bytes `inside` a node, or between nodes: of one, or of many."""
    node, network, reached = hardware.node.for_kind("send"), hardware.network.for_kind("send"), hardware.reached
    near = node.latency + size / (node.bandwidth * reached.node)
    return np.where(inside, near, network.latency + size / (network.bandwidth * reached.network))


def group_seconds(op: str, size: Number, n: Number, here: Number, hardware: Hardware) -> Number:
    """Return the seconds of a collective of n ranks, `here` of which share a node, on an input of `size` bytes: of one
    group, or of many at once; 0 for groups of one rank."""
    node, network = hardware.node.for_kind(op), hardware.network.for_kind(op)
    inside, outside = node.bandwidth * hardware.reached.node, network.bandwidth * hardware.reached.network
    across, others = here < n, np.maximum(n - 1, 1)
    # a ring leaves each node once, over the adapters of all of the group's ranks there
    ring = np.where(across, np.minimum(inside, np.minimum(here, hardware.adapters) * outside), inside)
    nodes, far = np.ceil(n / here), network.hop / node.hop
    steps = np.where(across, nodes * (here - 1) + (nodes - 1) * far, n - 1)
    tree = np.log2(here) + np.where(across, np.log2(nodes) * far, 0.0)

    def around(turns: float, moved: Number) -> Number:
        """Return the seconds of `turns` times around the ring with `moved` bytes over each link, or down a tree."""
        by_ring = moved / ring + turns * steps * node.hop
        by_tree = 1.15 * moved / ring * n / others + 2 * turns * tree * node.hop
        return np.minimum(by_ring, by_tree)

    match op:
        case "all_reduce":
            found = around(2, 2 * (n - 1) / n * size)
        case "all_gather":
            found = around(1, (n - 1) * size)
        case "reduce_scatter":
            found = around(1, (n - 1) / n * size)
        case "all_to_all" | "all_to_allv":
            total = size * n / others if op == "all_to_allv" else size
            between = np.where(across, (n - here) / n * total / outside, 0.0)
            found = np.maximum((here - 1) / n * total / inside, between) + (n - 1) * node.hop
        case "rotate":
            found = size / np.where(across, outside, inside)
        case "scatter" | "gather":
            found = (n - 1) * size / ring
        case _:  # broadcast, reduce
            found = size / ring + tree * node.hop
    return np.where(n > 1, np.where(across, network.latency, node.latency) + found, 0.0)


def update_bytes(itemsize: Mapping[str, int], moments: int) -> int:
    """Return the bytes that an update reads and writes per element, with so many `moments` beside each master."""
    # gradients are read for their norm, then read and cleared; masters and moments read and written; copies written
    wide, narrow = itemsize["master"], itemsize["compute"]
    return wide * (3 + 2 * (1 + moments)) + (narrow if narrow != wide else 0)


class _Sums(NamedTuple):
    """Sums of a stage's gradients: seconds in which the bytes of all move once (`transfer`), seconds by which each
    bucket makes a step longer beside its bytes (`each`), and bytes of the gradients, summed or not (`size`)."""

    transfer: float
    each: float
    size: int


def bucket_count(transfer: Number, each: Number) -> Number:
    """Return in how many buckets to sum what moves in `transfer` seconds, if one costs `each` > 0 seconds beside."""
    # the backward pass hides all but the last bucket's transfer / n, and n buckets cost n * each: least where equal
    return np.maximum(1.0, np.sqrt(transfer / each))


def bucket_mebibytes(plan: Plan, hardware: Hardware) -> int:
    """Return the MiB of gradients in a bucket that suit a plan on the links of a hardware, at least 1; BUCKET_MIB if
    ranks sum none."""
    if not any(plan.reductions.values()):
        return BUCKET_MIB
    whole = replace(plan, bucket_mib=WHOLE, shorter={})
    elements = Counter[int]()  # by stage; the largest one counts
    for p in plan.parameters:
        elements.update(dict.fromkeys(plan.stages_of[p.name], prod(plan.local_shape(p))))
    found = _sums(whole.at(max(elements, key=elements.__getitem__)), hardware)
    if not found.each:
        return BUCKET_MIB
    return max(1, ceil(found.size / float(bucket_count(found.transfer, found.each)) / MIB))


def _sums(plan: Plan, hardware: Hardware) -> _Sums:
    """Return the sums of one stage's gradients on a hardware. `plan`: the plan of that stage, in few buckets."""
    transfer, each = 0.0, Counter[int]()  # by identity of a bucket
    for found in bucket_collectives(plan):
        sums, full = found.place == "gradients", found.collective
        if found.place == "matrices":  # of parameters, whatever buckets they are in
            continue
        latency, seconds = (
            collective_seconds(c, plan.mesh, hardware, plan.itemsize) for c in (replace(full, elements=0), full)
        )
        transfer += seconds - latency if sums else 0.0
        # what a backward pass hides slows it; nothing hides the gathers after an update
        each[id(found.bucket)] += (hardware.interference if sums else 1.0) * found.launches * latency  # type: ignore[assignment]
    one = {(b.axes, b.only): each[id(b)] for b in plan.buckets}  # each chunk of a stage has its own
    return _Sums(transfer, sum(one.values()), sum(b.elements for b in plan.buckets) * plan.itemsize["master"])
