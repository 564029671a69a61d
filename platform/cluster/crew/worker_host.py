"""Host of one worker in its own process: sets up environment and log file, executes and answers the driver's calls."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from itertools import chain, repeat
from pathlib import Path
from queue import SimpleQueue
from socket import gethostname
from typing import Any, get_type_hints

from platform.boundary import schema
from platform.boundary.documents import error_line
from platform.boundary.redaction import Shield, register_secrets
from platform.boundary.refusals import find_refusal, is_stop_signal
from platform.boundary.terminal import escape_terminal_text
from platform.boundary.world_faults import is_external_fault
from platform.cluster.crew import channel
from platform.cluster.crew.channel import Abort, Ask, Beat, Call, Dump, Dumped, Line, Order, Raised, encode_message
from platform.cluster.crew.crew import format_call
from platform.cluster.crew.job import START, Assignment
from platform.cluster.crew.switchboard import raise_open_file_limit
from platform.runtime.progress import PROGRESS
from platform.train.replies import METHODS

# Binding of a worker to the CPU cores next to its GPU: memory that a GPU reads lies on the NUMA node of the core that
# wrote it, and a read across nodes takes about twice as long.

_GPUS = Path("/proc/driver/nvidia/gpus")  # a folder per GPU, named by its place on the PCI bus
_DEVICES = Path("/sys/bus/pci/devices")


def cores_near_gpu(gpu: str, gpus: Path = _GPUS, devices: Path = _DEVICES) -> set[int]:
    """Return the CPU cores next to a worker's GPU, named as in CUDA_VISIBLE_DEVICES by number or UUID; empty if the
    machine does not report them. Read from the kernel's files, without CUDA. Numbers count along the PCI bus, as CUDA's
    do where all GPUs of a machine are alike."""
    try:
        places = sorted(gpus.iterdir())
        named = (place for place in places if gpu and gpu in (place / "information").read_text())
        place = places[int(gpu)] if gpu.isdigit() else next(named)
        return _parse_core_list((devices / place.name.lower() / "local_cpulist").read_text())
    except (OSError, IndexError, StopIteration, ValueError):
        return set()


def _parse_core_list(text: str) -> set[int]:
    """Parse the kernel's list of CPU cores next to a worker's GPU, such as 0-3,8, into the set of their numbers."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def bind_near_gpu(environment: Mapping[str, str] = os.environ) -> set[int]:
    """Bind the calling worker process to its CPU cores next to its GPU, the first of CUDA_VISIBLE_DEVICES; return these
    cores. Does nothing, and returns the empty set, where that would leave it none or all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    usable = os.sched_getaffinity(0)
    near = cores_near_gpu(visible) & usable if visible else set()
    if not near or near == usable:
        return set()
    with suppress(OSError):
        os.sched_setaffinity(0, near)
    return near


ORPHAN_SECONDS = 2.0  # for a worker to end by itself once its driver is gone
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_MOST_MAPPED = 1 << 25  # bytes: the most below which glibc can be told to map no memory for an allocation of its own


def serve_worker(assignment: Assignment, address: tuple[str, int], token: str, *, own_process: bool = True) -> None:
    """Serve the worker of one member in this process: dial the driver at `address` (host, port) with the secret
    `token`, construct the worker that `assignment` describes, and execute the driver's calls, in order, until the
    driver closes the connection.

    Sets the environment before torch is imported, because torch reads it then. `own_process`: this process has no other
    purpose, so it exits when the driver is gone, even if the worker does not return from a call.
    """
    assignment.enter_environment()
    if own_process and assignment.device == "cuda" and assignment.config.cluster.bind:
        bind_near_gpu()  # before there are threads, which inherit it
    if assignment.log:
        _redirect_output(assignment.log, f"[worker{assignment.number} {gethostname()}] ")
    line = channel.connect_to_driver(address, token, assignment.number, assignment.node, assignment.tiers)
    serve_connection(assignment, line, own_process=own_process)


def serve_connection(assignment: Assignment, line: Line, *, own_process: bool) -> None:
    """Construct the worker of a member that the driver has admitted on connection `line`, and execute the driver's
    calls until it closes the connection, as `serve_worker` does; close `line`. Unless the environment names another
    network interface for gloo, it is the one that leads to the driver."""
    register_secrets(assignment.secrets)
    if own_process:
        raise_open_file_limit()  # connections to other ranks: to hundreds in a restore, to all of them with gloo alone
    # gloo would take the one of the machine's name, which may be loopback
    if interface := channel.find_interface(line.local_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if own_process and assignment.device == "cpu":
        _keep_freed_memory()
    try:
        _Host(assignment, line, own_process).serve_calls()
    finally:
        line.close()


def _keep_freed_memory() -> None:
    """Let this worker process keep the memory that it frees, for its next tensors, unless the user has set malloc's
    thresholds: every step allocates what the one before has freed, and each page that the kernel takes back meanwhile
    costs a fault and is cleared anew. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        mallopt(_M_MMAP_THRESHOLD, _MOST_MAPPED)
        mallopt(_M_TRIM_THRESHOLD, -1)


