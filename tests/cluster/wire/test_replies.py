"""A member that answers what no worker answers: in this process, each in a thread of its own."""

import json
import threading

import pytest

from platform.boundary.schema import Malformed
from platform.cluster.crew.channel import encode_json
from platform.cluster.crew.crew import Launcher
from platform.cluster.crew.failures import WorkerFailed
from platform.cluster.crew.job import assign_worker
from platform.cluster.crew.remote_crew import RemoteCrew
from platform.cluster.crew.worker_host import serve_worker
from platform.train import replies
from platform.train.replies import Taken
from tests.doubles.simulated_worker import SimulatedWorker, report

RIGHT = json.loads(encode_json(report(1, 2)))
WRONG = [5, None, "x", [], {}, {"step": "1"}, {"step": True}, RIGHT | {"samples": [0]}]
WRONG += [RIGHT | {key: value} for key in RIGHT for value in (None, "x", [[]]) if value != RIGHT[key] and key != "held"]
WRONG += [RIGHT | {"held": "x"}]


class Garbled(SimulatedWorker):
    """`step` answers what it is told to."""

    def __init__(self, config, number, **others):
        self.number = number

    def step(self, value, rank):
        return value if self.number == rank else Taken(1) if self.number else report(1, 2)


class Threads(Launcher):
    def prepare_launch(self, job, size):
        return "127.0.0.1"

    def launch_workers(self, job, numbers, board):
        for number in numbers:
            place = assign_worker(job, number, local_rank=0, local_world_size=1, group_rank=0)
            told = type(place)(**vars(place) | {"log": "", "environment": {}}), board.address
            args, alone = (*told, board.member_token(number)), {"own_process": False}
            threading.Thread(target=serve_worker, args=args, kwargs=alone, daemon=True).start()

    def describe_exit(self, number, seconds):
        return None

    def kill_worker(self, number):
        pass

    def end_workers(self, polite):
        pass


def test_a_wrong_answer_is_the_end_of_who_gives_it(job):
    with RemoteCrew(Threads(), job(2, "tests.cluster.wire.test_replies:Garbled"), 1) as crew:
        crew.assign_ranks(job(2), [0, 1])
        assert crew.call_ranks("step", None, 7)[0] == report(1, 2)
        with pytest.raises(WorkerFailed, match="died in step.*: what it answers is no answer") as caught:
            crew.call_ranks("step", "x", 1)
        assert caught.value.culprit.member.number == 1
        crew.release_members()
        assert [*crew.ready_members_by_number] == [0, 2]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:40])
def test_what_is_no_report(value):
    assert replies.read_reply("step", 0, RIGHT) == report(1, 2) and replies.read_reply("step", 1, {"step": 1}) == Taken(
        1
    )
    with pytest.raises(Malformed):
        replies.read_reply("step", 0, value)
