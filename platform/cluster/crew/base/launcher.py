"""Interface of a launcher, a way to start the worker processes of a crew."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from platform.cluster.crew.base.failures import Member
from platform.cluster.crew.base.job import Job
from platform.cluster.wire.switchboard import Switchboard


class Launcher(ABC):
    """Starts, observes and kills the processes of a crew, by member number.

    Attributes:
        can_hire: True if processes can be started after the initial ones.
        key: derives the members' tokens, "" for a fresh one; `open` may set it.
        greeted: every member that has ever dialled in, as it introduced itself.
    """

    can_hire = True
    key = ""

    def __init__(self) -> None:
        """Initialise a launcher of worker processes; no member has dialled in to the driver yet."""
        self.greeted: dict[int, Member] = {}

    @abstractmethod
    def open(self, job: Job, size: int) -> str:
        """Prepare to start `size` worker processes for `job`, and perhaps more later; return the host on which the
        driver is to listen, one that they can reach."""

    @abstractmethod
    def launch(self, job: Job, numbers: Sequence[int], board: Switchboard) -> None:
        """Start worker processes for the members `numbers`, each of which will dial the driver's switchboard `board`
        and serve its worker there. The first call names all initial members."""

    def ready(self) -> None:  # noqa: B027  most launchers need not know
        """Note that all initial worker processes are ready, so that things needed only to start them can be removed."""

    @abstractmethod
    def ended(self, number: int, seconds: float) -> str | None:
        """Return a phrase on how worker process `number` ended; None if no end is known within `seconds`."""

    @abstractmethod
    def kill(self, number: int) -> None:
        """Kill the worker process of member `number` at once; it may be stopped (SIGSTOP) or already gone."""

    @abstractmethod
    def dismiss(self, polite: bool) -> None:
        """End all worker processes: if `polite`, wait briefly for them to end by themselves; kill the rest."""

    def leaving(self, members: Mapping[int, Member]) -> Set[int]:
        """Return the numbers of `members` whose machines the cluster has announced to take away soon."""
        return frozenset()

    def log(self, job: Job, number: int) -> Path | None:
        """Return the path of the output file of member `number`'s worker process, None if it has none."""
        return job.log(number)
