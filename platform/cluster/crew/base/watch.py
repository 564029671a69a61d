"""Detection of members that hang in a call. A hung process does not report itself, so the driver asks for heartbeats
(beats) and judges by the answers.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from platform.parallel.communicator.progress import Activity

SOON = 0.98  # fraction of `within` after which hung members are looked for, so that the finding is in time
NEARLY = 0.9  # fraction of `within` that counts as hung: a hang from soon after the start is found at the deadline
BEAT_SECONDS = 1.0  # allowed for the answer to a beat once the call is late; also sets the interval of requests
CALM_SECONDS = 10.0  # at least, before a member that is at work hangs, or a silence that may be the driver's own
LONGER = 5 / 3  # times `within`, likewise
FIRST_STEP_SECONDS = 120.0  # for a first step, which allocates buffers and opens connections, or to prepare otherwise
BUSY = 0.2  # share of its time from which a member is at work, and not blocked
SLOWER = 3.0  # times the slowest answer to a beat that another one may take


class Watch:
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
    def silent(self) -> set[int]:
        """Return the workers that owe an answer to a request for a heartbeat."""
        return set(self._asked)

    def ask(self, pending: Collection[int], now: float) -> list[int]:
        """Return which `pending` workers of a call to ask for a heartbeat at time `now`; [] if it is too early."""
        if now < self._next:
            return []
        self._next = now + (BEAT_SECONDS if now >= self._deadline else BEAT_SECONDS / 2)
        asked = [number for number in pending if number not in self._asked]
        self._asked.update(dict.fromkeys(asked, now))
        return asked

    def heard(self, number: int, beat: Activity, now: float) -> None:
        """Record the heartbeat `beat` of worker `number`, received at time `now`, and the progress that it shows."""
        self._excuse(now)
        self._heard, self._slowest = now, max(self._slowest, now - self._asked.pop(number, now))
        self._beats[number] = beat
        self._moved = max(self._moved, now - beat.seconds)

    def answered(self, now: float) -> None:
        """Record that a worker answered the call at `now`, which is progress: ranks that waited for it will move."""
        self._excuse(now)
        self._moved = self._heard = now

    def patience(self, now: float) -> float:
        """Return the seconds from `now` to the next heartbeat request to workers or the deadline: the longest wait."""
        due = min(self._next, self._deadline) if now < self._deadline else self._next
        self._due = max(now, due)
        return self._due - now

    def _excuse(self, now: float) -> None:
        """Shift the times by which hung workers are found by the time in which the driver itself was stopped, before
        `now`."""
        if self._due == inf:  # it has not waited yet
            return
        away, self._due = now - self._due, now  # nothing more is waited for until `patience` is asked again
        if away < BEAT_SECONDS:
            return
        self._next, self._deadline = self._next + away, self._deadline + away
        self._moved, self._heard = self._moved + away, self._heard + away
        self._asked = {number: asked + away for number, asked in self._asked.items()}

    def hung(self, pending: Collection[int], now: float) -> tuple[dict[int, str], set[int]]:
        """Return which of `pending`, the members that have not answered the call, hang at time `now`, each with a
        description, and the subset of them to blame: none if all pending members have waited for each other for
        `within` seconds, which is how a lost message looks.

        A member hangs if it does not answer a beat (the process is stopped, or something holds the GIL) for much longer
        than others take, or if it is where it was `within` seconds ago, is blocked, and is not waiting for other ranks.
        A slow member that moves does not hang, nor does one that gets no processor. Where all wait, some for their
        devices, those hang whose device is at work while another rank waits for others.
        """
        self._excuse(now)
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
        stuck = {n: _where(b) for n, b in busy.items() if b.call and b.seconds >= NEARLY * self._bound(b)}
        if stuck:
            return stuck, set(stuck)
        if not busy and now - self._moved >= self._within:
            working = {n: _where(b) for n, b in beats.items() if b.device and not b.device_waits}
            if 0 < len(working) < len(beats):
                return working, set(working)
            if now - self._moved >= self._calm:
                return {n: f"all pending ranks wait for each other: {_where(b)}" for n, b in beats.items()}, set()
        return {}, set()

    def _bound(self, beat: Activity) -> float:
        """Return the seconds after which a worker with this heartbeat counts as hung, unless it waits for others."""
        if beat.preparing:  # by other processes or threads too, while its main thread is idle
            return max(self._calm, FIRST_STEP_SECONDS)
        return self._within if beat.busy < BUSY else self._calm


def _where(beat: Activity) -> str:
    """Describe in a line where a worker's heartbeat shows it to be: the seconds since it moved, the call and the
    section of code, and where its device is if it waits for that."""
    device = f" of its device, in {beat.device} after {beat.completed} waits for others" if beat.device else ""
    return f"{beat.seconds:.1f} s at {beat.call}{beat.section and ': '}{beat.section}{device}"
