"""What a snapshot sends to other nodes is predicted to the byte, and how often there is time for it follows."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from math import ceil

import pytest
import torch

from platform.boundary.refusals import ConfigError
from platform.checkpoint.blocks import list_held_states, list_held_tensors, list_written_parts
from platform.launch import compose_config, prepare_plan
from platform.monitor import Journal, events, json_records
from platform.optimizer.optimizers import probe_optimizer_state
from platform.plan.__main__ import main
from platform.predict.hardware import StorageRates
from platform.predict.make_plan import make_plan
from platform.predict.recovery_price import (
    WORKER_HOURS,
    Known,
    MeasuredCosts,
    checkpoint_price,
    count_bytes_leaving_node,
    read_measured_costs,
    settle_intervals,
    snapshot_price,
)
from platform.predict.step_price import read_hardware, step_price
from platform.train.training_state import SIDES, RankTrainingState, list_state_tensors
from tests.harness.memories import opened, take
from tests.harness.metrics_rows import row
from tests.harness.oracle import configure, trainer_of
from tests.harness.threads import run_threads

UNKNOWN = Known("cuda", None)
LAYOUTS = {
    "replicas": {"data": 4},
    "zero 1": {"data": 4, "zero": 1},
    "zero 3 x 1d": {"data": 2, "zero": 3, "tensor": "1d", "axes": {"t": 2}},
    "stages": {"pipeline": "1f1b", "stages": 2, "layers": 2, "tensor": "1d", "axes": {"t": 2}},
    "odd nodes": {"data": 3, "zero": 1, "microbatch": 1, "global_batch": 3},
}


def sent(c, plan, per_node: int) -> int:
    """The most bytes that the ranks of one node really send to others for a snapshot."""
    leaving = Counter[int]()

    def work(communicator):
        state = RankTrainingState(trainer_of(c, plan, communicator))
        nodes = [str(rank // per_node) for rank in range(plan.mesh.world_size)]
        memory = opened(state.held, nodes, communicator)

        def transfer(outgoing, received):
            assert all(nodes[peer] != nodes[communicator.rank] for peer, _ in outgoing)
            leaving[communicator.rank // per_node] += sum(x.nbytes for _, x in outgoing)
            communicator.transfer(outgoing, received)

        take(memory, 1, state.live_blocks(), state.read_values(), transfer)

    run_threads(plan.mesh, work)
    return max(leaving.values())


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [*((name, "adamw") for name in LAYOUTS), ("zero 1", "muon"), ("zero 1", "adafactor"), ("stages", "adafactor")],
)
def test_the_bytes_of_a_plan_are_those_that_are_sent(layout, optimizer):
    c = configure(**LAYOUTS[layout])
    c.optimizer.kind, c.train.ema = optimizer, 0.9 if layout == "stages" else 0.0
    plan = make_plan(c)
    leaving = count_bytes_leaving_node(c, plan, 2)
    assert leaving == sent(c, plan, 2) and (leaving > 0) == (layout != "replicas")
    assert count_bytes_leaving_node(c, plan, plan.mesh.world_size) == 0, "one node has no other"


@pytest.mark.parametrize(
    ("changes", "leaving", "interval"),
    [
        ([], 130.8, 1),
        (["cluster.network=3"], 130.8, 3),  # 349 s in three steps of 170
        (["cluster.network=3", "cluster.gpu=H100"], 130.8, 7),  # which are shorter there
        (["cluster.network=3", "cluster.gpu="], 130.8, 1),  # of a length that nobody knows
        (["cluster.network=3", "cluster.device=cpu"], 130.8, 1),
        (["cluster.network=3", "parallel.data=8", "parallel.zero=1"], 16.35, 3),
        (["cluster.network=3", "parallel.data=8"], 0.0, 1),  # another node has it anyway
    ],
)
def test_an_interval_is_the_least_that_there_is_time_for(changes, leaving, interval):
    c = compose_config(["+experiment=gpt175b", "elastic.snapshot_every=auto", *changes])
    plan = make_plan(c)
    price = snapshot_price(c, plan, 8)
    assert price.bytes / 1e9 == pytest.approx(leaving, abs=0.1)
    if price.step:
        assert price.seconds <= interval * price.step and (interval == 1 or price.seconds > (interval - 1) * price.step)
    [line] = settle_intervals(c, plan, 8, UNKNOWN)
    assert line.startswith(f"elastic.snapshot_every={interval}: ")
    assert c.elastic.snapshot_every == c.elastic.snapshot_interval == interval
    c.elastic.snapshot_every = 5
    assert settle_intervals(c, plan, 8, UNKNOWN) == []
    assert c.elastic.snapshot_interval == 5, "who says how often is obeyed"


@pytest.mark.parametrize(("gpu", "hardware"), [("A100-80GB", "a100_80g"), ("H200", "h200")])
def test_a_gpu_whose_step_is_shorter_than_the_copy_to_its_host_takes_fewer(gpu, hardware):
    """12 bytes a parameter over its link, of which the hardware's file says how fast it is."""
    one = ["+experiment=one_gpu", "cluster.device=cuda", f"cluster.gpu={gpu}", "elastic.snapshot_every=auto"]
    c = compose_config([*one, "train.microbatch=8", "train.global_batch=8"])
    plan, known = make_plan(c), Known("cuda", read_hardware(hardware))
    price = snapshot_price(c, plan, 1, known)
    assert price.copy == pytest.approx(12 * plan.parameter_count / (25 / 32 * known.hardware.host), rel=0.01)
    assert 1 < price.interval_steps == ceil(price.copy / price.step)
    [line] = settle_intervals(c, plan, 1, known)
    assert line.startswith(f"elastic.snapshot_every={price.interval_steps}: one takes ") and "reach host memory" in line
    fast = snapshot_price(c, plan, 1, Known("cuda", replace(known.hardware, host=1e15)))
    assert fast.interval_steps == 1 and snapshot_price(c, plan, 1, Known("cpu", known.hardware)).copy == 0


