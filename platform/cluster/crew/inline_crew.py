"""Crew with a single worker, in the launching process itself."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Any

from platform.boundary.refusals import find_refusal, is_stop_signal, refuse_process_end
from platform.boundary.terminal import escape_terminal_text
from platform.boundary.world_faults import is_external_fault
from platform.cluster.crew.crew import Crew, T, arguments_of_rank, format_call
from platform.cluster.crew.failures import Failure, Member, WorkerFailed
from platform.cluster.crew.heartbeats import CallMonitor
from platform.cluster.crew.job import Job, assign_worker, open_tcp_store
from platform.monitor.journal import SeenWorker
from platform.runtime.progress import PROGRESS
from platform.train.replies import METHODS


class OwnOutlook(CallMonitor):
    """Outlook of the driver on the worker in its own process, whose heartbeat is read when it is wanted."""

    def list_workers(self) -> list[SeenWorker]:
        """Return the sight of the only worker, by a heartbeat of now."""
        self.note_heartbeat(0, PROGRESS.build_heartbeat(), monotonic(), True)
        return super().list_workers()


class InlineCrew(Crew):
    """Crew whose only worker is an object in this process, so that a debugger stops in it and a profiler sees it."""

    def __init__(self, job: Job):
        """Construct the only worker of the crew, member 0, in this process; `job` has one rank."""
        assert job.world_size == 1
        self.job = job
        self.unstarted, self.outlook = [], OwnOutlook()
        self._closed = False
        self._member = Member(0, socket.gethostname(), os.getpid())
        assignment = assign_worker(job, 0, local_rank=0, local_world_size=1, group_rank=0)
        replace(assignment, environment={}).enter_environment()  # CUDA reads it when it is first used
        self._worker = assignment.construct_worker()

    @property
    def ready_members_by_number(self) -> Mapping[int, Member]:
        """Return the only member, whose worker runs in this process, under its number 0."""
        return {0: self._member}

    @property
    def starting_members(self) -> Set[int]:
        """Return the empty set: the only worker, in this process, has been constructed."""
        return frozenset()

    def assign_ranks(self, job: Job, numbers: Sequence[int]) -> None:
        """Give the only worker, in this process, rank 0, and open a TCPStore for its process groups."""
        assert job.world_size == 1 and list(numbers) == [0]
        self.job = job
        self._rendezvous = open_tcp_store("127.0.0.1")
        self.store = self._rendezvous.host, self._rendezvous.port

    def call_ranks(self, method: Callable[..., T], *args: Any, within: float = inf) -> list[T]:
        """Run a call of the driver on the worker in this process; raise WorkerFailed, after a traceback, if it
        fails."""
        word = str(method)
        call = format_call(word, args)
        self.outlook.begin_call(word, call, {0: 0}, self.ready_members_by_number, {0})
        PROGRESS.begin_call(call)
        try:
            with self.outlook, refuse_process_end():
                return [getattr(self._worker, METHODS.get(word, word))(*arguments_of_rank(args, 0))]
        except BaseException as error:
            if is_stop_signal(error):
                raise
            cause = traceback.format_exc()  # as other crews report it: the failing line is in the user's own code
            print(escape_terminal_text(cause), file=sys.stderr, end="")
            name, coordinates = self.job.rank_name(0), self.job.coordinates[0]
            failure = Failure(self._member, "failed", call, cause, 0, name, coordinates)
            failure = replace(failure, refusal=find_refusal(error), of_world=is_external_fault(error))
            raise WorkerFailed([failure]) from error
        finally:
            PROGRESS.begin_call("")

    def release_members(self) -> list[Failure]:
        """Let the only worker, in this process, leave its process groups; none can be lost."""
        self._worker.leave()
        return []

    def hire_workers(self, count: int) -> None:
        """Raise AssertionError: a crew of one worker in this process cannot grow."""
        raise AssertionError("a world of one in this process hires nobody")

    def close(self) -> None:
        """Close the only worker, in this process; further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._worker.close()
