"""The verdict on a run: one line that names the culprit, and what it follows from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from platform.monitor.records import records

# how sure a verdict is, by its evidence
CERTAIN = "certain"  # the run itself recorded it
LIKELY = "likely"  # it follows from what was measured
GUESS = "guess"  # nothing else is known to do this


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run. `why`: a word of the table in docs/troubleshooting.md; `line`: all of it in one line;
    `attention`: True if a person should act. `rank`, `number` and `node`: of the worker to blame, None or "" if none
    is; `since`: seconds since the epoch; `details`: further lines; `stack`: frames of the culprit itself, the innermost
    last.
    """

    why: str
    line: str
    attention: bool = True
    rank: int | None = None
    number: int | None = None
    node: str = ""
    step: int | None = None
    since: float | None = None
    sure: str = CERTAIN
    details: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return the fields of the verdict on a run as plain data; fields that are None are left out."""
        return records.plain(self)