def test_a_run_settles_it_and_a_plan_shows_it(capsys):
    c = compose_config(["+experiment=gpt_quick", "elastic.snapshot_every=auto"])
    plan, lines = prepare_plan(c, [])
    assert plan and not lines and c.elastic.snapshot_interval == 1
    assert main(["+experiment=gpt175b", "elastic.snapshot_every=auto", "cluster.network=3", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "  a snapshot  131 GB   349 s at cluster.network=3 Gbit/s, beside 3 steps of 170 s" in shown
    assert "  a step      43.6 GB  with elastic.snapshot_every=3" in shown
    assert main(["+experiment=gpt175b", "elastic.snapshot_every=0", "--all"]) == 0
    assert "a snapshot" not in capsys.readouterr().out


GPT175B = ["+experiment=gpt175b", "elastic.snapshot_every=auto", "checkpoint.every=auto"]


def settled(known, *changes):
    c = compose_config([*GPT175B, *changes])
    plan = make_plan(c)
    lines = settle_intervals(c, plan, 8, known)
    return c, plan, lines


def test_rare_failures_make_snapshots_and_checkpoints_rare():
    """Young's formula, sqrt(2 x cost x time between failures): four times as rare failures, twice the interval."""
    known = Known("cuda", read_hardware("a100_80g"))
    intervals = []
    for hours in (1e4, 4e4, 1.0):
        c, plan, lines = settled(known, f"elastic.mean_hours_between_failures={hours}")
        price, saved = snapshot_price(c, plan, 8, known), checkpoint_price(c, plan, known)
        assert price.usual == step_price(c, plan, known.hardware).seconds and len(lines) == 2
        assert c.elastic.snapshot_interval == max(1, int((2 * price.cost * hours * 3600) ** 0.5 / price.usual))
        assert saved.interval_seconds == pytest.approx(max(saved.saving, (2 * saved.stall * hours * 3600) ** 0.5))
        assert f"checkpoint.every={c.checkpoint.every}: " in lines[1] and "as predicted" in lines[1]
        intervals.append((c.elastic.snapshot_interval, saved.interval_seconds))
    (some, often), (rare, seldom), (least, written) = intervals
    assert 1 < some < rare <= 2 * some + 1 and seldom == pytest.approx(2 * often)
    assert least == 1 and written < often and "to write" not in lines[1]


def test_nobody_saves_more_often_than_a_checkpoint_is_written():
    hardware = read_hardware("a100_80g")
    slow = Known("cuda", replace(hardware, storage=StorageRates(1e12, 1e9)))
    c, plan, lines = settled(slow, "elastic.mean_hours_between_failures=1")
    state = 12 * plan.parameter_count  # masters and two moments in fp32
    assert checkpoint_price(c, plan, slow).interval_seconds == pytest.approx(state / 1e9) and "to write" in lines[1]
    assert c.checkpoint.every == f"{round(state / 1e9 / 60)}m"


def test_what_a_run_has_measured_counts_and_unknown_failures_are_guessed(tmp_path):
    own = MeasuredCosts(step=10.0, snapshot=2.0, stall=8.0, saving=100.0)
    c, plan, lines = settled(Known("cuda", read_hardware("a100_80g"), own), "elastic.mean_hours_between_failures=100")
    assert c.elastic.snapshot_interval == int((2 * 2.0 * 360_000) ** 0.5 / 10) and c.checkpoint.every == "40m"
    assert all("as measured" in line for line in lines)
    c, plan, lines = settled(UNKNOWN)
    mean = WORKER_HOURS / plan.mesh.world_size * 3600
    assert checkpoint_price(c, plan, UNKNOWN).mean == mean and "50,000 for each worker" in lines[1]
    assert read_measured_costs(tmp_path, 8) == MeasuredCosts(), "of no run"


def test_a_run_s_own_costs_are_read_from_its_rows_and_journal(tmp_path):
    rows = [
        row(step, world_size=2 if step > 2 else 4, step_seconds=1.0 + step / 100, parts={"snapshot": 0.5 * (step % 2)})
        for step in range(1, 10)
    ]
    rows[5].seconds["checkpoint"] = 0.25  # of step 6, after a checkpoint of step 5: no snapshot was taken in it
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(json_records.plain_fields(r)) + "\n" for r in rows))
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(events.Checkpoint(step=5, directory="step-5", bytes=10, seconds=7.0))
    assert read_measured_costs(tmp_path, 2) == MeasuredCosts(step=1.06, snapshot=0.5, stall=0.25, saving=7.0)
    assert read_measured_costs(tmp_path, 3) == MeasuredCosts(saving=7.0), "on so many workers it never ran"


