"""Lowered rows that the driver sends to a stage's workers, and their plain-data form for the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from platform.plan.schedule.lowering import lower
from platform.plan.schedule.table import Action, Kind, Schedule

_KINDS = list(Kind)


@dataclass(frozen=True)
class StageRows:
    """Lowered schedule rows of one pipeline stage, which the driver sends to its workers. `step`: a training step;
    `forward`: a forward pass of one microbatch, number 0, for evaluation and sampling."""

    step: tuple[Action, ...]
    forward: tuple[Action, ...]

    def plain(self) -> list[list[list[int]]]:
        """Return both rows as lists of numbers: the actions' kinds, as positions in `Kind`, microbatches, chunks, and
        peers, -1 for none."""
        return [
            [
                [_KINDS.index(a.kind) for a in row],
                [a.microbatch for a in row],
                [a.chunk for a in row],
                [-1 if a.peer is None else a.peer for a in row],
            ]
            for row in (self.step, self.forward)
        ]

    @classmethod
    def from_plain(cls, rows: Sequence[Sequence[Sequence[int]]]) -> StageRows:
        """Make the rows of which `plain` returned `rows`. Raises ValueError for anything else."""
        step, forward = (
            tuple(
                Action(_KINDS[kind], microbatch, chunk, None if peer < 0 else peer)
                for kind, microbatch, chunk, peer in zip(*columns, strict=True)
            )
            for columns in rows
        )
        return cls(step, forward)


def stage_rows(schedule: Schedule) -> list[StageRows]:
    """Lower a pipeline schedule for the workers: return, by stage, the row of a training step and that of a forward
    pass, both with sends and receives."""
    chunks = (schedule.chunks_of(stage) for stage in range(schedule.stages))
    passes = tuple(tuple(Action(Kind.FORWARD, 0, chunk) for chunk in of_stage) for of_stage in chunks)
    once = Schedule("forward", schedule.stages, schedule.chunks, 1, passes)
    return [StageRows(step, forward) for step, forward in zip(lower(schedule), lower(once), strict=True)]
