"""Tables of measured runs: the plan that `compare` makes of a row is the run's own; sweeps of the papers are legal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from platform import launch
from platform.cluster.resources import Supply
from platform.cluster.shown_commands import PhaseTimes
from platform.config.composition import CONF
from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.plan.plan_data import plan_digest
from platform.predict.make_plan import make_plan
from platform.predict.measured_runs import TrainedRun, build_table_row, format_sweep, iterate_overrides, write_run_table
from tests.harness.commands import command, in_this_process

PAPERS = sorted(path.stem for path in (CONF / "experiment" / "paper").glob("*.yaml") if path.stem != "base")
RUNS = {
    "tensor": ["+experiment=gpt_quick", "recompute=full", "precision=bf16", "model.norm=rmsnorm"],
    "cube": ["+experiment=cube_bert", "precision=bf16"],
    "stages": ["+experiment=gpt_quick", "pipeline=interleaved", "pipeline.stages=2", "pipeline.chunks=2",
               "parallel.zero=1"],
    "branches": ["+experiment=gpt_quick", "tensor=serial", "branch=dsp", "branch.axes.g=2"],
    "experts": ["+experiment=moe_quick", "model.capacity_factor=2"],
    "layout": ["+experiment=gpt_quick", "tensor=layout", "tensor.axes={c: 2}", "parallel.data=1",
               "tensor.layout={stream: {length: c}, attention: {length: c}, mlp: {length: c}, logits: {length: c}}"],
}  # fmt: skip


def table(directory: Path, name: str, steps: dict[str, list[float]]) -> Path:
    """Write the table of runs that took so many seconds per step."""
    runs = []
    for key, seconds in steps.items():
        folder = directory / key
        folder.mkdir()
        config = compose_config([*RUNS[key], f"run.dir={folder}"])
        rows = [{"step": i, "generation": 1, "step_seconds": s} for i, s in enumerate(seconds, 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        plan = make_plan(config)
        config.parallel.data = plan.num_replicas
        runs.append(TrainedRun([key], config, plan.mesh.world_size))
    assert write_run_table(directory / name, runs, compose_config) == len([s for s in steps.values() if s])
    return directory / name


@pytest.mark.parametrize("key", RUNS)
def test_a_row_makes_the_plan_of_its_run(key):
    config = compose_config(RUNS[key])
    plan = make_plan(config)
    config.parallel.data, config.parallel.bucket_mib = plan.num_replicas, plan.bucket_mib
    again = make_plan(
        compose_config(
            list(
                iterate_overrides(build_table_row(TrainedRun([key], config, plan.mesh.world_size), 1.0, compose_config))
            )
        )
    )
    assert plan_digest(again) == plan_digest(plan)


def test_a_sweep_is_compared(tmp_path, capsys):
    """Steps are the median of those after the first three; a run without any is left out."""
    path = table(tmp_path, "sweep.csv", {"tensor": [9, 9, 9, 2, 4, 3], "experts": [1.0], "stages": []})
    assert main(["compare", str(path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["name"], row["measured"]) for row in rows] == [("tensor", 3.0), ("experts", 1.0)]


def test_a_run_without_a_row_is_left_out(tmp_path):
    """A scheme that no command knows without the user's files does not fail the table of what is trained."""
    runs = []
    for name in ("tensor", "cube"):
        config = compose_config([*RUNS[name], f"run.dir={tmp_path / name}"])
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "generation": 1, "step_seconds": 2.0}\n')
        config.parallel.data = (plan := make_plan(config)).num_replicas
        runs.append(TrainedRun([name], config, plan.mesh.world_size))
    runs[0].config.tensor.scheme = "mine"
    assert write_run_table(tmp_path / "sweep.csv", runs, compose_config) == 1


def test_a_row_has_the_device_that_its_run_had(tmp_path):
    """As the journal says, whatever is there when the sweep ends."""
    config = compose_config([*RUNS["cube"], f"run.dir={tmp_path}", "cluster.gpu=A100-80GB"])
    config.parallel.data = (plan := make_plan(config)).num_replicas
    run = TrainedRun(["cube"], config, plan.mesh.world_size)
    assert run.device == "cpu"
    line = {"time": 1.0, "generation": 0, "event": "starting", "world_size": 8, "cluster": "ray", "device": "cuda"}
    (tmp_path / "journal.jsonl").write_text(f"{json.dumps(line)}\n")
    row = build_table_row(run, 1.0, compose_config)
    assert (row["cluster.device"], row["hardware"]) == ("cuda", "a100_80g")