def test_nothing_of_whole_replicas_on_several_nodes_leaves_one(monkeypatch):
    """Nobody asks each of a million workers what it holds; it is what asking them says."""
    for tensor in (["tensor=serial"], ["tensor=1d", "tensor.axes.t=2"]):
        typed = ["+experiment=gpt_quick", *tensor, "train.global_batch=16", "train.microbatch=1"]
        for data, per_node in product((1, 2, 4), (1, 2, 4, 8)):
            c = compose_config([*typed, f"parallel.data={data}"])
            asked = [*list_held_tensors(plan := make_plan(c), "model", "float32"), *list_held_states(plan, "float32")]
            nodes = [{rank // per_node for rank in ranks} for held in asked for ranks in held.holders.values()]
            alone = plan.mesh.world_size > per_node and any(len(each) == 1 for each in nodes)
            assert (count_bytes_leaving_node(c, plan, per_node) > 0) == alone
    large = compose_config(["parallel.data=999998", "train.global_batch=999998", "train.microbatch=1"])
    monkeypatch.setattr("platform.predict.recovery_price.list_held_tensors", None)
    assert count_bytes_leaving_node(large, make_plan(large), 8) == 0


PLANS = {
    "replicas": "tensor=serial parallel.data=4",
    "tensor": "tensor=1d tensor.axes.t=2 parallel.data=2",
    "cube": "tensor=3d tensor.axes.x=2 tensor.axes.y=2 tensor.axes.z=2 parallel.data=1",
    "stages": "tensor=serial pipeline=1f1b pipeline.stages=2 parallel.data=2",
    "shards": "tensor=serial parallel.zero=1 parallel.data=4",
    "adafactor": "tensor=serial parallel.data=2 optimizer=adafactor",
    "frozen": "tensor=serial parallel.data=2 train.freeze=[embedding]",
    "experts": "experiment=moe_quick tensor=serial parallel.data=2 parallel.experts=2",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_checkpoint_has_the_bytes_and_files_that_are_planned(name):
    """As its manifest says, which lists what each rank writes."""
    first = [] if "experiment=" in PLANS[name] else ["+experiment=gpt_quick"]
    c = compose_config([*first, *PLANS[name].split()])
    plan = make_plan(c)
    moments, _ = probe_optimizer_state(c.optimizer, torch.float32, torch.device("cpu"))
    state = list_state_tensors(plan, [*moments, *(SIDES if plan.factored else ())])
    written = [sum(part.nbytes for part in list_written_parts(state, rank)) for rank in range(plan.mesh.world_size)]
    price = checkpoint_price(c, plan, UNKNOWN)
    assert sum(written) == price.bytes and all(written)
    assert 0.8 * price.largest < max(written) < 1.1 * price.largest  # stages share what both have, as embeddings


def test_a_checkpoint_is_written_and_read_at_the_rates_of_the_storage(capsys):
    """Narayanan et al., section 5.10: 1 TB/s read, 273 GB/s written. Saves were priced as reads are."""
    arguments = ["+experiment=gpt175b", "pipeline.stages=12", "pipeline.chunks=2", "train.microbatch=1"]
    assert main([*arguments, "--hardware", "a100_80g", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["checkpoint"]
    assert saved["bytes"] / 12 == pytest.approx(174.6e9, rel=1e-3)
    assert saved["saving"] == pytest.approx(saved["bytes"] / 273e9)
    assert saved["reading"] == pytest.approx(saved["bytes"] / 1e12) and saved["files"] == 96
    assert main([*arguments, "--hardware", "a100_80g"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  checkpoint ")]
    assert "in 96 files of at most" in line and "written in 7.6" in line and "auto: every " in line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{read: 1, write: 0}", "storage.write=0: must be a number > 0"),
        ("{read: x}", "storage.read=x: must be a number > 0"),
        ("{read: 1, write: 1, other: 2}", "storage.other: unknown key"),
        ("x", "storage=x: must be a number > 0"),
    ],
)  # fmt: skip
def test_mistakes_in_the_rates_of_a_storage_are_refused(text, line, tmp_path):
    (tmp_path / "own.yaml").write_text(f"like: a100_80g\nstorage: {text}\n")
    with pytest.raises(ConfigError, match=re.escape(line)):
        read_hardware(str(tmp_path / "own.yaml"))