class _Host:
    """Executes the driver's calls on one worker in the calling thread; a reader thread receives the driver's messages
    and handles heartbeat requests and aborts at once."""

    def __init__(self, assignment: Assignment, line: Line, own_process: bool):
        """Prepare to run the worker of `assignment` by the driver's calls, which come on connection `line`."""
        self._place, self._line, self._own_process = assignment, line, own_process
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._worker: Any = None

    def serve_calls(self) -> None:
        """Construct the worker, then execute the driver's calls, in order, until the driver closes the connection."""
        threading.Thread(target=self._read_orders, name="control", daemon=True).start()
        self._execute_call(START, "start()", self._construct_worker)
        while call := self._calls.get():
            self._execute_call(call.call, format_call(call.method, call.args), lambda: self._run_method(call))  # noqa: B023

    def _construct_worker(self) -> None:
        """Construct the worker that the assignment describes, and exempt present objects from garbage collection."""
        self._worker = self._place.construct_worker()
        gc.freeze()  # exempts what the imports created from collection, so that `leave` collects fast

    def _run_method(self, call: Call) -> Any:
        """Execute a call of the driver: run the worker's method that it names on arguments of the declared types."""
        method = getattr(self._worker, METHODS.get(call.method, call.method))
        return method(*convert_arguments(method, call.args))

    def _execute_call(self, number: int, call: str, function: Callable[[], Any]) -> None:
        """Run `function`, the body of the driver's call `number` on this worker, and send its result or traceback to
        the driver. `call`: its text for heartbeats."""
        PROGRESS.begin_call(call)
        cause, refusal, of_world = "", "", False
        try:
            frame = encode_message(channel.Answer(number, function()))
        except BaseException as error:  # code of the user's own may raise anything, SystemExit too
            if is_stop_signal(error):
                raise
            cause = traceback.format_exc().encode(errors="backslashreplace").decode()[-schema.LONGEST :]
            refusal, of_world = find_refusal(error)[: schema.LONGEST], is_external_fault(error)
        if cause:  # after the except block: within it the failed frames are alive, and keep groups open
            self._leave_groups()
            print(escape_terminal_text(cause), file=sys.stderr, end="")  # into the log file as well
            frame = encode_message(Raised(number, cause, refusal, of_world))
        PROGRESS.begin_call("")
        with suppress(OSError):  # the driver is gone: `_read_orders` ends this process
            self._line.send_frame(frame)

    def _leave_groups(self) -> None:
        """Leave the worker's process groups right after a call of it has raised, before the driver asks: with gloo only
        the neighbours of a lost rank notice, and only their leaving frees the ranks after them."""
        if self._worker is not None:
            try:
                self._worker.leave()
            except Exception:
                traceback.print_exc()

    def _dump_worker(self, name: str) -> None:
        """Let the worker write where it stands, in a thread of its own, and answer the driver."""
        why = ""
        try:
            self._worker.dump(name)
        except Exception as error:
            why = error_line(error)[: schema.LONGEST]
        with suppress(OSError):  # the driver is gone
            self._line.send_frame(encode_message(Dumped(name, why)))

    def _read_orders(self) -> None:
        """Receive the driver's messages to this worker until the driver closes the connection: queue calls for
        `serve_calls`, answer heartbeat requests, start aborts. Then, in a process of its own, exit after ORPHAN_SECONDS
        even if a call still runs."""
        try:
            for message in self._line.receive_messages():
                match channel.parse_message(Order, message):
                    case Call() as call:
                        self._calls.put(call)
                    case Ask(beat=number):
                        self._line.send_frame(encode_message(Beat(number, PROGRESS.build_heartbeat())))
                    case Dump(dump=name):
                        threading.Thread(target=self._dump_worker, args=[name], name="dump", daemon=True).start()
                    case Abort() if self._worker is not None:
                        threading.Thread(target=self._worker.abort, name="abort", daemon=True).start()
        except (OSError, channel.Garbled):
            pass
        self._calls.put(None)
        if self._own_process:
            time.sleep(ORPHAN_SECONDS)
            os._exit(1)


def convert_arguments(method: Callable[..., Any], args: Sequence[object]) -> list[Any]:
    """Return the arguments of a driver's call on a worker in the types that `method` declares. Raises Malformed."""
    kinds = chain(_parameter_types(getattr(method, "__func__", method)), repeat(object))
    return [schema.parse_value(kind, value) for kind, value in zip(kinds, args, strict=False)]


@cache
def _parameter_types(function: Callable[..., Any]) -> list[Any]:
    """Return the declared types of a worker method's parameters but `self`, in order; object where there is none."""
    hints = get_type_hints(function, include_extras=True)
    return [hints.get(name, object) for name in signature(function).parameters if name != "self"]


def _redirect_output(path: str, name: str) -> None:
    """Append all output of this worker process, C libraries included, to the log file `path`, with secrets of Python's
    output redacted, and `name` before each line of it. If the file cannot be opened, output is discarded; if the disk
    is full, the rest is lost without error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the stream is closed or None
            stream.flush()
    try:
        Path(path).parent.mkdir(0o700, parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        file = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    writers = (io.BufferedWriter(_PrefixedOutput(n, name)) for n in (1, 2))
    sys.stdout, sys.stderr = (Shield(io.TextIOWrapper(w, "utf-8", "replace", line_buffering=True)) for w in writers)


class _PrefixedOutput(io.FileIO):
    """Raw file, of a worker's output, that begins every line with a name, accepts every write, and drops silently what
    cannot be written."""

    def __init__(self, descriptor: int, prefix: str):
        """Open a worker's output file by its descriptor `descriptor`; each line written begins with `prefix`."""
        super().__init__(descriptor, "w", closefd=False)
        self._prefix, self._begins = prefix.encode(errors="replace"), True

    def write(self, data: Any) -> int:
        """Write `data` with the worker's name before every line; return its length even if it could not be written."""
        text = bytes(data)
        ends = text.endswith(b"\n")
        named = text.removesuffix(b"\n").replace(b"\n", b"\n" + self._prefix) + b"\n" * ends
        with suppress(OSError):
            super().write(self._prefix + named if self._begins else named)
        self._begins = ends
        return len(data)
