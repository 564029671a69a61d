"""Price of a failure: the seconds in which a mesh forms, in which a run goes on after a failure, and the steps that it
does again. Pure."""

from __future__ import annotations

from typing import NamedTuple

from platform.config.fields import Config
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import communicators
from platform.planning.memory_budget import device_kind
from platform.planning.snapshot_price import SnapshotPrice

# Seconds of the driver and its workers beside NCCL, for a mesh and for each worker of it: from a failure to the next
# step, 0.5 s of 8 workers and 4.5 s of 1,024, measured on one machine (tests/benchmarks/RESULTS.md).
MESH, WORKER = 0.5, 0.004
JOINING = 0.5  # seconds in which NCCL connects the ranks of one communicator: an estimate, until it is measured


class FailurePrice(NamedTuple):
    """Price of a failure: seconds of the `formation` of a mesh whose workers are each in so many `communicators`, and
    of the `recovery`, from a failure known to the next step; `steps` that are done again, on average, None where
    nothing is in memory and the run goes on from its last checkpoint."""

    formation: float
    communicators: int
    recovery: float
    steps: float | None


def failure_price(config: Config, plan: Plan, snapshot: SnapshotPrice, every: int) -> FailurePrice:
    """Predict what a lost worker costs a run under `plan`, with a `snapshot` after `every` steps; without any if 0."""
    cuda, most = device_kind(config) == "cuda", max(sum(pair) for pair in communicators(plan))
    formation = MESH + WORKER * plan.mesh.size + (JOINING * most if cuda else 0.0)
    steps = every / 2 + (1.0 if cuda else 0.0) if every else None  # on a GPU the copy goes on beside the next step
    # a peer sends what the lost node alone had back as fast as it came
    return FailurePrice(formation, most, formation + (snapshot.seconds if every else 0.0), steps)
