"""The time at which a run has to end by itself: `run.time_limit`, or the end of the Slurm allocation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from platform.config.durations import seconds_of
from platform.config.groups.execution_group import Run
from platform.config.key import SECONDS


def seconds_left(run: Run, environment: Mapping[str, str] = os.environ, now: float | None = None) -> float | None:
    """Return the seconds from now until the run should begin to stop by itself, so that `run.time_margin` seconds are
    left for the last checkpoint; None if the run has no time limit. `now`: seconds since the epoch, None for the
    clock's.

    The limit is `run.time_limit` or, if that is not set, the end of the Slurm allocation, in SLURM_JOB_END_TIME of
    `environment` (seconds since the epoch).
    """
    if run.time_limit:
        limit = seconds_of(run.time_limit)
        return max(0.0, limit - min(run.time_margin, limit / 2)) if limit else None
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not (end.isascii() and end.isdigit() and len(end) <= 12):  # absent, or no plausible time in seconds
        return None
    left = int(end) - run.time_margin - (time.time() if now is None else now)
    return min(max(0.0, left), SECONDS)  # what a timer can wait for
