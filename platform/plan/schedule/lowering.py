"""Lowering of a compute table to rows with sends and receives, and checks that they run.

Every receive is placed together with its send: all stages' rows are then parts of one common order, in which each send
stands next to its receive. So no two stages can wait for each other, even if a send blocks until it is received, and
two stages that are each other's neighbour on both sides (two stages with several chunks) see their messages in the same
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from platform.plan.schedule.simulate import simulate
from platform.plan.schedule.table import COMPUTE, Action, Kind, Schedule, ScheduleError

Message = tuple[tuple[int, Action], tuple[int, Action]]  # (stage, send), (stage, receive)


@lru_cache(maxsize=16)
def validate(schedule: Schedule) -> None:
    """Raise ScheduleError with every violation of a pipeline schedule's compute table: counts, unknown or repeated
    actions, order; if there is none of these, for a deadlock.

    A table without any backward pass is legal: evaluation uses one.
    """
    if lines := list(_violations(schedule)):
        raise ScheduleError(lines, schedule.rows)
    simulate(schedule)  # raises ScheduleError on deadlock


@lru_cache(maxsize=16)
def lower(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Lower a pipeline schedule: return each stage's row with sends and receives inserted, as its workers execute it.
    Raises ScheduleError as `validate` does.

    The common order is the order of the actions' ends in a simulation with nominal times: a receive stands before the
    action during which its message is sent, so it is posted by then.
    """
    if not schedule.proven:
        validate(schedule)
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    for event in simulate(schedule).timeline:
        rows[event.stage].append(event.action)
        for stage, action in message(schedule, event.action) or ():
            rows[stage].append(action)
    return tuple(tuple(row) for row in rows)


def message(schedule: Schedule, action: Action) -> Message | None:
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


def _violations(schedule: Schedule) -> Iterator[str]:
    """Yield one message per rule that a pipeline schedule's compute table breaks: its number of rows, actions that are
    unknown, repeated, missing or out of order, and chunks on several stages."""
    if len(schedule.rows) != schedule.stages:
        yield f"{schedule.name}: {len(schedule.rows)} rows for {schedule.stages} stages"
    stages: dict[int, int] = {}  # chunk -> stage
    counts: Counter[tuple[Kind, int, int]] = Counter()
    place: dict[tuple[Kind, int, int], int] = {}  # action -> position in its row
    size = f"{schedule.total_chunks} chunks and {schedule.microbatches} microbatches"
    for stage, row in enumerate(schedule.rows):
        for position, a in enumerate(row):
            known = 0 <= a.chunk < schedule.total_chunks and 0 <= a.microbatch < schedule.microbatches
            if a.kind not in COMPUTE or not known:
                yield f"stage {stage}: {a} is no computation of {size}"
            elif stages.setdefault(a.chunk, stage) != stage:
                yield f"stage {stage}: {a}, but chunk {a.chunk} lives on stage {stages[a.chunk]}"
            counts[key := (a.kind, a.chunk, a.microbatch)] += 1
            place[key] = position
    yield from (f"{c}{kind}{m} occurs {n} times" for (kind, c, m), n in counts.items() if n > 1)
    trains = any(kind is not Kind.FORWARD for kind, _, _ in counts)
    for chunk in range(schedule.total_chunks):
        for m in range(schedule.microbatches):
            here = {kind: place[kind, chunk, m] for kind in COMPUTE if (kind, chunk, m) in place}
            yield from _pass_violations(here, chunk, m, trains)


BEFORE = ((Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.INPUT), (Kind.INPUT, Kind.WEIGHT))


def _pass_violations(here: dict[Kind, int], chunk: int, m: int, trains: bool) -> Iterator[str]:
    """Yield one message per missing, surplus or misordered action of one chunk on microbatch `m` in a pipeline
    schedule; `here`: the positions of its actions in the stage's row. `trains`: the table has backward passes, so this
    chunk must have its own."""
    split = {Kind.INPUT, Kind.WEIGHT}
    backward = split if split & here.keys() else {Kind.BACKWARD}
    wanted = {Kind.FORWARD, *(backward if trains else ())}
    yield from (f"{chunk}{kind}{m} is missing" for kind in COMPUTE if kind in wanted and kind not in here)
    yield from (f"{chunk}{kind}{m} repeats {chunk}I{m} and {chunk}W{m}" for kind in here if kind not in wanted)
    for first, second in BEFORE:
        if first in here and second in here and here[second] < here[first]:
            yield f"{chunk}{second}{m} stands before {chunk}{first}{m}"
