"""Roster of a crew's member processes: started, dialled in, ready, ended."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path
from time import monotonic

from platform.boundary.terminal import phase
from platform.cluster.crew.base import rendezvous
from platform.cluster.crew.base.failures import Failure, Member, WorkerFailed
from platform.cluster.crew.base.job import START, Job
from platform.cluster.crew.base.launcher import Launcher
from platform.cluster.wire.channel import encode
from platform.cluster.wire.messages import Answer, Hello, Raised, Said
from platform.cluster.wire.switchboard import Switchboard

_CUT_OFF = "its connection is closed"
_ENDING_SECONDS = 2.0  # for a process to end after its connection has closed
_LOOK_SECONDS = 0.1  # interval of checks on processes that have not dialled in


class Roster:
    """Tracks the worker processes of a crew by member number, and carries messages to and from them.

    Attributes:
        ready: members that are alive and ready.
        starting: numbers of the members that were started and are not ready yet.
        deaths: how members died that were starting or ready.
        unstarted: failures of members that never got ready.
        came: when the first member dialled in, a reading of the monotonic clock.
    """

    def __init__(self, launcher: Launcher, job: Job):
        """Initialise the roster of a crew whose worker processes `launcher` starts for `job`; none is started yet."""
        self.job, self._launcher = job, launcher
        self.ready: dict[int, Member] = {}
        self.starting: set[int] = set()
        self.deaths: dict[int, str] = {}
        self.unstarted: list[Failure] = []
        self._greeted = launcher.greeted
        self.came: float | None = None
        self._hired = 0
        self._looked = 0.0
        self._opened = ExitStack()

    def start(self, size: int) -> None:
        """Open the driver's switchboard, start `size` worker processes, and wait until all of them are ready. Raises
        WorkerFailed if one of them dies or fails to construct its worker."""
        with phase("starting workers", size, "workers", lambda: (self._hired - len(self.starting), size)):
            self.host = self._launcher.open(self.job, size)
            self.board = self._opened.enter_context(closing(Switchboard(self.host, self._launcher.key)))
            self.hire(size)
            rendezvous.preload()
            while self.starting:
                self.poll(_LOOK_SECONDS)
                if self.unstarted:
                    raise WorkerFailed(self.unstarted)
            self._launcher.ready()

    def hire(self, count: int) -> None:
        """Start `count` more worker processes, under new member numbers, without waiting until they are ready."""
        numbers = range(self._hired, self._hired + count)
        self._hired += count
        self.starting.update(numbers)
        self.board.expect(numbers)
        self._launcher.launch(self.job, numbers, self.board)

    def send(self, numbers: Collection[int], message: object) -> None:
        """Send one message from the driver to the workers `numbers`, encoded once for all."""
        if numbers:
            frame = encode(message)
            for number in numbers:
                self.board.send(number, frame)

    def poll(self, timeout: float) -> list[tuple[int, Said]]:
        """Return the messages that the crew's members have sent, with their numbers, waiting at most `timeout` seconds
        for any.

        Also records the members that dial in, get ready or die.
        """
        said: list[tuple[int, Said]] = []
        if self.starting:
            timeout = min(timeout, _LOOK_SECONDS)
        deadline = monotonic() + _ENDING_SECONDS
        for number, message in self.board.poll(max(0.0, timeout)):
            match message:
                case None:
                    self.bury(number, self._launcher.ended(number, max(0.0, deadline - monotonic())))
                case Hello():
                    self.came = self.came or monotonic()
                    self._greeted[number] = Member(number, message.node, message.pid, tuple(message.tiers))
                case Answer(answer=call) | Raised(answer=call) if call == START:
                    self._book_start(number, message)
                case _:
                    said.append((number, message))
        if self.starting and monotonic() > self._looked + _LOOK_SECONDS:
            for number in self.starting - self._greeted.keys():
                if cause := self._launcher.ended(number, 0.0):
                    self.bury(number, cause)
            self._looked = monotonic()
        return said

    def _book_start(self, number: int, message: Said) -> None:
        """Record that a starting member is ready or, if `message` is Raised, that constructing its worker failed."""
        self.starting.discard(number)
        if isinstance(message, Raised):
            self._book_unstarted(number, "failed", message.error)
            self.dispose(number)
        else:
            self.ready[number] = self._greeted[number]

    def bury(self, number: int, cause: str | None) -> None:
        """Record that a member's process is dead, of `cause` if known; close its connection and kill the process."""
        self.deaths[number] = cause or _CUT_OFF
        if number in self.starting:
            self.starting.remove(number)
            self._book_unstarted(number, "died", self.deaths[number])
        self.dispose(number)

    def _book_unstarted(self, number: int, kind: str, cause: str) -> None:
        """Record the failure of a worker process that never got ready. `kind`: died | failed."""
        failure = Failure(self.member(number), kind, "start()", cause, name=f"worker{number}", log=self.log(number))
        self.unstarted.append(failure)

    def dispose(self, number: int) -> None:
        """Close the driver's connection to a worker and kill the worker's process; it is no longer in `ready`."""
        self.board.hang_up(number)
        self._launcher.kill(number)
        self.ready.pop(number, None)

    def member(self, number: int) -> Member:
        """Return the worker process of this number, alive or not; with node "" and process id 0 if never dialled in."""
        return self._greeted.get(number, Member(number, "", 0))

    def log(self, number: int) -> Path | None:
        """Return the path of the output file of member `number`'s worker process, None if it has none."""
        return self._launcher.log(self.job, number)

    def close(self, polite: bool) -> None:
        """Close all connections to a crew's workers, which ends idle ones; end all processes by `Launcher.dismiss`."""
        self._opened.close()
        self._launcher.dismiss(polite)
