"""Crew whose members are other processes: ranks, calls, collected answers, and recovery after a member fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from time import monotonic
from typing import Any

from platform.cluster.crew.base.crew import ByRank, Crew, arguments, shown
from platform.cluster.crew.base.failures import Failure, Member, WorkerFailed
from platform.cluster.crew.base.job import START, Job
from platform.cluster.crew.base.members import CUT_OFF, Members
from platform.cluster.crew.base.rendezvous import Rendezvous
from platform.cluster.crew.base.watch import BEAT_SECONDS, Watch
from platform.cluster.wire.answers import is_answer
from platform.cluster.wire.channel import encode, framed, text

GRACE = (0.0, 0.5, 2.0)  # seconds to wait for a likelier culprit, indexed by `Failure.innocence`
LEAVE_SECONDS = 5.0  # without progress in any member that is to leave its call and groups; then those left are killed
CLOSE_SECONDS = 10.0  # for the members to close by themselves; then they are killed


class RemoteCrew(Members, Crew):
    """Implements ranks, calls, failures and release over the switchboard, for every launcher with processes."""

    elastic = True

    def __init__(self, job: Job, spares: int = 0):
        self._silence: float = job.config["elastic"]["hang_seconds"]
        self._seats: list[int] = []  # rank -> member number
        self._gone: dict[int, str] = {}  # seated members that died in this generation, and how
        self._hung: set[int] = set()  # members to blame for a hang; `release` kills them
        self._failures: dict[int, Failure] = {}  # of this generation
        self._call = START
        self._polite = True  # True while the members can be expected to answer
        self._closed = False
        self._rendezvous: Rendezvous | None = None
        super().__init__(job, spares)
        try:
            with self._impolite():
                self._start()
        except BaseException:
            self.close()
            raise

    def seat(self, job: Job, numbers: Sequence[int]) -> None:
        assert not self._seats and len(set(numbers)) == len(numbers) == job.world_size
        self.job, self._seats = job, list(numbers)
        for number in numbers:
            if number not in self._members:
                self._gone[number] = "it was gone before the generation began"
        self._rendezvous = Rendezvous(self._host)
        self._rendezvous.start()
        self.store = self._rendezvous.address

    def call(self, method: str, *args: Any, within: float = inf) -> list[Any]:
        self._send(method, args)
        values = self._gather(method, shown(method, args), within)
        return [values[number] for number in self._seats]

    def release(self) -> list[Failure]:
        self._polite = True
        with self._impolite():
            self._rendezvous = None  # frees members that wait in the store for a lost rank
            for number in self._hung & self._members.keys():
                self._dispose(number)
            lost = [f for number, f in self._failures.items() if number not in self._members]
            left = set(self._seats) & self._members.keys()
            self._tell(left, {"abort": True})
            self._tell(left, self._next_call("leave"))
            answers = self._answers(left, LEAVE_SECONDS, beats=True)
            for number in left - self._gone.keys():
                if number not in answers:
                    lost.append(self._failure(number, "hung", "leave()", f"it has not left in {LEAVE_SECONDS:.0f} s"))
                elif "error" in answers[number]:
                    lost.append(self._failure(number, "failed", "leave()", answers[number]["error"]))
                else:
                    continue
                self._dispose(number)
            known = {failure.member.number for failure in lost}
            lost += [self._failure(n, "died", "release()", why) for n, why in self._gone.items() if n not in known]
            self._seats, self._gone, self._hung, self._failures = [], {}, set(), {}
        return lost

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        polite, self._polite = self._polite, False
        try:
            if polite:
                ready = set(self._members)
                self._tell(ready, self._next_call("close"))
                polite = self._answers(ready, CLOSE_SECONDS).keys() == ready and not self._starting
        finally:
            self._rendezvous = None
            self._opened.close()  # closes the connections, which ends members waiting for a call
            self._dismiss(polite)

    # calls and answers

    def _next_call(self, method: str, args: Sequence[Any] = ()) -> dict[str, Any]:
        self._call += 1
        return {"call": self._call, "method": method, "args": args}

    def _send(self, method: str, args: tuple[Any, ...]) -> None:
        call = self._next_call(method, args)
        if not any(isinstance(a, ByRank) for a in args):
            return self._tell(self._seats, call)
        head = text(call | {"args": []}).removesuffix(b"]}")
        texts: dict[int, bytes] = {}  # by identity: a value that several ranks get is encoded once
        for rank, number in enumerate(self._seats):
            own = arguments(args, rank)
            for value in own:
                if id(value) not in texts:
                    texts[id(value)] = text(value)
            self._board.send(number, framed(head + b",".join(texts[id(value)] for value in own) + b"]}"))

    def _tell(self, numbers: Collection[int], message: Mapping[str, Any]) -> None:
        if numbers:
            frame = encode(message)  # encoded once for all members
            for number in numbers:
                self._board.send(number, frame)

    def _gather(self, method: str, call: str, within: float) -> dict[int, Any]:
        """Collect the answer of every seated member, by number. Raises WorkerFailed."""
        values: dict[int, Any] = {}
        failures = self._failures
        pending, deadline, watch = set(self._seats), inf, Watch(within, monotonic(), self._silence)
        with self._impolite():
            while pending:
                for number in self._gone.keys() - failures.keys():
                    failures[number] = self._failure(number, "died", call, self._gone[number])
                hung, self._hung = watch.hung(pending, monotonic())
                failures |= {number: self._failure(number, "hung", call, cause) for number, cause in hung.items()}
                if hung or self._gone or monotonic() >= deadline:
                    raise WorkerFailed(list(failures.values()))
                self._tell(watch.ask(pending, monotonic()), {"beat": self._call})
                for number, message in self._events(min(watch.patience(monotonic()), deadline - monotonic())):
                    if message.get("beat") == self._call:
                        watch.heard(number, message["progress"], monotonic())
                    elif message.get("answer") == self._call and number in pending:
                        if "error" in message:
                            failures[number] = self._failure(number, "failed", call, message["error"])
                            deadline = min(deadline, monotonic() + GRACE[failures[number].innocence])
                        elif not is_answer(method, self._seats.index(number), message["value"]):
                            self._book_death(number, "what it answers is no answer")
                            continue  # stays pending, and is now dead
                        else:
                            values[number] = message["value"]
                            watch.answered(monotonic())
                        pending.remove(number)
                if failures and not pending:
                    raise WorkerFailed(list(failures.values()))
        return values

    def _answers(self, numbers: Collection[int], seconds: float, beats: bool = False) -> dict[int, dict[str, Any]]:
        """Collect the answers to the last call from those of `numbers` that are alive. Stops when none has answered for
        `seconds`; with `beats`, progress of any of them counts too."""
        answers: dict[int, dict[str, Any]] = {}
        pending, deadline, ask = set(numbers), monotonic() + seconds, monotonic() + BEAT_SECONDS
        while (pending := pending & self._members.keys()) and monotonic() < deadline:
            if beats and monotonic() >= ask:
                self._tell(pending, {"beat": self._call})
                ask = monotonic() + BEAT_SECONDS
            for number, message in self._events(min(deadline, ask if beats else inf) - monotonic()):
                if message.get("answer") == self._call:
                    answers[number] = message
                    pending.discard(number)
                    deadline = monotonic() + seconds
                elif message.get("beat") == self._call:
                    deadline = max(deadline, monotonic() + seconds - message["progress"]["seconds"])
        return answers

    @contextmanager
    def _impolite(self) -> Iterator[None]:
        """Mark the members as not expected to answer during the block; for good if it raises, also by a signal.

        `close` then kills them instead of asking.
        """
        before, self._polite = self._polite, False
        yield
        self._polite = before

    def _book_death(self, number: int, cause: str | None) -> None:
        super()._book_death(number, cause)
        if number in self._seats:
            self._gone[number] = cause or CUT_OFF

    def _failure(self, number: int, kind: str, call: str, cause: str) -> Failure:
        member = self._greeted.get(number, Member(number, "", 0))
        rank = self._seats.index(number)
        name, coordinates = self.job.name(rank), dict(self.job.coordinates[rank])
        return Failure(member, kind, call, cause, rank, name, coordinates, self._log(number))
