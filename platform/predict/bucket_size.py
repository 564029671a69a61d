"""Size of the buckets in which gradients are summed that suits a plan on the links of a hardware."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, prod
from typing import NamedTuple

import numpy as np

from platform.plan.chunks import BUCKET_MIB
from platform.plan.plan import Plan
from platform.plan.step_collectives import bucket_collectives
from platform.predict.hardware import Hardware
from platform.predict.price import Number, collective_seconds

MIB = 1 << 20
WHOLE = 1 << 30  # MiB: a stage's gradients in as few buckets as there can be


class _Sums(NamedTuple):
    """Sums of a stage's gradients: seconds in which the bytes of all move once (`transfer`), seconds by which each
    bucket makes a step longer beside its bytes (`each`), and bytes of the gradients, summed or not (`size`)."""

    transfer: float
    each: float
    size: int


def choose_bucket_count(transfer: Number, each: Number) -> Number:
    """Return in how many buckets to sum what moves in `transfer` seconds, if one costs `each` > 0 seconds beside."""
    # the backward pass hides all but the last bucket's transfer / n, and n buckets cost n * each: least where equal
    return np.maximum(1.0, np.sqrt(transfer / each))


def choose_bucket_mebibytes(plan: Plan, hardware: Hardware) -> int:
    """Return the MiB of gradients in a bucket that suit a plan on the links of a hardware, at least 1; BUCKET_MIB if
    ranks sum none."""
    if not any(plan.reductions.values()):
        return BUCKET_MIB
    whole_plan = replace(plan, bucket_mib=WHOLE, shorter={})
    elements = Counter[int]()  # by stage; the largest one counts
    for p in plan.parameters:
        elements.update(dict.fromkeys(plan.stages_of[p.name], prod(plan.local_shape(p))))
    sums = _price_gradient_sums(whole_plan.stage_part(max(elements, key=elements.__getitem__)), hardware)
    if not sums.each:
        return BUCKET_MIB
    return max(1, ceil(sums.size / float(choose_bucket_count(sums.transfer, sums.each)) / MIB))


def _price_gradient_sums(plan: Plan, hardware: Hardware) -> _Sums:
    """Return the sums of one stage's gradients on a hardware. `plan`: the plan of that stage, in few buckets."""
    transfer, each = 0.0, Counter[int]()  # by identity of a bucket
    for reduction in bucket_collectives(plan):
        full = reduction.collective
        if reduction.place == "matrices":  # of parameters, whatever buckets they are in
            continue
        seconds = collective_seconds(full, plan.mesh, hardware, plan.itemsize)
        latency = collective_seconds(replace(full, elements=0), plan.mesh, hardware, plan.itemsize)
        transfer += seconds - latency
        each[id(reduction.bucket)] += hardware.interference * reduction.launches * latency  # type: ignore[assignment]
    seconds_by_kind = {(b.axes, b.only): each[id(b)] for b in plan.buckets}  # each chunk of a stage has its own
    size = sum(b.elements for b in plan.buckets) * plan.itemsize["master"]
    return _Sums(transfer, sum(seconds_by_kind.values()), size)
