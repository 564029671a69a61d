"""The benchmark of peers compares like with like: same weights, batches and updates, and it sees where they part."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from benchmarks.peers.__main__ import APART, line, verdict
from benchmarks.peers.pairs import OURS, PEER, Job, Seen, alternate, bootstrap, compare
from benchmarks.peers.rows import ROWS, configured
from platform.config.fields import Model
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.suite import suite

SMALL = Model(layers=2, d_model=32, heads=4, length=16, vocab=64)
LLAMA = replace(SMALL, kv_heads=2, d_ff=48, norm="rmsnorm", activation="swiglu", positions="rope", bias=False,
                tied=False)  # fmt: skip
STEPS = 24
TORCHS = [{"row": name} for name in ("zero3_fsdp2", "1f1b_torch", "ddp", "zero1_redundancy", "tp_dtensor")]


def job(name: str, model: Model = SMALL) -> Job:
    c = configured(ROWS[name], STEPS)
    c.model, c.optimizer.lr = model, 1e-2
    return Job(c, ROWS[name].peer, compiled=False, warmup=STEPS - 1, pairs=1)


def apart(one: Job) -> tuple[float, tuple[float, float]]:
    plan = make_plan(one.config)
    comparison = compare([alternate(one, plan, SingleRank(plan.mesh))])
    return comparison.apart, comparison.losses


@pytest.mark.parametrize("model", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_both_train_alike(model):
    difference, (first, last) = apart(job("gpt_tiny", model))
    assert difference < 1e-5
    assert last < 0.9 * first  # something is learnt, so that a difference can show


def test_what_trains_otherwise_is_seen(monkeypatch):
    """A peer whose learning rate is a tenth higher."""
    from benchmarks.peers import replicated

    theirs = replicated.settings_of
    monkeypatch.setattr("benchmarks.peers.gpt.settings_of", lambda c: {**theirs(c), "lr": 1.1 * c.optimizer.lr})
    assert apart(job("gpt_tiny"))[0] > APART


@suite("peers on two ranks", TORCHS, chosen=TORCHS[:2])
def test_ranks_train_alike(pool, case):
    one = job(case["row"])
    comparison = compare(pool.run(alternate, one, make_plan(one.config)))
    assert comparison.apart < 1e-5
    assert comparison.losses[1] < 0.9 * comparison.losses[0]


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_a_plan_and_a_peer(name):
    row = ROWS[name]
    assert make_plan(configured(row, 1)).mesh.world_size <= 2
    module, _, function = row.peer.partition(":")
    spec = importlib.util.find_spec(f"benchmarks.peers.{module}")
    assert spec and spec.origin
    with open(spec.origin) as f:
        assert f"def {function}(" in f.read()


def test_a_comparison_counts_the_slowest_rank_and_the_cpu_of_all():
    ranks = [
        {OURS: Seen([2.0], [1.0, 2.0], [0.5, 0.5]), PEER: Seen([2.0], [2.0, 2.0], [1.0, 1.0])},
        {OURS: Seen([float("nan")], [3.0, 1.0], [0.5, 0.5]), PEER: Seen([1.0], [1.0, 4.0], [1.0, 1.0])},
    ]
    comparison = compare(ranks)
    assert comparison.seconds == (2.5, 3.0)  # of 3 and 2, of 2 and 4
    assert comparison.ratio == (3 / 2 + 2 / 4) / 2
    assert comparison.cpu == (1.0, 2.0) and comparison.cpu_ratio == 0.5
    assert comparison.apart == pytest.approx(0.5 / 1.5)
    shown = line("zb_h1_torch", ROWS["zb_h1_torch"], comparison, [2_000_000, 3_000_000])
    assert "**1.000**" in shown and "<= 0.90: not met" in shown and "0.500 (<= 1.05: met)" in shown and "2, 3" in shown


def test_the_interval_narrows_with_more_pairs():
    few, many = (bootstrap([0.9, 1.0, 1.1, 1.2] * n) for n in (2, 50))
    assert few[0] <= many[0] <= many[1] <= few[1] and few[1] - few[0] > many[1] - many[0]
    assert bootstrap([1.0] * 5) == (1.0, 1.0)
    assert verdict(0.95, 0.95) == "<= 0.95: met" and verdict(0.96, None) == "-"
