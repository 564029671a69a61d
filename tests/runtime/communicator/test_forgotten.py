"""A message that gloo forgets when its connection ends: who waits for it goes on, and leaves."""

from __future__ import annotations

import time

import pytest

from platform.runtime.process_groups import ABORTED, ProcessGroups


class Forgotten:
    """Work of gloo that nobody completes."""

    def __init__(self, groups):
        self.groups, self.waits = groups, 0

    def wait(self, timeout):
        self.waits += 1
        self.groups._aborted = self.waits >= 4
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


class Late:
    """Work of gloo that ends at the moment in which a wait for it does, as it should or with a failure."""

    def __init__(self, failure: str = ""):
        self.failure, self.done = failure, False

    def wait(self, timeout=None):
        if not self.done:
            self.done = True
            raise RuntimeError("Operation timed out!")
        if self.failure:
            raise RuntimeError(self.failure)

    def is_completed(self):
        return self.done


@pytest.fixture
def groups():
    process_groups = ProcessGroups.__new__(ProcessGroups)  # without torch.distributed
    process_groups._aborted = process_groups._stuck = False
    return process_groups


def test_it_is_waited_for_until_an_abort_and_a_little_longer(groups):
    work, begin = Forgotten(groups), time.monotonic()
    with pytest.raises(RuntimeError):
        groups._wait_unless_aborted(work)
    assert groups._stuck and work.waits == 5
    assert time.monotonic() - begin > 5 * ABORTED.total_seconds()  # also what an abort frees has time for that


def test_what_ends_as_a_wait_does_is_no_failure(groups):
    groups._wait_unless_aborted(Late())
    assert not groups._stuck


def test_a_failure_is_raised_as_it_is(groups):
    with pytest.raises(RuntimeError, match="closed by peer"):
        groups._wait_unless_aborted(Late("closed by peer"))
    assert not groups._stuck
