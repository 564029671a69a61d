"""The objects that all parts of one run's driver share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from platform.cluster.crew.job import Job
from platform.cluster.crew.signals import StopSignals
from platform.config.fields import Config
from platform.data.corpus import Corpus
from platform.monitor import Journal, RunMonitor, Timeline
from platform.plan.plan import Plan
from platform.predict.tier_traffic import NetworkTiers

if TYPE_CHECKING:
    from platform.cluster.answer_scores import RunTasks
    from platform.cluster.control.checkpoints import Checkpoints
    from platform.cluster.resources import Places
    from platform.cluster.run_directory import RunDirectory
    from platform.train.state_recovery import Formation


@dataclass(frozen=True)
class RunContext:
    """Context that all parts of one run's driver share. `config`, `plan`, `job`: values at the run's start, a
    generation may have others; `steps`: the last step to train; `places`: device and number of workers that the cluster
    has room for; `tasks`: tasks that score the model."""

    config: Config
    plan: Plan
    job: Job
    steps: int
    journal: Journal
    monitor: RunMonitor
    signals: StopSignals
    checkpoints: Checkpoints
    directory: RunDirectory
    places: Places
    corpus: Corpus
    tasks: RunTasks | None = None


@dataclass
class Generation:
    """Mesh of seated workers that has formed, between two failures. `number`: counts from the run's first; `formed`:
    seats and configuration; `tiers`: cluster tiers that its ranks are in; `step`: updates in the state that it starts
    from; `device`: name of a worker's; `peak_flops`: its FLOP/s, None if unknown; `timeline`: None unless
    monitor.timeline is set; `seconds`: duration of its forming; `predicted_seconds`: seconds of a full step, None until
    they are predicted."""

    number: int
    plan: Plan
    formed: Formation
    tiers: NetworkTiers
    step: int
    device: str
    peak_flops: float | None
    timeline: Timeline | None
    job: Job
    seconds: float = 0.0
    predicted_seconds: float | None = None

    @property
    def seats(self) -> list[int]:
        """Return the number of the crew member that has each rank of this generation of workers, by rank."""
        return self.formed.seats

    @property
    def size(self) -> int:
        """Return the number of ranks of the mesh of this generation of workers."""
        return len(self.seats)
