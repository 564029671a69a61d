"""A crew of plain local processes: no Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Sequence
from itertools import count
from time import monotonic

from platform.cluster.crew.base.job import Assignment, assign, one_gpu
from platform.cluster.crew.base.remote import RemoteCrew
from platform.cluster.crew.base.signals import STOPPING
from platform.cluster.crew.launchers.host import serve

_EXIT_SECONDS = 3.0  # for a process that was told to end
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class ProcessCrew(RemoteCrew):
    """One spawned process per member. A process that is hired for one that is gone takes its slot, and so its GPU."""

    def _open(self) -> str:
        self._processes: dict[int, multiprocessing.process.BaseProcess] = {}
        self._slots: dict[int, int] = {}  # of those that live
        return "127.0.0.1"

    def _launch(self, numbers: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        for number in numbers:
            slot = next(i for i in count() if i not in self._slots.values())
            self._slots[number] = slot
            size = self.job.world_size
            place = assign(self.job, number, local_rank=slot, local_world_size=size, group_rank=0)
            if self.job.device == "cuda":
                place.environment.update(one_gpu(slot))
            told = (place, self._board.address, self._board.token(number))
            process = context.Process(target=_main, args=told, name=f"worker{number}", daemon=True)
            process.start()
            self._processes[number] = process

    def _ended(self, number: int, seconds: float) -> str | None:
        process = self._processes[number]
        process.join(seconds)
        code = process.exitcode
        if code is None:
            return None
        return f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"its exit status is {code}"

    def _kill(self, number: int) -> None:
        self._slots.pop(number, None)
        if process := self._processes.pop(number, None):
            process.kill()
            process.join()
            process.close()  # its pipes

    def _dismiss(self, polite: bool) -> None:
        deadline = monotonic() + (_EXIT_SECONDS if polite else 0.0)
        for process in self._processes.values():
            process.join(max(0.0, deadline - monotonic()))
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()


def _main(place: Assignment, address: tuple[str, int], token: str) -> None:
    _die_with_the_driver()
    for number in STOPPING:  # a terminal's Ctrl-C, or a service's end, reaches every process; the driver decides
        signal.signal(number, signal.SIG_IGN)
    serve(place, address, token)


def _die_with_the_driver() -> None:
    """Also where this process is stopped or hangs, and so does not notice that its connection is closed."""
    if prctl := getattr(ctypes.CDLL(None), "prctl", None):  # Linux has it
        prctl(_DEATH_SIGNAL, signal.SIGKILL)
