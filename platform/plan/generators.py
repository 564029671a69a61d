"""Generators of the shipped schedules: pure functions (stages, chunks per stage, microbatches) -> table of actions.

All follow one pattern per stage: w forward passes (warm-up), then forward and backward passes in turn, then the
remaining backward passes. They differ in w, in the order of chunks and microbatches, and in splitting off the weight
gradient:

    schedule     w on stage r of S, with C chunks per stage and groups of G microbatches
    gpipe        all microbatches
    1f1b         S - r - 1
    interleaved  2 (S - r - 1) + (C - 1) G; as 1f1b if C = 1
    zb_h1        S - r - 1 + (C - 1) G; weight gradients split off, each r steps later
    in pairs     2 (S - r - 1) + (C - 1) G + 1, of 1f1b too; each forward pass after it runs with a backward pass
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

from platform.plan.schedule import Action, Kind, Rows, Schedule, ScheduleError
from platform.plan.simulate import validate_schedule

MOST_PASSES = 200_000  # limit on a table's forward passes: making and checking more takes seconds

Generator = Callable[[int, int, int], Rows]  # (stages, chunks per stage, microbatches) -> compute rows


def build_gpipe_table(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate the compute table of the GPipe pipeline schedule (arXiv 1811.06965): all forward passes, then all
    backward passes. `chunks`: per stage, must be 1, else ScheduleError."""
    _refuse_several_chunks("gpipe", chunks)
    order = [(m, 0) for m in range(microbatches)]
    return [_build_row(stage, stages, 1, order, warmup=microbatches) for stage in range(stages)]


