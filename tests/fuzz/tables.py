"""Random pipeline tables: whole and split backward passes in any legal order, chunks placed on any stages."""

from __future__ import annotations

from random import Random

from platform.plan.schedule import Action, Kind, Schedule, needs_of_action, result_of_action

LATE = (0.0, 0.5, 0.9)  # how likely a weight gradient is put off once more
SPLIT = (0.0, 0.5, 1.0, 1.0)  # share of the backward passes that are split


def draw_table(r: Random, stages: int, chunks: int, microbatches: int) -> Schedule:
    """Draw a schedule: one legal order of all stages' actions together, which every row is a part of."""
    total = stages * chunks
    place = _uneven(r, stages, total) if r.random() < 0.3 else [chunk % stages for chunk in range(total)]
    r.shuffle(place)
    split, late, eager = r.choice(SPLIT), r.choice(LATE), r.choice((0.0, 0.5, 0.9))
    left = {Action(Kind.FORWARD, m, chunk): None for chunk in range(total) for m in range(microbatches)}
    for action in list(left):
        kinds = (Kind.INPUT, Kind.WEIGHT) if r.random() < split else (Kind.BACKWARD,)
        left |= {Action(kind, action.microbatch, action.chunk): None for kind in kinds}
    rows: list[list[Action]] = [[] for _ in range(stages)]
    done: set[tuple[str, int, int]] = set()
    while left:
        ready = [a for a in left if all(need in done for need in needs_of_action(a, total))]
        action = _pick(r, ready, late, eager)
        del left[action]
        done.add(result_of_action(action))
        rows[place[action.chunk]].append(action)
    return Schedule("random", stages, chunks, microbatches, tuple(map(tuple, rows)))


def _uneven(r: Random, stages: int, total: int) -> list[int]:
    """Draw a stage for every chunk, so that none is left out."""
    return [*range(stages), *(r.randrange(stages) for _ in range(total - stages))]


def _pick(r: Random, ready: list[Action], late: float, eager: float) -> Action:
    """Choose an action: weight gradients late with one probability, backward passes first with another."""
    others = [a for a in ready if a.kind is not Kind.WEIGHT]
    if others and r.random() < late:
        ready = others
    backward = [a for a in ready if a.kind is not Kind.FORWARD]
    return r.choice(backward if backward and r.random() < eager else ready)


def spoil(r: Random, schedule: Schedule) -> Schedule:
    """Take an action out, put one in twice, or exchange two: most such tables cannot run."""
    rows = [list(row) for row in schedule.rows]
    row = r.choice([row for row in rows if row])
    i, j = r.randrange(len(row)), r.randrange(len(row))
    change = r.choice(("drop", "repeat", "exchange"))
    if change == "drop" and len(row) > 1:
        del row[i]
    elif change == "repeat":
        row.insert(j, row[i])
    else:
        row[i], row[j] = row[j], row[i]
    return Schedule(schedule.name, schedule.stages, schedule.chunks, schedule.microbatches, tuple(map(tuple, rows)))
