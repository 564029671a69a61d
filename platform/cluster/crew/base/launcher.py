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
        self.greeted: dict[int, Member] = {}

    @abstractmethod
    def open(self, job: Job, size: int) -> str:
        """Prepare to start `size` processes and perhaps more; return the host to listen on, which they can reach."""

    @abstractmethod
    def launch(self, job: Job, numbers: Sequence[int], board: Switchboard) -> None:
        """Start processes that `serve` these members at `board`. The first call names all initial members."""

    def ready(self) -> None:  # noqa: B027  most launchers need not know
        """Take note that all initial members are ready."""

    @abstractmethod
    def ended(self, number: int, seconds: float) -> str | None:
        """Return how the process of a member ended, or None if it has not ended within `seconds`."""

    @abstractmethod
    def kill(self, number: int) -> None:
        """Kill the process of a member at once; it may be stopped (SIGSTOP) or already gone."""

    @abstractmethod
    def dismiss(self, polite: bool) -> None:
        """Wait briefly for all processes to end by themselves if `polite`; kill the rest."""

    def leaving(self, members: Mapping[int, Member]) -> Set[int]:
        """Return the numbers of those `members` whose nodes are about to be taken away."""
        return frozenset()

    def log(self, job: Job, number: int) -> Path | None:
        """Return the file with the output of a member, None if there is none."""
        return job.log(number)
