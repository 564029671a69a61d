"""A member that answers what no worker answers: in this process, each in a thread of its own."""

import threading

import pytest

from platform.cluster.crew.base.failures import WorkerFailed
from platform.cluster.crew.base.job import assign
from platform.cluster.crew.base.remote import RemoteCrew
from platform.cluster.crew.launchers.host import serve
from platform.cluster.wire.answers import is_answer
from tests.doubles.simulated_worker import SimulatedWorker, report

WRONG = [5, None, "x", [], {}, {"step": "1"}, {"step": True}, report(1, 2) | {"samples": [0]}]
WRONG += [report(1, 2) | {key: value} for key in report(1, 2) for value in (None, "x", [[]]) if key != "step_seconds"]


class Garbled(SimulatedWorker):
    """`step` answers what it is told to."""

    def __init__(self, config, number, **others):
        self.number = number

    def step(self, value, rank):
        return value if self.number == rank else report(1, 2)


class Threads(RemoteCrew):
    def _open(self):
        return "127.0.0.1"

    def _launch(self, numbers):
        for number in numbers:
            place = assign(self.job, number, local_rank=0, local_world_size=1, group_rank=0)
            told = type(place)(**vars(place) | {"log": "", "environment": {}}), self._board.address
            args, alone = (*told, self._board.token(number)), {"own_process": False}
            threading.Thread(target=serve, args=args, kwargs=alone, daemon=True).start()

    def _ended(self, number, seconds):
        return None

    def _kill(self, number):
        pass

    def _dismiss(self, polite):
        pass


def test_a_wrong_answer_is_the_end_of_who_gives_it(job):
    with Threads(job(2, "tests.cluster.wire.test_answers:Garbled"), 1) as crew:
        crew.seat(job(2), [0, 1])
        assert crew.call("step", None, 7)[0] == report(1, 2)
        with pytest.raises(WorkerFailed, match="died in step.*: what it answers is no answer") as caught:
            crew.call("step", "x", 1)
        assert caught.value.culprit.member.number == 1
        crew.release()
        assert [*crew.members] == [0, 2]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:40])
def test_what_is_no_report(value):
    assert is_answer("step", 0, report(1, 2)) and is_answer("step", 1, {"step": 1})
    assert not is_answer("step", 0, value)
