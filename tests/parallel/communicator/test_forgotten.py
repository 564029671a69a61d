"""Waiting for a collective of gloo: for one that it has forgotten only until an abort, for any other to its end."""

from __future__ import annotations

import threading
import time

import pytest

from platform.parallel.communicator.torch_distributed import ABORTED, ProcessGroups


class Forgotten:
    """Work of gloo that nobody completes."""

    def __init__(self):
        self.waits = 0

    def wait(self, timeout):
        self.waits += 1
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


class Failed(Forgotten):
    """Work that has failed."""

    def wait(self, timeout=None):
        raise RuntimeError("Connection closed by peer")

    def is_completed(self):
        return True


class Late(Forgotten):
    """Work that ends well just after a wait for it was given up."""

    def wait(self, timeout=None):
        self.waits += 1
        if self.waits <= 2:
            raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return self.waits == 2


@pytest.fixture
def groups():
    made = ProcessGroups.__new__(ProcessGroups)  # without torch.distributed
    made._aborted = made._stuck = False
    return made


def test_it_is_waited_for_until_an_abort_and_a_little_longer(groups):
    work, begin = Forgotten(), time.monotonic()
    threading.Timer(4 * ABORTED.total_seconds(), setattr, (groups, "_aborted", True)).start()
    with pytest.raises(RuntimeError):
        groups._until_aborted(work)
    assert groups._stuck and work.waits > 4
    assert time.monotonic() - begin > 5 * ABORTED.total_seconds()  # also what an abort frees has time for that


def test_a_failure_is_raised_at_once(groups):
    with pytest.raises(RuntimeError, match="closed"):
        groups._until_aborted(Failed())
    assert not groups._stuck


def test_one_that_ends_well_between_two_waits_is_no_failure(groups):
    work = Late()
    groups._until_aborted(work)
    assert work.waits == 3 and not groups._stuck
