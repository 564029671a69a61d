"""Outlook of the driver on its workers: the call under way, and their heartbeats, which it asks for once a call takes
long, and now and then. A thread of the driver writes it to live.json (`platform.cluster.control.pulse`)."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from platform.boundary.terminal import phase
from platform.cluster.crew.base.failures import Member
from platform.monitor.records.live import MOST, SeenLink, SeenWorker, kernel_state
from platform.monitor.verdict.telling import doings_text
from platform.parallel.communicator.progress import PROGRESS, Activity
from platform.parallel.communicator.sockets import TcpLink

LOOK_SECONDS = 2.0  # of a call, after which its workers are asked where they are, and again after as long
ROUND_SECONDS = 10.0  # between two questions at least, for the speed of links while all goes well
WORKERS_A_SECOND = 500  # are asked at most
_BUSY_SECONDS = 0.05  # of a link between two heartbeats, from which on its speed is known
_SENT_BYTES = 1 << 18  # likewise: fewer show how long a message takes, and not the speed
_SPEEDS = 3  # of a link, whose median is its rate
_DOING = {  # method of a call -> state of the run meanwhile
    "evaluate": "evaluating",
    "hold": "saving",
    "snapshot": "saving",
    "write": "saving",
    "written": "saving",
    "step": "training",
    "lead": "training",
    "leave": "releasing",
}
_OTHERWISE = "forming"
_SHOWN = {  # method of a call that may take long -> what a user sees meanwhile; of steps the first of a generation
    "begin": "reading the initial weights",
    "build": "building the model",
    "continue_texts": "writing text",
    "evaluate": "evaluating",
    "examine": "examining the workers",
    "form": "joining the workers",
    "gather": "gathering the state from memory",
    "prove": "comparing the workers' files",
    "recover": "recovering the state from memory",
    "rehearse": "compiling",
    "restore": "restoring the checkpoint",
    "score_texts": "scoring text",
    "snapshot": "copying the state to host memory",
    "step": "the first step",
}
_FAR = {"evaluate": "sequences", "recover": "B", "restore": "B"}  # method of a call that says how far it is -> its unit


class _Counted(NamedTuple):
    """Counters of a worker's link as its last heartbeat had them; its last speeds, and the best `rate`."""

    link: TcpLink
    speeds: tuple[float, ...] = ()
    best: float | None = None

    @property
    def rate(self) -> float | None:
        """Return the speed of the link lately, in bytes per second, None if it is not known."""
        return median(self.speeds) if self.speeds else None

    def after(self, link: TcpLink) -> _Counted:
        """Return the counters of a worker's link after a later heartbeat."""
        if link.sent < self.link.sent or link.busy < self.link.busy:  # other connections than before
            return _Counted(link, (), self.best)
        sent, busy = link.sent - self.link.sent, link.busy - self.link.busy
        if busy < _BUSY_SECONDS or sent < _SENT_BYTES:
            counted_on = self.link._replace(queued=link.queued, quiet=link.quiet)  # a long transfer is under way
            return self._replace(link=counted_on if link.queued else link)
        found = self._replace(link=link, speeds=(*self.speeds, sent / busy)[-_SPEEDS:])
        return found._replace(best=max(self.best or 0.0, found.rate or 0.0))


