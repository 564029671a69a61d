"""Life of a crew's member processes: started, dialled in, ready, ended. Kinds of crew differ only in how they start,
observe and kill a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any

from platform.cluster.crew.base.failures import Failure, Member, WorkerFailed
from platform.cluster.crew.base.job import START, Job
from platform.cluster.wire.switchboard import Switchboard

CUT_OFF = "its connection is closed"
_ENDING_SECONDS = 2.0  # for a process to end after its connection has closed
_LOOK_SECONDS = 0.1  # interval of checks on processes that have not dialled in


class Members(ABC):
    """Tracks the processes of a crew by member number. `unstarted`: failures of those that never got ready."""

    can_hire = True
    _key = ""  # derives the members' tokens; `_open` may set it. "": a fresh one

    def __init__(self, job: Job, spares: int):
        self.job, self._wanted = job, job.world_size + spares
        self.unstarted: list[Failure] = []
        self._members: dict[int, Member] = {}  # ready, alive
        self._starting: set[int] = set()
        self._greeted: dict[int, Member] = {}  # every member that has ever dialled in
        self._hired = 0
        self._looked = 0.0
        self._opened = ExitStack()

    @abstractmethod
    def _open(self) -> str:
        """Prepare to start processes; return the host to listen on, which they can reach."""

    @abstractmethod
    def _launch(self, numbers: Sequence[int]) -> None:
        """Start processes that `serve` these members at `_board.address`. The first call names all initial members."""

    @abstractmethod
    def _ended(self, number: int, seconds: float) -> str | None:
        """Return how the process of a member ended, or None if it has not ended within `seconds`."""

    @abstractmethod
    def _kill(self, number: int) -> None:
        """Kill the process of a member at once; it may be stopped (SIGSTOP) or already gone."""

    @abstractmethod
    def _dismiss(self, polite: bool) -> None:
        """Wait briefly for all processes to end by themselves if `polite`; kill the rest."""

    def _log(self, number: int) -> Path | None:
        return self.job.log(number)

    def _start(self) -> None:
        """Open the switchboard and wait until the initial members are ready. Raises WorkerFailed if one is not."""
        self._host = self._open()
        self._board = self._opened.enter_context(closing(Switchboard(self._host, self._key)))
        self.hire(self._wanted)
        while self._starting:
            self._events(_LOOK_SECONDS)
            if self.unstarted:
                raise WorkerFailed(self.unstarted)

    @property
    def members(self) -> Mapping[int, Member]:
        self._events(0.0)
        return MappingProxyType(dict(sorted(self._members.items())))

    @property
    def starting(self) -> frozenset[int]:
        self._events(0.0)
        return frozenset(self._starting)

    def hire(self, count: int) -> None:
        numbers = range(self._hired, self._hired + count)
        self._hired += count
        self._starting.update(numbers)
        self._board.expect(numbers)
        self._launch(numbers)

    def _events(self, timeout: float) -> list[tuple[int, dict[str, Any]]]:
        """Return the members' messages, waiting at most `timeout` seconds for any.

        Also records the members that dial in, get ready or die.
        """
        said: list[tuple[int, dict[str, Any]]] = []
        if self._starting:
            timeout = min(timeout, _LOOK_SECONDS)
        deadline = monotonic() + _ENDING_SECONDS
        for number, message in self._board.poll(max(0.0, timeout)):
            if message is None:
                self._book_death(number, self._ended(number, max(0.0, deadline - monotonic())))
            elif "hello" in message:
                self._greeted[number] = Member(number, message["hello"]["node"], message["hello"]["pid"])
            elif message.get("answer") == START:
                self._book_start(number, message.get("error"))
            else:
                said.append((number, message))
        if self._starting and monotonic() > self._looked + _LOOK_SECONDS:
            for number in self._starting - self._greeted.keys():
                if cause := self._ended(number, 0.0):
                    self._book_death(number, cause)
            self._looked = monotonic()
        return said

    def _book_start(self, number: int, error: str | None) -> None:
        if error is None:
            self._members[number] = self._greeted[number]
        else:
            self._book_unstarted(number, "failed", error)
            self._dispose(number)
        self._starting.discard(number)

    def _book_death(self, number: int, cause: str | None) -> None:
        if number in self._starting:
            self._starting.remove(number)
            self._book_unstarted(number, "died", cause or CUT_OFF)
        self._dispose(number)

    def _book_unstarted(self, number: int, kind: str, cause: str) -> None:
        member = self._greeted.get(number, Member(number, "", 0))
        self.unstarted.append(Failure(member, kind, "start()", cause, name=f"worker{number}", log=self._log(number)))

    def _dispose(self, number: int) -> None:
        self._board.hang_up(number)
        self._kill(number)
        self._members.pop(number, None)
