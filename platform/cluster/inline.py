"""A crew of one in the launching process."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from platform.cluster.crew import Crew, Outcome, WorkerFailed, arguments, shown
from platform.cluster.job import Job, threads
from platform.cluster.rendezvous import Rendezvous


class InlineCrew(Crew):
    """A world of one in this process: a debugger stops in the worker, a profiler sees it."""

    def __init__(self, job: Job):
        assert job.world_size == 1
        self.job = job
        self._closed = False
        self._rendezvous = Rendezvous("127.0.0.1")
        self._rendezvous.start()
        self.store = self._rendezvous.address
        count = threads(job.config, local_world_size=1)
        arguments = {"device": job.device, "run_dir": str(job.run_dir), "threads": count}
        self._worker = resolve_name(job.worker)(job.config, 0, 1, **arguments)

    def call(self, method: str, *args: Any) -> list[Any]:
        try:
            return [getattr(self._worker, method)(*arguments(args, 0))]
        except Exception as error:
            outcome = Outcome(0, error=f"{type(error).__name__}: {error}")
            raise WorkerFailed(self.job, shown(method, args), outcome, None) from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.close()
