"""Where a step's time goes: sections that partition the time of one rank."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Books every moment to the innermost open section. On CUDA it marks events in the stream, so that reading the
    clock is the only synchronisation."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._cuda = torch.device(device).type == "cuda"
        self._open: list[str] = []
        self._marks: list[tuple[str, Any]] = []  # (section that ends here, when)

    def _mark(self) -> None:
        if self._cuda:
            when: Any = torch.cuda.Event(enable_timing=True)
            when.record()
        else:
            when = time.perf_counter()
        self._marks.append((self._open[-1] if self._open else "", when))

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._mark()
        self._open.append(name)
        try:
            yield
        finally:
            self._mark()
            self._open.pop()

    def read(self) -> dict[str, float]:
        """Seconds per section since the last reading; time outside of any section under ''."""
        seconds: dict[str, float] = defaultdict(float)
        marks, self._marks = self._marks, []
        if self._cuda and marks:
            marks[-1][1].synchronize()
        for (_, begin), (name, end) in zip(marks, marks[1:], strict=False):
            seconds[name] += begin.elapsed_time(end) / 1000 if self._cuda else end - begin
        return dict(seconds)
