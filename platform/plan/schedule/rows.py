"""Lowered rows that the driver sends to a stage's workers, and their plain-data form for the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import Action, Kind, Schedule

_KINDS = list(Kind)


@dataclass(frozen=True)
class StageRows:
    """Lowered schedule rows of one pipeline stage, which the driver sends to its workers. `forward`: a forward pass of
    one microbatch, number 0, for evaluation and sampling; `steps`: a training step, for each number of microbatches
    that a batch of the run has, ascending."""

    forward: tuple[Action, ...]
    steps: tuple[tuple[Action, ...], ...]

    def step(self, microbatches: int) -> tuple[Action, ...]:
        """Return this stage's schedule row for a training step of so many microbatches, the shortest with room."""
        return next(row for row in self.steps if any(a.microbatch + 1 >= microbatches for a in row))

    def plain(self) -> list[list[list[int]]]:
        """Return a stage's schedule rows as lists of numbers, to be sent to workers: the actions' kinds, as positions
        in `Kind`, microbatches, chunks, and peers, -1 for none."""
        return [
            [
                [_KINDS.index(a.kind) for a in row],
                [a.microbatch for a in row],
                [a.chunk for a in row],
                [-1 if a.peer is None else a.peer for a in row],
            ]
            for row in (self.forward, *self.steps)
        ]

    @classmethod
    def from_plain(cls, rows: Sequence[Sequence[Sequence[int]]]) -> StageRows:
        """Rebuild a stage's schedule rows from the lists of numbers made by `plain`. Raises ValueError if illegal."""
        forward, *steps = (
            tuple(
                Action(_KINDS[kind], microbatch, chunk, None if peer < 0 else peer)
                for kind, microbatch, chunk, peer in zip(*columns, strict=True)
            )
            for columns in rows
        )
        return cls(forward, tuple(steps))


def stage_rows(schedules: Sequence[Schedule]) -> list[StageRows]:
    """Lower the pipeline schedules of a run for the workers, one for each number of microbatches that its batches have,
    ascending: return, by stage, the rows of a forward pass and of training steps, all with sends and receives."""
    some = schedules[-1]
    chunks = (some.chunks_of(stage) for stage in range(some.stages))
    passes = tuple(tuple(Action(Kind.FORWARD, 0, chunk) for chunk in of_stage) for of_stage in chunks)
    once = Schedule("forward", some.stages, some.chunks, 1, passes)
    steps = zip(*map(lower, schedules), strict=True)
    return [StageRows(forward, of_stage) for forward, of_stage in zip(lower(once), steps, strict=True)]
