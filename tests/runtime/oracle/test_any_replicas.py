"""Any number of replicas is legal: 16 sequences over 1 to 7 of them, equal to one process in fp64."""

from __future__ import annotations

from math import prod

import pytest
import torch

from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import choose_attempt_directory, commit_checkpoint, load_manifest
from platform.checkpoint.manifest import Meta
from platform.plan.generators import SCHEDULES
from platform.plan.plan_summary import describe
from platform.plan.schedule import ScheduleError
from platform.predict.choose_schedule import build_schedule, count_microbatches
from platform.predict.make_plan import make_plan
from platform.predict.replan import replan
from platform.runtime.communicator import SingleRank
from platform.runtime.parallel_ops import ParallelOps
from platform.train.stage_passes import StagePasses
from platform.train.training_state import RankTrainingState
from tests.harness.oracle import MODELS, compare, configure, prove, run, serial, trainer_of
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.harness.threads import run_threads

BATCH = 16
SCHEMES = {
    "serial": ("serial", {}, {}),
    "1d": ("1d", {"t": 2}, {}),
    "3d": ("3d", {"x": 2, "y": 1, "z": 1}, {}),
    "dsp": ("serial", {}, {"branch": "dsp", "branch_axes": {"g": 2}}),
    "dsp_csub": ("serial", {}, {"branch": "dsp_csub", "branch_axes": {"g": 2}}),
}
FACTORS = {
    "data": [1, 2, 3, 4, 5, 6, 7],
    "zero": [0, 1, 2, 3],
    "zero_group": [0, 2],
    "pipeline": [("none", 1, 1), ("gpipe", 2, 1), ("1f1b", 3, 1), ("interleaved", 3, 2), ("zb_h1", 2, 2)],
    "scheme": list(SCHEMES),
    "microbatch": [2, 4],
    "model": ["gpt", "bert", "original", "t5"],
    "dropout": [0.0, 0.2],
}


def legal(case) -> bool:
    if case["zero"] and (case["data"] == 1 or case["scheme"] == "dsp_csub"):
        return False
    if case["zero_group"] and not (case["zero"] and case["data"] in (3, 4, 6)):
        return False  # of 3, each is a group by itself; of 4 and 6, there are several
    return ranks(case) <= 14


def ranks(case) -> int:
    _, axes, branch = SCHEMES[case["scheme"]]
    return case["data"] * case["pipeline"][1] * prod((*axes.values(), *branch.get("branch_axes", {}).values()))


CASES = product(FACTORS, legal)
FEW = [c for c in CASES if ranks(c) <= 8 and c["model"] in ("gpt", "bert")]
QUICK = cover([c for c in FEW if c["data"] in (3, 5, 7) or (c["data"] == 4 and c["zero_group"])])


def configured(case):
    tensor, axes, branch = SCHEMES[case["scheme"]]
    kind, stages, chunks = case["pipeline"]
    shape = {"pipeline": kind, "stages": stages, "chunks": chunks, "data": case["data"]}
    shape |= {"zero": case["zero"], "zero_group": case["zero_group"]}
    sizes = {"d_model": 16, "heads": 4, "d_ff": 32, "length": 8, "layers": 4 if stages * chunks > 5 else 2}
    model = {**MODELS[case["model"]], **sizes, "dropout": case["dropout"]}
    return configure(tensor, axes, microbatch=case["microbatch"], global_batch=BATCH, **shape, **branch, **model)


@suite("oracle of any number of replicas (threads)", CASES, QUICK)
def test_equals_one_process(case):
    prove(configured(case))


def trained(c, steps, start: str = "", end: str = "", storage=None) -> list[float]:
    """Losses of steps `steps`, from a checkpoint and to one: all ranks of the plan, as threads."""
    plan = make_plan(c)
    reports, tensors = [], {}

    def work(communicator):
        torch.set_num_threads(1)
        trainer = trainer_of(c, plan, communicator)
        state = RankTrainingState(trainer)
        if start:
            state.restore_checkpoint(storage, start, load_manifest(storage, start))
        losses = []
        for step in steps:
            report = trainer.step(step)
            assert report.samples == ((step - 1) * BATCH, step * BATCH)
            losses.append(report.loss)
        if end:
            state.checkpoint_image.fill_parts(state.live_blocks())
            reports.append(state.checkpoint_image.write_file(storage, end))
            tensors.update({h.name: h.shape for h in state.held})
        return losses, state.read_values()

    ranks = [work(SingleRank(plan.mesh))] if plan.mesh.world_size == 1 else run_threads(plan.mesh, work)
    assert all(losses == ranks[0][0] for losses, _ in ranks)
    if end:
        values = ranks[0][1]
        commit_checkpoint(
            storage, end, tensors, reports, Meta(steps[-1], steps[-1] * BATCH, c.seed, "", {}, "", {}, values)
        )
    return ranks[0][0]


EXPERTS_OF_FOUR = {"data": 4, "experts_of": 4, "microbatch": 4, **MODELS["experts"]}
SURVIVORS = [
    ({"data": 4, "zero": 3, "microbatch": 4}, 3, {"data": 3}),
    ({"data": 2, "zero": 3, "microbatch": 4}, 1, {}),
    ({"tensor": "1d", "axes": {"t": 2}, "data": 2, "zero": 3, "microbatch": 2}, 3, {"t": 2}),
    (EXPERTS_OF_FOUR, 3, {"data": 3}),
]


