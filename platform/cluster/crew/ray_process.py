"""The process beside the driver in which all of Ray is: a call of Ray's may wait for minutes, and its C++ code may end
its process, so that none is made in the driver's.

`RayProcess` sends it orders, which it carries out one after the other (`serve_orders`, with an
`platform.cluster.crew.ray_actors.ActorHost`), and hears answers and news. `find_silence` asks the cluster's
control store for a sign of life without any of Ray's code.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from time import monotonic
from typing import Any

from platform.boundary.interrupts import ENDING
from platform.boundary.refusals import SHOWN, ConfigError
from platform.boundary.terminal import escape_unprintable
from platform.cluster.crew.failures import NoPlaces, WorkerFailed

_PROGRAM = """
import json, sys, __main__
path, fd, *argv = sys.argv[1:]
sys.path[:], sys.argv[:], __main__.__file__ = json.loads(path), argv, argv[0]  # no __file__: Ray takes it for a shell
from platform.cluster.crew.ray_actors import ActorHost
from platform.cluster.crew.ray_process import serve_orders
serve_orders(int(fd), ActorHost)
"""
_KNOCK_SECONDS = 2.0  # interval of the looks for a sign of life, and time for its connection
_ANSWER_SECONDS = 5.0  # for a sign of life
_END_SECONDS = 10.0  # for Ray to give back what the run has of it; then its process is killed
_KILL_SECONDS = 2.0  # the same after a failure
_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"  # after which Ray ends its processes, 60 s unless set
# HTTP/2's preface and an empty frame of settings, and the beginning of the frame that every server answers with
_GREETING, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 4
_LOG = logging.getLogger("platform.cluster")


def find_silence(address: str) -> str:
    """Return why the control store of a Ray cluster at `address` gives no sign of life, "" if it does, within seconds.
    An address of another form is not looked at."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "/" in host:
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS) as line:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return ""
            line.settimeout(_ANSWER_SECONDS)
            line.sendall(_GREETING)
            head = line.makefile("rb").read(9)
    except TimeoutError:
        return f"it does not answer within {_ANSWER_SECONDS:g} s"
    except (OSError, OverflowError) as error:
        return str(error)
    return "" if len(head) == 9 and head[3] == _SETTINGS else "what answers there is no Ray"


