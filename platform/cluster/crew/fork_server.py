"""Fork server: a process that imports once what workers need (torch above all, seconds of CPU) and forks them all.

`forked_workers` has the other end: the process that starts this one, which is its parent and ends it by ending, passes
it a connection per worker. A connection carries first a worker's order, pickled, then, from this process, the worker's
exit code as text, -N after signal N. Closing its other end kills the worker.

Nothing here may start a thread or touch a device before the last worker is forked, and no worker may outlive this
process, nor this process its parent, even if they are stopped: the kernel kills them (PR_SET_PDEATHSIG, Linux only).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress

from platform.boundary.interrupts import ENDING
from platform.cluster.crew.worker_host import serve_worker
from platform.train import environment_proof

_LATE = "torch._dynamo"  # imported by the first optimizer of a process; most of a second
_ORDER_SECONDS = 10.0  # for an order to arrive whole
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(control: int, parent: int, module: str) -> None:
    """Import `module`, the workers' own, then fork workers as the process `parent` orders over the connection `control`
    (a file descriptor), until it closes that."""
    _die_with_parent(parent)
    for number in ENDING:  # Ctrl-C in a terminal, or the end of a service, signals every process; the driver decides
        signal.signal(number, signal.SIG_IGN)
    _import_quietly(module)
    if "torch" in sys.modules:
        _import_quietly(_LATE)
        environment_proof.read_code()
    gc.collect()
    gc.freeze()  # keeps the collector of a worker from copying the pages that all share
    _Server(socket.socket(fileno=control)).serve_orders()


def _import_quietly(name: str) -> None:
    """Import a module that workers need into the fork server; ignore errors, which a worker meets and reports."""
    with suppress(Exception):  # a worker meets the same error, and reports it
        importlib.import_module(name)


def _die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this fork server when the process `parent` dies; end it if that has happened."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Server:
    """Forks, kills and reaps workers in a loop without threads. `control`: the connection with the parent."""

    def __init__(self, control: socket.socket):
        """Prepare to fork workers on the orders of the parent process, received on the connection `control`."""
        self._control, (self._woken, self._waker) = control, socket.socketpair()
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the end of a worker wakes the loop
        self._sockets: dict[int, socket.socket] = {}  # by file descriptor
        self._workers: dict[int, int] = {}  # file descriptor of a worker's connection -> its process id
        self._poll = select.poll()
        self._add_polled_socket(control)
        self._add_polled_socket(self._woken)

    def _add_polled_socket(self, source: socket.socket) -> None:
        """Add a connection or listener to the ones from which the fork server waits for orders and news of workers."""
        self._sockets[source.fileno()] = source
        self._poll.register(source, select.POLLIN)

    def serve_orders(self) -> None:
        """Fork workers as the parent process orders, and reap ended ones, until the parent closes its connection; then
        kill the remaining workers."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._control.fileno():
                    if not self._receive_socket():
                        return self._kill_workers()
                elif fd == self._woken.fileno():
                    self._woken.recv(1 << 12)
                    self._reap_workers()
                elif fd in self._workers:
                    self._poll.unregister(fd)  # it is readable for ever
                    os.kill(self._workers[fd], signal.SIGKILL)  # not reaped yet, so the number is still its own
                elif fd in self._sockets:
                    self._fork_worker(self._sockets[fd].accept()[0])

    def _receive_socket(self) -> bool:
        """Take a socket that the fork server's parent passes: a worker's connection, or one that accepts such
        connections; return False if the parent has closed its own instead."""
        try:
            kind, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        except OSError:
            return False
        if not kind:
            return False
        passed = socket.socket(fileno=fds[0])
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            self._add_polled_socket(passed)
        else:
            self._fork_worker(passed)
        return True

    def _fork_worker(self, line: socket.socket) -> None:
        """Fork a worker process, whose order comes first on the connection `line`; do nothing if it does not come."""
        try:
            line.settimeout(_ORDER_SECONDS)
            with line.makefile("rb") as order:
                environment, path, member = pickle.load(order)
        except (OSError, EOFError, pickle.UnpicklingError):
            return line.close()
        parent = os.getpid()
        if process := os.fork():
            self._workers[line.fileno()] = process
            self._add_polled_socket(line)
            return
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (line, self._waker, *self._sockets.values()):
                other.close()
            _die_with_parent(parent)
            status = _serve_ordered_worker(environment, path, member)
        finally:
            os._exit(status)

    def _reap_workers(self) -> None:
        """Reap the forked workers that have ended, and send each exit code over the worker's connection."""
        for fd, process in list(self._workers.items()):
            ended, how = os.waitpid(process, os.WNOHANG)
            if ended:
                with suppress(KeyError):
                    self._poll.unregister(fd)
                del self._workers[fd]
                with suppress(OSError), self._sockets.pop(fd) as line:
                    line.sendall(str(os.waitstatus_to_exitcode(how)).encode())

    def _kill_workers(self) -> None:
        """Kill all workers that this fork server has forked, and reap them."""
        for process in self._workers.values():
            os.kill(process, signal.SIGKILL)
        for process in self._workers.values():
            os.waitpid(process, 0)


def _serve_ordered_worker(environment: dict[str, str], import_path: list[str], member: bytes) -> int:
    """Serve the worker that an order describes in this process, just forked, with the environment and the import path
    of the process that ordered it; return the exit status."""
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = import_path
        assignment, address, token = pickle.loads(member)
        multiprocessing.current_process().name = f"worker{assignment.number}"
        serve_worker(assignment, address, token)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return status
