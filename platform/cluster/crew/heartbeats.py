"""Heartbeats of workers, as the driver sees them: the call under way, and who hangs in it.

`CallMonitor` asks for heartbeats once a call takes long, and now and then; a thread of the driver writes it to
live.json (`platform.cluster.control.pulse`). `HangWatch` detects members that hang in a call: a hung process does not
report itself, so the driver asks for heartbeats (beats) and judges by the answers."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from platform.boundary.terminal import show_phase
from platform.cluster.crew.failures import Member
from platform.monitor.journal import MOST, SeenLink, SeenWorker, kernel_state
from platform.monitor.verdict.evidence import format_activities
from platform.runtime.progress import PROGRESS, Activity, TcpLink

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


class _LinkCounters(NamedTuple):
    """Counters of a worker's link as its last heartbeat had them; its last speeds, and the best `rate`."""

    link: TcpLink
    speeds: tuple[float, ...] = ()
    best: float | None = None

    @property
    def rate(self) -> float | None:
        """Return the speed of a crew's link by recent heartbeats, in bytes per second, None if it is not known."""
        return median(self.speeds) if self.speeds else None

    def update_counters(self, link: TcpLink) -> _LinkCounters:
        """Return the counters of a worker's link after a later heartbeat."""
        if link.sent < self.link.sent or link.busy < self.link.busy:  # other connections than before
            return _LinkCounters(link, (), self.best)
        sent, busy = link.sent - self.link.sent, link.busy - self.link.busy
        if busy < _BUSY_SECONDS or sent < _SENT_BYTES:
            counted_on = self.link._replace(queued=link.queued, quiet=link.quiet)  # a long transfer is under way
            return self._replace(link=counted_on if link.queued else link)
        updated = self._replace(link=link, speeds=(*self.speeds, sent / busy)[-_SPEEDS:])
        return updated._replace(best=max(self.best or 0.0, updated.rate or 0.0))


class CallMonitor:
    """Sees the seated workers of a crew for the driver. One thread calls `begin_call` and `note_heartbeat`, others may
    read meanwhile, since each of its values is replaced as a whole or copied in one step.

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
        self._counted: dict[tuple[int, str, str], _LinkCounters] = {}  # by member, its address, the other address
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
        self._shown = self._show_call_progress(method) if method in _SHOWN and not known else nullcontext()
        self._steps = method == "step" or (self._steps and doing != _OTHERWISE)

    def _show_call_progress(self, method: str) -> AbstractContextManager[Any]:
        """Return the context in which a user sees how many workers have answered the call of a method."""
        workers = len(self.pending)
        if method in _FAR:
            return show_phase(_SHOWN[method], unit=_FAR[method], look=partial(self._progress_of_call, method))
        if workers < 2:
            return show_phase(_SHOWN[method])
        return show_phase(_SHOWN[method], workers, "workers", lambda: (workers - len(self.pending), workers))

    def _progress_of_call(self, method: str) -> tuple[float, float]:
        """Return how much of a call of a method is done, and of how much: bytes of all, or sequences of each."""
        beats = [beat for beat, _ in list(self._beats.values()) if beat.total]
        beats = beats or [PROGRESS.current_activity()]  # of this process
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

    def workers_to_ask(self, pending: Collection[int], now: float) -> list[int]:
        """Return which `pending` workers of the call to ask for a heartbeat at `now`; [] if it is too early."""
        if now < self._next and now < self._round:
            return []
        pause = max(LOOK_SECONDS, len(pending) / WORKERS_A_SECOND)
        self._next, self._round = now + pause, now + max(ROUND_SECONDS, pause)
        asked = [number for number in pending if number not in self._asked]
        self._asked = self._asked | dict.fromkeys(asked, now)
        return asked

    def seconds_to_wait(self, now: float) -> float:
        """Return the seconds from `now` until workers in the call are to be asked next."""
        return max(0.0, min(self._next, self._round) - now)

    def note_heartbeat(self, number: int, beat: Activity, now: float, current: bool) -> None:
        """Record the heartbeat of worker `number` at `now`; unless it is `current`, its links alone count."""
        if current:
            self._asked.pop(number, None)
            self._beats[number] = beat, now
        for link in beat.links:
            link_key = number, link.here, link.there
            self._counted[link_key] = self._counted.get(link_key, _LinkCounters(link)).update_counters(link)

    def list_workers(self) -> list[SeenWorker]:
        """Return the sight of the seated workers in the call under way: silent ones first, then ones at work, then ones
        that wait for others, then ones that have answered."""
        now, beats, asked, pending = monotonic(), dict(self._beats), dict(self._asked), set(self.pending)
        sights = []
        for number, rank in self._ranks.items():
            member, (beat, heard) = self._members.get(number), beats.get(number, (None, now))
            owes = now - asked[number] if number in asked and number in pending else None
            node = member.node if member else ""
            process = _read_process_state(member) if owes is not None else ""
            age = now - heard
            activity = beat if number in pending else None
            sights.append(SeenWorker(rank, number, node, number not in pending, owes, process, age, activity))
        return sorted(sights, key=_suspicion_sort_key)[:MOST]

    def list_links(self) -> list[SeenLink]:
        """Return the links of the seated workers: the longest without an acknowledgement first, then the slowest."""
        links = [
            SeenLink(member.node, c.link.here, c.link.there, c.rate, c.best, c.link.queued, c.link.quiet)
            for (number, _, _), c in list(self._counted.items())
            if (member := self._members.get(number)) and number in self._ranks
        ]
        return sorted(links, key=lambda link: (-link.quiet, link.rate is None, link.rate or 0.0))[:MOST]

    def describe_other_workers(self, culprit: int) -> list[str]:
        """Return lines on the doings of all workers but `culprit` in the call under way, with their ranks."""
        others = [n for n in self._beats if n != culprit and n in self.pending and n in self._ranks]
        return format_activities((self._ranks[number], self._beats[number][0]) for number in others)

    def last_stack(self, number: int) -> list[str]:
        """Return where worker `number` stood still by its last heartbeat, frames with the innermost last."""
        return self._beats[number][0].stack if number in self._beats else []


NOTHING = CallMonitor()


def _suspicion_sort_key(worker: SeenWorker) -> tuple[int, int]:
    """Order a crew's workers by how much their heartbeats explain of a standstill, the most first."""
    beat = worker.activity
    kind = 3 if worker.answered else 0 if worker.owes is not None else 1 if beat and not beat.waiting else 2
    return kind, worker.rank


