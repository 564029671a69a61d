"""Limits of a parser's process, beside those that a login node or a batch system has set."""

from __future__ import annotations

import os
import resource

import pytest

from platform.boundary.parser_process import _limit_resources

KINDS = {"RLIMIT_DATA": 1 << 33, "RLIMIT_CPU": 3600}


@pytest.mark.parametrize(("name", "hard"), KINDS.items())
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_a_hard_limit_is_kept(name, hard, share):
    """Without the right to raise it the process died, for a reason that nobody saw."""
    limit, wanted = getattr(resource, name), int(share * hard)
    if not (child := os.fork()):
        try:
            resource.setrlimit(limit, (hard, hard))
            _limit_resources(*([wanted, 10] if name == "RLIMIT_DATA" else [1 << 32, wanted]))
            soft, now = resource.getrlimit(limit)
            os._exit(0 if now == hard and 0 < soft <= hard and (share > 1) == (soft == hard) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