class RayProcess:
    """Process in which all of Ray is, for as long as this one lives. Must be used from one thread.

    Attributes:
        lost: why Ray is of no use any more, "" as long as it is.
        leaving: Ray ids of the cluster's draining nodes.
        exits: how actors of workers ended, by member number.
        joined: a cluster was joined.
    """

    joined = False

    def __init__(self) -> None:
        """Start the process, and the thread that hears it; it has joined no Ray yet."""
        ours, theirs = socket.socketpair()
        self.lost, self.leaving, self.exits = "", frozenset[str](), dict[int, str]()
        self._numbers, self._answers = count(), dict[int, Future[Any]]()
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  what Ray prints as it ends its process
        command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(theirs.fileno()), *sys.argv]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._errors,
                stderr=self._errors, start_new_session=True,  # Ctrl-C is for the driver
            )  # fmt: skip
        self._line, self._orders = Connection(ours.detach()), SimpleQueue[Any]()
        for run in (self._send_orders, self._receive_messages_until_end):
            threading.Thread(target=run, name="ray", daemon=True).start()

    def order(self, name: str, *args: Any) -> Future[Any]:
        """Order the process to call a method of its host, without waiting; return the answer to come."""
        number, answer = next(self._numbers), Future[Any]()
        with self._changed:
            if self.lost:
                answer.set_exception(NoPlaces(self.lost))
                return answer
            self._answers[number] = answer
        self._orders.put((number, name, args))
        return answer

    def ask(self, name: str, *args: Any, seconds: float | None = None) -> Any:
        """Order a call and return its answer, or raise what it raised; NoPlaces if none comes in time."""
        try:
            return self.order(name, *args).result(seconds)
        except TimeoutError:
            raise NoPlaces(f"Ray has not answered for {seconds:.0f} s") from None

    def await_exit(self, number: int, seconds: float) -> str | None:
        """Return how the actor of a worker ended, None if that is not known within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: number in self.exits or self.lost, seconds)
        return self.exits.get(number)

    def watch_cluster(self, address: str) -> None:
        """Look for signs of life of the joined cluster's control store from now on: `lost` says if there were none for
        half of the time after which Ray ends the cluster's processes."""
        threading.Thread(target=self._watch_control_store, args=(address,), name="ray", daemon=True).start()

    def close(self, *, polite: bool = True) -> None:
        """End the process, and what the run has of Ray, within bounds of time. May be called again."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.order("end")
        self._orders.put(None)
        try:
            self._process.wait(_END_SECONDS if polite and not self.lost else _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # Ray ends the actors of a process that is gone
            self._process.wait()
        self._errors.close()

    def _send_orders(self) -> None:
        """Send orders to the process until `close`, in a thread, as the process may read none for minutes."""
        with suppress(OSError):
            while order := self._orders.get():
                self._line.send(order)

    def _receive_messages_until_end(self) -> None:
        """Note what the process says until it ends, which is the end of Ray for this run unless it was asked to."""
        try:
            while True:
                word, *values = self._line.recv()
                if word == "say":
                    _LOG.log(*values)
                    continue
                with self._changed:
                    self._note_message(word, *values)
                    self._changed.notify_all()
        except Exception:  # its end, as a rule
            self._process.kill()
            status = self._process.wait()
            if not self._closed.is_set():
                self._mark_lost(
                    f"the process that speaks to Ray has ended (status {status}{self._fatal_line_of_ray()})"
                )

    def _note_message(self, word: str, *values: Any) -> None:
        """Note one message of the process: an answer, the leaving nodes, or an actor's end."""
        match word, values:
            case "answer", (number, value):
                self._answers.pop(number, Future()).set_result(value)
            case "raised", (number, error):
                self._answers.pop(number, Future()).set_exception(error)
            case "leaving", (nodes,):
                self.leaving = nodes
            case "ended", (number, text):
                self.exits[number] = text

    def _fatal_line_of_ray(self) -> str:
        """Return the line in which Ray's C++ code said why it ended the process, with a colon; "" if there is none."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        fatal = [line.rpartition(" C  ")[2] or line for line in lines if "Check failed" in line or " C " in line]
        return f": {escape_unprintable(' '.join(fatal[0].split())[:SHOWN])}" if fatal else ""

    def _watch_control_store(self, address: str) -> None:
        """Say when the cluster's control store falls silent and when it is back; end with `lost` if it stays silent."""
        limit = 30.0
        with suppress(ValueError):
            limit = float(os.environ.get(_RECONNECT, 60)) / 2
        since: float | None = None
        while not self._closed.wait(_KNOCK_SECONDS) and not self.lost:
            began = monotonic()
            silence = find_silence(address)
            if silence and since is None:
                _LOG.warning("Ray at %s: %s; nobody is lost by that, and nobody can be replaced", address, silence)
            elif since is not None and not silence:
                _LOG.info("Ray at %s answers again after %.0f s", address, monotonic() - since)
            since = (began if since is None else since) if silence else None
            if since is not None and monotonic() - since > limit:
                self._mark_lost(f"Ray at {address} gives no sign of life for {monotonic() - since:.0f} s ({silence})")

    def _mark_lost(self, reason: str) -> None:
        """Note why Ray is of no use any more, and wake who waits for it."""
        with self._changed:
            self.lost = self.lost or reason
            while self._answers:
                self._answers.popitem()[1].set_exception(NoPlaces(self.lost))
            self._changed.notify_all()


_shared: list[RayProcess] = []


def share_ray_process(*, unjoined: bool = False) -> RayProcess:
    """Return this process's RayProcess, a new one if there is none that lives; if `unjoined`, none that has joined a
    cluster."""
    if _shared and (_shared[0].lost or (unjoined and _shared[0].joined)):
        close_ray_process(polite=False)
    if not _shared:
        _shared.append(RayProcess())
    return _shared[0]


def close_ray_process(*, polite: bool = True) -> None:
    """Close this process's RayProcess, if there is one."""
    if _shared:
        _shared.pop().close(polite=polite)


atexit.register(close_ray_process)


def serve_orders(fd: int, make_host: Callable[[Callable[..., None]], Any]) -> None:
    """Serve the orders that come over the socket `fd`, in the process beside the driver, until it is closed.
    `make_host`: makes the object whose methods are called, from a function that sends news."""
    line, lock, orders = Connection(fd), threading.Lock(), SimpleQueue[Any]()
    for number in ENDING:  # some schedulers send them to all processes of a job; the driver decides
        signal.signal(number, lambda *_: None)

    def send(*message: Any) -> None:
        """Send a message to the driver, from any thread; nothing if it is gone."""
        with lock, suppress(OSError):
            line.send(message)

    def read_orders() -> None:
        """Pass on the driver's orders until it closes the connection or dies; then end, within bounds of time."""
        with suppress(Exception):  # its end, as a rule
            while True:
                orders.put(line.recv())
        orders.put((0, "end", ()))
        timer = threading.Timer(_END_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()

    logger = logging.getLogger("platform.cluster")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: send("say", record.levelno, "%s", record.getMessage())  # type: ignore[method-assign]
    host = make_host(send)
    threading.Thread(target=read_orders, name="orders", daemon=True).start()
    while True:
        number, name, args = orders.get()
        try:
            send("answer", number, getattr(host, name)(*args))
        except Exception as error:
            known = isinstance(error, ConfigError | NoPlaces | WorkerFailed)
            send("raised", number, error if known else RuntimeError(f"{type(error).__name__}: {error}"))
        if name == "end":
            os._exit(0)  # Ray's threads may not end
