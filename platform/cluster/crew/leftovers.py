"""Programs that this process starts and that must not outlive it: an embedded Ray above all. After SIGKILL Ray's agents
would stay for another minute, and a stopped worker and the files for ever.

Each has the variable MARK in its environment, the name of their directory. A sweeper, `python leftovers.py DIRECTORY`,
which needs the standard library alone, waits at its standard input, which ends with this process, however it does; then
it ends the remaining ones and removes the directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from subprocess import Popen
from typing import Any, Self

MARK = "PLATFORM_EMBEDDED_RAY"
PATIENCE = 4.0  # seconds for the processes to end by themselves; then they are killed
AT_ONCE = b"at once"  # said to the sweeper: they are killed without patience
_LOOK_SECONDS = 0.02  # between two looks at the processes
_KILL_SECONDS = 10.0  # for killed processes to be gone


class MarkedPrograms:
    """Programs that this process starts, and a directory for their files; a context that ends the ones and removes the
    other. `directory`: only this user can read it."""

    def __init__(self) -> None:
        """Prepare to start programs, such as an embedded Ray, that end with this process; none is started yet."""
        self._main: Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Create the directory for an embedded Ray's files, and start the sweeper that cleans up after this process."""
        self.directory = _create_short_directory()
        command = [sys.executable, "-I", __file__, self.directory]
        # in its own session, so that Ctrl-C in the terminal does not reach it
        self._sweeper = Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return self

    def __exit__(self, *_: object) -> None:
        """End the embedded Ray and all programs started here, and let the sweeper process remove what is left."""
        self.end()
        self._sweeper.communicate(AT_ONCE)

    def start_program(self, command: Sequence[str], environment: Mapping[str, str], **how: Any) -> Popen[bytes]:
        """Start a program of an embedded Ray, which must not outlive this process; `how`: options of Popen."""
        return Popen(command, env={**environment, MARK: self.directory}, start_new_session=True, **how)

    def start_main_program(self, command: Sequence[str], environment: Mapping[str, str], **how: Any) -> Popen[bytes]:
        """Start the main program, such as a Ray, of which there is one at a time; `how`: options of Popen."""
        self._main = self.start_program(command, environment, **how)
        return self._main

    @property
    def is_running(self) -> bool:
        """Return True if the main program, such as an embedded Ray, was started and has not ended."""
        return self._main is not None and self._main.poll() is None

    def end(self) -> None:
        """End the embedded Ray, if it was started, at once, with all programs that it or this object has started."""
        if self._main is not None:
            self._main.kill()
            self._main.wait()
            self._main = None
            end_processes_of_directory(self.directory, max_seconds=_KILL_SECONDS)


@contextmanager
def block_sigterm() -> Iterator[None]:
    """Start processes, such as an embedded Ray, inside the block with SIGTERM blocked, for themselves and for all that
    they start. Some schedulers send it to every process of a job: then only this process reacts, and decides which
    processes end, and when."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _create_short_directory() -> str:
    """Create a temporary directory for an embedded Ray; a short path, as Unix sockets allow 107 characters."""
    with suppress(OSError):
        return tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    return tempfile.mkdtemp(prefix="ray-")


def end_processes_of_directory(
    directory: str, patience: float = 0.0, max_seconds: float = inf, spared: int = 0
) -> None:
    """Wait until no process started for an embedded Ray's `directory` (see `find_processes_of_directory`) is left but
    the one of id `spared`, for at most `max_seconds` seconds; kill the remaining ones after `patience` seconds."""
    begin = time.monotonic()
    while remaining := [process for process in find_processes_of_directory(directory) if process != spared]:
        waited = time.monotonic() - begin
        if waited >= max_seconds:
            return
        for process in remaining if waited >= patience else ():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def find_processes_of_directory(directory: str) -> list[int]:
    """Return the ids of the processes started for an embedded Ray's `directory`, without this process: with
    MARK=`directory` in the environment, or with files open in it, since a process that changes its title overwrites its
    environment, and the mark with it."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [number for number in numbers if number != os.getpid() and _uses_directory(number, directory)]


def _uses_directory(process: int, directory: str) -> bool:
    """Return True if the process of id `process` was started for an embedded Ray's `directory`: the variable MARK of
    its environment names that, or it has a file in it open."""
    with suppress(OSError):  # another user's process, or one that is gone
        with open(f"/proc/{process}/environ", "rb") as environment:
            if f"{MARK}={directory}".encode() in environment.read().split(b"\0"):
                return True
        files = f"/proc/{process}/fd"
        return any(os.readlink(f"{files}/{fd}").startswith(f"{directory}/") for fd in os.listdir(files))
    return False


def main(directory: str) -> None:
    """Clean up after a process that has started an embedded Ray: wait for the end of standard input, which comes when
    that process ends or closes it, then until no other process that belongs to `directory` is left, killing those left
    after PATIENCE; remove `directory`."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # some schedulers send it to all processes of a job
    end_processes_of_directory(directory, 0.0 if sys.stdin.buffer.read() == AT_ONCE else PATIENCE, spared=parent)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
