"""Single entry point for opening a crew: maps the kind of cluster to its launcher."""

from __future__ import annotations

from platform.cluster.crew.crew import Crew
from platform.cluster.crew.job import Job
from platform.cluster.crew.remote_crew import RemoteCrew


def open_crew(kind: str, job: Job, spares: int = 0) -> Crew:
    """Open the crew of a run on a cluster of `kind`, inline | processes | local | ray | torchrun, with a worker per
    rank of `job` plus `spares` more (fewer if `spares` is negative; inline and torchrun ignore it), and wait until all
    are ready. Members are numbered from 0, and none has a rank yet. Raises WorkerFailed if a member cannot start,
    NoPlaces if the cluster finds no place for it in time."""
    match kind:
        case "inline":
            from platform.cluster.crew.inline_crew import InlineCrew

            return InlineCrew(job)
        case "processes":
            from platform.cluster.crew.forked_workers import ForkLauncher

            return RemoteCrew(ForkLauncher(), job, spares)
        case "local" | "ray":
            from platform.cluster.crew.ray_actors import RayActors

            return RemoteCrew(RayActors(embedded=kind == "local"), job, spares)
        case "torchrun":
            from platform.cluster.crew.torchrun import TorchrunLauncher

            return RemoteCrew(TorchrunLauncher(), job)
    raise AssertionError(kind)
