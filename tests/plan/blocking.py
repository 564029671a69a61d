"""Lowered rows replayed under the strictest rule, and tables without their backward passes."""

from __future__ import annotations

from platform.plan.schedule import (
    COMPUTE,
    SENDS,
    Action,
    Kind,
    Rows,
    Schedule,
    ScheduleError,
    needs_of_action,
    result_of_action,
)


def replay_blocking(rows: Rows) -> None:
    """Replay lowered rows under the strictest rule: a send blocks until its receive is reached, and the reverse.

    Raises ScheduleError with what every stuck stage waits for, or with an action that runs before its inputs are there.
    """
    total_chunks = 1 + max((a.chunk for row in rows for a in row), default=0)
    at = [0] * len(rows)
    results: list[set[tuple[str, int, int]]] = [set() for _ in rows]  # of each stage
    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(rows):
            while at[stage] < len(row):
                action = row[at[stage]]
                if action.kind in COMPUTE:
                    missing = [r for r in needs_of_action(action, total_chunks) if r not in results[stage]]
                    if missing:
                        names = " and ".join(f"{chunk}{kind}{m}" for kind, chunk, m in missing)
                        raise ScheduleError(f"stage {stage}: {action} runs before {names} is there", rows)
                    results[stage].add(result_of_action(action))
                elif _meets(rows, at, stage, action):
                    assert action.peer is not None
                    results[action.peer].add(result_of_action(action))
                    at[action.peer] += 1
                else:
                    break
                at[stage] += 1
                progress = True
    heads = [(stage, row[i]) for stage, (row, i) in enumerate(zip(rows, at, strict=True)) if i < len(row)]
    if heads:
        stuck = "; ".join(f"stage {stage} waits at {action} for stage {action.peer}" for stage, action in heads)
        raise ScheduleError(f"deadlock where sends block: {stuck}", rows)


def _meets(rows: Rows, at: list[int], stage: int, send: Action) -> bool:
    """Return True if `send` is a send whose peer has reached the receive for it; False for a receive, which waits for
    its sender."""
    if send.kind not in SENDS or send.peer is None or at[send.peer] == len(rows[send.peer]):
        return False
    forward = send.kind is Kind.SEND_F
    kind, chunk = (Kind.RECV_F, send.chunk + 1) if forward else (Kind.RECV_B, send.chunk - 1)
    return rows[send.peer][at[send.peer]] == Action(kind, send.microbatch, chunk, stage)


def forward_only(schedule: Schedule) -> Schedule:
    """The same table without its backward passes, as evaluation runs it."""
    rows = tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in schedule.rows)
    return Schedule(schedule.name, schedule.stages, schedule.chunks, schedule.microbatches, rows)
