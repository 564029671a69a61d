"""Whose fault an exception is: every number of the system and every status of HTTP is on one side of the table."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from platform.boundary.refusals import ConfigError, refuse_failures, report_refusal
from platform.boundary.world_faults import LONGEST_PAUSE, UNAVAILABLE, growing_pauses, is_external_fault, walk_causes

MISTAKES = """EPERM ENOENT ENOEXEC EACCES EEXIST EXDEV ENOTDIR EISDIR EINVAL EFBIG EROFS ENAMETOOLONG ELOOP ENOTEMPTY
EADDRINUSE EADDRNOTAVAIL EAFNOSUPPORT EPROTONOSUPPORT ENOSYS ENOTSUP ENOTTY EILSEQ EBADF EDOM ERANGE""".split()
FAULTS = """EIO ESTALE ETIMEDOUT ECONNREFUSED ECONNRESET EHOSTUNREACH ENETUNREACH EAGAIN EBUSY EPIPE ENOSPC EDQUOT
ENOMEM EMFILE ENFILE""".split()


@pytest.mark.parametrize("name", FAULTS)
def test_what_others_may_cure(name):
    number = getattr(errno, name)
    assert is_external_fault(OSError(number, os.strerror(number), "file"))


@pytest.mark.parametrize("name", MISTAKES)
def test_what_the_user_has_to_correct(name):
    number = getattr(errno, name)
    assert not is_external_fault(OSError(number, os.strerror(number), "file"))
    assert not is_external_fault(ConfigError("x", 1, "is no y"))


def test_no_refusal_hides_whose_fault_it_was(capsys):
    """However it words it, and however deep it lies."""
    for number in errno.errorcode:
        error = OSError(number, "what")
        with pytest.raises(ConfigError) as caught:
            try:
                with refuse_failures("checkpoint.url", "s3://b", OSError, why="cannot be reached: {}"):
                    raise error
            except ConfigError as refusal:
                raise ConfigError([f"config: {line}" for line in refusal.violations]) from None
        assert error in walk_causes(caught.value)
        assert is_external_fault(caught.value) == is_external_fault(error)
        assert report_refusal(caught.value, "config") == (UNAVAILABLE if is_external_fault(error) else 2)
    capsys.readouterr()


@pytest.mark.parametrize("status", [*range(400, 600)])
def test_what_a_service_answers(status):
    botocore = pytest.importorskip("botocore.exceptions")
    answer = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = botocore.ClientError(answer, "PutObject")
    assert is_external_fault(error) == (status >= 500 or status in (408, 425, 429))
    with pytest.raises(OSError, match="no") as caught:
        try:
            raise error
        except Exception as cause:
            raise OSError("no") from cause
    assert is_external_fault(caught.value) == is_external_fault(error)


def test_what_clients_raise_without_an_answer():
    botocore = pytest.importorskip("botocore.exceptions")
    url = {"endpoint_url": "http://x", "error": "no", "request": None}
    for name in ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError"):
        assert is_external_fault(getattr(botocore, name)(**url)), name
    assert not is_external_fault(botocore.NoCredentialsError())
    assert not is_external_fault(botocore.ParamValidationError(report="x"))
    assert is_external_fault(socket.gaierror(socket.EAI_AGAIN, "no name server"))
    aiohttp = pytest.importorskip("aiohttp")
    assert is_external_fault(aiohttp.ServerDisconnectedError()) and is_external_fault(aiohttp.ClientPayloadError())
    assert not is_external_fault(aiohttp.InvalidURL("x"))


def test_what_ray_raises():
    exceptions = pytest.importorskip("ray.exceptions")
    assert is_external_fault(exceptions.RpcError("unavailable")) and is_external_fault(exceptions.GetTimeoutError())
    assert not is_external_fault(exceptions.RuntimeEnvSetupError("x"))


@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0, 10.0, 1000.0])
def test_pauses_grow_to_a_limit(limit):
    pauses = [*growing_pauses(limit)]
    assert sum(pauses) == pytest.approx(limit) and all(0 < pause <= LONGEST_PAUSE for pause in pauses)
    assert pauses[:-1] == sorted(pauses[:-1])
