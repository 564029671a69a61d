"""How Slurm ends a job: which signals, to whom, and when it kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from tests.harness.process_tree import descendants
from tests.harness.slurm import SlurmJob


class End(NamedTuple):
    """How Slurm ends a life of a job. `signals`: sent together, at each of the seconds `at`, unless it has ended;
    `whom`: to the batch script, to the tasks of its steps with it (as proctrack/cgroup does), or to all processes below
    (proctrack/linuxproc); `wait`: seconds until all are killed, at most so many, by chance, if `early`; `status`: of
    the script, None if it may have no time; `requeues`: it asks for that."""

    signals: tuple[signal.Signals, ...]
    whom: str
    status: int | None
    at: tuple[float, ...] = (0.0,)
    wait: float = 30.0  # KillWait, as it is by default
    early: bool = False
    requeues: bool = False


ASKED = (signal.SIGCONT, signal.SIGTERM)  # what scancel and a preemption begin with
ENDS = {
    "scancel": End(ASKED, "tasks", 143),
    "scancel --batch --signal=USR2": End((signal.SIGUSR2,), "script", 75),
    "scancel, to all processes": End(ASKED, "tree", 143),
    "scancel --batch --signal=USR1": End((signal.SIGUSR1,), "script", 75, requeues=True),
    # said twice at once, as a real one does, and again after GraceTime
    "preemption": End(ASKED, "tree", 143, at=(0.0, 0.2, 10.0), wait=40.0),
    "KillWait too short": End(ASKED, "tree", None, wait=1.5, early=True),
    "SIGKILL to all": End((), "tree", None, wait=0.0),
}


def end_life(end: End, job: SlurmJob, process: subprocess.Popen[bytes], chance: random.Random) -> int | None:
    """End a life of `job`, whose script is `process`, as Slurm does; return the script's status, None if everything
    below this process was killed."""
    began = time.monotonic()
    whom = {
        "script": lambda: [process.pid],
        "tasks": lambda: [process.pid, *job.tasks()],
        "tree": lambda: [process.pid, *descendants(process.pid)],
    }[end.whom]
    for number, moment in [(number, moment) for moment in end.at for number in end.signals]:
        if not _ends(process, began + moment):
            send(whom(), number)
    if not _ends(process, began + (chance.uniform(0, end.wait) if end.early else end.wait)):
        kill(descendants())
        return None
    return process.returncode


def _ends(process: subprocess.Popen[bytes], until: float) -> bool:
    """Return whether a process ends until then."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, until - time.monotonic()))
    return process.returncode is not None


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill(pids: set[int]) -> None:
    """Kill processes, and those that they start meanwhile."""
    while pids:
        send(pids, signal.SIGKILL)
        time.sleep(0.1)
        pids = descendants()
