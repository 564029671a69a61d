"""Pipeline schedule as data: for each stage, in order, which pass of which chunk on which microbatch it computes.

A table has no communication: `platform.plan.schedule.lowering` adds it. See docs/design.md, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Kind(StrEnum):
    """Kind of an action. Actions are written as in torch.distributed.pipelining: chunk, kind, microbatch ("4B0")."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward pass: INPUT and WEIGHT in one
    INPUT = "I"  # the gradient of the chunk's input; the chunk before waits for it
    WEIGHT = "W"  # the gradient of its parameters; no other chunk waits for it
    SEND_F = "SEND_F"  # the chunk's output, to the stage of the next chunk
    RECV_F = "RECV_F"  # the chunk's input
    SEND_B = "SEND_B"  # the gradient of the chunk's input, to the stage of the chunk before
    RECV_B = "RECV_B"  # the gradient of the chunk's output


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
SENDS = (Kind.SEND_F, Kind.SEND_B)
RECEIVES = (Kind.RECV_F, Kind.RECV_B)
BACKWARD_KINDS = (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
SENDS_IN_FLIGHT = 8  # sends of a stage whose buffers are kept: gloo reports one as done only when it is waited for
PASS = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B", Kind.WEIGHT: "W", Kind.SEND_F: "F", Kind.SEND_B: "B"}


@dataclass(frozen=True, slots=True)
class Action:
    """Entry of a row. `chunk` counts through the whole model: chunk 0 holds the embedding, the last one the loss.

    `peer`: the other stage of a send or receive; None for compute actions.
    """

    kind: Kind
    microbatch: int
    chunk: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


Rows = Sequence[Sequence[Action]]  # one row per stage


class ScheduleError(ValueError):
    """Refusal of a table that cannot run. `violations`: one line each, without a configuration key; the message ends
    with the table, if there is one."""

    def __init__(self, violations: Sequence[str] | str, rows: Rows = ()):
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        self.rows = rows
        super().__init__("\n".join([*self.violations, *([table(rows)] if rows else [])]))


@dataclass(frozen=True)
class Schedule:
    """Table of every stage's compute actions in order; `chunks` is per stage.

    A chunk's stage is read from the rows, so a table may place chunks as it likes (in a loop, in a V).
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    @property
    def total_chunks(self) -> int:
        return self.stages * self.chunks

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Return the stage of every chunk; `platform.plan.schedule.lowering.validate` checks that it is unique."""
        stages = {action.chunk: stage for stage, row in enumerate(self.rows) for action in row}
        return tuple(stages[chunk] for chunk in range(self.total_chunks))

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks that live on a stage, ascending."""
        return tuple(chunk for chunk, owner in enumerate(self.placement) if owner == stage)


def with_completed(row: Sequence[Action]) -> Iterator[tuple[Action, int | None]]:
    """Yield the actions of a row, each with the chunk whose parameter gradients it completes, None if it completes
    none."""
    last = {a.chunk: i for i, a in enumerate(row) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    for i, action in enumerate(row):
        yield action, action.chunk if last.get(action.chunk) == i else None


def needs(action: Action, total_chunks: int) -> list[tuple[str, int, int]]:
    """Return the results that a compute action waits for, as (F or B, chunk, microbatch)."""
    chunk, microbatch = action.chunk, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return [("F", chunk - 1, microbatch)] if chunk else []
        case Kind.WEIGHT:
            return [("B", chunk, microbatch)]
    own = ("F", chunk, microbatch)
    return [own] if chunk + 1 == total_chunks else [own, ("B", chunk + 1, microbatch)]


def result(action: Action) -> tuple[str, int, int]:
    """Return what an action computes or a send carries, as (pass, chunk, microbatch). Pass: F, the chunk's output; B,
    the gradient of its input; W, parameter gradients, which no action waits for."""
    return PASS[action.kind], action.chunk, action.microbatch


def table(rows: Iterable[Iterable[Action]]) -> str:
    """Format the rows as text, one line per stage: `stage 0 | 0F0 0F1 0B0 0B1`."""
    return "\n".join(f"stage {stage} | {' '.join(map(str, row))}" for stage, row in enumerate(rows))
