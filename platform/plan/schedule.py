"""Pipeline schedule as data: for each stage, in order, which pass of which chunk on which microbatch it computes.

A table has no communication: `platform.plan.simulate` adds it. See docs/runtime.md. `place_layers` divides a model's
units (embedding, blocks, head) into chunks: contiguous ranges, as even in cost as possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, islice
from math import inf


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
    """Entry of one pipeline stage's row in a schedule: a pass, send or receive of one microbatch through one model
    chunk. `chunk` counts through the whole model: chunk 0 holds the embedding, the last one the loss.

    `peer`: the other stage of a send or receive; None for compute actions. `paired`: a forward pass and the backward
    pass behind it in the row, both paired, run at once.
    """

    kind: Kind
    microbatch: int
    chunk: int
    peer: int | None = None
    paired: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Format this action of a pipeline schedule as chunk, kind and microbatch, such as `4B0`."""
        return f"{self.chunk}{self.kind}{self.microbatch}"


Rows = Sequence[Sequence[Action]]  # one row per stage


class ScheduleError(ValueError):
    """Refusal of a pipeline schedule whose table cannot run. `violations`: one line each, without a configuration key;
    the message ends with the table `rows`, if given."""

    def __init__(self, violations: Sequence[str] | str, rows: Rows = ()):
        """Construct the refusal of a pipeline schedule; arguments as in the class."""
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        self.rows = rows
        super().__init__("\n".join([*self.violations, *([table(rows)] if rows else [])]))


@dataclass(frozen=True)
class Schedule:
    """Table of the compute actions (no sends or receives) of every pipeline stage in order; `chunks` is per stage.

    A chunk's stage is read from the rows, so a table may place chunks as it likes (in a loop, in a V). `proven`: tests
    validate all tables of its generator.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    rows: tuple[tuple[Action, ...], ...] = field(hash=False)  # too long to hash each time
    proven: bool = field(default=False, compare=False)

    @property
    def total_chunks(self) -> int:
        """Return the number of model chunks on all pipeline stages together."""
        return self.stages * self.chunks

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Return the pipeline stage of every model chunk, by chunk number; `platform.plan.simulate.validate_schedule`
        checks that each chunk has only one."""
        stages = {action.chunk: stage for stage, row in enumerate(self.rows) for action in row}
        return tuple(stages[chunk] for chunk in range(self.total_chunks))

    @cached_property
    def splits_weight_gradients(self) -> bool:
        """Return True if passes of this schedule leave weight gradients for later ones."""
        return any(action.kind is Kind.WEIGHT for row in self.rows for action in row)

    def chunks_of_stage(self, stage: int) -> tuple[int, ...]:
        """Return the numbers of the model chunks that the schedule places on one pipeline stage, ascending."""
        return tuple(chunk for chunk, owner in enumerate(self.placement) if owner == stage)


def mark_completed_chunks(row: Sequence[Action]) -> Iterator[tuple[Action, int | None]]:
    """Yield the actions of one stage's schedule row, each with the number of the chunk whose parameter gradients are
    complete after it (its last backward or weight-gradient pass of the step), else None; then their reduction can
    start."""
    last = {a.chunk: i for i, a in enumerate(row) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)}
    for i, action in enumerate(row):
        yield action, action.chunk if last.get(action.chunk) == i else None


