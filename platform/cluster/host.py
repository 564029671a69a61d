"""What runs around one worker in its own process: environment, log file, and calls that are answered with data."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from platform.cluster.job import Assignment

Call = tuple[str, list[Any]]  # method, arguments
Answer = dict[str, Any]  # {"value": ...} or {"error": traceback}; plain JSON


class Host:
    """The worker of this process. Made before torch is imported, because the environment decides what torch does."""

    def __init__(self, assignment: Assignment):
        os.environ.update(assignment.environment)
        if assignment.log:
            _redirect_output(assignment.log)
        self._assignment = assignment
        self._worker: Any = None

    def start(self) -> Answer:
        """Makes the worker."""
        return _answer(self._make)

    def call(self, method: str, args: list[Any]) -> Answer:
        return _answer(getattr(self._worker, method), *args)

    def _make(self) -> None:
        a = self._assignment
        arguments = {"device": a.device, "run_dir": a.run_dir, "threads": a.threads}
        self._worker = resolve_name(a.worker)(a.config, a.rank, a.world_size, **arguments)


def serve(assignment: Assignment, receive: Callable[[], Call | None], send: Callable[[Answer], None]) -> None:
    """Makes the worker and answers calls, in order, until `receive` gives None. The first answer is the making's."""
    host = Host(assignment)
    send(host.start())
    while call := receive():
        send(host.call(*call))


def _answer(function: Callable[..., Any], *args: Any) -> Answer:
    try:
        return {"value": function(*args)}
    except Exception:
        traceback.print_exc()  # the log has it too
        return {"error": traceback.format_exc()}


def _redirect_output(path: str) -> None:
    """Appends all output of this process, also that of its libraries in C, to a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
