"""Faults of the world: the one table of exceptions that no user can mend, and that may not come again.

A storage without an answer, a busy service, a network that is down: the same command can work in a minute. Missing,
forbidden and malformed files are for the user to correct. `is_external_fault` decides by the exceptions that another
one was raised from, so that a refusal knows of it however it words it. It decides the exit status (UNAVAILABLE),
whether a start waits, and whether a job's supervisor starts its driver again."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

UNAVAILABLE = 69  # exit status: something outside does not answer, as EX_UNAVAILABLE of sysexits.h
LONGEST_PAUSE = 60.0  # seconds between two attempts; the first pause is of one second
# Errors of the system that others may cure. All other numbers are the user's to correct: ENOENT, EACCES, EROFS, ...
_ERRNOS = frozenset(
    number
    for name in """
    EIO EREMOTEIO ESTALE ENOLINK ECOMM EPROTO ETIME ETIMEDOUT EAGAIN EINTR EBUSY EPIPE ENXIO ENODEV
    ENOSPC EDQUOT ENOMEM ENOBUFS ENFILE EMFILE ENOLCK EDEADLK
    ECONNREFUSED ECONNRESET ECONNABORTED ENETDOWN ENETUNREACH ENETRESET EHOSTDOWN EHOSTUNREACH ENOTCONN ESHUTDOWN
    """.split()
    if (number := getattr(errno, name, None))
)
_HTTP_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_CODES = frozenset("SlowDown RequestTimeout ThrottlingException Throttling RequestLimitExceeded InternalError".split())
# Names of exceptions of clients of storages, and of Ray, that are no OSError; by name, as a client need not be there.
_NAMES = frozenset(
    """
    HTTPClientError ConnectionError ConnectionClosedError ReadTimeoutError ConnectTimeoutError IncompleteReadError
    ResponseStreamingError ClientConnectionError ServerDisconnectedError ClientPayloadError ServerTimeoutError
    TransportError RetryError ServiceRequestError ServiceResponseError FSTimeoutError
    RaySystemError RpcError RayTimeoutError GetTimeoutError LocalRayletDiedError
    """.split()
)


def is_external_fault(error: BaseException | None) -> bool:
    """Return True if an exception is, or was raised from or while handling, a fault of the world. A WorkerFailed
    carries what its culprit said of itself, as `of_world`."""
    return any(getattr(cause, "of_world", False) or _is_of_table(cause) for cause in walk_causes(error))


def walk_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, then the one it was raised from or while handling, and so on, to find a reason in it."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_table(error: BaseException) -> bool:
    """Return True if the tables of this module have the exception: by its HTTP status, its number or its type."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore: the service has answered
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _HTTP_STATUSES or response.get("Error", {}).get("Code") in _CODES
    if isinstance(status := getattr(error, "status", getattr(error, "code", None)), int) and 400 <= status < 600:
        return status in _HTTP_STATUSES
    if isinstance(error, TimeoutError | ConnectionError | socket.gaierror | InterruptedError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return any(kind.__name__ in _NAMES for kind in type(error).__mro__)


def growing_pauses(limit: float) -> Iterator[float]:
    """Yield the seconds of one pause after the other, each twice as long up to LONGEST_PAUSE, `limit` in all."""
    pause = 1.0
    while limit > 0:
        yield min(pause, limit)
        limit -= pause
        pause = min(2 * pause, LONGEST_PAUSE)
