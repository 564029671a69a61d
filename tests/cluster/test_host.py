"""What runs around a worker."""

import gc
import weakref

from platform.cluster.crew.base.job import Assignment
from platform.cluster.crew.launchers.host import _Host
from platform.cluster.wire.channel import Unframer


class Hand:
    """Such as a message under way, whose group stays open while somebody refers to it."""


class FailsWithFullHands:
    def step(self):
        hand = Hand()
        self.hand = weakref.ref(hand)
        raise ValueError("boom")

    def leave(self):
        gc.collect()
        self.empty = self.hand() is None


class Sent:
    def __init__(self):
        self.messages = []

    def send(self, frame):
        self.messages += Unframer().feed(frame)


def test_a_worker_that_failed_leaves_with_empty_hands(capsys):
    line, worker = Sent(), FailsWithFullHands()
    host = _Host(Assignment("", {}, 0, "cpu", "", 1), line, own_process=False)
    host._worker = worker
    host._execute(7, "step(1)", worker.step)
    assert worker.empty
    [answer] = line.messages
    assert answer["answer"] == 7 and "ValueError: boom" in answer["error"]
    assert "ValueError: boom" in capsys.readouterr().err
