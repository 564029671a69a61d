"""Workers forked by a fork server (`fork_server`), seen from the process that starts it, or orders a worker from it."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from platform.cluster.crew.base.job import Assignment

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from platform.cluster.crew.launchers.fork_server import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""
_KILL_SECONDS = 5.0  # for a killed process to be gone; one that waits for a disk or a device takes long
_END_SECONDS = 2.0  # for the server to end with its workers


class ForkServer:
    """Process that has imported what workers such as the one of `place` need, and forks them. It ends with this
    process, and its workers with it, however this one ends. Must be started from the main thread: the kernel takes a
    thread's end for its parent's."""

    def __init__(self, place: Assignment):
        """Start the fork server, a process that imports the module of the worker that `place` describes."""
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()), place.worker.partition(":")[0]]
            # One thread: what is forked must have no other, and a worker sets its own number of them.
            environment = os.environ | place.unset(os.environ) | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Return True if the fork server's process still runs."""
        return self._process.poll() is None

    def fork(self, place: Assignment, address: tuple[str, int], token: str) -> Forked:
        """Order a forked worker process, without waiting for it: it will serve the member of `place`, with the driver
        at `address` and the secret `token`, in this process's environment."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # the server is gone: the connection ends, as if the worker had died
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return Forked(ours, place, address, token)

    def listen(self, path: str) -> None:
        """Accept orders of workers by `order_worker` at the Unix socket `path`, which only this user can reach."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            socket.send_fds(self._control, [b"l"], [listener.fileno()])

    def close(self) -> None:
        """End the fork server and all worker processes that it has forked, at once."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it is stopped
            self._process.kill()
            self._process.wait()


def order_worker(path: str, place: Assignment, address: tuple[str, int], token: str) -> Forked:
    """Order a worker process, as `ForkServer.fork` does, of the fork server listening at `path`. Raises OSError."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    return Forked(line, place, address, token)


def _readable(line: socket.socket, seconds: float | None) -> bool:
    """Wait up to `seconds` (None: for ever) for data on a fork server's connection; return False if none comes."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class Forked:
    """Worker process that a fork server forks. `line`: a fresh connection with the server, which takes the order; the
    worker dies when it is closed."""

    def __init__(self, line: socket.socket, place: Assignment, address: tuple[str, int], token: str):
        """Order a worker from the fork server over `line`: send it the environment, `place`, `address` and `token`."""
        self._line, self._how = line, ""
        order = pickle.dumps((dict(os.environ), sys.path, pickle.dumps((place, address, token))))
        with suppress(OSError):  # as in `ForkServer.fork`
            line.sendall(order)

    def ended(self, seconds: float | None) -> str | None:
        """Return how the forked worker process ended, as a phrase; None if not within `seconds` (None: for ever)."""
        if not self._how and _readable(self._line, seconds):
            with suppress(OSError):
                self._how = _phrase(self._line.recv(16))
        return self._how or None

    def kill(self) -> None:
        """Kill the forked worker process, which may be stopped or gone, and wait until it is gone."""
        with suppress(OSError), self._line:
            self._line.shutdown(socket.SHUT_WR)
            self.ended(_KILL_SECONDS)


def _phrase(code: bytes) -> str:
    """Describe how a forked worker process ended, by the exit code that its server sent, b"" if the server is gone."""
    if not code:
        return "the process was killed with the process that it was forked from"
    if code.startswith(b"-"):
        return f"the process was killed by {signal.Signals(-int(code)).name}"
    return f"its exit status is {int(code)}"
