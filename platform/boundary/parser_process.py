"""Child process of `platform.boundary.confinement`: answers requests to parse foreign bytes within the limits of each.

It reads frames from its standard input and writes frames to its original standard output: lengths of 8 bytes, JSON and
raw bytes, never pickles. It knows nothing of the process that started it, and has neither its environment nor its
files.
"""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

REQUEST, REPLY, WANTED = struct.Struct("<QQ"), struct.Struct("<cQ"), struct.Struct("<QQ")
DONE, REFUSED, WANTS = b"=", b"!", b"?"
AT_ONCE = 1 << 24  # most bytes of a file in one frame
_LONGEST_REASON = 500  # characters

Read = Callable[[int, int], bytes]  # (offset, bytes) -> the bytes of the file there, fewer at its end
Answer = Callable[[dict[str, Any], bytes, Read], bytes]


class AskedFile(io.RawIOBase):
    """File of `size` bytes whose content is asked of the process that holds it."""

    def __init__(self, read: Read, size: int):
        """Construct a parser process's view of a file of `size` bytes; `read`: (offset, bytes) -> bytes there."""
        super().__init__()
        self._read, self._size, self._place = read, size, 0

    def readable(self) -> bool:
        """Return True: a parser may read this file, whose bytes the parent process supplies."""
        return True

    def seekable(self) -> bool:
        """Return True: a parser may move within this file, whose bytes the parent process supplies."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move a parser's reading position in the file to be parsed; return the position, in bytes from its start."""
        self._place = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence])
        return self._place

    def tell(self) -> int:
        """Return a parser's reading position in the file to be parsed, in bytes from its start."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes of the file to be parsed, from the parent process, into `buffer`; return their number."""
        data = self._read(self._place, min(len(buffer), max(0, self._size - self._place)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def answer_requests(parser: str) -> None:
    """Run the child process of a parser of foreign bytes: answer the requests on standard input by the function
    `parser`, "MODULE:FUNCTION", until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply
    module, _, name = parser.partition(":")
    answer: Answer = getattr(import_module(module), name)

    def send_message(kind: bytes, payload: bytes) -> None:
        """Write a message of this parser process to its parent: its `kind`, such as DONE or WANTS, and payload."""
        replies.write(REPLY.pack(kind, len(payload)))
        replies.write(payload)
        replies.flush()

    def read_range(offset: int, size: int) -> bytes:
        """Return `size` bytes of the file to be parsed from byte `offset` on, asking the parent process for them."""
        parts = [b"."]
        while size > 0 and parts[-1]:
            send_message(WANTS, WANTED.pack(offset, min(size, AT_ONCE)))
            parts.append(_read_exact_bytes(requests, struct.unpack("<Q", _read_exact_bytes(requests, 8))[0]))
            offset, size = offset + len(parts[-1]), size - len(parts[-1])
        return b"".join(parts[1:])

    while head := requests.read(REQUEST.size):
        sizes = REQUEST.unpack(head)
        request, body = json.loads(_read_exact_bytes(requests, sizes[0])), _read_exact_bytes(requests, sizes[1])
        _limit_resources(request["memory"], request["seconds"])
        send_message(*_answer_parser_request(answer, request, body, read_range))


def _read_exact_bytes(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes of a request to a parser's child process; exit the process if the stream ends before."""
    chunk = stream.read(size)
    if len(chunk) < size:
        raise SystemExit(0)
    return chunk


def _limit_resources(memory: int, seconds: int) -> None:
    """Limit this parser process in its next answer: bytes of memory in all, seconds of processor time from now on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor_seconds = int(used.ru_utime + used.ru_stime) + 1 + seconds
    for limit, amount in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CPU, processor_seconds)):
        hard = resource.getrlimit(limit)[1]  # of a login node or a batch system, which nobody may raise
        resource.setrlimit(limit, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _answer_parser_request(answer: Answer, request: dict[str, Any], body: bytes, read: Read) -> tuple[bytes, bytes]:
    """Return kind and payload of a parser process's reply: (DONE, the answer), or (REFUSED, the reason as UTF-8) for
    any error that a foreign file makes the parser raise."""
    try:
        return DONE, answer(request, body, read)
    except SystemExit:
        raise
    except MemoryError:
        reason = f"needs more than {request['memory'] >> 20} MiB of memory"
    except RecursionError:
        reason = "too many parts in each other"
    except BaseException as error:  # what a foreign file makes a library raise; panics are no Exception
        try:
            reason = str(error) or type(error).__name__
        except Exception:
            reason = type(error).__name__
        if type(error).__name__ == "ArrowMemoryError":
            reason = f"needs more than {request['memory'] >> 20} MiB of memory"
    return REFUSED, reason[:_LONGEST_REASON].encode(errors="replace")
