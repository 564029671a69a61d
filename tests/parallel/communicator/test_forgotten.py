"""A message that gloo forgets when its connection ends: who waits for it goes on, and leaves."""

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
    def is_completed(self):
        return True


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
    work = Failed()
    with pytest.raises(RuntimeError):
        groups._until_aborted(work)
    assert not groups._stuck and work.waits == 1
