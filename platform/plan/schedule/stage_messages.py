"""Messages between the stages of a schedule on links that they share: how long a step takes where links are busy.

A message is under way from when its sender has computed it and its receiver has posted the receive, as transports ask
first. Messages under way at once have an equal share of the link of the stage that they leave, and of the one that they
enter; between one pair of stages they go one after the other. Stages of a node that share its adapters have one link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf

from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import COMPUTE, RECEIVES, Action, Kind, Schedule, needs, result

NEVER = inf  # the end of what does not happen
Key = tuple[str, int, int]  # a result, see `table.result`


@dataclass(frozen=True)
class StageMessages:
    """Messages between the stages of a step: `seconds` of one from a stage to another that has its links for itself;
    `link`: the name of a stage's link, the same for stages that share one; `early`: True if receives are posted a
    computation earlier than a stage's row has them."""

    seconds: Callable[[int, int], float]
    link: Callable[[int], Hashable] = lambda stage: stage
    early: bool = False


def makespan_with(messages: StageMessages, schedule: Schedule, seconds: Callable[[int, Action], float]) -> float:
    """Return the seconds of a schedule's step, given the seconds of (stage, action)."""
    return _Step(messages, schedule, seconds).run()


@dataclass
class _Task:
    """Computation in a stage's row; the receives posted when it `begins` and behind it (`posts`), and its `sends`, each
    as (result, other stage)."""

    action: Action | None
    begins: list[Key] = field(default_factory=list)
    posts: list[Key] = field(default_factory=list)
    sends: list[tuple[Key, int]] = field(default_factory=list)


@dataclass
class _Message:
    """Message under way, with the seconds that are left of it on a link of its own."""

    key: Key
    source: int
    sink: int
    left: float


class _Step:
    """Step of a schedule as it is simulated, from one end of a computation or message to the next."""

    def __init__(self, messages: StageMessages, schedule: Schedule, seconds: Callable[[int, Action], float]):
        """Begin a step."""
        self.messages, self.seconds, self.total = messages, seconds, schedule.total_chunks
        self.rows = [_lowered_tasks(row, messages.early) for row in lower(schedule)]
        stages = range(len(self.rows))
        self.at, self.ends, self.now = [0 for _ in stages], [NEVER for _ in stages], 0.0
        self.there: list[set[Key]] = [set() for _ in stages]  # results that a stage has
        self.posted: list[set[Key]] = [set() for _ in stages]
        self.waiting: list[_Message] = []
        self.moving: list[_Message] = []

    def run(self) -> float:
        """Run the step; return its seconds."""
        last = 0.0
        for stage in range(len(self.rows)):
            self._begin_task(stage)
        while True:
            self._start_messages()
            speeds = self._speeds_of_messages()
            arrivals = [m.left / speed for m, speed in zip(self.moving, speeds, strict=True)]
            soonest = min(self.ends)
            took = min([soonest - self.now, *arrivals])
            if took == NEVER:
                return last
            self.now += took
            for m, speed in zip(self.moving, speeds, strict=True):
                m.left -= took * speed
            ended = [stage for stage, end in enumerate(self.ends) if end <= self.now + 1e-12]
            for stage in ended:
                last = self.now
                self._end_task(stage)
            for m in (m for m in self.moving if m.left <= 1e-12):
                self.there[m.sink].add(m.key)
                ended.append(m.sink)
            self.moving = [m for m in self.moving if m.left > 1e-12]
            for stage in ended:
                self._begin_task(stage)

    def _begin_task(self, stage: int) -> None:
        """Begin a stage's next computation if what it needs is there."""
        row, here = self.rows[stage], self.there[stage]
        while self.ends[stage] == NEVER and self.at[stage] < len(row):
            task = row[self.at[stage]]
            if task.action is None:  # receives before any computation
                self.posted[stage].update(task.posts)
                self.at[stage] += 1
                continue
            if not all(key in here for key in needs(task.action, self.total)):
                return
            self.posted[stage].update(task.begins)
            self.ends[stage] = self.now + self.seconds(stage, task.action)

    def _end_task(self, stage: int) -> None:
        """End a stage's computation: its result is there, and is sent."""
        task = self.rows[stage][self.at[stage]]
        assert task.action is not None
        self.there[stage].add(result(task.action))
        self.posted[stage].update(task.posts)
        self.waiting += [_Message(key, stage, to, self.messages.seconds(stage, to)) for key, to in task.sends]
        self.at[stage] += 1
        self.ends[stage] = NEVER

    def _start_messages(self) -> None:
        """Start the messages whose receives are posted, one for each pair of stages, in the order of their sends."""
        pairs = {(m.source, m.sink) for m in self.moving}
        stay = []
        for m in self.waiting:
            if (m.source, m.sink) in pairs or m.key not in self.posted[m.sink]:
                stay.append(m)
            else:
                pairs.add((m.source, m.sink))
                self.moving.append(m)
        self.waiting = stay

    def _speeds_of_messages(self) -> list[float]:
        """Return the share of its speed alone at which each message under way goes."""
        link = self.messages.link
        out, into = Counter(link(m.source) for m in self.moving), Counter(link(m.sink) for m in self.moving)
        return [1 / max(out[link(m.source)], into[link(m.sink)]) for m in self.moving]


def _lowered_tasks(row: tuple[Action, ...], early: bool) -> list[_Task]:
    """Return a stage's row, lowered, as its computations and what goes with them."""
    tasks = [_Task(None)]
    for a in row:
        last = tasks[-1]
        if a.kind in COMPUTE:
            tasks.append(_Task(a))
        elif a.kind in RECEIVES:
            forward = a.kind is Kind.RECV_F
            key = ("F", a.chunk - 1, a.microbatch) if forward else ("B", a.chunk + 1, a.microbatch)
            (last.begins if early and last.action else last.posts).append(key)
        else:
            assert a.peer is not None
            last.sends.append((result(a), a.peer))
    return tasks
