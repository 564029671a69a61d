"""Counting of what several ranks have alike in sums over all ranks: one of them counts it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from platform.plan.core.plan import Plan
from platform.plan.language.ops import Parameter

Coordinates = Mapping[str, int]  # a rank's place: mesh axis -> index


def counts_at(at: Coordinates, axes: Iterable[str]) -> bool:
    """Return True if the rank at mesh coordinates `at` counts its part in a sum over all ranks (loss, gradient norm) of
    a quantity split over `axes` and replicated over all other axes of its stage: of the replicas, the one at index 0
    counts."""
    split = {"stage", *axes}
    return all(i == 0 for axis, i in at.items() if axis not in split)


def counts_gradient(plan: Plan, at: Coordinates, p: Parameter) -> bool:
    """Return True if the rank at mesh coordinates `at` counts its part of the gradient of `p` in a sum over all ranks:
    one of the ranks that replicate it does, in the owner stage if it is tied; none does if it is frozen. `plan`: the
    plan of the rank's stage."""
    own = plan.stages_of[p.name][0] == at["stage"] and p.name not in plan.frozen
    return own and counts_at(at, plan.split_over(p))


def counted_stretches(plan: Plan, at: Coordinates) -> dict[str, list[slice]]:
    """Return, by the name of each bucket's first parameter, the slices of the rank's flat gradients (one shard of the
    bucket's buffer) that the rank at mesh coordinates `at` counts in the gradient norm (`counts_gradient`); adjacent
    slices are joined. `plan`: the plan of the rank's stage."""
    out: dict[str, list[slice]] = {}
    for bucket in (plan.bucket_at(bucket, at) for bucket in plan.buckets):
        before = plan.mesh.index(at, bucket.sharded) * bucket.shard_elements  # elements of other shards
        stretches = out.setdefault(bucket.parameters[0].name, [])
        for p in bucket.parameters:
            start, stop = (bucket.ranges[p.name][0] + i - before for i in plan.shard_range(p, at))
            if start < stop and counts_gradient(plan, at, p):
                follows = stretches and stretches[-1].stop == start
                stretches.append(slice(stretches.pop().start if follows else start, stop))
    return out
