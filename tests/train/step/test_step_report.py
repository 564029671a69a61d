"""The ranks' reports as one: the same numbers that every rank's own report gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.train.replies import SlowRank, StepReport, Taken
from platform.train.step_report import OWN_WORK, ReportCombiner
from platform.train.trainer import SECTIONS
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

CASES = {
    "zero 3": configure("1d_sp", {"t": 2}, data=2, zero=3, global_batch=8),
    "3d": configure("3d", {"x": 2, "y": 2, "z": 2}, microbatch=8, global_batch=8),
    "pipeline": configure(
        "1d", {"t": 2}, data=2, pipeline="interleaved", stages=2, chunks=2, layers=4, global_batch=16, microbatch=2
    ),
    "csub": configure("1d", {"t": 2}, branch="dsp_csub", branch_axes={"g": 2}, data=2, global_batch=8),
}


def steps(config, communicator):
    config.monitor.layers = 2
    plan = make_plan(config)
    trainer, report = trainer_of(config, plan, communicator), ReportCombiner(plan, communicator, slow=1.5, layers=2)
    reports = []
    for step in (1, 2):
        mine = trainer.step(step)
        reports.append((mine, report.combine_reports(mine)))
    return reports


@pytest.mark.parametrize("name", CASES)
def test_threads(name):
    check(run_threads(make_plan(CASES[name]).mesh, lambda communicator: steps(CASES[name], communicator)))


def test_alone():
    config = configure()
    check([steps(config, SingleRank(make_plan(config).mesh))])


def check(ranks):
    for step in (1, 2):
        own = [rank[step - 1][0] for rank in ranks]
        together, *others = (rank[step - 1][1] for rank in ranks)
        assert others == [Taken(step)] * (len(ranks) - 1)
        moved: Counter[str] = Counter()
        for report in own:
            moved.update(report.comm_bytes)
        assert together.comm_bytes == dict(moved)
        assert all(type(n) is int for n in together.comm_bytes.values())
        for section in SECTIONS:
            assert together.seconds[section] == pytest.approx(fmean(r.seconds[section] for r in own))
        assert together.parts.keys() >= {"computing", "optimizer", "data"} and not together.waits
        assert together.peak_memory_bytes == max(r.peak_memory_bytes for r in own)
        assert together.world_size == len(ranks)
        for key in ("loss", "grad_norm", "lr", "samples", "tokens", "skipped"):
            assert getattr(together, key) == getattr(own[0], key)


def report(seconds, moved=None):
    return StepReport(1, 1.0, 1.0, 1.0, False, 1, (0, 1), 1.0, seconds, moved or {}, 1, 1, [])


def test_a_slow_rank_is_named():
    """Rank 2 takes four times as long as its stage's others; that stage 1 takes twice as long is its layers'."""
    plan = make_plan(CASES["pipeline"])

    def work(communicator):
        seconds = dict.fromkeys(SECTIONS, 0.0)
        seconds["forward"] = {0: 1.0, 1: 2.0}[communicator.coordinates["stage"]] * (4 if communicator.rank == 2 else 1)
        seconds["exposed_comm"] = 100.0 * communicator.rank
        return ReportCombiner(plan, communicator, slow=1.5, layers=2).combine_reports(report(seconds))

    assert run_threads(plan.mesh, work)[0].slow == [SlowRank(2, 4.0, "forward")]
    assert "exposed_comm" not in OWN_WORK


def test_the_parts_of_a_step_are_those_of_the_stage_that_computes_longest():
    plan = make_plan(CASES["pipeline"])

    def work(communicator):
        seconds, stage = dict.fromkeys(SECTIONS, 0.0), communicator.coordinates["stage"]
        seconds |= {"forward": 1.0 + stage, "backward": 2.0, "exposed_comm": 0.5, "bubble": 3.0 - stage, "reduce": 0.25}
        mine = replace(report(seconds), waits={"t": float(communicator.rank), "moon": 9.0})
        return ReportCombiner(plan, communicator, slow=0).combine_reports(mine)

    parts = run_threads(plan.mesh, work)[0].parts
    ranks = [rank for rank in range(plan.mesh.world_size) if plan.mesh.rank_coordinates(rank)["stage"] == 1]
    assert {name: seconds for name, seconds in parts.items() if seconds} == {
        "computing": 4.0, "waiting for t": fmean(ranks), "bubble": 2.0, "optimizer": 0.25,
    }  # fmt: skip


def test_a_collective_that_was_not_planned_is_ours_to_mend():
    plan = make_plan(configure())
    with pytest.raises(AssertionError, match="not planned"):
        seconds = dict.fromkeys(SECTIONS, 0.0)
        ReportCombiner(plan, SingleRank(plan.mesh), 0).combine_reports(report(seconds, {"all_reduce/moon": 8}))


def on_gloo(config, plan, communicator):
    return steps(config, communicator)


def test_processes(pool):
    check(pool.run(on_gloo, CASES["zero 3"], make_plan(CASES["zero 3"])))