class Outlook:
    """Sees the seated workers of a crew for the driver. One thread calls `begin_call` and `heard`, others may read
    meanwhile, since each of its values is replaced as a whole or copied in one step.

    Attributes:
        doing: state of the run, as the calls show it, with the time since when.
        call: text of the call under way with the time of its begin, ("", 0) between calls. Times are monotonic.
        pending: numbers of the members that have yet to answer it.
    """

    def __init__(self) -> None:
        """Start the outlook of a driver that has called no worker yet."""
        self.doing, self.call = (_OTHERWISE, monotonic()), ("", 0.0)
        self._ranks: Mapping[int, int] = {}  # member number -> rank
        self._members: Mapping[int, Member] = {}
        self.pending: Collection[int] = ()
        self._beats: dict[int, tuple[Activity, float]] = {}  # by member number, of this call
        self._asked: dict[int, float] = {}  # members that owe a heartbeat, since when
        self._next = self._round = 0.0  # when to ask again in this call; when to ask even if it is young
        self._counted: dict[tuple[int, str, str], _Counted] = {}  # by member, its address, the other address
        self._steps = False  # the call before was a step
        self._shown: AbstractContextManager[Any] = nullcontext()

    def begin_call(
        self, method: str, call: str, ranks: Mapping[int, int], members: Mapping[int, Member], pending: Collection[int]
    ) -> None:
        """Note that the driver begins a call of `method`, which the members in `pending`, a set that shrinks, have yet
        to answer. `ranks`: rank of each seated member."""
        now, doing = monotonic(), _DOING.get(method, _OTHERWISE)
        if doing != self.doing[0]:
            self.doing = doing, now
        self._beats, self._asked, self.pending = {}, {}, pending
        self._ranks, self._members = ranks, members
        self._next = now + LOOK_SECONDS
        self.call = call, now
        known = method == "step" and self._steps
        self._shown = self._phase_of(method) if method in _SHOWN and not known else nullcontext()
        self._steps = method == "step" or (self._steps and doing != _OTHERWISE)

    def _phase_of(self, method: str) -> AbstractContextManager[Any]:
        """Return the context in which a user sees how many workers have answered the call of a method."""
        workers = len(self.pending)
        if method in _FAR:
            return phase(_SHOWN[method], unit=_FAR[method], look=partial(self._far, method))
        if workers < 2:
            return phase(_SHOWN[method])
        return phase(_SHOWN[method], workers, "workers", lambda: (workers - len(self.pending), workers))

    def _far(self, method: str) -> tuple[float, float]:
        """Return how much of a call of a method is done, and of how much: bytes of all, or sequences of each."""
        beats = [beat for beat, _ in list(self._beats.values()) if beat.total] or [PROGRESS.here()]  # of this process
        done, total = sum(beat.done for beat in beats), sum(beat.total for beat in beats)
        each = 1 if _FAR[method] == "B" else len(beats)
        return done / each, total / each

    def __enter__(self) -> None:
        """Leave the outlook as `begin_call` has made it: within the block the call is under way."""
        self._shown.__enter__()

    def __exit__(self, *_: object) -> None:
        """Note that the call of the workers is over."""
        self._shown.__exit__(None, None, None)
        self.call, self.pending = ("", monotonic()), ()

    def ask(self, pending: Collection[int], now: float) -> list[int]:
        """Return which `pending` workers of the call to ask for a heartbeat at `now`; [] if it is too early."""
        if now < self._next and now < self._round:
            return []
        pause = max(LOOK_SECONDS, len(pending) / WORKERS_A_SECOND)
        self._next, self._round = now + pause, now + max(ROUND_SECONDS, pause)
        asked = [number for number in pending if number not in self._asked]
        self._asked = self._asked | dict.fromkeys(asked, now)
        return asked

    def patience(self, now: float) -> float:
        """Return the seconds from `now` until workers in the call are to be asked next."""
        return max(0.0, min(self._next, self._round) - now)

    def heard(self, number: int, beat: Activity, now: float, current: bool) -> None:
        """Record the heartbeat of worker `number` at `now`; unless it is `current`, its links alone count."""
        if current:
            self._asked.pop(number, None)
            self._beats[number] = beat, now
        for link in beat.links:
            place = number, link.here, link.there
            self._counted[place] = self._counted.get(place, _Counted(link)).after(link)

    def workers(self) -> list[SeenWorker]:
        """Return the sight of the seated workers in the call under way: silent ones first, then ones at work, then ones
        that wait for others, then ones that have answered."""
        now, beats, asked, pending = monotonic(), dict(self._beats), dict(self._asked), set(self.pending)
        found = []
        for number, rank in self._ranks.items():
            member, (beat, heard) = self._members.get(number), beats.get(number, (None, now))
            owes = now - asked[number] if number in asked and number in pending else None
            node = member.node if member else ""
            process = _process(member) if owes is not None else ""
            age = now - heard
            activity = beat if number in pending else None
            found.append(SeenWorker(rank, number, node, number not in pending, owes, process, age, activity))
        return sorted(found, key=_suspicion)[:MOST]

    def links(self) -> list[SeenLink]:
        """Return the links of the seated workers: the longest without an acknowledgement first, then the slowest."""
        found = [
            SeenLink(member.node, c.link.here, c.link.there, c.rate, c.best, c.link.queued, c.link.quiet)
            for (number, _, _), c in list(self._counted.items())
            if (member := self._members.get(number)) and number in self._ranks
        ]
        return sorted(found, key=lambda link: (-link.quiet, link.rate is None, link.rate or 0.0))[:MOST]

    def witnesses(self, culprit: int) -> list[str]:
        """Return lines on the doings of all workers but `culprit` in the call under way, with their ranks."""
        others = [n for n in self._beats if n != culprit and n in self.pending and n in self._ranks]
        return doings_text((self._ranks[number], self._beats[number][0]) for number in others)

    def stack(self, number: int) -> list[str]:
        """Return where worker `number` stood still by its last heartbeat, frames with the innermost last."""
        return self._beats[number][0].stack if number in self._beats else []


NOTHING = Outlook()


def _suspicion(worker: SeenWorker) -> tuple[int, int]:
    """Order the workers of a run by how much each explains of a standstill, the most first."""
    beat = worker.activity
    kind = 3 if worker.answered else 0 if worker.owes is not None else 1 if beat and not beat.waiting else 2
    return kind, worker.rank


def _process(member: Member | None) -> str:
    """Return the state of a member's process by the kernel's letter, T if it is stopped; "" on another machine."""
    here = member is not None and member.pid and member.host == socket.gethostname()
    return kernel_state(member.pid) if member and here else ""