@pytest.mark.parametrize(
    ("before", "workers", "mesh"), SURVIVORS, ids=["4 to 3", "2 to 1", "2x2 to 3", "experts of 4 to 3"]
)
def test_fewer_workers_keep_samples_and_losses(before, workers, mesh, tmp_path):
    """Three steps, a worker is lost, three more under the plan for the others: as one process that nothing happened
    to."""
    model = {"global_batch": BATCH, "dropout": 0.1, "layers": 1, "length": 8, "d_model": 16, "vocab": 61}
    c, storage = configure(**before, **model), open_storage(str(tmp_path))
    middle = choose_attempt_directory(storage, 3)
    after = replan(c, workers)
    assert {a: n for a, n in after.plan.mesh.axes.items() if n > 1} == mesh
    losses = trained(c, [1, 2, 3], end=middle, storage=storage)
    losses += trained(after.config, [4, 5, 6], start=middle, storage=storage)
    alone = {**vars(c.model), "global_batch": BATCH, "microbatch": BATCH}
    undisturbed = trained(configure(**alone), [1, 2, 3, 4, 5, 6])
    assert losses == pytest.approx(undisturbed, rel=1e-10, abs=0)


def test_negative_control_mean_over_replicas(monkeypatch):
    """Where each replica divides by its own tokens and the means are averaged, replicas that got fewer sequences weigh
    too much: the oracle must see it."""
    c = configure(data=3, zero=3, microbatch=4, global_batch=BATCH, layers=1)
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    run_part = StagePasses.run_chunk

    counts = {0: 8, 1: 4, 2: 4}  # sequences that each replica gets: 4 + 4, 4, 4

    def weighted(self, *arguments):
        out = run_part(self, *arguments)
        own = BATCH / (3 * counts[self.communicator.coordinates["data"]])
        return {name: x * own if name == "loss" else x for name, x in out.items()}

    monkeypatch.setattr(StagePasses, "run_chunk", weighted)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c), serial(c))


@pytest.mark.parametrize("data", [3, 5, 7])
@pytest.mark.parametrize("scheme", ["serial", "dsp_csub"])
def test_a_model_without_labels(data, scheme):
    tensor, axes, branch = SCHEMES[scheme]
    model = {"kind": "two_layer", "length": 1, "io": 8, "hidden": 24, "vocab": 1000}
    prove(configure(tensor, axes, data=data, microbatch=2, global_batch=BATCH, **branch, **model))


def test_negative_control_padding_of_a_model_without_labels(monkeypatch):
    c = configure(data=3, microbatch=4, global_batch=BATCH, kind="two_layer", length=1, io=8, hidden=24, vocab=1000)
    squared_error = ParallelOps.squared_error.run_on_blocks

    def blind(self, name, y, target, spec, ids):
        return squared_error(self, name, y, target, spec, {key: x.abs() for key, x in ids.items()})

    monkeypatch.setattr(ParallelOps, "squared_error", blind)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(c, *run(c), serial(c))


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("data", [3, 5, 7])
def test_lower_precisions(precision, tolerance, data):
    c = configure(data=data, zero=3, microbatch=4, global_batch=BATCH, precision=precision, layers=1)
    _, results = run(c)
    expected = serial(configure(global_batch=BATCH, layers=1))
    assert results[0].losses == pytest.approx(expected.losses, rel=tolerance)


def test_a_schedule_gets_the_microbatches_that_it_needs(monkeypatch):
    """The fewest that it takes: a multiple of nothing where it asks for none."""
    for data, stages, microbatches in [(1, 3, 8), (2, 3, 4), (3, 3, 3), (4, 3, 3), (7, 3, 3), (7, 4, 4)]:
        for kind in ("interleaved", "zb_h1"):
            c = configure(pipeline=kind, stages=stages, chunks=2, data=data, microbatch=2, global_batch=BATCH)
            assert count_microbatches(c, data) == build_schedule(c, data).microbatches == microbatches
    one = configure(pipeline="zb_h1", stages=4, data=4, microbatch=4, global_batch=BATCH)
    assert count_microbatches(one, 4) == build_schedule(one, 4).microbatches == 1

    def by_fours(stages, chunks, microbatches):
        if microbatches % 4:
            raise ScheduleError("must be a multiple of 4")
        return SCHEDULES["1f1b"](stages, chunks, microbatches)

    monkeypatch.setitem(SCHEDULES, "mine", by_fours)
    mine = configure(pipeline="mine", stages=2, data=3, microbatch=1, global_batch=BATCH)
    assert count_microbatches(mine, 3) == build_schedule(mine, 3).microbatches == 8
    prove(mine)


def test_the_plan_says_what_padding_costs():
    lines = describe(make_plan(configure(data=3, microbatch=4, global_batch=BATCH)))
    assert "tokens in 2 microbatches x 3 replicas, 8 of 24 sequences are padding; " in lines
    lines = describe(make_plan(configure(data=1, microbatch=5, global_batch=BATCH)))
    assert "tokens in 4 microbatches, 4 of 20 sequences are padding; " in lines
    assert "padding" not in describe(make_plan(configure(data=2, global_batch=BATCH)))
