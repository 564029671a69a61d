"""The workers of a run as one thing: `seat` gives members their ranks, `call` runs a method on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from math import inf
from types import TracebackType
from typing import Any

from platform.cluster.crew.base.failures import Failure, Member
from platform.cluster.crew.base.job import Job


class ByRank(list[Any]):
    """An argument of a call that differs by rank: one value for each."""


class Crew(ABC):
    """Worker processes, of which some have a rank (are seated) and the others are spares. A context manager: leaving
    it closes the crew, and no process remains. Driven by one thread.

    Attributes:
        store: host and port of a TCPStore of this generation, for `Worker.form`; from `seat` to `release`.
        can_hire: whether `hire` is supported.
        elastic: whether the others can go on without one that failed.
        unstarted: what became of hired members that never got ready.
    """

    store: tuple[str, int]
    can_hire: bool = False
    elastic: bool = False
    unstarted: list[Failure]

    @property
    @abstractmethod
    def members(self) -> Mapping[int, Member]:
        """Who is alive and ready at this moment, by number; seated or spare."""

    @property
    def leaving(self) -> Set[int]:
        """Members that will soon be taken away, as the cluster has announced."""
        return set()

    @property
    @abstractmethod
    def starting(self) -> Set[int]:
        """Numbers of those that are not ready yet at this moment."""

    @abstractmethod
    def seat(self, job: Job, numbers: Sequence[int]) -> None:
        """Begins a generation: rank i is member numbers[i]. `job` has the ranks' coordinates."""

    @abstractmethod
    def call(self, method: str, *args: Any, within: float = inf) -> list[Any]:
        """The results of `worker.method(*args)` on all ranks at once, by rank. Arguments and results are plain data,
        as JSON has it (tuples arrive as lists); a `ByRank` gives each rank its own.

        Raises WorkerFailed as soon as one rank has failed, without waiting for others that may hang in a collective;
        also where a rank has made no progress for `within` seconds.
        """

    @abstractmethod
    def release(self) -> list[Failure]:
        """Ends the generation, after WorkerFailed or without need: nobody has a rank, and all members that remain have
        left their groups. Kills who is dead to the others (hung), and who does not leave in time; a member that only
        raised remains. Returns who was lost."""

    @abstractmethod
    def hire(self, count: int) -> None:
        """Starts more members, without waiting: they get ready in `members`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the workers: politely and for a bounded time, after a failure by force. Can be repeated."""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def seating(members: Mapping[int, Member]) -> list[int]:
    """The numbers in the order in which ranks are best dealt: node by node, so that neighbours share a node."""
    first: dict[str, int] = {}  # of each node
    for number in sorted(members):
        first.setdefault(members[number].node, number)
    return sorted(members, key=lambda number: (first[members[number].node], number))


def arguments(args: Iterable[Any], rank: int) -> list[Any]:
    """The arguments of a call on one rank."""
    return [a[rank] if isinstance(a, ByRank) else a for a in args]


def shown(method: str, args: Iterable[Any]) -> str:
    """A call as messages name it: by its first argument, step(3)."""
    first = next(iter(args), "")
    return f"{method}({first if isinstance(first, str | int) else '...'})"
