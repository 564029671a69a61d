"""Child processes that parse foreign bytes, by native code or code without a bound of its own, within limits of memory,
processor time and output, so that no file harms the process that reads it.

A parser is named "MODULE:FUNCTION", see `Answer` of `platform.boundary.parser_process`. A child answers one request at
a time, and is used again for the next file; one that dies is one line of a refusal.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple
from weakref import WeakSet

from platform.boundary.documents import printable_line
from platform.boundary.parser_process import AT_ONCE, DONE, REFUSED, REPLY, REQUEST, WANTED, WANTS, Read
from platform.boundary.schema import Malformed

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from platform.boundary.parser_process import answer_requests
answer_requests(sys.argv[2])
"""
# no secret
_KEPT = ("PATH", "PYTHONHOME", "PYTHONPATH", "LD_LIBRARY_PATH", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
_OWN = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}  # other pools reserve memory ahead
_ITSELF = 384 << 20  # bytes of memory of a parser's own code and tables
_THREAD = 8 << 20  # and of each thread of a library: its stack and its arena
_PATIENCE = 30  # most seconds to wait per second of processor time, on a machine that does other things


class Limits(NamedTuple):
    """Limits of one answer: bytes of memory, of a child's own too, seconds of processor time, bytes of output."""

    memory: int
    seconds: int
    output: int


def compute_limits(memory: int, seconds: float, output: int) -> Limits:
    """Return the limits for a child's parsing of foreign bytes: memory (at most half the machine's), time, output."""
    own_memory = _ITSELF + _THREAD * (os.cpu_count() or 1)
    usable_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Limits(min(own_memory + memory, max(own_memory, usable_memory // 2)), int(seconds) + 1, output)


class _Ended(Exception):
    """Exception for a child that has ended, or takes too long."""


class ParserProcess:
    """Child process that answers requests by a function, `name`: "MODULE:FUNCTION"; of one thread at a time."""

    def __init__(self, function_name: str):
        """Start the child process that parses foreign files by `function_name`, "MODULE:FUNCTION"; it gets none of the
        secrets in this process's environment."""
        self.name = function_name
        environment = {key: os.environ[key] for key in _KEPT if key in os.environ} | _OWN
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), function_name],
            bufsize=0, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.owner = os.getpid()
        self.pid = self._process.pid
        self.alive = True
        _all.add(self)

    @property
    def is_usable(self) -> bool:
        """Return True if this process started the parser's child process and has not closed it."""
        return self.alive and self.owner == os.getpid()

    def request_answer(self, request: dict[str, Any], body: bytes, bounds: Limits, read: Read | None = None) -> bytes:
        """Return the child process's answer to a request to parse foreign bytes: `request`, plain data, and `body`, raw
        bytes, within the limits `bounds`. `read`: function that supplies parts of the file to parse. Raises Malformed
        if the parser refuses the file, dies, or exceeds a limit."""
        if not self.alive:
            raise Malformed("its parser has died")
        done = False
        try:
            kind, payload = self._exchange_messages(request, body, bounds, read)
            done = True
        except _Ended:
            raise Malformed(self._explain_death(bounds)) from None
        finally:
            if not done:
                self.close()
        if kind == REFUSED:
            raise Malformed(printable_line(payload))
        return payload

    def _exchange_messages(
        self, request: dict[str, Any], body: bytes, bounds: Limits, read: Read | None
    ) -> tuple[bytes, bytes]:
        """Send a request to the parser's child process, serve its reads of the file by `read`, and return the kind
        (DONE, REFUSED) and the payload of its reply. Raises Malformed for an answer longer than `bounds` allow, _Ended
        if the child ends or takes too long."""
        head = json.dumps({**request, "memory": bounds.memory, "seconds": bounds.seconds}).encode()
        self._write_pipe(REQUEST.pack(len(head), len(body)) + head)
        self._write_pipe(body)
        until = monotonic() + 60 + _PATIENCE * bounds.seconds
        while True:
            kind, size = REPLY.unpack(self._read_pipe(REPLY.size, until))
            if kind == WANTS and size == WANTED.size and read:
                offset, wanted_bytes = WANTED.unpack(self._read_pipe(size, until))
                data = read(offset, min(wanted_bytes, AT_ONCE))
                self._write_pipe(struct.pack("<Q", len(data)) + data)
                continue
            if kind not in (DONE, REFUSED) or size > max(bounds.output, 1 << 16):
                raise Malformed(f"becomes more than {bounds.output >> 20} MiB" if kind == DONE else "its parser fails")
            return kind, self._read_pipe(size, until)

    def _write_pipe(self, data: bytes) -> None:
        """Write all of `data` to the parser's child process; raises _Ended if it has ended."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._to, view) :]
        except BrokenPipeError:
            raise _Ended from None

    def _read_pipe(self, size: int, until: float) -> bytes:
        """Read `size` bytes that the parser's child process writes. Raises _Ended if it has ended, or does not write
        them by `until` (monotonic clock)."""
        received = bytearray()
        while len(received) < size:
            poll = select.poll()
            poll.register(self._from, select.POLLIN)
            if not poll.poll(max(0.0, until - monotonic()) * 1000):
                raise _Ended
            chunk = os.read(self._from, min(size - len(received), 1 << 20))
            if not chunk:
                raise _Ended
            received += chunk
        return bytes(received)

    def _explain_death(self, bounds: Limits) -> str:
        """Return why the child process that parsed a foreign file has died, as text for the user: its processor time,
        or the signal or status that it ended by and its memory limit."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.poll()
        if code is None or code == -signal.SIGXCPU:
            return f"takes more than {bounds.seconds} s of processor time to parse"
        by = signal.Signals(-code).name if -code in {*signal.Signals} else f"status {code}"
        return f"its parser died ({by}); it may take {bounds.memory >> 20} MiB of memory"

    def close(self) -> None:
        """Kill the parser's child process, and close the pipes to it."""
        self.alive = False
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()

    def __del__(self) -> None:
        """Kill the parser's child process if it has not been closed."""
        if getattr(self, "alive", False):
            self.close()


_idle: dict[str, list[ParserProcess]] = {}  # children that wait for the next file, by parser
_all: WeakSet[ParserProcess] = WeakSet()
os.register_at_fork(after_in_child=_idle.clear)


def list_living_parsers() -> list[ParserProcess]:
    """Return the parsers of foreign files whose child processes this process has started and not closed."""
    return [parser for parser in _all if parser.is_usable]


@atexit.register
def _close_parsers() -> None:
    """Kill all child processes that parse foreign files, when this process exits."""
    for parser in list_living_parsers():
        parser.close()
    _idle.clear()


def borrow_parser_process(name: str) -> ParserProcess:
    """Return a child process of the parser `name`, "MODULE:FUNCTION", idle or new, for `keep_parser_process_idle`."""
    waiting = _idle.setdefault(name, [])
    return waiting.pop() if waiting else ParserProcess(name)


def keep_parser_process_idle(parser: ParserProcess) -> None:
    """Keep a parser's child process idle for the next foreign file, if it is alive."""
    if parser.is_usable:
        _idle.setdefault(parser.name, []).append(parser)


@contextmanager
def use_parser(name: str) -> Iterator[ParserProcess]:
    """Yield a child process with the parser `name`, "MODULE:FUNCTION", idle or new; keep it for the next file."""
    parser = borrow_parser_process(name)
    try:
        yield parser
    finally:
        keep_parser_process_idle(parser)
