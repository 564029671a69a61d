"""What runs around a worker."""

import gc
import json
import subprocess
import sys
import weakref
from math import inf
from types import MethodType

import pytest

from platform.boundary.schema import Malformed
from platform.cluster.crew.channel import Unframer, encode_json
from platform.cluster.crew.job import Assignment
from platform.cluster.crew.worker_host import _Host, convert_arguments
from platform.config.fields import Config
from platform.train import replies
from platform.train.faults import Fault
from platform.train.replies import (
    CollectiveSpan,
    Damage,
    Differences,
    Dispute,
    RankTimeline,
    SectionSpan,
    SlowRank,
    StepReport,
)
from platform.train.state_recovery import Formation, MemorySource
from platform.train.worker import Worker


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

    def send_frame(self, frame):
        self.messages += Unframer().split_messages(frame)


def test_a_worker_that_failed_leaves_with_empty_hands(capsys):
    line, worker = Sent(), FailsWithFullHands()
    host = _Host(Assignment("", {}, 0, "cpu", "", 1), line, own_process=False)
    host._worker = worker
    host._execute_call(7, "step(1)", worker.step)
    assert worker.empty
    [answer] = line.messages
    assert answer["answer"] == 7 and "ValueError: boom" in answer["error"]
    assert "ValueError: boom" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "args"),
    [
        (
            Worker.exchange_snapshots,
            [
                MemorySource(1, 2, Formation(Config(), [0], ["a"], [0, 7], []), [0], [0, 1], [0, 1]),
                1,
                ("here", 5),
                "2/gather",
            ],
        ),
        (Worker.recover_state, [MemorySource(1, 2, Formation(Config(), None, [], [0, 7], ["m"]), [0], [], [0], [7])]),
        (Worker.step, [3, inf, [Fault(3, "kill", 1, "forward")]]),
    ],
)
def test_what_the_driver_gives_is_what_the_worker_gets(method, args):
    converted = convert_arguments(MethodType(method, object()), json.loads(encode_json(args)))
    assert converted == args and list(map(type, converted)) == list(map(type, args))
    with pytest.raises(Malformed):
        convert_arguments(MethodType(method, object()), [None])


def test_a_process_keeps_freed_memory_unless_the_user_has_told_malloc_otherwise():
    """The first two are the control of what `test_crew.py` sees of workers."""
    code = (
        "import os\n"
        "from platform.cluster.crew.worker_host import _keep_freed_memory\n"
        "from tests.doubles.fake_worker import faults_again\n"
        "found = [faults_again()]\n"
        "os.environ['MALLOC_TRIM_THRESHOLD_'] = '131072'; _keep_freed_memory(); found.append(faults_again())\n"
        "del os.environ['MALLOC_TRIM_THRESHOLD_']; _keep_freed_memory(); found.append(faults_again())\n"
        "print(*found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    default, told, kept = map(int, done.stdout.split())
    assert min(default, told) > 20_000 and kept < 2_000


def test_no_number_of_a_configuration_changes_its_type():
    """Both sides plan from it, and plans are compared by digest."""
    config = Config()
    config.model.rope_theta = 10000
    sent = json.loads(encode_json([MemorySource(1, 2, Formation(config, None, [], [], []), [], [], [])]))
    [source] = convert_arguments(MethodType(Worker.recover_state, object()), sent)
    assert type(source.formed.config.model.rope_theta) is int


def test_what_the_worker_answers_is_what_the_driver_gets():
    report = StepReport(
        step=3, loss=inf, grad_norm=0.5, lr=1e-3, skipped=True, tokens=9, samples=(4, 8), step_seconds=0.5,
        seconds={"data": 0.25}, comm_bytes={"send/stage": 8}, peak_memory_bytes=1, world_size=2,
        slow=[SlowRank(1, 2.0)], differences=Differences([Damage(1, "model.w")], [Dispute([0, 1], "model.v")]),
        timeline=RankTimeline(
            [SectionSpan("data", 0.0, 0.25)],
            [SectionSpan("forward layers.0", 0.25, 0.5)],
            [CollectiveSpan("gather layers.0", "all_gather", "data", 64, 0.0, 0.25, 0.3)],
        ),
    )  # fmt: skip
    assert replies.read_reply("step", 0, json.loads(encode_json(report))) == report


def test_every_call_is_a_method_of_the_worker_and_has_a_word_of_its_own():
    assert [method for method in replies.WORDS if not callable(getattr(Worker, method, None))] == []
    assert len(replies.METHODS) == len(replies.WORDS)
