"""A crew of plain local processes: no Ray, no elasticity."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Set
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

from platform.cluster.crew import Outcome, RemoteCrew, arguments
from platform.cluster.host import serve
from platform.cluster.job import Assignment, assign, one_gpu
from platform.cluster.rendezvous import Rendezvous

_EXIT_SECONDS = 3.0  # for a process that was told to end


class ProcessCrew(RemoteCrew):
    """One spawned process per rank, with a pipe each. They end when the driver does, however it ends."""

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._rendezvous = Rendezvous("127.0.0.1")
        self.store = self._rendezvous.address
        context = multiprocessing.get_context("spawn")
        size = self.job.world_size
        for rank in range(size):
            place = assign(self.job, rank, local_rank=rank, local_world_size=size, group_rank=0, store=self.store)
            if self.job.device == "cuda":
                place.environment.update(one_gpu(rank))
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, place), name=self.job.name(rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._rendezvous.start()  # takes a while (torch), as does the start of the processes

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def _send(self, method: str, args: tuple[Any, ...]) -> None:
        for rank, pipe in enumerate(self._pipes):
            with suppress(BrokenPipeError, ConnectionResetError):  # dead: `_receive` says so
                pipe.send((method, arguments(args, rank)))

    def _receive(self, pending: Set[int], timeout: float) -> list[Outcome]:
        sources = {self._pipes[rank]: rank for rank in pending}
        ready = wait([*sources, *(self._processes[rank].sentinel for rank in pending)], timeout)
        outcomes = []
        for rank in sorted(pending):
            if self._pipes[rank] in ready or self._processes[rank].sentinel in ready:
                try:
                    outcomes.append(Outcome(rank, **self._pipes[rank].recv()))
                except (EOFError, ConnectionResetError):
                    outcomes.append(Outcome(rank, error=self._ending(rank), died=True))
        return outcomes

    def _ending(self, rank: int) -> str:
        self._processes[rank].join(_EXIT_SECONDS)
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit status {code}"

    def _dismiss(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # ends a rank that waits for its next call
        deadline = monotonic() + (_EXIT_SECONDS if self._polite else 0.0)
        for process in self._processes:
            process.join(max(0.0, deadline - monotonic()))
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _main(pipe: Connection, place: Assignment) -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # a terminal's Ctrl-C reaches every process; the driver decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, daemon=True).start()

    def receive() -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    serve(place, receive, pipe.send)


def _end_with_driver() -> None:
    driver = multiprocessing.parent_process()
    assert driver is not None
    driver.join()
    os._exit(1)
