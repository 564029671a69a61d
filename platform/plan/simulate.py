"""Simulation of a schedule: when each action starts and ends, the bubble, and how many activations are alive.

`lower_schedule` adds sends and receives to a schedule's table; `StageRows` is its part for one stage, as the driver
sends it to workers. `makespan_over_links` is the length of a step where stages share links that are busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import inf

from platform.plan.schedule import (
    COMPUTE,
    PASS,
    RECEIVES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    iterate_turns,
    needs_of_action,
    result_of_action,
)

# Durations in units of one chunk's forward pass of one microbatch.
NOMINAL: Mapping[Kind, float] = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUT: 1.0, Kind.WEIGHT: 1.0}

Tensor = tuple[str, int, int]  # a result: pass, chunk, microbatch
Span = tuple[float, float]  # start, end of an action
Times = Mapping[Kind, float] | Callable[[int, Action], float]  # seconds by kind, or by (stage, action)


@dataclass(frozen=True, slots=True)
class TimedAction:
    """Action of a pipeline stage with its start and end, planned or measured, in seconds from the start of the step."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Result of simulating a pipeline schedule with `simulate`. `timeline` is ordered by end, then stage. `peak_live`:
    most forward passes of each stage at once whose backward pass, or weight gradient if split off, is not done."""

    timeline: tuple[TimedAction, ...]
    makespan: float  # seconds
    busy: tuple[float, ...]  # seconds that each stage computes
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Return the pipeline bubble: makespan / ideal - 1, where ideal is the busiest stage's time of computing."""
        return self.makespan / max(self.busy) - 1


def simulate(schedule: Schedule, times: Times = NOMINAL, transfer: float = 0.0) -> Simulation:
    """Simulate one step of a pipeline schedule's compute table, in which every stage starts its next action as soon as
    its inputs are there. The passes of a pair start together, and end together after the time of both.

    `times`: duration of an action by kind, or as a function of (stage, action), by default NOMINAL. `transfer`: seconds
    between the end of an action and the start of one on another stage that needs its result; it keeps no stage busy.
    Raises ScheduleError with the stuck actions if stages wait for each other.
    """
    if times is NOMINAL and not transfer:
        return _simulate_nominal(schedule)
    return _simulate_actions(schedule, times, transfer)


@lru_cache(maxsize=4)
def _simulate_nominal(schedule: Schedule) -> Simulation:
    """Simulate a pipeline schedule with nominal times, once for the check, the lowering and the picture of it."""
    return _simulate_actions(schedule, NOMINAL, 0.0)


def _simulate_actions(schedule: Schedule, times: Times, transfer: float) -> Simulation:
    """Simulate one step of a pipeline schedule action by action; arguments and errors as of `simulate`."""
    seconds = times if callable(times) else (lambda stage, action: times[action.kind])
    spans = _time_rows(schedule, seconds, transfer)
    events = [
        TimedAction(stage, action, start, end)
        for stage, (row, row_spans) in enumerate(zip(schedule.rows, spans, strict=True))
        for action, (start, end) in zip(row, row_spans, strict=True)
    ]
    return Simulation(
        timeline=tuple(sorted(events, key=lambda e: (e.end, e.stage, e.start))),
        makespan=_last_end(spans),
        busy=tuple(sum(seconds(stage, action) for action in row) for stage, row in enumerate(schedule.rows)),
        peak_live=tuple(map(_peak_live, schedule.rows)),
    )


def compute_makespan(schedule: Schedule, seconds: Callable[[int, Action], float]) -> float:
    """Return the seconds of a schedule's step, as `simulate` does, from the seconds of (stage, action)."""
    return _last_end(_time_rows(schedule, seconds, 0.0))


def _last_end(spans: Sequence[Sequence[Span]]) -> float:
    """Return when the last action of a simulated schedule ends."""
    return max((row[-1][1] for row in spans if row), default=0.0)


def _time_rows(schedule: Schedule, seconds: Callable[[int, Action], float], transfer: float) -> list[list[Span]]:
    """Return by stage the start and the end of each action of its row; arguments and errors as of `simulate`."""
    waits = _waits_by_row(schedule)
    origins = {n: stage for stage, row in enumerate(waits) for *_, results in row for n in results} if transfer else {}
    ends: dict[int, float] = {}  # by number of a result
    spans: list[list[Span]] = [[] for _ in waits]
    remaining = [row[::-1] for row in waits]
    progress = True
    while progress:
        progress = False
        for stage, (row, row_spans) in enumerate(zip(remaining, spans, strict=True)):
            now = row_spans[-1][1] if row_spans else 0.0
            while row:
                actions, inputs, results = row[-1]
                start = now
                for number in inputs:
                    if (when := ends.get(number)) is None:
                        break
                    if transfer and origins[number] != stage:
                        when += transfer
                    if when > start:
                        start = when
                else:
                    row.pop()
                    now = start + sum(seconds(stage, action) for action in actions)
                    for number in results:
                        ends[number] = now
                        row_spans.append((start, now))
                    progress = True
                    continue
                break
    if any(remaining):
        raise ScheduleError(f"deadlock: {'; '.join(_describe_stuck_stages(schedule, spans))}", schedule.rows)
    return spans


