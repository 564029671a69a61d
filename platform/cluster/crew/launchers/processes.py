"""Launcher of plain processes on this machine, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import monotonic

from platform.cluster.crew.base.job import Assignment, Job, assign, one_gpu
from platform.cluster.crew.base.launcher import Launcher
from platform.cluster.crew.launchers.forks import Forked, ForkServer
from platform.cluster.wire.switchboard import Switchboard

_JOIN_SECONDS = 3.0  # for a process to exit after it was asked to close


class Processes(Launcher):
    """Forks one worker process per member on this machine, from a server that has imported what they need. A process
    hired after another died gets its slot, and so its GPU."""

    def __init__(self) -> None:
        """Initialise a launcher of plain worker processes on this machine, which has forked none yet."""
        super().__init__()
        self._server: ForkServer | None = None
        self._forked: dict[int, Forked] = {}
        self._slots: dict[int, int] = {}  # member number -> slot, of living members

    def open(self, job: Job, size: int) -> str:
        """Start the fork server of the crew; return this machine's loopback address for the driver to listen on."""
        self._forks(job)
        return "127.0.0.1"

    def launch(self, job: Job, numbers: Sequence[int], board: Switchboard) -> None:
        """Fork a worker for each of the members `numbers`, in the lowest free slot of this machine."""
        server = self._forks(job)
        for number in numbers:
            slot = next(i for i in count() if i not in self._slots.values())
            self._slots[number] = slot
            place = _place(job, number, slot)
            if job.device == "cuda":
                place.environment.update(one_gpu(slot))
            self._forked[number] = server.fork(place, board.address, board.token(number))

    def _forks(self, job: Job) -> ForkServer:
        """Return the fork server of the worker processes: a new one at first, and if the last one was killed."""
        if self._server and not self._server.alive:
            self._server.close()
            self._server = None
        self._server = self._server or ForkServer(_place(job, -1, 0))
        return self._server

    def ended(self, number: int, seconds: float) -> str | None:
        return self._forked[number].ended(seconds)

    def kill(self, number: int) -> None:
        self._slots.pop(number, None)
        if process := self._forked.pop(number, None):
            process.kill()

    def dismiss(self, polite: bool) -> None:
        """End all forked workers, waiting for them briefly if `polite`, and the fork server."""
        deadline = monotonic() + (_JOIN_SECONDS if polite else 0.0)
        for process in self._forked.values():
            process.ended(max(0.0, deadline - monotonic()))
        for process in self._forked.values():
            process.kill()
        if self._server:
            self._server.close()


def _place(job: Job, number: int, slot: int) -> Assignment:
    """Return the assignment of worker process `number` in a slot of this machine, from 0."""
    return assign(job, number, local_rank=slot, local_world_size=job.world_size, group_rank=0)
