"""Interface of a crew, the workers of a run: `assign_ranks` gives members their ranks, `call_ranks` runs a method on
every rank. `Launcher` is the interface of a way to start a crew's worker processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from platform.cluster.crew.failures import Failure, Member
from platform.cluster.crew.heartbeats import NOTHING, CallMonitor
from platform.cluster.crew.job import Job
from platform.cluster.crew.switchboard import WorkerSwitchboard
from platform.train.replies import WORDS

if TYPE_CHECKING:
    from platform.train.worker import Worker  # whose methods editors and mypy follow from the driver's calls
else:
    Worker = SimpleNamespace(**WORDS)  # a driver needs only the words, and the module imports torch

T = TypeVar("T")


class ByRank(list[Any]):
    """Argument of `Crew.call_ranks` that differs by rank: a list with one value per rank."""


class Crew(AbstractContextManager["Crew"]):
    """Group of worker processes, the members, of which some have a rank (are seated) and the others are spares. A
    context manager: leaving it closes the crew, and no process remains. Must be used from one thread.

    Attributes:
        store: host and port of this generation's TCPStore, for `Worker.join_mesh`; valid from `assign_ranks` to
            `release_members`.
        can_hire: True if `hire_workers` is supported.
        elastic: True if the other members can go on after one has failed.
        unstarted: failures of hired members that never got ready.
        came: when the first process dialled in, a reading of the monotonic clock; None if none has to.
        outlook: sight of the seated workers, which other threads may read.
        lost: why the cluster is of no use to the crew any more, which ends soon then; "" as long as it is.
    """

    store: tuple[str, int]
    can_hire: bool = False
    elastic: bool = False
    unstarted: list[Failure]
    came: float | None = None
    outlook: CallMonitor = NOTHING
    lost = ""

    @property
    @abstractmethod
    def ready_members_by_number(self) -> Mapping[int, Member]:
        """Return the crew's worker processes that are alive and ready now, with or without a rank, by member number."""

    @property
    def leaving_members(self) -> Set[int]:
        """Return the numbers of workers on draining nodes, which go soon; empty if this kind of crew gets no notice."""
        return set()

    @property
    @abstractmethod
    def starting_members(self) -> Set[int]:
        """Return the numbers of the worker processes that were started and are not ready for calls yet."""

    @abstractmethod
    def assign_ranks(self, job: Job, numbers: Sequence[int]) -> None:
        """Begin a generation of workers: give member numbers[i] rank i and open the generation's TCPStore; members not
        named are spares. `job` has the mesh coordinates of the ranks."""

    @abstractmethod
    def call_ranks(self, method: Callable[..., T], *args: Any, within: float = inf) -> list[T]:
        """Run a `method` of `Worker`, as `Worker.step`, on all ranks at once and return the results by rank, as
        `platform.train.replies` declares them. Arguments are plain data or dataclasses of it; a `ByRank`
        argument gives each rank its own value.

        Raises WorkerFailed as soon as one rank has failed, without waiting for others that may hang in a collective;
        also if a rank has made no progress for `within` seconds.
        """

    def lead_step(self, step: int, *args: Any, within: float = inf) -> Any:
        """Run `worker.step(step, *args)` on all ranks by `call_ranks`; return rank 0's result, for all."""
        return self.call_ranks(Worker.step, step, *args, within=within)[0]

    @abstractmethod
    def release_members(self) -> list[Failure]:
        """End this generation of workers, whether or not a call failed: no member has a rank any more, and all that
        remain have left their process groups. Kills members that hang or do not leave in time; a member that merely
        raised remains. Returns the failures of the members lost in this generation."""

    @abstractmethod
    def hire_workers(self, count: int) -> None:
        """Start `count` more worker processes of the crew without waiting; they appear in `members` once ready."""

    def dismiss_members(self, numbers: Set[int]) -> None:  # noqa: B027  most kinds of crew need not
        """End the worker processes of members without a rank, whose nodes the cluster is about to take away anyway."""

    @abstractmethod
    def close(self) -> None:
        """End all worker processes in bounded time: by request, or by force after a failure. May be called again."""

    def __exit__(self, *_: object) -> None:
        """Close the crew: end all of its worker processes, when the block is left."""
        self.close()


def arguments_of_rank(args: Iterable[Any], rank: int) -> list[Any]:
    """Return the arguments of a `Crew.call_ranks` as `rank` gets them: each `ByRank` by its value there."""
    return [a[rank] if isinstance(a, ByRank) else a for a in args]


def format_call(method: str, args: Iterable[Any]) -> str:
    """Format a `Crew.call_ranks` for the user: step(3), or "..." for an argument of another type."""
    first = next(iter(args), "")
    return f"{method}({first if isinstance(first, str | int) else '...'})"


class Launcher(ABC):
    """Starts, observes and kills the processes of a crew, by member number.

    Attributes:
        can_hire: True if processes can be started after the initial ones.
        key: derives the members' tokens, "" for a fresh one; `prepare_launch` may set it.
        greeted: every member that has ever dialled in, as it introduced itself.
        lost: why the cluster is of no use any more; "" as long as it is.
    """

    can_hire = True
    lost = ""
    key = ""

    def __init__(self) -> None:
        """Initialise a launcher of worker processes; no member has dialled in to the driver yet."""
        self.greeted: dict[int, Member] = {}

    @abstractmethod
    def prepare_launch(self, job: Job, size: int) -> str:
        """Prepare to start `size` worker processes for `job`, and perhaps more later; return the host on which the
        driver is to listen, one that they can reach."""

    @abstractmethod
    def launch_workers(self, job: Job, numbers: Sequence[int], board: WorkerSwitchboard) -> None:
        """Start worker processes for the members `numbers`, each of which will dial the driver's switchboard `board`
        and serve its worker there. The first call names all initial members."""

    def clean_up_after_start(self) -> None:  # noqa: B027  most launchers need not know
        """Note that all initial worker processes are ready, so that things needed only to start them can be removed."""

    @abstractmethod
    def describe_exit(self, number: int, seconds: float) -> str | None:
        """Return a phrase on how worker process `number` ended; None if no end is known within `seconds`."""

    @abstractmethod
    def kill_worker(self, number: int) -> None:
        """Kill the worker process of member `number` at once; it may be stopped (SIGSTOP) or already gone."""

    @abstractmethod
    def end_workers(self, polite: bool) -> None:
        """End all worker processes: if `polite`, wait briefly for them to end by themselves; kill the rest."""

    def find_leaving_members(self, members: Mapping[int, Member]) -> Set[int]:
        """Return the numbers of `members` whose machines the cluster has announced to take away soon."""
        return frozenset()

    def log_path(self, job: Job, number: int) -> Path | None:
        """Return the path of the output file of member `number`'s worker process, None if it has none."""
        return job.log_path(number)