@lru_cache(maxsize=8)
def _waits_by_row(schedule: Schedule) -> list[list[tuple[tuple[Action, ...], list[int], list[int]]]]:
    """Return the rows of a schedule: of a turn's actions the numbers of the results that they need, and of theirs."""
    total, n = schedule.total_chunks, schedule.microbatches
    first = {which: i * total for i, which in enumerate(dict.fromkeys(PASS.values()))}

    def number_result(tensor: Tensor) -> int:
        """Return the number of a result of an action of the schedule."""
        which, chunk, microbatch = tensor
        return (first[which] + chunk) * n + microbatch

    def number_results(turn: tuple[Action, ...]) -> tuple[tuple[Action, ...], list[int], list[int]]:
        """Return the actions of a turn with the numbers of the results that they need, and of theirs."""
        needs = [number_result(need) for a in turn for need in needs_of_action(a, total)]
        return turn, needs, [number_result(result_of_action(a)) for a in turn]

    return [list(map(number_results, iterate_turns(row))) for row in schedule.rows]


def _describe_stuck_stages(schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Iterator[str]:
    """Yield a line per stage of the simulated schedule that is stuck: at which action, and why."""
    pairs = list(zip(schedule.rows, spans, strict=True))
    done = {result_of_action(action) for row, row_spans in pairs for action in row[: len(row_spans)]}
    for stage, (row, row_spans) in enumerate(pairs):
        if len(row_spans) < len(row):
            missing = [r for r in needs_of_action(row[len(row_spans)], schedule.total_chunks) if r not in done]
            missing_names = ", ".join(f"{chunk}{kind}{microbatch}" for kind, chunk, microbatch in missing)
            yield f"stage {stage} is stuck at {row[len(row_spans)]}, which waits for {missing_names}"


def _peak_live(row: tuple[Action, ...]) -> int:
    """Return the most microbatches in flight in one stage's row of a pipeline schedule: forward done, backward not."""
    steps = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1}
    return max(accumulate(steps[a.kind] for a in row), default=0)


# Lowering of a compute table to rows with sends and receives, and checks that they run.
#
# Every receive is placed together with its send: all stages' rows are then parts of one common order, in which each
# send stands next to its receive. So no two stages can wait for each other, even if a send blocks until it is received,
# and two stages that are each other's neighbour on both sides (two stages with several chunks) see their messages in
# the same order.

Message = tuple[tuple[int, Action], tuple[int, Action]]  # (stage, send), (stage, receive)


@lru_cache(maxsize=16)
def validate_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError with every violation of a pipeline schedule's compute table: counts, unknown or repeated
    actions, order; if there is none of these, for a deadlock.

    A table without any backward pass is legal: evaluation uses one.
    """
    if lines := list(_violations_of_table(schedule)):
        raise ScheduleError(lines, schedule.rows)
    simulate(schedule)  # raises ScheduleError on deadlock


@lru_cache(maxsize=16)
def lower_schedule(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Lower a pipeline schedule: return each stage's row with sends and receives inserted, as its workers execute it.
    Raises ScheduleError as `validate_schedule` does.

    The common order is the order of the actions' ends in a simulation with nominal times: a receive stands before the
    action during which its message is sent, so it is posted by then.
    """
    if not schedule.proven:
        validate_schedule(schedule)
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    spans = _time_rows(schedule, lambda stage, action: NOMINAL[action.kind], 0.0)
    turns = [list(iterate_turns(row)) for row in schedule.rows]
    last_actions = [list(accumulate(map(len, row), initial=-1))[1:] for row in turns]
    ends = ((spans[n][last][1], n, i) for n, row in enumerate(last_actions) for i, last in enumerate(row))
    for _, number, i in sorted(ends):
        rows[number] += turns[number][i]
        for computed in turns[number][i]:
            for stage, action in find_message(schedule, computed) or ():
                rows[stage].append(action)
    return tuple(tuple(row) for row in rows)


def find_message(schedule: Schedule, action: Action) -> Message | None:
    """Return (sending stage, send action) and (receiving stage, receive action) of the result of a compute action in a
    pipeline schedule; None if the result stays on its stage."""
    forward, m, chunk = action.kind is Kind.FORWARD, action.microbatch, action.chunk
    target = chunk + 1 if forward else chunk - 1
    if action.kind is Kind.WEIGHT or not 0 <= target < schedule.total_chunks:
        return None
    source, sink = schedule.placement[chunk], schedule.placement[target]
    send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
    pair = (source, Action(send, m, chunk, sink)), (sink, Action(receive, m, target, source))
    return pair if source != sink else None


