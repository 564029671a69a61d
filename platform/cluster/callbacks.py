"""Callbacks of a run that Python code starts: the user's functions, called with the run's own records.

`seconds_left` knows the time at which a run has to end by itself: `run.time_limit`, or the end of the Slurm allocation.
`demonstration_warning` is for a long run that would train on the demonstration text alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass

from platform.cluster.crew.signals import Stopped
from platform.config.fields import Config
from platform.config.groups import Run
from platform.config.key import SECONDS, parse_duration
from platform.monitor.events import JournalEvent
from platform.monitor.metrics import MetricsRow
from platform.plan.accelerators import dense_bf16_peak
from platform.plan.plan import Plan
from platform.plan.plan_summary import format_number


@dataclass(frozen=True)
class Callbacks:
    """Functions of the user that a run calls in the driver's process, each with a copy of the record just made.

    `on_step(row)`: after every committed step, with its row of metrics.jsonl. `on_event(event)`: after every event of
    the run, with its entry in journal.jsonl. The run waits until they return, and ignores what they return.
    """

    on_step: Callable[[MetricsRow], object] | None = None
    on_event: Callable[[JournalEvent], object] | None = None


class CallbackGuard:
    """Calls the user's callbacks and keeps their exceptions out of the run. The first exception is kept as `error` and
    makes the guard call `stop`, which ends the run at the next safe moment, as a signal does; a callback that has
    raised is not called again."""

    def __init__(self, callbacks: Callbacks):
        """Guard a run against exceptions of the user's callbacks, of which none has raised yet."""
        self._callbacks = callbacks
        self.error: BaseException | None = None
        self._failed: set[str] = set()
        self.stop: Callable[[str], None] = lambda reason: None  # set by the driver

    def call_on_step(self, row: MetricsRow) -> None:
        """Call the user's callback `on_step` with a copy of the run's newest row of metrics.jsonl."""
        self._call_callback("on_step", row)

    def call_on_event(self, event: JournalEvent) -> None:
        """Call the user's callback `on_event` with a copy of an event of the run's journal."""
        self._call_callback("on_event", event)

    def _call_callback(self, name: str, value: MetricsRow | JournalEvent) -> None:
        """Call the user's callback of this name with a copy of `value`, unless it has raised before; an exception that
        it raises is kept, and stops the run at the next safe moment."""
        function = getattr(self._callbacks, name)
        if function is None or name in self._failed:
            return
        try:
            function(deepcopy(value))
        except Stopped:  # a second signal, which came during the call
            raise
        except BaseException as error:  # SystemExit too: it would leave the workers behind
            self._failed.add(name)
            self.error = self.error or error
            self.stop(f"{name}, which raised {type(error).__name__}")


def seconds_left(run: Run, environment: Mapping[str, str] = os.environ, now: float | None = None) -> float | None:
    """Return the seconds from now until a run's driver should begin to stop it, so that `run.time_margin` seconds are
    left for the last checkpoint; None if the run has no time limit. `now`: seconds since the epoch, None for the
    clock's.

    The limit is `run.time_limit` or, if that is not set, the end of the Slurm allocation, in SLURM_JOB_END_TIME of
    `environment` (seconds since the epoch).
    """
    if run.time_limit:
        limit = parse_duration(run.time_limit)
        return max(0.0, limit - min(run.time_margin, limit / 2)) if limit else None
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not (end.isascii() and end.isdigit() and len(end) <= 12):  # absent, or no plausible time in seconds
        return None
    left = int(end) - run.time_margin - (time.time() if now is None else now)
    return min(max(0.0, left), SECONDS)  # what a timer can wait for


_DAY = 86400.0
_CORE = 1e11  # FLOP/s of a CPU worker, at most
_BYTES_PER_TOKEN = 3.5  # of Python source, under a vocabulary trained on it


def demonstration_warning(config: Config, plan: Plan, text_bytes: float) -> str:
    """Return the line by which a driver warns, at its start, of a run that would take more than a day even at its
    devices' peak, but has only the demonstration text, `text_bytes` bytes of Python's standard library (data=stdlib),
    to train on; else ""."""
    tokens = config.train.steps * plan.tokens_per_step
    peak = dense_bf16_peak(config.cluster.gpu) or _CORE
    if config.data.kind != "stdlib" or tokens * plan.flops_per_token < _DAY * peak * plan.mesh.world_size:
        return ""
    available_tokens = text_bytes / _BYTES_PER_TOKEN
    wanted, has = (format_number(n).strip() for n in (tokens, available_tokens))
    return (
        f"data=stdlib: {config.train.steps} steps take {wanted} tokens, and the demonstration text, Python's own"
        f" standard library, has about {has}: {tokens / available_tokens:,.0f} times over; for text of your own:"
        " data=text data.path=FILE_OR_FOLDER"
    )
