"""Workers forked by a fork server (`fork_server`), seen from the process that starts it, or orders a worker from it;
`ForkLauncher` launches a crew of them on this machine, without Ray."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from time import monotonic

from platform.cluster.crew.crew import Launcher
from platform.cluster.crew.job import Assignment, Job, assign_worker, single_gpu_environment
from platform.cluster.crew.switchboard import WorkerSwitchboard

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from platform.cluster.crew.fork_server import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""
_KILL_SECONDS = 5.0  # for a killed process to be gone; one that waits for a disk or a device takes long
_END_SECONDS = 2.0  # for the server to end with its workers


class ForkServer:
    """Process that has imported what workers such as the one of `place` need, and forks them. It ends with this
    process, and its workers with it, however this one ends. Must be started from the main thread: the kernel takes a
    thread's end for its parent's."""

    def __init__(self, assignment: Assignment):
        """Start the fork server, a process that imports the module of the worker that `assignment` describes."""
        self._control, theirs = socket.socketpair()
        with theirs:
            arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            arguments.append(assignment.worker.partition(":")[0])
            # One thread: what is forked must have no other, and a worker sets its own number of them.
            environment = os.environ | assignment.unset_defaults(os.environ) | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        """Return True if the fork server's process still runs."""
        return self._process.poll() is None

    def fork_worker(self, assignment: Assignment, address: tuple[str, int], token: str) -> ForkedWorker:
        """Order a forked worker process, without waiting for it: it will serve the member of `assignment`, with the
        driver at `address` and the secret `token`, in this process's environment."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):  # the server is gone: the connection ends, as if the worker had died
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ForkedWorker(ours, assignment, address, token)

    def listen_for_orders(self, path: str) -> None:
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


def order_worker(path: str, assignment: Assignment, address: tuple[str, int], token: str) -> ForkedWorker:
    """Order a worker process of the fork server at `path`, as `ForkServer.fork_worker`. Raises OSError."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    return ForkedWorker(line, assignment, address, token)


def _await_data(line: socket.socket, seconds: float | None) -> bool:
    """Wait up to `seconds` (None: for ever) for data on a fork server's connection; return False if none comes."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


class ForkedWorker:
    """Worker process that a fork server forks. `line`: a fresh connection with the server, which takes the order; the
    worker dies when it is closed."""

    def __init__(self, line: socket.socket, assignment: Assignment, address: tuple[str, int], token: str):
        """Order a worker over `line`: send its environment, `assignment`, `address` and `token`."""
        self._line, self._how = line, ""
        order = pickle.dumps((dict(os.environ), sys.path, pickle.dumps((assignment, address, token))))
        with suppress(OSError):  # as in `ForkServer.fork_worker`
            line.sendall(order)

    def describe_exit(self, seconds: float | None) -> str | None:
        """Return how the forked worker process ended, as a phrase; None if not within `seconds` (None: for ever)."""
        if not self._how and _await_data(self._line, seconds):
            with suppress(OSError):
                self._how = _describe_exit_code(self._line.recv(16))
        return self._how or None

    def kill(self) -> None:
        """Kill the forked worker process, which may be stopped or gone, and wait until it is gone."""
        with suppress(OSError), self._line:
            self._line.shutdown(socket.SHUT_WR)
            self.describe_exit(_KILL_SECONDS)


def _describe_exit_code(code: bytes) -> str:
    """Describe how a forked worker process ended, by the exit code that its server sent, b"" if the server is gone."""
    if not code:
        return "the process was killed with the process that it was forked from"
    if code.startswith(b"-"):
        return f"the process was killed by {signal.Signals(-int(code)).name}"
    return f"its exit status is {int(code)}"


_JOIN_SECONDS = 3.0  # for a process to exit after it was asked to close


class ForkLauncher(Launcher):
    """Forks one worker process per member on this machine, from a server that has imported what they need. A process
    hired after another died gets its slot, and so its GPU."""

    def __init__(self) -> None:
        """Initialise a launcher of plain worker processes on this machine, which has forked none yet."""
        super().__init__()
        self._server: ForkServer | None = None
        self._forked: dict[int, ForkedWorker] = {}
        self._slots: dict[int, int] = {}  # member number -> slot, of living members

    def prepare_launch(self, job: Job, size: int) -> str:
        """Start the fork server of the crew; return this machine's loopback address for the driver to listen on."""
        self._open_fork_server(job)
        return "127.0.0.1"

    def launch_workers(self, job: Job, numbers: Sequence[int], board: WorkerSwitchboard) -> None:
        """Fork a worker for each of the members `numbers`, in the lowest free slot of this machine."""
        server = self._open_fork_server(job)
        for number in numbers:
            slot = next(i for i in count() if i not in self._slots.values())
            self._slots[number] = slot
            assignment = _build_assignment(job, number, slot)
            if job.device == "cuda":
                assignment.environment.update(single_gpu_environment(slot))
            self._forked[number] = server.fork_worker(assignment, board.address, board.member_token(number))

    def _open_fork_server(self, job: Job) -> ForkServer:
        """Return the fork server of the worker processes: a new one at first, and if the last one was killed."""
        if self._server and not self._server.is_alive:
            self._server.close()
            self._server = None
        self._server = self._server or ForkServer(_build_assignment(job, -1, 0))
        return self._server

    def describe_exit(self, number: int, seconds: float) -> str | None:
        return self._forked[number].describe_exit(seconds)

    def kill_worker(self, number: int) -> None:
        self._slots.pop(number, None)
        if process := self._forked.pop(number, None):
            process.kill()

    def end_workers(self, polite: bool) -> None:
        """End all forked workers, waiting for them briefly if `polite`, and the fork server."""
        deadline = monotonic() + (_JOIN_SECONDS if polite else 0.0)
        for process in self._forked.values():
            process.describe_exit(max(0.0, deadline - monotonic()))
        for process in self._forked.values():
            process.kill()
        if self._server:
            self._server.close()


def _build_assignment(job: Job, number: int, slot: int) -> Assignment:
    """Return the assignment of worker process `number` in a slot of this machine, from 0."""
    return assign_worker(job, number, local_rank=slot, local_world_size=job.world_size, group_rank=0)
