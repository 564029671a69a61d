"""What runs around one worker in its own process: environment, log file, and calls that are answered with data."""

from __future__ import annotations

import gc
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from platform.boundary.redaction import Shield, learn
from platform.cluster.crew.base.crew import shown
from platform.cluster.crew.base.job import START, Assignment
from platform.cluster.wire.channel import Garbled, Line, dial, encode
from platform.parallel.communicator.progress import PROGRESS

GRACE = 2.0  # seconds for a worker whose driver is gone to end by itself


def serve(place: Assignment, address: tuple[str, int], token: str, *, own_process: bool = True) -> None:
    """Dial the driver, make the worker and execute calls, in order, until the driver hangs up.

    Begins before torch is imported, because the environment decides what torch does. `own_process`: nothing else is in
    this process, and a worker that does not return ends with it.
    """
    os.environ.update(place.environment)
    if place.log:
        _redirect_output(place.log)
    attend(place, dial(address, token, place.number, place.node), own_process=own_process)


def attend(place: Assignment, line: Line, *, own_process: bool) -> None:
    """Make the worker of a member that is welcome, and execute calls as `serve` does."""
    learn(place.secrets)
    try:
        _Host(place, line, own_process).run()
    finally:
        line.close()


class _Host:
    """The calling thread executes; a reader thread takes messages and answers at once what must not wait."""

    def __init__(self, place: Assignment, line: Line, own_process: bool):
        self._place, self._line, self._own_process = place, line, own_process
        self._calls: SimpleQueue[tuple[int, str, list[Any]] | None] = SimpleQueue()
        self._worker: Any = None

    def run(self) -> None:
        threading.Thread(target=self._read, name="control", daemon=True).start()
        self._execute(START, "start()", self._make)
        while call := self._calls.get():
            number, method, args = call
            self._execute(number, shown(method, args), lambda: getattr(self._worker, method)(*args))  # noqa: B023

    def _make(self) -> None:
        a = self._place
        arguments = {"device": a.device, "run_dir": a.run_dir, "threads": a.threads}
        self._worker = resolve_name(a.worker)(a.config, a.number, **arguments)
        gc.freeze()  # what the imports made stays for good: a collection, as in leaving, takes no time then

    def _execute(self, number: int, call: str, function: Callable[[], Any]) -> None:
        PROGRESS.begin(call)
        cause = ""
        try:
            frame = encode({"answer": number, "value": function()})
        except Exception:
            cause = traceback.format_exc()
        if cause:  # and nothing refers to the frames that failed any more: what they have in hand keeps groups open
            self._leave()
            print(cause, file=sys.stderr, end="")  # the log has it too
            frame = encode({"answer": number, "error": cause})
        PROGRESS.begin("")
        with suppress(OSError):  # nobody wants to know: `_read` ends us
            self._line.send(frame)

    def _leave(self) -> None:
        """At once, not when the driver says so: under gloo only the neighbours of a rank that is gone notice it, and
        it is their leaving that frees the next ones."""
        if self._worker is not None:
            try:
                self._worker.leave()
            except Exception:
                traceback.print_exc()

    def _read(self) -> None:
        try:
            for message in self._line.messages():
                if "call" in message:
                    self._calls.put((message["call"], message["method"], message["args"]))
                elif "beat" in message:
                    self._line.send(encode({"beat": message["beat"], "progress": PROGRESS.beat()}))
                elif "abort" in message and self._worker is not None:
                    threading.Thread(target=self._worker.abort, name="abort", daemon=True).start()
        except (OSError, Garbled):
            pass
        self._calls.put(None)
        if self._own_process:
            time.sleep(GRACE)
            os._exit(1)


def _redirect_output(path: str) -> None:
    """Appends all output of this process, also that of its libraries in C, to a file, secrets redacted; to none, where
    there can be none. What a full disk does not take is lost, and nobody fails."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            stream.flush()
    try:
        Path(path).parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (
        Shield(
            io.TextIOWrapper(io.BufferedWriter(_Lossy(n, "w", closefd=False)), "utf-8", "replace", line_buffering=True)
        )
        for n in (1, 2)
    )


class _Lossy(io.FileIO):
    """A file that takes everything, and keeps what it can."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)