def iterate_turns(row: Iterable[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield the turns of a stage's `row` in order: tuples of one action, or of the two of a pair, which run at once."""
    actions = iter(row)
    for action in actions:
        yield tuple(islice(chain((action,), actions), 1 + action.paired))


def has_pairs(row: Iterable[Action]) -> bool:
    """Return True if some passes in a stage's `row` run in pairs."""
    return any(action.paired for action in row)


def count_in_flight(row: Iterable[Action]) -> dict[int, int]:
    """Return by chunk the most microbatches in flight at once in a stage's `row`: forward done, backward not."""
    ends, present, most = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}, Counter[int](), Counter[int]()
    for action in row:
        present[action.chunk] += ends.get(action.kind, 0)
        most[action.chunk] = max(most[action.chunk], present[action.chunk])
    return dict(most)


def is_in_order(row: Sequence[Action]) -> bool:
    """Return True if each kind of pass in a stage's `row` takes all microbatches of its chunk, one after the other."""
    passes = defaultdict[tuple[int, Kind], list[int]](list)
    for action in row:
        if action.kind in COMPUTE:
            passes[action.chunk, action.kind].append(action.microbatch)
    every = [*range(1 + max((action.microbatch for action in row), default=-1))]
    return all(microbatches == every for microbatches in passes.values())


def needs_of_action(action: Action, total_chunks: int) -> list[tuple[str, int, int]]:
    """Return the results of other compute actions that must exist before a compute action of a pipeline schedule can
    start, as (pass, chunk, microbatch), named as `result_of_action` does: F the chunk's output, B the gradient of its
    input. `total_chunks`: chunks of all stages together."""
    chunk, microbatch = action.chunk, action.microbatch
    match action.kind:
        case Kind.FORWARD:
            return [("F", chunk - 1, microbatch)] if chunk else []
        case Kind.WEIGHT:
            return [("B", chunk, microbatch)]
    forward_output = ("F", chunk, microbatch)
    return [forward_output] if chunk + 1 == total_chunks else [forward_output, ("B", chunk + 1, microbatch)]


def result_of_action(action: Action) -> tuple[str, int, int]:
    """Return the name of the tensor that an action of a pipeline schedule computes or sends, as (pass, chunk,
    microbatch), by which `needs_of_action` refers to it. The pass is F for the output of `chunk`, B for the gradient of
    the chunk's input, W for its parameter gradients, which no other action waits for. Receives have none: KeyError."""
    return PASS[action.kind], action.chunk, action.microbatch


def table(rows: Iterable[Iterable[Action]]) -> str:
    """Format the rows of a pipeline schedule as text, one line per stage, such as `stage 0 | 0F0 0F1 0B0 0B1`; an
    action is written chunk, kind, microbatch, and a pair `0F1|0B0`."""
    turns = (" ".join("|".join(map(str, turn)) for turn in iterate_turns(row)) for row in rows)
    return "\n".join(f"stage {stage} | {actions}" for stage, actions in enumerate(turns))


def place_layers(costs: Sequence[float], chunks: int) -> list[range]:
    """Divide a model's units (embedding, blocks, head) into one contiguous range of unit numbers per pipeline chunk, so
    that the cost of the most expensive chunk is as small as possible.

    `costs`: one per unit in the model's order, embedding and head included, in seconds, FLOPs or any other measure.
    Among the placements with the smallest maximum the most even one (least sum of squares) is taken; among equals the
    one with shorter early chunks, which keep more microbatches alive. Exact, by dynamic programming in O(chunks x
    units^2), and deterministic. With fewer units than chunks, the last unit, which has the loss, goes to the last
    chunk, and the chunks just before it are empty.
    """
    parts = min(chunks, len(costs))
    ranges = _most_even_ranges(costs, parts, _smallest_maximum(costs, parts))
    empty = [range(ranges[-1].start, ranges[-1].start)] * (chunks - parts)
    return [*ranges[:-1], *empty, ranges[-1]]


def _smallest_maximum(costs: Sequence[float], parts: int) -> float:
    """Return the smallest cost that the most expensive pipeline chunk can have if the model's units (embedding, blocks,
    head), whose costs in model order are `costs`, are placed on at most `parts` chunks of consecutive units. It is
    found by bisection among the sums of all contiguous ranges: under a limit, chunks are filled one after the other."""

    def count_chunks_needed(limit: float) -> int:
        """Return how many pipeline chunks hold all units of the model if none may cost more than `limit`."""
        count, filled = 1, 0.0
        for c in costs:
            if filled + c > limit:
                count, filled = count + 1, 0.0
            filled += c
        return count

    sums = sorted({s for start in range(len(costs)) for s in accumulate(costs[start:])})
    possible = sums[bisect_left(sums, max(costs)) :]
    return possible[bisect_left(possible, True, key=lambda limit: count_chunks_needed(limit) <= parts)]


def _most_even_ranges(costs: Sequence[float], parts: int, limit: float) -> list[range]:
    """Return `parts` non-empty ranges of numbers of units, one per pipeline chunk, that tile the units of such `costs`
    in order, none of a cost above `limit`, with the least sum of squared costs; of equals the one with the earliest
    first cut."""
    units, total = len(costs), [0.0, *accumulate(costs)]
    best = [[inf] * (units + 1) for _ in range(parts + 1)]  # best[k][i]: units from i on in k ranges
    cut = [[units] * (units + 1) for _ in range(parts + 1)]  # cut[k][i]: the end of the first of these ranges
    best[0][units] = 0.0
    slack = limit * 1e-9  # sums of floats differ in the last place
    for k in range(1, parts + 1):
        behind = best[k - 1]
        for i in range(units - k + 1):
            for j in range(i + 1, units - k + 2):
                if (range_cost := total[j] - total[i]) > limit + slack:
                    break
                if (price := range_cost**2 + behind[j]) < best[k][i]:
                    best[k][i], cut[k][i] = price, j
    ranges, start = [], 0
    for k in range(parts, 0, -1):
        ranges.append(range(start, cut[k][start]))
        start = cut[k][start]
    return ranges
