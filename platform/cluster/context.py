"""What everything that drives one run works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from platform.cluster.job import Job
from platform.cluster.signals import StopSignals
from platform.config import Config
from platform.monitor import Journal, Monitor
from platform.plan.plan import Plan

if TYPE_CHECKING:
    from platform.cluster.checkpoints import Checkpoints
    from platform.cluster.resources import Places
    from platform.cluster.run_directory import RunDirectory


@dataclass(frozen=True)
class Run:
    """`config`, `plan` and `job` are those of the start: a generation may have others. `steps`: the last one."""

    config: Config
    plan: Plan
    job: Job
    steps: int
    journal: Journal
    monitor: Monitor
    signals: StopSignals
    checkpoints: Checkpoints
    directory: RunDirectory
    places: Places
