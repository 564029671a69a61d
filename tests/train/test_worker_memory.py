"""A worker goes on from its memory after its step failed."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from platform.checkpoint import buffer, snapshots
from platform.checkpoint.blocks import Block, Box, HeldTensor, Share
from platform.cluster.crew.heartbeats import HangWatch
from platform.config.fields import Config, Tune
from platform.plan.simulate import stage_rows
from platform.predict.choose_schedule import build_schedules
from platform.runtime.progress import PROGRESS
from platform.train.state_recovery import Formation, find_source
from platform.train.worker import Worker
from tests.harness.oracle import configure
from tests.harness.seats import seated


@pytest.fixture
def config() -> Config:
    c = configure(layers=1)
    c.data.kind, c.data.objective = "synthetic", ""
    return c


@pytest.fixture
def worker(config, tmp_path):
    return lambda: form(Worker(config, 0, device="cpu", run_dir=str(tmp_path), threads=1), 1)


def held_by(w: Worker) -> list[tuple[int, list[int]]]:
    """(generation, the steps whose state is whole in its memory) each."""
    return [(generation, memory.complete_steps) for generation, memory in w.memories.items() if memory.complete_steps]


def form(w: Worker, generation: int) -> Worker:
    w.join_mesh(0, 1, w.config, ("", 0), generation, [0])
    w.build_trainer([row.encode_rows() for row in stage_rows(build_schedules(w.config, 1))][0])
    return w


def test_after_a_step_that_failed(config, worker):
    undisturbed, disturbed = worker(), worker()
    expected = [undisturbed.step(step).loss for step in (1, 2, 3)]
    assert held_by(disturbed) == []
    assert [disturbed.step(step).loss for step in (1, 2)] == expected[:2] and held_by(disturbed) == [(1, [1, 2])]
    disturbed.trainer.weights.refresh_copies = lambda ahead: 1 / 0
    with pytest.raises(ZeroDivisionError):
        disturbed.step(3)  # the master copies have changed
    formed = {1: Formation(config, [0], [""], [7], ["exp_avg", "exp_avg_sq"])}
    source, _ = find_source({1: 2}, formed, [7], 1)
    assert source
    disturbed.close()
    form(disturbed, 2)
    disturbed.recover_state(seated(source, [], 1))
    assert held_by(disturbed) == [(1, [2]), (2, [2])], "until a step is taken, there are both to go back to"
    assert disturbed.step(3).loss == expected[2] and held_by(disturbed) == [(2, [2, 3])]
    pairs = zip(undisturbed.state.live_blocks(), disturbed.state.live_blocks(), strict=True)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


@pytest.mark.parametrize(("every", "held"), [(0, []), (2, [(1, [2, 4])])])
def test_as_often_as_asked(config, worker, every, held):
    config.elastic.snapshot_every = every
    w = worker()
    reports = [w.step(step) for step in range(1, 6)]
    assert held_by(w) == held
    assert [r.seconds["checkpoint"] > 0 for r in reports] == [every > 0 and r.step % 2 == 0 for r in reports]
    assert all(r.step_seconds >= sum(r.seconds.values()) for r in reports)


def test_beside_the_next_step_and_acknowledged_with_it(config, worker):
    """As on a GPU: what is held is the same, a step later, and never less than two steps are at stake at once."""
    at_once, late = worker(), worker()
    late.late = True
    for step in range(1, 6):
        reports = at_once.step(step), late.step(step)
        assert reports[0].loss == reports[1].loss
        assert [r.held for r in reports] == [step, step - 1 or None]
        assert held_by(late) == ([(1, list(range(max(1, step - 2), step)))] if step > 1 else [])
        if step > 1:
            mine, theirs = (w.memories[1].find_snapshot(step - 1) for w in (late, at_once))
            assert torch.equal(mine.own_buffer.data, theirs.own_buffer.data) and mine.values == theirs.values
            assert mine.own_buffer.data.any()
    late.take_snapshot(5)
    assert held_by(late) == held_by(at_once) == [(1, [4, 5])]
    assert torch.equal(
        late.memories[1].find_snapshot(5).own_buffer.data, at_once.memories[1].find_snapshot(5).own_buffer.data
    )
    assert late.step(6).loss == at_once.step(6).loss and held_by(late) == [(1, [4, 5])], "held once"


def test_a_step_that_fails_while_its_snapshot_runs(config, worker):
    undisturbed, disturbed = worker(), worker()
    disturbed.late = True
    expected = [undisturbed.step(step).loss for step in (1, 2, 3, 4)]
    for step in (1, 2, 3):
        disturbed.step(step)
    assert held_by(disturbed) == [(1, [1, 2])]
    disturbed.trainer.settle = lambda: 1 / 0
    disturbed._finish_snapshot = disturbed.trainer.settle
    with pytest.raises(ZeroDivisionError):
        disturbed.step(4)  # the copy of step 3 has begun, over that of step 1
    assert held_by(disturbed) == [(1, [2])]
    del disturbed._finish_snapshot
    trainer = weakref.ref(disturbed.trainer)
    formed = {1: Formation(config, [0], [""], [7], ["exp_avg", "exp_avg_sq"])}
    source, _ = find_source({1: 2}, formed, [7], 1)
    disturbed.close()
    assert trainer() is None, "the snapshot that had begun keeps nothing of the generation"
    form(disturbed, 2)
    disturbed.recover_state(seated(source, [], 1))
    assert [disturbed.step(step).loss for step in (3, 4)] == expected[2:]


def test_what_adapters_are_of_stays_in_memory(config, worker, monkeypatch):
    """A worker that leaves keeps it, up to the first step of a generation that has it."""
    config.tune = Tune(kind="lora", rank=2)
    undisturbed, disturbed = worker(), worker()
    config.train.init = "nowhere"  # from which nothing can be read
    expected = [undisturbed.step(step).loss for step in (1, 2)]
    disturbed.step(1)
    for _, _, weights in disturbed.state.base_blocks():
        assert weights.untyped_storage().data_ptr() in {
            b.tensor.untyped_storage().data_ptr() for b in disturbed.memories[1].base
        }, "it is there once"
    disturbed.leave()
    form(disturbed, 2)
    for _, _, weights in disturbed.state.base_blocks():
        weights.fill_(torch.nan)
    source, _ = find_source({1: 1}, {1: Formation(config, [0], [""], [7], ["exp_avg", "exp_avg_sq"])}, [7], 1)
    disturbed.recover_state(seated(source, [], 1))
    assert disturbed.step(2).loss == expected[1] and [*disturbed.memories] == [2]


SECONDS = 0.5  # of a transfer, and of the passes of a step


def slow(w: Worker, transfer) -> Worker:
    """A worker whose passes last SECONDS, as on a device, and whose copies are passed on by `transfer`."""
    passes, w.communicator.transfer = w.trainer._run_forward_backward, transfer

    def slowly(step):
        with w.trainer.clock.time_section("backward"):
            time.sleep(SECONDS)
        return passes(step)

    w.trainer._run_forward_backward = slowly
    return w


@pytest.mark.parametrize("late", [True, False])
def test_a_transfer_beside_a_step_does_not_lengthen_it(worker, late):
    """Unless the step waits for it at once, which is the control."""
    w = slow(worker(), lambda sent, received: time.sleep(SECONDS))
    w.late = late
    w.step(1)
    start = time.perf_counter()
    report = w.step(2)
    seconds = time.perf_counter() - start
    assert report.held == 2 - late
    assert (report.seconds["checkpoint"] < 0.3 * SECONDS) == late == (seconds < 1.5 * SECONDS)


def test_a_step_updates_nothing_before_the_transfer_is_over(worker):
    over, w = threading.Event(), worker()
    w = slow(w, lambda sent, received: over.wait(10))
    w.late, update, ended = True, w.trainer._update_weights, []
    w.trainer._update_weights = lambda *arguments: ended.append(over.is_set()) or update(*arguments)
    w.step(1)
    threading.Timer(2 * SECONDS, over.set).start()
    assert w.step(2).held == 1 and ended == [False, True]  # the first step has nothing to wait for


def test_a_transfer_that_fails_fails_the_step_that_it_runs_beside(worker, monkeypatch):
    """As a collective of that step does; the snapshot before is whole, and the worker leaves in no time."""
    w, transfers = worker(), []

    def transfer(sent, received):
        transfers.append(threading.current_thread())
        if len(transfers) == 2:
            raise ConnectionResetError("by peer")

    w = slow(w, transfer)
    w.late = True
    assert [w.step(step).held for step in (1, 2)] == [None, 1]
    with pytest.raises(ConnectionResetError, match="by peer"):
        w.step(3)
    assert held_by(w) == [(1, [1])] and threading.current_thread() not in transfers
    trainer, start = weakref.ref(w.trainer), time.perf_counter()
    monkeypatch.setattr(snapshots, "ABANDONED", 60)
    w.leave()
    assert trainer() is None and time.perf_counter() - start < 0.5 * snapshots.ABANDONED


def test_who_transfers_is_where_its_main_thread_is(worker):
    """Blamed if that hangs in work of its own; not if it waits for the transfer, as who waits for another rank."""
    w, beats = worker(), {}

    def transfer(sent, received):
        time.sleep(0.5 * SECONDS)
        beats["beside"] = PROGRESS.build_heartbeat()
        time.sleep(SECONDS)
        beats["settling"] = PROGRESS.build_heartbeat()

    w = slow(w, transfer)
    w.late = True
    w.step(1)
    PROGRESS.begin_call("step(2)")
    w.step(2)
    PROGRESS.begin_call("")
    beside, settling = beats["beside"], beats["settling"]
    assert (beside.section, beside.waiting) == ("backward", False)
    assert (settling.section, settling.waiting, settling.device) == ("transfer", True, "")

    def blamed(*beats):
        watch = HangWatch(2.0, 0.0)
        watch.workers_to_ask(range(len(beats)), 5.0)
        for number, beat in enumerate(beats):
            watch.note_heartbeat(number, replace(beat, seconds=4.0, busy=0.0), 5.0)
        return watch.find_hung(range(len(beats)), 5.0)[1]

    assert blamed(settling, beside) == {1} and blamed(beside, beside) == {0, 1} and blamed(settling, settling) == set()


def test_copies_run_in_a_stream_of_their_own(monkeypatch):
    """On doubles of CUDA's streams: after what is queued, beside what follows, and waited for in the end alone."""
    log = []

    class Stream:
        def wait_stream(self, other):
            log.append(f"wait for {other}")

        def record_event(self, event):
            log.append(f"record {event}")
            return SimpleNamespace(synchronize=lambda: log.append("synchronize"))

        def __enter__(self):
            log.append("enter")

        def __exit__(self, *_):
            log.append("exit")

    doubles = {"Stream": Stream, "stream": lambda s: s, "current_stream": lambda: "the update", "Event": dict}
    for name, value in doubles.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(buffer, "allocate_pinned_bytes", lambda n: torch.zeros(n, dtype=torch.uint8))
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a, **o: log.append(f"copy {o}") or copy(*a))
    whole = Box((0,), (4,))
    part = Share(HeldTensor("model.w", "float32", (4,), {whole: (0,)}), whole)
    wait = buffer.HostBuffer([part], pinned=True).start_copy([Block("model.w", whole, torch.ones(4))])
    wait()  # what lies in host memory is copied behind what comes from the device
    before = ["wait for the update", "enter", "exit", "record {'blocking': True}", "synchronize"]
    assert log == [*before, "copy {'non_blocking': True}"]