def _violations_of_table(schedule: Schedule) -> Iterator[str]:
    """Yield one message per rule that a pipeline schedule's compute table breaks: its number of rows, actions that are
    unknown, repeated, missing or out of order, and chunks on several stages."""
    if len(schedule.rows) != schedule.stages:
        yield f"{schedule.name}: {len(schedule.rows)} rows for {schedule.stages} stages"
    stages: dict[int, int] = {}  # chunk -> stage
    counts: Counter[tuple[Kind, int, int]] = Counter()
    row_positions: dict[tuple[Kind, int, int], int] = {}  # action -> position in its row
    size = f"{schedule.total_chunks} chunks and {schedule.microbatches} microbatches"
    for stage, row in enumerate(schedule.rows):
        for position, a in enumerate(row):
            known = 0 <= a.chunk < schedule.total_chunks and 0 <= a.microbatch < schedule.microbatches
            if a.kind not in COMPUTE or not known:
                yield f"stage {stage}: {a} is no computation of {size}"
            elif stages.setdefault(a.chunk, stage) != stage:
                yield f"stage {stage}: {a}, but chunk {a.chunk} lives on stage {stages[a.chunk]}"
            counts[key := (a.kind, a.chunk, a.microbatch)] += 1
            row_positions[key] = position
        yield from (f"stage {stage}: {'|'.join(map(str, turn))} is no pair of a forward and a backward pass"
                    for turn in iterate_turns(row) if turn[0].paired and not _is_pair(turn))  # fmt: skip
    yield from (f"{c}{kind}{m} occurs {n} times" for (kind, c, m), n in counts.items() if n > 1)
    trains = any(kind is not Kind.FORWARD for kind, _, _ in counts)
    for chunk in range(schedule.total_chunks):
        for m in range(schedule.microbatches):
            positions = {kind: row_positions[kind, chunk, m] for kind in COMPUTE if (kind, chunk, m) in row_positions}
            yield from _pass_violations(positions, chunk, m, trains)


def _is_pair(turn: Sequence[Action]) -> bool:
    """Return True if the actions of a turn are a paired forward pass, and a backward pass that does not wait for it."""
    passes = [(a.kind, a.paired) for a in turn] == [(Kind.FORWARD, True), (Kind.BACKWARD, True)]
    return passes and (turn[0].chunk, turn[0].microbatch) != (turn[1].chunk, turn[1].microbatch)


BEFORE = ((Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.INPUT), (Kind.INPUT, Kind.WEIGHT))


def _pass_violations(positions: dict[Kind, int], chunk: int, m: int, trains: bool) -> Iterator[str]:
    """Yield one message per missing, surplus or misordered action of one chunk on microbatch `m` in a pipeline
    schedule; `positions`: the positions of its actions in the stage's row. `trains`: the table has backward passes, so
    this chunk must have its own."""
    split = {Kind.INPUT, Kind.WEIGHT}
    backward = split if split & positions.keys() else {Kind.BACKWARD}
    expected = {Kind.FORWARD, *(backward if trains else ())}
    yield from (f"{chunk}{kind}{m} is missing" for kind in COMPUTE if kind in expected and kind not in positions)
    yield from (f"{chunk}{kind}{m} repeats {chunk}I{m} and {chunk}W{m}" for kind in positions if kind not in expected)
    for first, second in BEFORE:
        if first in positions and second in positions and positions[second] < positions[first]:
            yield f"{chunk}{second}{m} stands before {chunk}{first}{m}"


_KINDS = list(Kind)


@dataclass(frozen=True)
class StageRows:
    """Lowered schedule rows of one pipeline stage, which the driver sends to its workers. `forward`: a forward pass of
    one microbatch, number 0, for evaluation and sampling; `steps`: a training step, for each number of microbatches
    that a batch of the run has, ascending."""

    forward: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]

    def row_of_step(self, microbatches: int) -> tuple[Action, ...]:
        """Return this stage's row of the schedule for a step of so many microbatches, the shortest with room."""
        return next(row for row in self.steps if any(a.microbatch + 1 >= microbatches for a in row))

    def encode_rows(self) -> list[list[list[int]]]:
        """Return a stage's schedule rows as lists of numbers, to be sent to workers: the actions' kinds, as positions
        in `Kind`, microbatches, chunks, peers, -1 for none, and whether they are paired."""
        return [
            [
                [_KINDS.index(a.kind) for a in row],
                [a.microbatch for a in row],
                [a.chunk for a in row],
                [-1 if a.peer is None else a.peer for a in row],
                [int(a.paired) for a in row],
            ]
            for row in (self.forward, *self.steps)
        ]

    @classmethod
    def decode_rows(cls, rows: Sequence[Sequence[Sequence[int]]]) -> StageRows:
        """Rebuild a stage's schedule rows from the lists of numbers made by `encode_rows`. Raises ValueError if
        illegal."""
        forward, *steps = (
            tuple(
                Action(_KINDS[kind], m, c, None if p < 0 else p, bool(paired))
                for kind, m, c, p, paired in zip(*columns, strict=True)
            )
            for columns in rows
        )
        return cls(forward, tuple(steps))


