"""What a page draws is in the files of a run, whatever state they are in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from platform.report.page import page_html
from platform.report.page_data import WatchedRun, collect_page_data
from platform.status.run_facts import clock_text

KEPT = next(Path(__file__).parents[1].glob("commands/kept_runs/*/run"))


def looked(*directories: Path) -> dict[str, Any]:
    runs = [WatchedRun(d) for d in directories]
    for run in runs:
        run.read_run_news()
    return collect_page_data(runs)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of a run that an older version wrote, in which a worker was killed."""
    return shutil.copytree(KEPT, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))


def test_a_run_of_an_older_version_is_drawn(kept: Path) -> None:
    [run] = looked(kept)["runs"]
    assert run["faults"] == [] and run["state"] == {"tone": "good", "line": "done: step 5 of 5", "details": []}
    assert [f[2] for f in run["failures"]] == ["rank 1 on node-0"]
    assert {"train/loss", "time/forward", "elastic/world_size"} <= run["curves"]["of"].keys()
    assert run["plan"]["facts"]["workers"] and run["settings"]["elastic.faults"]


@pytest.mark.parametrize("torn", ["journal.jsonl", "metrics.jsonl", "plan.json", "config.yaml"])
def test_a_torn_file_costs_what_it_held_alone(kept: Path, torn: str) -> None:
    text = (kept / torn).read_bytes()
    (kept / torn).write_bytes(text[: len(text) * 2 // 3])
    [run] = looked(kept)["runs"]
    whole = torn.endswith(".jsonl")  # a torn last line is no fault
    assert bool(run["faults"]) is not whole or torn == "config.yaml"
    assert run["curves"]["of"]["train/loss"][1] and run["events"]


def test_metrics_alone_are_no_run_that_has_yet_to_start(tmp_path: Path) -> None:
    write_long(tmp_path, 1200)
    assert looked(tmp_path)["runs"][0]["state"]["line"] == "of this run only its metrics are here, up to step 1,200"


def test_an_empty_or_missing_run_is_drawn(tmp_path: Path) -> None:
    data = looked(tmp_path, tmp_path / "none")
    assert [run["curves"]["of"] for run in data["runs"]] == [{}, {}]
    assert all(run["state"]["line"] == "no run has started here yet" for run in data["runs"])
    assert page_html(data)


def test_a_run_that_failed_says_since_when_and_how_sure_that_is(kept: Path) -> None:
    end = {"event": "gave_up", "generation": 2, "time": 1795600000.5, "cause": "no more workers", "step": 5}
    lines = (kept / "journal.jsonl").read_text().splitlines()
    past = [line for line in lines if '"done"' not in line and '"goodput"' not in line]
    (kept / "journal.jsonl").write_text("\n".join([*past, json.dumps(end)]) + "\n")
    [run] = looked(kept)["runs"]
    assert run["state"]["tone"] == "bad" and run["state"]["line"] == "the run gave up after step 5: no more workers"
    assert run["state"]["details"][0] == f"since {clock_text(1795600000.5)}; certain"


def test_settings_are_written_as_a_command_line_has_them(kept: Path) -> None:
    (kept / "config.yaml").write_text("monitor: {timeline: true, tags: [a, b]}\ntrain: {steps: 5}\n")
    [run] = looked(kept)["runs"]
    assert run["settings"] == {"monitor.tags": "[a,b]", "monitor.timeline": "true", "train.steps": "5"}


def test_a_schedule_is_drawn_as_measured_or_else_as_planned(kept: Path) -> None:
    (kept / "config.yaml").write_text("pipeline: {kind: 1f1b, stages: 2}\nmodel: {layers: 4}\n")
    assert [title for title, _ in looked(kept)["runs"][0]["pictures"]] == ["as planned"]
    (kept / "timeline.svg").write_text("<svg/>")
    [run] = looked(kept)["runs"]
    assert [title for title, _ in run["pictures"]] == ["as planned, predicted and measured"]
    (kept / "timeline.svg").write_bytes(b" " * (500 << 10))
    [run] = looked(kept)["runs"]
    assert [title for title, _ in run["pictures"]] == ["as planned"] and "is not shown: more than" in run["faults"][0]


def test_runs_are_named_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    for path in paths:
        path.mkdir(parents=True)
    assert [run["name"] for run in looked(*paths)["runs"]] == ["a/run", "b/run"]
    assert [run["name"] for run in looked(paths[0], paths[0])["runs"]] == [
        f"{'/'.join(paths[0].parts[-5:])} ({i})" for i in (1, 2)
    ]


def write_long(folder: Path, steps: int) -> None:
    """Write metrics with one spike, one hole, and a validation every 1000 steps."""
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row: dict[str, Any] = {"step": step, "loss": 5.0, "grad_norm": 1 / step, "tokens": 2048 * step}
            row |= {
                "step_seconds": 0.5,
                "seconds": {"forward": 0.25, "backward": 0.125},
                "comm_bytes": {"send/stage": 7},
            }
            row["loss"] = 99.0 if step == 4321 else 1.0 if step == 7654 else 5.0
            row |= {"val_loss": 4.0} if step % 1000 == 0 else {}
            row["workers"] = {
                f"{gauge}/{end}": 0.1 + (0.9 if gauge == "power" and step == 4321 else 0) + size
                for gauge in (
                    "cpu",
                    "gpu",
                    "memory",
                    "device_memory",
                    "power",
                    "temperature",
                    "bandwidth/between nodes",
                )
                for end, size in (("min", 0), ("median", 1 / step), ("max", 0.5))
            }
            row["worker_ranks"] = {f"power/{end}": 9 if step == 4321 else 2 for end in ("min", "max")}
            file.write(json.dumps(row) + "\n")


def test_a_long_run_keeps_its_peaks(tmp_path: Path) -> None:
    write_long(tmp_path, 10_000)
    curves = looked(tmp_path)["runs"][0]["curves"]
    grid, mean, low, high = curves["of"]["train/loss"]
    assert len(mean) == len(curves["grids"][grid]["step"]) == 1000 and max(high) == 99.0 and min(low) == 1.0
    assert sum(mean) / len(mean) == pytest.approx(5.009, abs=1e-3)  # parts of as many rows each
    assert curves["grids"][grid]["step"][-1] == 10_000 and curves["grids"][grid]["hours"][-1] == pytest.approx(1.3889)
    sparse, values = curves["of"]["val/loss"]
    assert curves["grids"][sparse]["step"] == list(range(1000, 10_001, 1000)) and values == [4.0] * 10
    assert len(curves["of"]["comm/send/stage"]) == 2  # it never changes: no peaks


def test_a_spread_over_the_workers_keeps_its_ends_and_the_ranks_there(tmp_path: Path) -> None:
    write_long(tmp_path, 10_000)
    curves = looked(tmp_path)["runs"][0]["curves"]["of"]
    least, most, ranks = (
        curves[f"{name}"][1] for name in ("workers/power/min", "workers/power/max", "ranks/power/max")
    )
    assert (len(ranks), max(least), max(most)) == (len(most), 0.1, 1.5)
    assert [n for i, n in enumerate(ranks) if most[i] == 1.5] == [9] and set(ranks) == {2, 9}
    assert all(len(curve) == 2 for name, curve in curves.items() if name.startswith(("workers/", "ranks/")))


@pytest.mark.full
def test_a_page_of_100000_steps_is_small_and_quick(tmp_path: Path) -> None:
    import time

    write_long(tmp_path, 100_000)
    began = time.process_time()
    text = page_html(looked(tmp_path))
    assert len(text.encode()) < 2e6 and time.process_time() - began < 5


def test_a_webhook_is_on_no_page(kept: Path) -> None:
    (kept / "config.yaml").write_text("monitor: {alert_command: curl https://hooks.example.org/T0/SECRET}\n")
    command = "python -m platform.launch 'monitor.alert_command=curl https://hooks.example.org/T0/SECRET' seed=1"
    start = {"event": "starting", "generation": 0, "time": 1.0, "world_size": 1, "cluster": "x", "device": "cpu"}
    with (kept / "journal.jsonl").open("a") as file:
        file.write(json.dumps(start | {"command": command}) + "\n")
    data = looked(kept)
    assert "SECRET" not in page_html(data) and data["runs"][0]["settings"]["monitor.alert_command"] == "***"
