"""A worker by itself: what it says about what it does, and what is left of a generation that it has left."""

import threading
import weakref

import pytest

from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_schedules
from platform.runtime.clock import SectionClock
from platform.runtime.communicator import CollectiveHandle
from platform.runtime.progress import PROGRESS
from platform.train.worker import Worker
from tests.harness.oracle import configure


def test_progress_names_the_innermost_section_and_whether_it_waits():
    clock, beats = SectionClock(), []

    def note():
        beat = PROGRESS.build_heartbeat()
        beats.append((beat.call, beat.section, beat.waiting))

    PROGRESS.begin_call("step(3)")
    note()
    with clock.time_section("forward"):
        note()
        CollectiveHandle(clock, note, lambda: None).wait()
        note()
        with pytest.raises(ValueError), PROGRESS.mark_waiting("exchange"):
            note()
            raise ValueError
    note()
    PROGRESS.begin_call("")
    note()
    assert beats == [
        ("step(3)", "", False),
        ("step(3)", "forward", False),
        ("step(3)", "exposed_comm", True),
        ("step(3)", "forward", False),
        ("step(3)", "exchange", True),
        ("step(3)", "", False),
        ("", "", False),
    ]


def test_seconds_count_from_the_last_change():
    PROGRESS.begin_call("step(1)")
    threading.Event().wait(0.05)
    before = PROGRESS.build_heartbeat().seconds
    PROGRESS.enter_section("data")
    assert before >= 0.05 > PROGRESS.build_heartbeat().seconds


def test_a_generation_that_was_left_is_gone_and_the_next_one_is_the_same(tmp_path):
    c = configure(vocab=300)
    c.run.dir, c.data.kind = str(tmp_path), "synthetic"
    worker = Worker(c, 0, device="cpu", run_dir=str(tmp_path), threads=1)
    worker.leave()  # a spare has nothing to leave
    losses = []
    for generation in (1, 2):
        worker.join_mesh(0, 1, c, ("127.0.0.1", 1), generation, [0])
        with pytest.raises(RuntimeError, match="still in the generation before"):
            worker.join_mesh(0, 1, c, ("127.0.0.1", 1), generation, [0])
        worker.build_trainer(stage_rows(build_schedules(c, 1))[0].encode_rows())
        losses.append([worker.step(step).loss for step in (1, 2)])
        alive = [weakref.ref(worker.trainer), *map(weakref.ref, worker.trainer.weights.own_masters.values())]
        assert len(alive) > 10 and None not in [ref() for ref in alive]
        worker.leave()
        assert {ref() for ref in alive} == {None}
    assert losses[0] == losses[1]
    worker.close()