def stage_rows(schedules: Sequence[Schedule]) -> list[StageRows]:
    """Lower the pipeline schedules of a run for the workers, one for each number of microbatches that its batches have,
    ascending: return, by stage, the rows of a forward pass and of training steps, all with sends and receives."""
    last_schedule = schedules[-1]
    chunks = (last_schedule.chunks_of_stage(stage) for stage in range(last_schedule.stages))
    passes = tuple(tuple(Action(Kind.FORWARD, 0, chunk) for chunk in of_stage) for of_stage in chunks)
    once = Schedule("forward", last_schedule.stages, last_schedule.chunks, 1, passes)
    steps = zip(*map(lower_schedule, schedules), strict=True)
    return [StageRows(forward, of_stage) for forward, of_stage in zip(lower_schedule(once), steps, strict=True)]


# Messages between the stages of a schedule on links that they share: how long a step takes where links are busy.
#
# A message is under way from when its sender has computed it and its receiver has posted the receive, as transports ask
# first. Messages under way at once have an equal share of the link of the stage that they leave, and of the one that
# they enter; between one pair of stages they go one after the other. Stages of a node that share its adapters have one
# link.

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


def makespan_over_links(messages: StageMessages, schedule: Schedule, seconds: Callable[[int, Action], float]) -> float:
    """Return the seconds of a schedule's step, simulated over the stages' links, from seconds of (stage, action)."""
    return _LinkSimulation(messages, schedule, seconds).run_step()


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


class _LinkSimulation:
    """Step of a schedule as it is simulated, from one end of a computation or message to the next."""

    def __init__(self, messages: StageMessages, schedule: Schedule, seconds: Callable[[int, Action], float]):
        """Begin the simulation of one step of a `schedule`, with messages over the stages' links."""
        self.messages, self.seconds, self.total = messages, seconds, schedule.total_chunks
        self.rows = [_tasks_of_row(row, messages.early) for row in lower_schedule(schedule)]
        stages = range(len(self.rows))
        self.at, self.ends, self.now = [0 for _ in stages], [NEVER for _ in stages], 0.0
        self.there: list[set[Key]] = [set() for _ in stages]  # results that a stage has
        self.posted: list[set[Key]] = [set() for _ in stages]
        self.waiting: list[_Message] = []
        self.moving: list[_Message] = []

    def run_step(self) -> float:
        """Simulate the schedule's step to its end; return its seconds."""
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
        """Begin the next computation in a stage's simulated row if what it needs is there."""
        row, results = self.rows[stage], self.there[stage]
        while self.ends[stage] == NEVER and self.at[stage] < len(row):
            task = row[self.at[stage]]
            if task.action is None:  # receives before any computation
                self.posted[stage].update(task.posts)
                self.at[stage] += 1
                continue
            if not all(key in results for key in needs_of_action(task.action, self.total)):
                return
            self.posted[stage].update(task.begins)
            self.ends[stage] = self.now + self.seconds(stage, task.action)

    def _end_task(self, stage: int) -> None:
        """End a computation in a stage's simulated row of the schedule: its result is there, and is sent."""
        task = self.rows[stage][self.at[stage]]
        assert task.action is not None
        self.there[stage].add(result_of_action(task.action))
        self.posted[stage].update(task.posts)
        self.waiting += [_Message(key, stage, to, self.messages.seconds(stage, to)) for key, to in task.sends]
        self.at[stage] += 1
        self.ends[stage] = NEVER

    def _start_messages(self) -> None:
        """Start the simulated messages whose receives are posted, one per pair of stages, in order of their sends."""
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
        """Return the share of its speed alone at which each simulated message under way goes."""
        link = self.messages.link
        out, into = Counter(link(m.source) for m in self.moving), Counter(link(m.sink) for m in self.moving)
        return [1 / max(out[link(m.source)], into[link(m.sink)]) for m in self.moving]


def _tasks_of_row(row: tuple[Action, ...], early: bool) -> list[_Task]:
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
            last.sends.append((result_of_action(a), a.peer))
    return tasks
