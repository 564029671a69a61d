"""The workers of a run as one thing: `call` runs a method on every rank, whatever the ranks are made of."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from platform.cluster.job import Job

GRACE = 0.5  # seconds for the culprit of a failure to turn up after a rank that only noticed it
CLOSE_SECONDS = 10.0  # for the ranks to leave by themselves; then they are killed


class ByRank(list[Any]):
    """An argument of a call that differs by rank: one value for each."""


def arguments(args: Iterable[Any], rank: int) -> list[Any]:
    """The arguments of a call on one rank."""
    return [a[rank] if isinstance(a, ByRank) else a for a in args]


@dataclass(frozen=True)
class Outcome:
    """How a call ended on one rank."""

    rank: int
    value: Any = None
    error: str = ""  # the traceback; or, where `died`, how the process ended
    died: bool = False


class WorkerFailed(Exception):
    """A call failed on `rank`. `cause` is the remote traceback, or how the process ended; `log` None if it has none."""

    def __init__(self, job: Job, call: str, outcome: Outcome, log: Path | None):
        self.rank, self.coordinates, self.cause = outcome.rank, dict(job.coordinates[outcome.rank]), outcome.error
        self.method, self.log = call, log
        how = "died" if outcome.died else "failed"
        super().__init__(f"{job.name(outcome.rank)} {how} in {call}: {_last_line(outcome.error)}")


class Crew(ABC):
    """A running worker per rank. A context manager: leaving it closes the crew, and no process remains.

    Attributes:
        store: host and port of a TCPStore that outlives every generation, for `Worker.form`.
    """

    store: tuple[str, int]

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """The results of `worker.method(*args)` on all ranks at once, by rank. Arguments and results are plain data;
        a `ByRank` gives each rank its own.

        Raises WorkerFailed as soon as one rank has failed, without waiting for others that may hang in a collective.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the workers: politely and for a bounded time, after a failure by force. Can be repeated."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RemoteCrew(Crew):
    """A crew whose ranks are other processes (or threads): how calls go out and outcomes come in is the subclass's."""

    def __init__(self, job: Job):
        self.job = job
        self._polite = True  # the ranks can be expected to answer
        self._closed = False
        try:
            self._start()
            self._gather("start()")
        except BaseException:
            self._polite = False
            self.close()
            raise

    @abstractmethod
    def _start(self) -> None:
        """Sets `store`, and has every rank make its worker, which `_receive` reports."""

    @abstractmethod
    def _send(self, method: str, args: tuple[Any, ...]) -> None:
        """Starts a call on every rank, and never blocks on one."""

    @abstractmethod
    def _receive(self, pending: Set[int], timeout: float) -> list[Outcome]:
        """Outcomes that have come from the `pending` ranks, at least one unless `timeout` seconds pass first."""

    @abstractmethod
    def _dismiss(self) -> None:
        """Tells every rank that it may end, waits for those that do for a short while, and kills the rest."""

    def _log(self, rank: int) -> Path | None:
        return self.job.log(rank)

    def call(self, method: str, *args: Any) -> list[Any]:
        self._send(method, args)
        return self._gather(shown(method, args))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._polite:
                self._send("close", ())
                self._gather("close()", CLOSE_SECONDS)
        except (WorkerFailed, TimeoutError):
            pass  # the run's result is decided; the rank's own log has the reason
        finally:
            self._dismiss()

    def _gather(self, call: str, within: float = float("inf")) -> list[Any]:
        """The value of every rank. Raises WorkerFailed for the likeliest culprit, TimeoutError after `within` s."""
        polite, self._polite = self._polite, False  # also where a signal interrupts the wait
        outcomes: dict[int, Outcome] = {}
        failures: list[Outcome] = []
        deadline = monotonic() + within
        while len(outcomes) < self.job.world_size and (left := deadline - monotonic()) > 0:
            for outcome in self._receive(range(self.job.world_size) - outcomes.keys(), min(left, 1.0)):
                outcomes[outcome.rank] = outcome
                if outcome.error:
                    failures.append(outcome)
                    deadline = min(deadline, monotonic() + (0.0 if outcome.died else GRACE))
        if failures:
            culprit = min(failures, key=_innocence)
            raise WorkerFailed(self.job, call, culprit, self._log(culprit.rank))
        if len(outcomes) < self.job.world_size:
            raise TimeoutError(f"{call}: no answer from {sorted(range(self.job.world_size) - outcomes.keys())}")
        self._polite = polite
        return [outcomes[rank].value for rank in range(self.job.world_size)]


def open_crew(kind: str, job: Job) -> Crew:
    """A crew of this kind: inline | processes | local | ray | torchrun."""
    match kind:
        case "inline":
            from platform.cluster.inline import InlineCrew

            return InlineCrew(job)
        case "processes":
            from platform.cluster.processes import ProcessCrew

            return ProcessCrew(job)
        case "local" | "ray":
            from platform.cluster.ray_crew import RayCrew

            return RayCrew(job, embedded=kind == "local")
        case "torchrun":
            from platform.cluster.torchrun import TorchrunCrew

            return TorchrunCrew(job)
    raise AssertionError(kind)


def shown(method: str, args: Iterable[Any]) -> str:
    """A call as messages name it: long arguments are left out."""
    return f"{method}({', '.join(str(a) if isinstance(a, str | int | float) else '...' for a in args)})"


def _innocence(failure: Outcome) -> int:
    """Lower is guiltier: a dead process, an error of its own, an error because a peer is gone."""
    if failure.died:
        return 0
    return 2 if re.search(r"DistBackendError|DistNetworkError|DistStoreError|/gloo/|by peer", failure.error) else 1


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]
