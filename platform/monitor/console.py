"""Console output of a run: an aligned line every few steps, and on a terminal a status line refreshed in place."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import TextIO

from platform.boundary import terminal
from platform.boundary.redaction import redact
from platform.monitor.records.metrics import MetricsRow

_SCORES = 6  # of tasks that are shown
_HEADER_EVERY = 25  # lines between headers: about one per screen
_ERASE = "\r\x1b[2K"

# title, width, text of a row and the time left
_COLUMNS: tuple[tuple[str, int, Callable[[MetricsRow, str], str]], ...] = (
    ("step", 7, lambda row, _: str(row.step)),
    ("loss", 10, lambda row, _: f"{row.loss:.4f}"),
    ("grad norm", 11, lambda row, _: f"{row.grad_norm:.3f}"),
    ("lr", 11, lambda row, _: f"{row.lr:.2e}"),
    ("tokens/s", 12, lambda row, _: f"{row.tokens_per_second:,.0f}"),
    ("MFU", 8, lambda row, _: "~" if row.mfu is None else f"{row.mfu:.1%}"),
    ("world", 7, lambda row, _: str(row.world_size)),
    ("time left", 11, lambda _, left: left),
)


class Console:
    """Prints a run's progress: a line for the first step that it sees, for every `every`-th step and for the last one,
    and on a terminal a status line that every step refreshes.

    Loss and gradient norm are that step's own; tokens/s and MFU are means over the steps since the previous line.
    `stream`: None prints nothing.
    """

    def __init__(
        self, stream: TextIO | None, *, total_steps: int, every: int, clock: Callable[[], float] = time.monotonic
    ):
        """Configure the console of a run: a line every `every` steps of `total_steps` on `stream` (None: nothing)."""
        self._stream, self._total, self._every, self._clock = stream, total_steps, every, clock
        self._live = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._lines, self._length = 0, 0
        self._since: list[MetricsRow] = []  # rows since the last line
        self._pace: deque[tuple[int, float]] = deque(maxlen=50)  # (step, clock) of recent steps, for the time left

    def step(self, row: MetricsRow) -> None:
        """Show a committed step on the run's console: print its metrics if a line is due, and its validation loss if it
        has one; refresh the status line."""
        step, longer = row.step, self._length and row.length not in (None, self._length)
        self._length = row.length or 0
        if longer:
            self.say(f"from step {step} on, sequences have {row.length} tokens")
        if self._pace and step <= self._pace[-1][0]:  # rolled back: time lost is no part of the pace
            self._pace.clear()
        self._pace.append((step, self._clock()))
        self._since.append(row)
        left = self._left(step)
        if not self._lines or step % self._every == 0 or step == self._total:
            seconds = [r.step_seconds for r in self._since]
            speed = fmean([r.tokens_per_second for r in self._since], seconds)
            known = [r.mfu for r in self._since if r.mfu is not None]
            mfu = fmean(known, seconds) if len(known) == len(seconds) else None
            self._since.clear()
            self._line(replace(row, tokens_per_second=speed, mfu=mfu), left)
        if row.val_loss is not None:
            of = "".join(f"  {name} {loss:.4f}" for name, loss in (row.val_losses or {}).items())
            self.say(f"{step:>{_COLUMNS[0][1]}}{row.val_loss:>{_COLUMNS[1][1]}.4f}  validation loss{of}")
        if row.task_scores:
            self.say(f"{step:>{_COLUMNS[0][1]}}  tasks{_some(row.task_scores)}")
        if self._live:
            status = f"step {step}/{self._total}  loss {row.loss:.4f}  "
            status += f"{row.tokens_per_second:,.0f} tokens/s  {left} left"
            width = shutil.get_terminal_size().columns - 1  # a wrapped status line could not be erased
            self._write(_ERASE + status[:width])

    def say(self, text: str) -> None:
        """Print `text` as a line of its own on the run's console, above the status line."""
        self._write((_ERASE if self._live else "") + terminal.visible(text) + "\n")

    def close(self) -> None:
        """Clear the run's status line off the terminal."""
        if self._live:
            self._write(_ERASE)

    def _line(self, row: MetricsRow, left: str) -> None:
        """Print a step's metrics as an aligned console line, with the header every 25 lines; `left`: time left."""
        if self._lines % _HEADER_EVERY == 0:
            self.say("".join(f"{title:>{width}}" for title, width, _ in _COLUMNS))
        self._lines += 1
        self.say("".join(f"{text(row, left):>{width}}" for _, width, text in _COLUMNS))

    def _left(self, step: int) -> str:
        """Return the time that a run still takes after `step`, at the pace of recent steps, as text; "~" if unknown."""
        (first, then), (last, now) = self._pace[0], self._pace[-1]
        return _duration((now - then) / (last - first) * (self._total - step)) if last > first else "~"

    def _write(self, text: str) -> None:
        """Write a text to the run's console with its secrets redacted."""
        terminal.write_text(self._stream, redact(text))


def _some(scores: dict[str, float]) -> str:
    """Return the first scores of a run's evaluation tasks as text for its console, and how many more there are."""
    shown = "".join(f"  {name} {score:.4f}" for name, score in list(scores.items())[:_SCORES])
    return shown + (f"  and {len(scores) - _SCORES} more" if len(scores) > _SCORES else "")


def _duration(seconds: float) -> str:
    """Format the seconds left of a run as days and hours, hours and minutes, or minutes and seconds, such as 1m43s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
