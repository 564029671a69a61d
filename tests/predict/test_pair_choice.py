"""Which passes run in pairs, and why not others: as data of the plan, priced, within memory, and said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.model import build_model
from platform.plan.__main__ import main
from platform.plan.plan_check import find_unsoundness
from platform.plan.plan_data import decode_plan, encode_plan, plan_digest
from platform.plan.schedule import has_pairs
from platform.plan.simulate import StageRows, lower_schedule
from platform.plan.step_collectives import communication
from platform.predict.choose_schedule import build_schedule
from platform.predict.footprint import predict_footprint
from platform.predict.make_plan import make_plan, settle_for_workers
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.pair_choice import pair_passes, reason_against_pairs
from platform.predict.price import collective_seconds
from platform.predict.recorded_passes import reason_against_graphs
from platform.predict.replan import replan
from platform.predict.step_price import build_step_work, read_hardware, simulate_schedule, step_price

EXPERTS = """+experiment=gpt_quick tensor=serial tensor.axes={} model=llama_8b model.layers=4 model.experts=8
    model.experts_per_token=2 model.expert_d_ff=4096 model.capacity_factor=1.25 precision=bf16 cluster.gpu=H100
    parallel.data=8 parallel.experts=8 train.microbatch=1 train.global_batch=64""".split()
REASONS = {
    "train.pair_passes=off": ["train.pair_passes=off"],
    "no GPU is asked for": ["cluster.device=cpu"],
    "no experts exchange tokens over ranks": ["parallel.experts=1"],
    "no step is predicted to be shorter": ["model.d_model=64", "model.expert_d_ff=64", "model.heads=2",
                                           "model.kv_heads=2", "model.length=8"],
}  # fmt: skip
REFUSED = {
    "no experts exchange tokens over ranks": ["parallel.experts=1"],
    "its schedule has no pairs": ["pipeline=zb_h1", "pipeline.stages=2"],
    "ZeRO-3 gathers weights in the order of one pass": ["parallel.zero=3"],
    "activations go to host memory": ["recompute=full", "recompute_offload=true"],
    "its attention's kernels draw dropout masks": ["model.dropout=0.1", "model.fused_dropout=true"],
    "train.graphs=on records each pass": ["train.graphs=on"],
    "a step has no more microbatches": ["train.global_batch=8"],
}


@cache
def planned(*typed: str):
    config = compose_config([*EXPERTS, *typed])
    return config, make_plan(config)


def pairs_of(plan):
    """The same plan with its passes one after the other, and in pairs."""
    return replace(plan, pairs_passes=False, turns=plan.num_stages == 1), pair_passes(plan)


@pytest.mark.parametrize(
    "reason", [*[*REASONS][:3], *(pytest.param(r, marks=pytest.mark.full) for r in [*REASONS][3:])]
)
def test_auto_says_why_it_leaves_them_alone(reason):
    config, plan = planned(*REASONS[reason])
    assert not plan.pairs_passes and reason_against_pairs(config, plan).startswith(reason)


def test_auto_leaves_them_alone_where_memory_has_no_room():
    config, plan = planned()
    peaks = [predict_peak_bytes(config, p) for p in (pairs_of(plan)[0], plan)]
    assert peaks[0] < peaks[1]
    for memory, has_room in ((peaks[1] + 1e6, True), (peaks[1] - 1e6, False)):
        config, plan = planned(f"cluster.device_memory={memory / 1e9}")
        assert plan.pairs_passes == has_room
        assert ("memory has no room" in reason_against_pairs(config, plan)) != has_room


@pytest.mark.parametrize(
    "reason", [*[*REFUSED][:2], *(pytest.param(r, marks=pytest.mark.full) for r in [*REFUSED][2:])]
)
def test_on_is_refused_where_it_cannot_be(reason):
    with pytest.raises(ConfigError) as refused:
        make_plan(compose_config([*EXPERTS, "train.pair_passes=on", *REFUSED[reason]]))
    (line,) = [line for line in refused.value.violations if line.startswith("train.pair_passes")]
    assert line.startswith(f"train.pair_passes=on: {reason}") and line.endswith("; nearest legal: auto, off")


def test_auto_has_them_where_they_pay(capsys):
    config, plan = planned()
    assert plan.pairs_passes and not plan.turns
    assert not find_unsoundness(plan) and decode_plan(encode_plan(plan)) == plan
    assert main(EXPERTS) == 0
    assert "passes wait for their exchanges in pairs, each under the other's computation" in capsys.readouterr().out
    assert main([*EXPERTS, "train.pair_passes=off"]) == 0
    assert "one after the other, as train.pair_passes=off" in capsys.readouterr().out
    assert "in pairs" in reason_against_graphs(config, plan, "cuda")


def test_nothing_else_of_a_plan_changes():
    _, alone = planned("train.pair_passes=off")
    _, plan = planned()
    assert communication(plan) == communication(alone)
    assert pairs_of(plan) == (alone, plan)
    assert plan_digest(plan) != plan_digest(alone)


def test_a_pair_hides_exchanges_under_the_other_pass_at_most():
    """Of n microbatches n - 1 hide them; nothing else of a step's price changes."""
    config, plan = planned()
    hardware, n = replace(read_hardware("h100"), interference=0.0), plan.microbatches
    collectives = [c for o in plan.operations.values() for c in o.collectives if c.op == "all_to_all"]
    exchanges = sum(collective_seconds(c, plan.mesh, hardware, plan.itemsize) for c in collectives)
    alone, paired = (step_price(config, p, hardware) for p in pairs_of(plan))
    hidden = pytest.approx((n - 1) * exchanges)
    assert alone.seconds - paired.seconds == hidden == paired.hidden - alone.hidden
    assert alone.waiting["expert"] - paired.waiting["expert"] == hidden
    assert sum(paired.seconds_by_part.values()) == pytest.approx(paired.seconds)
    slow = replace(hardware, node=replace(hardware.node, bandwidth=hardware.node.bandwidth / 1000))
    alone, paired = (step_price(config, p, slow) for p in pairs_of(plan))
    assert 0 < alone.seconds - paired.seconds <= paired.computing, "no more than there is to compute"


