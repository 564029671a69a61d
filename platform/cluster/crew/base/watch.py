"""Who hangs in a call that is late: found by asking, since a hang never reports itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

SOON = 0.98  # of `within`: then who hangs is looked for, so that it is known in time
NEARLY = 0.9  # who hangs since shortly after the call began is found at its deadline, not a beat later
BEAT_SECONDS = 1.0  # for an answer; also how often is asked


class Watch:
    """Of one call. `within`: seconds after which a member that makes no progress hangs; `silence`: seconds after which
    one hangs that gives no sign of life, however long the call may take. All times: one clock's."""

    def __init__(self, within: float, start: float, silence: float = inf):
        self._within, self._deadline, self._silence = within, start + SOON * within, silence
        self._next = start + min(within, silence) - BEAT_SECONDS
        self._asked: dict[int, float] = {}  # members that owe an answer, since when: the longest first
        self._moved = start  # when anybody was last seen to go on
        self._beats: dict[int, Mapping[str, Any]] = {}

    def ask(self, pending: Collection[int], now: float) -> list[int]:
        """The members to ask for a beat now."""
        if now < self._next:
            return []
        self._next = now + BEAT_SECONDS / 2
        asked = [number for number in pending if number not in self._asked]
        self._asked.update(dict.fromkeys(asked, now))
        return asked

    def heard(self, number: int, beat: Mapping[str, Any], now: float) -> None:
        """A beat of `Progress.beat` has come."""
        self._asked.pop(number, None)
        self._beats[number] = beat
        self._moved = max(self._moved, now - beat["seconds"])

    def answered(self, now: float) -> None:
        """A member has answered the call: those that wait for it will move."""
        self._moved = now

    def patience(self, now: float) -> float:
        """Seconds until there is something to ask or to find."""
        due = min(self._next, self._deadline) if now < self._deadline else self._next
        return max(0.0, due - now)

    def hung(self, pending: Collection[int], now: float) -> tuple[dict[int, str], set[int]]:
        """The pending members that hang, with what is known of each; and those of them to blame: nobody, where all
        pending ones have waited for each other so long, which is how a lost message looks.

        A member hangs that does not answer (stopped, or something keeps Python's lock); or that is where it was
        `within` seconds ago and does not wait for other ranks. One that goes on, however slowly, does not.
        """
        late = now >= self._deadline
        patience = BEAT_SECONDS if late else self._silence
        if now - next(iter(self._asked.values()), inf) >= patience:  # not each time of all members
            owed = {number: now - since for number, since in self._asked.items() if number in pending}
            silent = {n: f"no sign of life for {seconds:.1f} s" for n, seconds in owed.items() if seconds >= patience}
            if silent:
                return silent, set(silent)
        if not late or any(number in self._asked or number not in self._beats for number in pending):
            return {}, set()
        beats = {number: self._beats[number] for number in pending}
        busy = {number: beat for number, beat in beats.items() if not beat["waiting"]}
        stuck = {n: _where(b) for n, b in busy.items() if b["call"] and b["seconds"] >= NEARLY * self._within}
        if stuck:
            return stuck, set(stuck)
        if not busy and now - self._moved >= self._within:
            return {n: f"all pending ranks wait for each other: {_where(beat)}" for n, beat in beats.items()}, set()
        return {}, set()


def _where(beat: Mapping[str, Any]) -> str:
    place = f"{beat['call']}: {beat['section']}" if beat["section"] else beat["call"]
    return f"{beat['seconds']:.1f} s at {place}"