@pytest.mark.full
def test_a_sweep_with_files_of_the_users_own_ends_with_its_table(tmp_path):
    """Each combination is trained, and the table's rows are made with the user's experiment."""
    own = tmp_path / "mine" / "experiment"
    own.mkdir(parents=True)
    small = "model.layers=1 model.d_model=32 model.d_ff=64 model.length=16 train.steps=4 data=synthetic".split()
    (own / "short.yaml").write_text("# @package _global_\ndefaults:\n  - gpt_quick\n  - _self_\n")
    arguments = ["-m", "+experiment=short", *small, "parallel.data=1", "tensor=serial", "seed=1,2", "cluster=inline"]
    done = command(*arguments, "--config-dir", str(tmp_path / "mine"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    title, _, path = last.rpartition(" ")
    assert title == "the measured steps, beside the predicted: python -m platform.plan compare"
    assert len(Path(path).read_text().splitlines()) == 3


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n.endswith("15") else pytest.mark.full) for n in PAPERS])
def test_sweeps_of_the_papers_are_legal(name, workers, monkeypatch):
    """Plans have both workers, and of eight as many as four heads and four layers can use."""
    monkeypatch.setattr("platform.cluster.resources._measure_supply", lambda *_: Supply(0, workers, "here"))
    arguments = get_args_parser().parse_intermixed_args(["-m", f"+experiment=paper/{name}", "cluster=processes"])
    jobs = launch._plan_jobs(arguments, PhaseTimes())
    assert len(jobs) > 1
    sizes = {job.plan.mesh.world_size for job in jobs}
    assert sizes == {4 if name.endswith("18") else 2} if workers == 2 else sizes <= {4, 8}


def test_a_sweep_has_a_result(tmp_path, monkeypatch):
    """The best first, what failed or never began last; it used to be left to the user to look for."""
    monkeypatch.chdir(tmp_path)
    config, swept = compose_config(["+experiment=gpt_quick"]), ["1e-3", "2e-3", "9", "3e-3", "4e-3"]
    runs = [TrainedRun(["x=1", f"lr={lr}"], replace(config, run=replace(config.run, dir=lr)), 1) for lr in swept]
    rows = [[5.0, 4.5], [4.75, 4.25], [9.0, None], [5.0], []]  # losses, validation losses
    for run, losses in zip(runs, rows, strict=True):
        Path(run.config.run.dir).mkdir()
        lines = [{"step": n, "loss": loss, "val_loss": loss and loss + 0.5} for n, loss in enumerate(losses, 1)]
        Path(run.config.run.dir, "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert format_sweep(runs, [0, 0, 1, 75]).splitlines() == [
        "jobs, the best first",
        "           last loss  lowest val loss  run directory",
        "  lr=2e-3  4.2500     4.7500           2e-3",
        "  lr=1e-3  4.5000     5.0000           1e-3",
        "  lr=3e-3  5.0000     5.5000           3e-3           stopped",
        "  lr=9     -          9.5000           9              failed (1)",
        "  lr=4e-3  -          -                4e-3           not run",
    ]


def test_a_sweep_by_command_ends_with_its_result(tmp_path):
    small = "model.layers=1 model.d_model=8 model.heads=2 model.length=8 train.steps=2 data=synthetic".split()
    one = (
        "train.global_batch=2 train.microbatch=2 cluster=inline tensor=serial parallel.data=1 monitor.sample=0".split()
    )
    lr = "optimizer.lr=1e-3,1e-1 optimizer.warmup_steps=0 eval.every=1 eval.batches=1".split()
    done = in_this_process("-m", "+experiment=gpt_quick", *small, *one, *lr, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, title, head, first, second, last = done.stdout.splitlines()
    assert title == "jobs, the best first" and "platform.plan compare" in last
    assert {first.split()[0], second.split()[0]} == {"optimizer.lr=0.001", "optimizer.lr=0.1"}
    best = [float(line.split()[2]) for line in (first, second)]
    assert best == sorted(best) and (tmp_path / first.split()[3] / "metrics.jsonl").exists()
    assert "next:" not in done.stdout, "the commands of each run are not repeated"