PIPED = ["pipeline=1f1b", "pipeline.stages=2", "parallel.data=4", "parallel.experts=4"]


@pytest.mark.full
def test_a_step_is_simulated_with_its_pairs():
    """Their price is that of the table; what a stage has in flight is that of its row."""
    config, plan = planned(*PIPED, "train.pair_passes=on")
    hardware, schedule = read_hardware("h100"), build_schedule(config, 4, plan.pairs_passes)
    assert all(map(has_pairs, schedule.rows))
    simulation = simulate_schedule(build_step_work(config, plan), hardware, schedule)
    price = step_price(config, plan, hardware)
    assert price.seconds == pytest.approx(simulation.makespan, rel=0.15)  # its beginning and end are no pass
    assert sum(price.seconds_by_part.values()) == pytest.approx(price.seconds)
    assert simulation.peak_live == (4, 2)


def test_memory_counts_both_passes_of_a_pair():
    """More microbatches are in flight; in a pair, one pass keeps less as the other keeps more."""
    config, plan = planned(*PIPED, "train.pair_passes=on")
    model = build_model(config.model)
    footprints = {}
    for in_pairs in (False, True):
        rows = lower_schedule(build_schedule(config, 4, in_pairs))
        footprints[in_pairs] = [predict_footprint(plan, model, row, s, 2, 0.0, "cuda") for s, row in enumerate(rows)]
    assert [f.in_flight for f in footprints[False]] == [2, 1] and [f.in_flight for f in footprints[True]] == [4, 2]
    for alone, paired, live in zip(*footprints.values(), (4, 2), strict=True):
        assert alone.total_bytes < paired.total_bytes and paired.activations <= live * alone.activations


def test_rows_keep_their_pairs_on_the_way_to_workers():
    config, plan = planned(*PIPED, "train.pair_passes=on")
    (row, _) = lower_schedule(build_schedule(config, 4, plan.pairs_passes))
    again = StageRows.decode_rows(StageRows((), (row,)).encode_rows()).steps[0]
    assert again == row and [a.paired for a in again] == [a.paired for a in row] and has_pairs(again)


def test_workers_and_smaller_meshes_plan_alike():
    """What the file of the hardware decided is written down; a mesh of one replica has nothing to exchange."""
    config, plan = planned()
    settled = compose_config(EXPERTS)
    settle_for_workers(settled, plan)
    assert settled.train.pair_passes == "on" and make_plan(settled, stage_of=[0]) == plan
    alone = replace(settled, parallel=replace(settled.parallel, data=1))
    assert not make_plan(alone).pairs_passes, "and it is not refused"
    one = replan(settled, 1)
    assert one and not one.plan.pairs_passes and one.plan.mesh.world_size == 1
    half = replan(settled, 4)
    assert half and half.plan.pairs_passes and half.plan.mesh.world_size == 4


@pytest.mark.full
def test_plans_of_shorter_sequences_have_the_same_pairs():
    _, plan = planned("train.length_ramp=[0:1024,10:8192]")
    assert plan.pairs_passes and all(short.pairs_passes for short in plan.shorter.values()) and plan.shorter
    assert pair_passes(plan) == plan
