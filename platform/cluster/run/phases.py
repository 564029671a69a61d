"""Phases of a run's start and end, and when each was reached: the breakdown that `monitor.timing` asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import monotonic

PHASES = {  # in the order in which a run reaches them -> what is done then
    "composed": "the configuration is composed and checked",
    "planned": "the plan is made",
    "starting": "directory, data and checkpoints are checked; the workers start",
    "first_process": "the first worker's process has dialled the driver",
    "ready": "every worker has imported all and is ready",
    "formed": "the workers are a mesh, their process groups open",
    "running": "the model is built, and has its state",
    "first_step": "the first step is committed",
    "last_step": "the last step is committed",
    "ended": "all is saved, and the workers are gone",
}
_EVENTS = {  # of the journal -> phase
    "starting": "starting", "forming": "ready", "formed": "formed", "running": "running", "first_step": "first_step",
}  # fmt: skip


class Phases:
    """Times at which one driver reached each of PHASES for the first time, of "last_step" for the last time.
    `seconds`: phase -> seconds since `start`, a reading of the monotonic clock; by default now."""

    def __init__(self, start: float | None = None):
        """Start to time a run's phases from `start`, a reading of the monotonic clock, by default now."""
        self._start = monotonic() if start is None else start
        self.seconds: dict[str, float] = {}

    def reach(self, phase: str, when: float | None = None) -> None:
        """Record that a phase of the run was reached at `when`, a reading of the monotonic clock, by default now."""
        self.seconds.setdefault(phase, (monotonic() if when is None else when) - self._start)

    def event(self, word: str) -> None:
        """Record the phase of the run that an event of its journal begins, if any; `word`: the event's kind."""
        if phase := _EVENTS.get(word):
            self.reach(phase)

    def step(self) -> None:
        """Record the time at which the run has committed a training step: the last one, as far as is known."""
        self.seconds["last_step"] = monotonic() - self._start


def command_start() -> float:
    """Return when the run's command was started, on the monotonic clock; the time now where /proc does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine's start
        up = float(Path("/proc/uptime").read_text().split()[0])
        return monotonic() - max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return monotonic()


def phase_table(seconds: Mapping[str, float]) -> str:
    """Format the phases that a run reached as a table for the user: how long each took, and when it was over."""
    lines, before = ["   took  until  phase (seconds, since the command)"], 0.0
    for phase, what in PHASES.items():
        if phase in seconds:
            lines.append(f"{seconds[phase] - before:7.2f}{seconds[phase]:7.2f}  {phase}: {what}")
            before = seconds[phase]
    return "\n".join(lines)