def build_1f1b_table(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate the compute table of the 1F1B pipeline schedule (PipeDream-Flush; Megatron-LM (Narayanan et al. 2021),
    section 2.2.1): GPipe's bubble, at most `stages` live microbatches. `chunks`: per stage, must be 1, else
    ScheduleError."""
    _refuse_several_chunks("1f1b", chunks)
    return build_interleaved_table(stages, chunks, microbatches)


def build_interleaved_table(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate the compute table of the interleaved 1F1B pipeline schedule (Megatron-LM (Narayanan et al. 2021),
    section 2.2.2) in Megatron's order: the bubble of 1F1B divided by `chunks`, the chunks per stage.

    With one chunk per stage it is 1F1B itself; with several, fewer microbatches than stages raise ScheduleError.
    """
    order, group = _order_by_groups("interleaved", stages, chunks, microbatches)
    step = 2 if chunks > 1 else 1
    return [_build_row(s, stages, chunks, order, step * (stages - s - 1) + (chunks - 1) * group) for s in range(stages)]


def build_paired_table(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate the compute table of 1F1B, interleaved if there are several `chunks` per stage, in pairs: a forward pass
    runs at once with the backward pass of an earlier microbatch (DeepSeek-V3, section 3.2.1; Megatron-Core's
    overlap_moe_expert_parallel_comm). A pair hands on both results at its end, so that 1F1B's warm-up, too, has two
    forward passes for each later stage; with one, neighbours would wait for each other in turn."""
    order, group = _order_by_groups("interleaved", stages, chunks, microbatches)
    rows = []
    for stage in range(stages):
        warmup = min(len(order), 2 * (stages - stage - 1) + (chunks - 1) * group + 1)
        row, end = _build_row(stage, stages, chunks, order, warmup), 2 * len(order) - warmup
        rows.append([replace(a, paired=warmup <= i < end) for i, a in enumerate(row)])
    return rows


def build_zb_h1_table(stages: int, chunks: int, microbatches: int) -> Rows:
    """Generate the compute table of the ZB-H1 pipeline schedule (arXiv 2401.10241): weight gradients, split off, fill
    the bubble; no more memory than 1F1B.

    With several `chunks` per stage it is interleaved too; stage r does each weight gradient r steps after its input
    gradient.
    """
    order, group = _order_by_groups("zb_h1", stages, chunks, microbatches)
    return [_build_row(s, stages, chunks, order, stages - s - 1 + (chunks - 1) * group, s) for s in range(stages)]


def _refuse_several_chunks(name: str, chunks: int) -> None:
    """Raise ScheduleError if the pipeline schedule `name`, which takes one chunk per stage, is given more."""
    if chunks != 1:
        raise ScheduleError(f"{name} has one chunk per stage, not {chunks}; interleaved and zb_h1 have several")


def _group_size(stages: int, microbatches: int) -> int:
    """Return the microbatches per group of an interleaved schedule: the least divisor of all >= `stages`, or all."""
    return next((n for n in range(stages, microbatches) if microbatches % n == 0), microbatches)


def _order_by_groups(name: str, stages: int, chunks: int, microbatches: int) -> tuple[list[tuple[int, int]], int]:
    """Return the forward passes of any stage of an interleaved schedule in order, as (microbatch, chunk on the stage),
    and the number of microbatches per group. Raises ScheduleError, with the schedule's `name`, for too few of them.

    A group goes through all chunks before the next group starts. With 2 chunks and 6 microbatches in groups of 3:

        microbatch | 0 1 2 0 1 2 3 4 5 3 4 5
        chunk      | 0 0 0 1 1 1 0 0 0 1 1 1

    A group is the smallest number >= stages that divides the microbatches: a larger one would hold more activations; in
    a smaller one the last stage's output would come too late for the first stage's next chunk.
    """
    if chunks > 1 and microbatches < stages:
        raise ScheduleError(f"{name} with several chunks needs at least as many microbatches as stages={stages}")
    group = _group_size(stages, microbatches)
    starts = range(0, microbatches, group)
    return [(m, chunk) for low in starts for chunk in range(chunks) for m in range(low, low + group)], group


def _build_row(
    stage: int, stages: int, chunks: int, order: list[tuple[int, int]], warmup: int, delay: int | None = None
) -> list[Action]:
    """Build one pipeline stage's row of a schedule, its compute actions in order: `warmup` forward passes, then forward
    and backward in turn, then the remaining backward passes.

    `order`: the stage's forward passes in order as (microbatch, chunk on the stage); the backward passes take the same
    order with the chunks in reverse. `delay`: split the backward passes, each weight gradient so many steps after its
    input gradient; None: unsplit.
    """

    def actions_of_kind(kind: Kind) -> list[Action]:
        """Return the stage's actions of one kind in order; backward passes take the chunks in reverse."""
        mirrored = kind is not Kind.FORWARD
        return [Action(kind, m, (chunks - 1 - c if mirrored else c) * stages + stage) for m, c in order]

    warmup = min(warmup, len(order))
    row = actions_of_kind(Kind.FORWARD)[:warmup]
    forwards = iter(actions_of_kind(Kind.FORWARD)[warmup:])
    weights = iter(actions_of_kind(Kind.WEIGHT) if delay is not None else ())
    for step, backward in enumerate(actions_of_kind(Kind.BACKWARD if delay is None else Kind.INPUT)):
        row += [*islice(forwards, 1), backward, *islice(weights, step >= (delay or 0))]
    return [*row, *weights]


NO_TABLE = "pipeline=file needs the table of a schedule, one line per stage"  # a refusal where no file is named
ONE_CHUNK = ("gpipe", "1f1b")  # schedules that allow only one chunk per stage
SCHEDULES: dict[str, Generator] = {
    "gpipe": build_gpipe_table,
    "1f1b": build_1f1b_table,
    "interleaved": build_interleaved_table,
    "zb_h1": build_zb_h1_table,
}
SHIPPED = tuple(SCHEDULES)
PROVEN = frozenset((*SCHEDULES.values(), build_paired_table))  # tests validate the tables of these
IN_PAIRS = ("none", "1f1b", "interleaved")  # schedules whose passes may run in pairs, as `build_paired_table` has them
SETTLED = 8  # microbatches after which the sends in flight have reached their maximum


def generate(kind: str, stages: int, chunks: int, microbatches: int, generator: Generator | None = None) -> Schedule:
    """Generate the table of a shipped pipeline schedule or of a user's, by its name `kind` in SCHEDULES, and validate
    it. `chunks`: per stage; `generator`: its function, if not the one in SCHEDULES. Raises ScheduleError if the
    schedule cannot take these numbers."""
    return _generate_once(kind, stages, chunks, microbatches, generator or SCHEDULES[kind])


@lru_cache(maxsize=8)
def _generate_once(kind: str, stages: int, chunks: int, microbatches: int, generator: Generator) -> Schedule:
    """Generate and validate a schedule's table, once for all plans of a process that follow it."""
    rows = tuple(tuple(row) for row in generator(stages, chunks, microbatches))
    schedule = Schedule(kind, stages, chunks, microbatches, rows, proven=generator in PROVEN)
    if not schedule.proven:
        validate_schedule(schedule)
    return schedule


def least_microbatches(kind: str, stages: int, chunks: int, least: int, generator: Generator | None = None) -> int:
    """Return the smallest number of microbatches per step >= `least` that the pipeline schedule `kind` takes, with
    `chunks` per stage; `least` itself if no number near it is legal. `generator`: its function (`generate`)."""
    if kind in SHIPPED:  # without making the table
        return max(least, stages) if chunks > 1 else least
    legal = nearest_legal_microbatches(kind, stages, chunks, least, generator) or ()
    return next((m for m in legal if m > least), least)


def representative_microbatches(kind: str, stages: int, chunks: int, microbatches: int) -> int:
    """Return a smaller number of microbatches whose table of the pipeline schedule `kind` has the same peak memory on
    every stage as one of `microbatches`, so that memory can be predicted from a short table; `microbatches` itself if
    no smaller one is known. `chunks`: per stage.

    The rows of the shipped schedules but gpipe repeat once every chunk has had its first backward pass with all its
    forward passes in flight.
    """
    if kind not in SHIPPED or kind == "gpipe":
        return microbatches
    if chunks == 1:
        return min(microbatches, 2 * stages + SETTLED)
    group = _group_size(stages, microbatches)
    numbers = range(3 * group, microbatches, group)
    return next((m for m in numbers if m >= SETTLED and _group_size(stages, m) == group), microbatches)


def nearest_legal_microbatches(
    kind: str, stages: int, chunks: int, microbatches: int, generator: Generator | None = None
) -> list[int] | None:
    """Return None if the pipeline schedule `kind` takes this number of microbatches per step with `chunks` per stage,
    else the at most 3 nearest numbers that it takes, ascending, for the error message. `generator`: its function
    (`generate`)."""

    def is_legal(m: int) -> bool:
        """Return True if the generator of the pipeline schedule has a table of actions for `m` microbatches."""
        try:
            generate(kind, stages, chunks, m, generator)
        except ScheduleError:
            return False
        return True

    if is_legal(microbatches):
        return None
    tried = max(1, MOST_PASSES // (stages * chunks * microbatches))  # tables made in about the time of one of this size
    near = (microbatches + sign * distance for distance in range(1, 4 * stages * chunks) for sign in (-1, 1))
    legal_counts = (m for m in islice((m for m in near if m > 0), tried) if is_legal(m))
    return sorted(m for m, _ in zip(legal_counts, range(3), strict=False))


# Schedules in CSV files: one line per stage, actions separated by commas, as torch.distributed.pipelining writes them.
#
#     0F0,0F1,,0B0,0B1
#     ,1F0,1B0,1F1,1B1
#
# is 1F1B on two stages. A cell is chunk, then F, B, I or W, then microbatch; empty cells only align the columns.

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
LARGEST = 16 << 20  # bytes that a file may have


def read_schedule_csv(path: str | Path) -> Schedule:
    """Read a user's pipeline schedule from a CSV file, one line per stage with cells such as `4B0`, and validate it;
    the numbers of stages, chunks and microbatches follow from its cells.

    Raises ScheduleError with every violation, also for a file that cannot be read or is larger than LARGEST bytes and
    for a table without backward passes.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe might never end
            raise ScheduleError("cannot be read (it is no file)")
        if Path(path).exists() and (size := Path(path).stat().st_size) > LARGEST:
            raise ScheduleError(f"has {size} bytes; a table has at most {LARGEST}")
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot be read ({error})") from None
    try:
        cells = [line for line in csv.reader(text.splitlines(), skipinitialspace=True) if line]
    except csv.Error as error:
        raise ScheduleError(f"cannot be read ({error})") from None
    if lines := list(_violations_of_csv_cells(cells)):
        raise ScheduleError(lines)
    rows = tuple(tuple(_parse_action(cell) for cell in line if cell.strip()) for line in cells)
    actions = [action for row in rows for action in row]
    if all(action.kind is Kind.FORWARD for action in actions):
        raise ScheduleError("the table has no backward pass")
    stages, chunks = len(rows), 1 + max(action.chunk for action in actions)
    if chunks % stages:
        raise ScheduleError(f"{chunks} chunks are not a multiple of {stages} stages, one per line")
    microbatches = 1 + max(action.microbatch for action in actions)
    if chunks * microbatches > min(MOST_PASSES, 1000 + 10 * (total := len(actions))):
        raise ScheduleError(f"{chunks} chunks x {microbatches} microbatches are far more than its {total} actions")
    schedule = Schedule(Path(path).stem, stages, chunks // stages, microbatches, rows)
    validate_schedule(schedule)
    return schedule


def _violations_of_csv_cells(cells: list[list[str]]) -> Iterator[str]:
    """Yield a message, with the stage, per non-empty CSV cell that is not an action such as `4B0`."""
    for stage, line in enumerate(cells):
        for cell in line:
            if cell.strip() and not CELL.fullmatch(cell.strip()):
                yield f"stage {stage}: {cell.strip()} is no action; 4B0 is the backward pass of chunk 4, microbatch 0"


def _parse_action(cell: str) -> Action:
    """Parse a cell of a pipeline schedule's CSV file, which is known to be legal, such as `4B0`."""
    match = CELL.fullmatch(cell.strip())
    assert match
    chunk, kind, microbatch = match.groups()
    return Action(Kind(kind), int(microbatch), int(chunk))