def _read_process_state(member: Member | None) -> str:
    """Return the state of a member's process by the kernel's letter, T if it is stopped; "" on another machine."""
    is_local = member is not None and member.pid and member.host == socket.gethostname()
    return kernel_state(member.pid) if member and is_local else ""


SOON = 0.98  # fraction of `within` after which hung members are looked for, so that the finding is in time
NEARLY = 0.9  # fraction of `within` that counts as hung: a hang from soon after the start is found at the deadline
BEAT_SECONDS = 1.0  # allowed for the answer to a beat once the call is late; also sets the interval of requests
CALM_SECONDS = 10.0  # at least, before a member that is at work hangs, or a silence that may be the driver's own
LONGER = 5 / 3  # times `within`, likewise
FIRST_STEP_SECONDS = 120.0  # for a first step, which allocates buffers and opens connections, or to prepare otherwise
BUSY = 0.2  # share of its time from which a member is at work, and not blocked
SLOWER = 3.0  # times the slowest answer to a beat that another one may take


class HangWatch:
    """Detects members that hang in one call of the driver: says which members to ask for a heartbeat (beat), and which
    ones hang. `within`: seconds without progress after which a member that is blocked hangs; one that is at work, or
    starved of processors, after LONGER times that and at least CALM_SECONDS, one that prepares something for the
    first time after FIRST_STEP_SECONDS. `silence`: seconds without any answer
    after which it hangs, however long the call may take. All times are readings of one clock, which stands for as long
    as the driver itself does not run (stopped, or its machine asleep): time in which it did not listen counts as no
    member's silence.
    """

    def __init__(self, within: float, start: float, silence: float = inf):
        """Begin to watch the workers in a call of the driver that starts at time `start`, to find hung ones. `within`:
        seconds without progress after which a blocked member hangs; `silence`: seconds without any heartbeat after
        which one does."""
        self._within, self._deadline, self._silence = within, start + SOON * within, silence
        self._calm = max(CALM_SECONDS, LONGER * within)
        self._next = start + min(within, silence) - BEAT_SECONDS
        self._asked: dict[int, float] = {}  # members that owe a beat, and since when; oldest first
        self._moved = start  # time of the last known progress of any member
        self._beats: dict[int, Activity] = {}
        self._heard, self._slowest = start, 0.0  # when any member said something last; seconds of the slowest beat
        self._due = inf  # when the driver is to look again, at the latest

    @property
    def silent_workers(self) -> set[int]:
        """Return the workers that owe an answer to a request for a heartbeat."""
        return set(self._asked)

    def workers_to_ask(self, pending: Collection[int], now: float) -> list[int]:
        """Return which `pending` workers of a call to ask for a heartbeat at time `now`; [] if it is too early."""
        if now < self._next:
            return []
        self._next = now + (BEAT_SECONDS if now >= self._deadline else BEAT_SECONDS / 2)
        asked = [number for number in pending if number not in self._asked]
        self._asked.update(dict.fromkeys(asked, now))
        return asked

    def note_heartbeat(self, number: int, beat: Activity, now: float) -> None:
        """Record the heartbeat `beat` of worker `number`, received at time `now`, and the progress that it shows."""
        self._excuse_driver_pause(now)
        self._heard, self._slowest = now, max(self._slowest, now - self._asked.pop(number, now))
        self._beats[number] = beat
        self._moved = max(self._moved, now - beat.seconds)

    def note_answer(self, now: float) -> None:
        """Record that a worker answered the call at `now`, which is progress: ranks that waited for it will move."""
        self._excuse_driver_pause(now)
        self._moved = self._heard = now

    def seconds_to_wait(self, now: float) -> float:
        """Return the seconds from `now` to the next heartbeat request to workers or the deadline: the longest wait."""
        due = min(self._next, self._deadline) if now < self._deadline else self._next
        self._due = max(now, due)
        return self._due - now

    def _excuse_driver_pause(self, now: float) -> None:
        """Shift the times by which hung workers are found by the time in which the driver itself was stopped, before
        `now`."""
        if self._due == inf:  # it has not waited yet
            return
        away, self._due = now - self._due, now  # nothing more is waited for until `seconds_to_wait` is asked again
        if away < BEAT_SECONDS:
            return
        self._next, self._deadline = self._next + away, self._deadline + away
        self._moved, self._heard = self._moved + away, self._heard + away
        self._asked = {number: asked + away for number, asked in self._asked.items()}

    def find_hung(self, pending: Collection[int], now: float) -> tuple[dict[int, str], set[int]]:
        """Return which of `pending`, the members that have not answered the call, hang at time `now`, each with a
        description, and the subset of them to blame: none if all pending members have waited for each other for
        `within` seconds, which is how a lost message looks.

        A member hangs if it does not answer a beat (the process is stopped, or something holds the GIL) for much longer
        than others take, or if it is where it was `within` seconds ago, is blocked, and is not waiting for other ranks.
        A slow member that moves does not hang, nor does one that gets no processor. Where all wait, some for their
        devices, those hang whose device is at work while another rank waits for others.
        """
        self._excuse_driver_pause(now)
        late = now >= self._deadline
        patience = max(BEAT_SECONDS if late else self._silence, SLOWER * self._slowest)
        if now - next(iter(self._asked.values()), inf) >= patience:  # the oldest alone, to skip a pass over all members
            # Where nobody at all is heard, it may be this machine that stood still.
            since = {number: asked for number, asked in self._asked.items() if number in pending}
            alone = max(patience, CALM_SECONDS)
            owed = {n: now - asked for n, asked in since.items() if asked <= self._heard or now - asked >= alone}
            silent = {n: f"no sign of life for {seconds:.1f} s" for n, seconds in owed.items() if seconds >= patience}
            if silent:
                return silent, set(silent)
        if not late or any(number in self._asked or number not in self._beats for number in pending):
            return {}, set()
        beats = {number: self._beats[number] for number in pending}
        busy = {number: beat for number, beat in beats.items() if not beat.waiting}
        in_calls = ((n, b) for n, b in busy.items() if b.call)
        stuck = {n: _describe_activity(b) for n, b in in_calls if b.seconds >= NEARLY * self._hang_seconds(b)}
        if stuck:
            return stuck, set(stuck)
        if not busy and now - self._moved >= self._within:
            working = {n: _describe_activity(b) for n, b in beats.items() if b.device and not b.device_waits}
            if 0 < len(working) < len(beats):
                return working, set(working)
            if now - self._moved >= self._calm:
                places = {n: _describe_activity(b) for n, b in beats.items()}
                return {n: f"all pending ranks wait for each other: {place}" for n, place in places.items()}, set()
        return {}, set()

    def _hang_seconds(self, beat: Activity) -> float:
        """Return the seconds after which a worker with this heartbeat counts as hung, unless it waits for others."""
        if beat.preparing:  # by other processes or threads too, while its main thread is idle
            return max(self._calm, FIRST_STEP_SECONDS)
        return self._within if beat.busy < BUSY else self._calm


def _describe_activity(beat: Activity) -> str:
    """Describe in a line where a worker's heartbeat shows it to be: the seconds since it moved, the call and the
    section of code, and where its device is if it waits for that."""
    device = f" of its device, in {beat.device} after {beat.completed} waits for others" if beat.device else ""
    return f"{beat.seconds:.1f} s at {beat.call}{beat.section and ': '}{beat.section}{device}"
