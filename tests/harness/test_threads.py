"""Ranks as threads: they wait for a rank that computes, and for none that never comes."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from platform.plan.layout import Mesh
from tests.harness.threads import ThreadGroups, run_threads

SHORT = timedelta(seconds=0.1)
TWO = Mesh((("data", 2),))


def test_a_rank_that_computes_is_waited_for():
    def work(communicator: ThreadGroups) -> float:
        time.sleep(0.5 * communicator.rank)  # as long as a trace, beside the patience
        return communicator.launch("all_reduce", torch.ones(1), ("data",)).wait().item()

    assert run_threads(TWO, work, SHORT) == [2, 2]


def test_a_rank_that_never_comes_is_not():
    def work(communicator: ThreadGroups) -> None:
        if communicator.rank == 0:
            communicator.launch("all_reduce", torch.ones(1), ("data",)).wait()

    with pytest.raises(TimeoutError, match=r"rank 0 waits for \{1\} in"):
        run_threads(TWO, work, SHORT)
