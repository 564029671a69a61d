"""Launcher of plain processes on this machine, without Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Sequence
from itertools import count
from time import monotonic

from platform.cluster.crew.base.job import Assignment, Job, assign, one_gpu
from platform.cluster.crew.base.launcher import Launcher
from platform.cluster.crew.base.signals import STOPPING
from platform.cluster.crew.launchers.host import serve
from platform.cluster.wire.switchboard import Switchboard

_JOIN_SECONDS = 3.0  # for a process to exit after it was asked to close
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


class Processes(Launcher):
    """Spawns one worker process per member on this machine. A process hired after another died gets its slot, and so
    its GPU."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._slots: dict[int, int] = {}  # member number -> slot, of living members

    def open(self, job: Job, size: int) -> str:
        return "127.0.0.1"

    def launch(self, job: Job, numbers: Sequence[int], board: Switchboard) -> None:
        context = multiprocessing.get_context("spawn")
        for number in numbers:
            slot = next(i for i in count() if i not in self._slots.values())
            self._slots[number] = slot
            place = assign(job, number, local_rank=slot, local_world_size=job.world_size, group_rank=0)
            if job.device == "cuda":
                place.environment.update(one_gpu(slot))
            told = (place, board.address, board.token(number))
            process = context.Process(target=_main, args=told, name=f"worker{number}", daemon=True)
            process.start()
            self._processes[number] = process

    def ended(self, number: int, seconds: float) -> str | None:
        process = self._processes[number]
        process.join(seconds)
        code = process.exitcode
        if code is None:
            return None
        return f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"its exit status is {code}"

    def kill(self, number: int) -> None:
        self._slots.pop(number, None)
        if process := self._processes.pop(number, None):
            process.kill()
            process.join()
            process.close()  # frees its pipes

    def dismiss(self, polite: bool) -> None:
        deadline = monotonic() + (_JOIN_SECONDS if polite else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - monotonic()))
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


def _main(place: Assignment, address: tuple[str, int], token: str) -> None:
    """Serve one member in a newly spawned process that dies with the driver and ignores stop signals."""
    _die_with_the_driver()
    for number in STOPPING:  # Ctrl-C in a terminal, or the end of a service, signals every process; the driver decides
        signal.signal(number, signal.SIG_IGN)
    serve(place, address, token)


def _die_with_the_driver() -> None:
    """Ask the kernel to kill this worker process when the driver dies: if stopped or hung, it would not notice by
    itself. Linux only."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # Linux only
        prctl(_DEATH_SIGNAL, signal.SIGKILL)
