"""What a user sees, by command: a run on Ray with its contract's files, equal numbers in every layout, bad input."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
import yaml

from platform.cluster.shown_commands import PHASES
from platform.monitor import MetricsRow
from tests.harness.commands import QUICK, SMALL, command, in_this_process, lines, refused

SECTIONS = set("data forward backward exposed_comm bubble reduce optimizer checkpoint other".split())


@pytest.fixture(scope="session")
def own_text(tmp_path_factory) -> list[str]:
    """A text of random words, as arguments; its tokens are cached beside it."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(200)]
    documents = (" ".join(draw.choices(words, k=3000)) for _ in range(20))
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document + "\n")
    return ["data=text", f"data.path={folder}", f"data.cache={folder / 'cache'}"]


@pytest.mark.ray
def test_a_run_on_ray(tmp_path, own_text):
    shrunk = "train.steps=3 model.layers=1 model.d_model=32 monitor.sample=4 eval.every=2"
    rate = ["optimizer.warmup_steps=1", "optimizer.lr=3e-3"]
    arguments = [QUICK, *shrunk.split(), *rate, *own_text, "run.dir=run", "monitor.every=1", "monitor.timing=true"]
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    for shown in (
        "plan  4 workers = data 2 x t 2",
        "a sample of 4 tokens",
        f"run directory: {run}",
        "next:",
    ):
        assert shown in done.stdout, done.stdout

    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["train"]["steps"], config["tensor"]["axes"], config["parallel"]["data"]) == (3, {"t": 2}, 2)
    plan = json.loads((run / "plan.json").read_text())
    assert plan["mesh"] == {"stage": 1, "data": 2, "t": 2}

    journal = lines(run / "journal.jsonl")
    events = {entry["event"]: entry for entry in journal}
    transitions = "forming formed running first_step predicted_step checkpoint sampled released done".split()
    assert [e["event"] for e in journal] == ["starting", *transitions, "goodput", "timing"]
    timing = [events["timing"][phase] for phase in PHASES]  # all of them, one after the other
    assert timing == sorted(timing) and timing[0] > 0 and "  first_process: " in done.stdout
    assert all(isinstance(e["time"], float) for e in journal)
    assert all(events[name]["generation"] == 1 for name in transitions)
    workers = events["formed"]["workers"]
    assert [w["rank"] for w in workers] == [0, 1, 2, 3]
    assert [w["coordinates"] for w in workers] == [{"stage": 0, "data": d, "t": t} for d in (0, 1) for t in (0, 1)]
    assert len({w["pid"] for w in workers}) == 4 and all(w["node"] for w in workers)
    assert events["done"]["step"] == 3

    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["samples"] for row in rows] == [[0, 16], [16, 32], [32, 48]]
    assert [row["tokens"] for row in rows] == [16 * 128 * k for k in (1, 2, 3)]
    for row in rows:
        unusual = {"val_losses", "task_scores", "bubble", "skipped", "recovery_seconds", "loss_scale"}
        unusual |= {"layer_grad_norms", "layer_rms", "experts", "expert_load", "length", "losses_ahead"}
        unusual |= {"predicted_seconds"} if row["step"] == 1 else set()
        assert set(row) == MetricsRow.__dataclass_fields__.keys() - unusual - (
            {"val_loss"} if row["step"] != 2 else set()
        )
        assert set(row["seconds"]) == SECTIONS
        assert row["comm_bytes"] == plan["communication"]
        assert (row["world_size"], row["generation"], row["mfu"]) == (4, 1, None)
        assert row["step_seconds"] > 0 and row["tokens_per_second"] > 0 and row["peak_memory_bytes"] > 0
    assert rows[0]["lr"] == 3e-3 and rows[2]["lr"] == pytest.approx(3e-4)
    assert len(list((run / "logs").iterdir())) >= 4

    before = {p: p.read_bytes() for p in run.iterdir() if p.is_file()}
    again = in_this_process(*arguments, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout == f"already done: 3 steps, in {run}\n"
    assert {p: p.read_bytes() for p in run.iterdir() if p.is_file()} == before


# The same model to the same numbers.

MAP = "tensor.layout=batch:rows;heads:cols;d_ff:cols;vocab:cols"
SCHEMES = {
    "serial": "tensor=serial",
    "1d": "tensor=1d tensor.axes.t=2",
    "1d_sp": "tensor=1d_sp tensor.axes.t=2",
    "3d": "tensor=3d tensor.axes.y=2 tensor.axes.z=2",
    "layout": f"tensor=layout tensor.axes.rows=2 tensor.axes.cols=2 {MAP}",
}
SMALLER = {  # four workers at most
    **SCHEMES,
    "3d": "tensor=3d tensor.axes.z=2",
    "layout": "tensor=layout tensor.axes.rows=2 tensor.layout=batch:rows",
}
BESIDE = {
    "alone": (SCHEMES, ""),
    "dsp": (SMALLER, "branch=dsp branch.axes.g=2"),
    "dsp_csub": (SMALLER, "branch=dsp_csub branch.axes.g=2"),
    "zero=1": (SMALLER, "parallel.data=2 parallel.zero=1"),
    "zero=3": (SMALLER, "parallel.data=2 parallel.zero=3"),
    "pipeline": (SMALLER, "pipeline=1f1b pipeline.stages=2"),
}
PRECISIONS = {"fp64": 1e-9, "fp32": 1e-4}
CASES = [(s, b, p) for p in PRECISIONS for b in BESIDE for s in SCHEMES if (s, b, p) != ("serial", "alone", "fp64")]
COVER = [
    ("1d_sp", "pipeline", "fp64"),
    ("layout", "dsp_csub", "fp32"),
]


def numbers(tmp_path: Path, *arguments: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of five steps."""
    fixed = "train.steps=5 optimizer.warmup_steps=2 parallel.data=1 data=synthetic run.dir=run".split()
    done = in_this_process(QUICK, *SMALL, *fixed, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert all(row["comm_bytes"] == plan["communication"] for row in rows)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    return [(row["loss"], row["grad_norm"]) for row in rows]


@pytest.fixture(scope="session")
def one_process(tmp_path_factory) -> tuple[Path, list[tuple[float, float]]]:
    """Where it ran, in ./run, and its numbers."""
    folder = tmp_path_factory.mktemp("serial")
    return folder, numbers(folder, "tensor=serial", "cluster=inline", "precision=fp64")


def equals_one_process(case, tmp_path, one_process) -> None:
    scheme, beside, precision = case
    schemes, more = BESIDE[beside]
    arguments = [*schemes[scheme].split(), *more.split(), f"precision={precision}", "cluster=processes"]
    actual = numbers(tmp_path, *arguments)
    for have, want in zip(actual, one_process[1], strict=True):
        assert have == pytest.approx(want, rel=PRECISIONS[precision], abs=0)


@pytest.mark.parametrize("case", COVER, ids=" ".join)
def test_every_layout_trains_to_the_same_numbers(case, tmp_path, one_process, record_count):
    record_count("equal numbers by command", len(COVER), len(CASES))
    equals_one_process(case, tmp_path, one_process)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in CASES if c not in COVER], ids=" ".join)
def test_the_rest_of_the_layouts(case, tmp_path, one_process):
    equals_one_process(case, tmp_path, one_process)


# Bad input.


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no file or folder"),
        ("empty.txt", b"", "no text in it"),
        ("binary.bin", b"text\0\1\2", "a binary file (NUL at byte 4)"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
    ],
)
def test_data_that_is_no_text(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (line,) = refused("data=text", f"data.path={name}", "run.dir=run", cwd=tmp_path)
    assert line.startswith(f"config: data.path={tmp_path / name}: ") and message in line


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("file/run", "Not a directory"),
        pytest.param("locked/run", "Permission denied", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may")),
        pytest.param("/proc/run", "", marks=pytest.mark.skipif(sys.platform != "linux", reason="no /proc")),
    ],
)
def test_a_run_directory_that_cannot_be_written(tmp_path, directory, why):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "locked").mkdir(mode=0o500)
    (line,) = refused("data=synthetic", f"run.dir={directory}", cwd=tmp_path)
    assert line.startswith(f"config: run.dir={tmp_path / directory}: cannot be used ({why}")


def test_a_run_directory_of_another_configuration(one_process):
    folder, _ = one_process
    first, *others = refused("data=synthetic", "run.dir=run", "model.layers=2", "seed=3", cwd=folder)
    assert first.startswith(f"config: run.dir={folder / 'run'}: holds another run")
    said = [line.split(";")[0] for line in others]
    assert "config: model.layers: 1 there, 2 here" in said and "config: seed: 0 there, 3 here" in said
