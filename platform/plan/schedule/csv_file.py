"""Schedules in CSV files: one line per stage, actions separated by commas, as torch.distributed.pipelining writes them.

    0F0,0F1,,0B0,0B1
    ,1F0,1B0,1F1,1B1

is 1F1B on two stages. A cell is chunk, then F, B, I or W, then microbatch; empty cells only align the columns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from platform.plan.schedule.generators import MOST_PASSES
from platform.plan.schedule.lowering import validate
from platform.plan.schedule.table import Action, Kind, Schedule, ScheduleError

CELL = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
LARGEST = 16 << 20  # bytes that a file may have


def from_csv(path: str | Path) -> Schedule:
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
    if lines := list(_unreadable(cells)):
        raise ScheduleError(lines)
    rows = tuple(tuple(_action(cell) for cell in line if cell.strip()) for line in cells)
    actions = [action for row in rows for action in row]
    if all(action.kind is Kind.FORWARD for action in actions):
        raise ScheduleError("the table has no backward pass")
    stages, chunks = len(rows), 1 + max(action.chunk for action in actions)
    if chunks % stages:
        raise ScheduleError(f"{chunks} chunks are not a multiple of {stages} stages, one per line")
    microbatches = 1 + max(action.microbatch for action in actions)
    if chunks * microbatches > min(MOST_PASSES, 1000 + 10 * len(actions)):
        raise ScheduleError(
            f"{chunks} chunks x {microbatches} microbatches are far more than its {len(actions)} actions"
        )
    schedule = Schedule(Path(path).stem, stages, chunks // stages, microbatches, rows)
    validate(schedule)
    return schedule


def _unreadable(cells: list[list[str]]) -> Iterator[str]:
    """Yield a message, with the stage, per non-empty CSV cell that is not an action such as `4B0`."""
    for stage, line in enumerate(cells):
        for cell in line:
            if cell.strip() and not CELL.fullmatch(cell.strip()):
                yield f"stage {stage}: {cell.strip()} is no action; 4B0 is the backward pass of chunk 4, microbatch 0"


def _action(cell: str) -> Action:
    """Parse a cell of a pipeline schedule's CSV file, which is known to be legal, such as `4B0`."""
    match = CELL.fullmatch(cell.strip())
    assert match
    chunk, kind, microbatch = match.groups()
    return Action(Kind(kind), int(microbatch), int(chunk))
