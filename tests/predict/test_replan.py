"""What a run becomes with fewer workers: the best legal plan, by brute force; always one, always the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from itertools import product
from math import inf, prod

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.identity import run_identity
from platform.config.validation import violations_of_configuration
from platform.launch import compose_config
from platform.plan.generators import generate
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.replan import iterate_shrinking, replan
from tests.harness.oracle import configure
from tests.harness.schedule_files import to_csv

SMALL = {"layers": 5, "d_model": 24, "heads": 6, "d_ff": 48, "length": 12, "microbatch": 4, "global_batch": 16}
CUBE = {"tensor": "1d", "axes": {"t": 2}, "pipeline": "1f1b", "stages": 2, "data": 2, **SMALL}
ROWS_COLS = {"batch": ["rows"], "heads": ["cols"], "d_ff": ["cols"], "vocab": ["cols"]}


def sizes(replanned) -> dict[str, int]:
    return {a: n for a, n in replanned.plan.mesh.axes.items() if n > 1}


@pytest.mark.parametrize(
    ("workers", "mesh", "reason"),
    [
        (8, {"stage": 2, "data": 2, "t": 2}, "8 workers: as configured"),
        (7, {"stage": 2, "t": 2}, "7 workers: data 2 -> 1, 3 idle"),
        (6, {"stage": 2, "t": 2}, "6 workers: data 2 -> 1, 2 idle"),
        (5, {"stage": 2, "t": 2}, "5 workers: data 2 -> 1, 1 idle"),
        (4, {"stage": 2, "t": 2}, "4 workers: data 2 -> 1"),
        (3, {"data": 3}, "3 workers: data 2 -> 3, stages 2 -> 1, t 2 -> 1, pipeline 1f1b -> none"),
        (2, {"stage": 2}, "2 workers: data 2 -> 1, t 2 -> 1"),
        (1, {}, "1 worker: data 2 -> 1, stages 2 -> 1, t 2 -> 1, pipeline 1f1b -> none"),
    ],
)
def test_a_cube_of_tensor_stage_and_data_loses_its_workers(workers, mesh, reason):
    replanned = replan(configure(**CUBE), workers)
    assert sizes(replanned) == mesh and replanned.reason == reason
    assert make_plan(replanned.config) == replanned.plan
    assert run_identity(replanned.config) == run_identity(configure(**CUBE))
    assert violations_of_configuration(replanned.config) == []


@pytest.fixture(autouse=True)
def _terse(monkeypatch):
    """A refusal looks for meshes to name: thousands of them take long."""
    monkeypatch.setattr("platform.predict.make_plan._iterate_legal_meshes", lambda *_: iter(()))


def every_plan(c, workers: int, need=lambda *_: 0.0) -> list[tuple[int, int, float]]:
    """(ranks, bytes per step, `need` of a worker in bytes) of all plans, each made from scratch."""
    axes, branches = c.tensor.order or list(c.tensor.axes), list(c.branch.axes)
    out = []
    free = [range(1, workers + 1)] * len(axes)
    fewer = [range(1, n + 1) for n in (*c.branch.axes.values(), c.pipeline.stages)]
    for *counts, stages, data in product(*free, *fewer, range(1, -(-c.train.global_batch // c.train.microbatch) + 1)):
        if (ranks := prod((*counts, stages, data))) > workers:
            continue
        other = deepcopy(c)
        other.tensor.axes = dict(zip(axes, counts, strict=False))
        other.branch.axes = dict(zip(branches, counts[len(axes) :], strict=True))
        other.pipeline.stages, other.parallel.data = stages, data
        if stages == 1:
            other.pipeline.kind, other.pipeline.chunks = "none", 1
        try:
            plan = make_plan(other)
        except ConfigError:
            continue
        out.append((ranks, sum(communication(plan).values()), need(other, plan)))
    return out


def best(plans: list[tuple[int, int, float]], workers: int, memory: float = inf) -> tuple[int, int]:
    """Most ranks, then fewest bytes."""
    return max(((n, -moved) for n, moved, need in plans if n <= workers and need <= memory), default=(0, 0))


OPTIMAL = {
    "1d, stages": CUBE,
    "1d, zero 3, stages": {**CUBE, "zero": 3},
    "interleaved": {**CUBE, "pipeline": "interleaved", "chunks": 2},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 3}, **SMALL},
    "2d, dsp": {"tensor": "2d", "axes": {"r": 1, "c": 3}, "branch": "dsp", "branch_axes": {"g": 2}, **SMALL},
    "layout": {"tensor": "layout", "axes": {"rows": 4, "cols": 2}, "rules": ROWS_COLS, **SMALL},
    "T5, csub": {"tensor": "1d", "axes": {"t": 2}, "branch": "dsp_csub", "branch_axes": {"g": 3}, **SMALL,
                 "kind": "encoder_decoder", "positions": "relative", "buckets": 8, "distance": 12},
}  # fmt: skip


SLOW = ("layout", "T5, csub")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in SLOW else []) for name in OPTIMAL]
)
def test_nothing_legal_is_better(name):
    c = configure(**OPTIMAL[name])
    c.parallel.data = 1
    inner = make_plan(c).mesh.world_size
    plans = every_plan(c, inner - 1)
    for workers in {inner - 1, inner // 2 + 1, 1}:
        plan = replan(c, workers).plan
        assert (plan.mesh.world_size, -sum(communication(plan).values())) == best(plans, workers), workers


def test_what_has_no_room_is_not_taken():
    """Weights are split over t and over stages, not over data."""
    c = configure(**{**CUBE, "axes": {"t": 4}, "heads": 8, "d_model": 32})
    c.parallel.data = 1
    own = predict_peak_bytes(c, make_plan(c))
    assert sizes(replan(c, 7)) == {"data": 3, "stage": 2}
    plans = every_plan(c, 7, predict_peak_bytes)
    for memory in (own * 1.3, own * 2, own * 3):
        config, plan, _ = replan(c, 7, memory=memory)
        assert predict_peak_bytes(config, plan) <= memory
        assert (plan.mesh.world_size, -sum(communication(plan).values())) == best(plans, 7, memory)
    assert replan(c, 8, memory=1).config == c  # the count is a model: what runs has room
    assert replan(c, 7, memory=1) is None


EXPERIMENTS = {
    "gpt_quick": ["pipeline=interleaved", "pipeline.stages=2"],
    "two_layer": ["train.microbatch=64"],
    "transformer_base": ["model.layers=1", "model.d_model=64", "model.length=32", "model.vocab=512"],
    "t5_large_mod": ["model=t5_tiny", "train.global_batch=8", "train.microbatch=4", "parallel.data=2"],
    "cube_bert": ["model.layers=1", "model.d_model=64", "model.heads=4", "model.length=32", "model.vocab=512",
                  "train.global_batch=16", "train.microbatch=8"],
    "mesh_lm": ["model=gpt_tiny", "train.global_batch=8", "train.microbatch=4"],
    "gpt175b": ["model.layers=2", "model.d_model=64", "model.heads=4", "model.length=128", "model.vocab=2048",
                "tensor.axes.t=2", "pipeline.stages=2", "pipeline.chunks=2", "train.global_batch=8"],
    "one_gpu": ["model.layers=2", "parallel.data=3", "parallel.zero=3"],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_there_is_a_legal_plan_for_any_number(name):
    c = compose_config([f"+experiment={name}", *EXPERIMENTS[name]])
    start = make_plan(c).mesh.world_size
    before = c.to_dict()
    last = start + 1
    for workers, (config, plan, _) in iterate_shrinking(c):  # the number of workers where the plan changes
        assert workers == last - 1
        last = plan.mesh.world_size
        assert last <= workers and violations_of_configuration(config) == []
        assert make_plan(config) == plan and run_identity(config) == run_identity(c) and config.train == c.train
        assert replan(c, last).config == config
    assert last == 1
    assert replan(c, start).config == replan(c, start + 1).config == c and c.to_dict() == before


def test_a_run_grows_to_its_limit_and_not_beyond_its_sequences():
    c = configure(**CUBE)
    assert replan(c, 100).config == c
    c.elastic.max_workers = 15
    assert sizes(replan(c, 100)) == {"stage": 2, "data": 3, "t": 2}
    c.elastic.max_workers = 1000
    assert sizes(replan(c, 100)) == {"stage": 2, "data": 4, "t": 2}  # 16 sequences, 4 each
    c.parallel.data = 6  # as the user wants
    assert replan(c, 24).config == c


def test_a_table_of_the_user_s_own_is_for_its_own_numbers(tmp_path):
    path = str(tmp_path / "mine.csv")
    to_csv(generate("zb_h1", 2, 2, 2), path)
    c = configure(**{**CUBE, "pipeline": "file", "chunks": 2})
    c.pipeline.file = path
    assert replan(c, 8).config == c
    replanned = replan(c, 4)  # with one replica the table would need twice its microbatches
    assert replanned.plan.mesh.world_size == 4 and replanned.config.pipeline.file == ""
    assert make_plan(replanned.config) == replanned.plan and violations_of_configuration(replanned.config) == []


SCRIPT = """
import json
from platform.launch import compose_config
from platform.plan.step_collectives import communication
from platform.predict.replan import iterate_shrinking
c = compose_config(["+experiment=gpt_quick", "model.layers=1", "branch=dsp", "branch.axes.g=2"])
replanned = iterate_shrinking(c)
print(json.dumps([[n, r.reason, r.config.to_dict(), communication(r.plan)] for n, r in replanned]))
"""


def test_the_same_answer_in_every_process():
    run = lambda seed: subprocess.run(  # noqa: E731
        [sys.executable, "-c", SCRIPT], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True
    )
    one, two = run("1"), run("2")
    assert one.stdout == two.stdout and len(json.loads(one.stdout)) > 3, one.stderr


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "platform.plan", "+experiment=gpt_quick", "--shrink"], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "workers  idle  bytes per step  mesh",
        "      4     0         46.5 MB  data 2 x t 2",
        "      3     1         37.8 MB  t 2",
        "      1     0             0 B  1",
    ], done.stderr
