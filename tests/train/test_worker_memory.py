"""A worker goes on from its memory after its step failed."""

from __future__ import annotations

import pytest
import torch

from platform.config.fields import Config
from platform.plan.schedule.rows import stage_rows
from platform.planning.choose_schedule import schedule_of
from platform.train.recovery.source import Formation, find_source, take_seats
from platform.train.worker import Worker
from tests.harness.oracle import configure


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
    return [(generation, memory.steps) for generation, memory in w.memories.items() if memory.steps]


def form(w: Worker, generation: int) -> Worker:
    w.form(0, 1, w.config, ("", 0), generation, [0])
    w.build([row.plain() for row in stage_rows(schedule_of(w.config, 1))][0])
    return w


def test_after_a_step_that_failed(config, worker):
    undisturbed, disturbed = worker(), worker()
    expected = [undisturbed.step(step).loss for step in (1, 2, 3)]
    assert held_by(disturbed) == []
    assert [disturbed.step(step).loss for step in (1, 2)] == expected[:2] and held_by(disturbed) == [(1, [1, 2])]
    disturbed.trainer.weights.refresh = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        disturbed.step(3)  # the master copies have changed
    formed = {1: Formation(config, [0], [""], [7], ["exp_avg", "exp_avg_sq"])}
    source, _ = find_source({7: held_by(disturbed)}, formed, 1)
    assert source
    disturbed.close()
    form(disturbed, 2)
    disturbed.recover(take_seats(source, [], 1))
    assert held_by(disturbed) == [(1, [2]), (2, [2])], "until a step is taken, there are both to go back to"
    assert disturbed.step(3).loss == expected[2] and held_by(disturbed) == [(2, [2, 3])]
    pairs = zip(undisturbed.state.blocks(), disturbed.state.blocks(), strict=True)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


@pytest.mark.parametrize(("every", "held"), [(0, []), (2, [(1, [2, 4])])])
def test_as_often_as_asked(config, worker, every, held):
    config.elastic.snapshot_every = every
    w = worker()
    reports = [w.step(step) for step in range(1, 6)]
    assert held_by(w) == held
    assert [r.seconds["checkpoint"] > 0 for r in reports] == [every > 0 and r.step % 2 == 0 for r in reports]
    assert all(r.step_seconds >= sum(r.seconds.values()) for r in reports)
