"""A run at W&B as its real client writes it offline, read back: nothing is lost, and each thing is there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.offline_run import history, records

FIRST = """
run.happen("starting")
run.train(1, 2)
(run.path / "checkpoints" / "step-2").mkdir(parents=True)
(run.path / "checkpoints" / "step-2" / "manifest.json").write_text("{}")
run.saved(2)
run.happen("sampled", step=2, prompt="A wolf", text="A <b>wolf</b>")
run.train(3, 4)
follower.catch_up()
run.happen("spike", step=4, loss=9.75, grad_norm=1.0)
run.happen("failure", step=5)
run.train(3, 4, attempt=2)
run.saved(3)  # which is pruned before it is sent
run.happen("first_step", step=3)
run.happen("slow")
follower.close(None)  # the driver has died
"""
SECOND = """
run.happen("starting")
run.happen("restored", step=2, directory="step-2", source=None)
run.train(3, 4, 5, 6, attempt=3)
follower.catch_up()
run.saved(6)
run.train(7, attempt=3)
run.happen("goodput", failures=1, recoveries=[1.5])
follower.close(75)
"""
SCRIPT = """
import os, sys
from pathlib import Path
from tests.monitor.sinks.a_run import ARun
run = ARun(Path(sys.argv[1]), tags=["first", "long"], group="mine", notes="as it is", project="here")
follower = run.followed("wandb")
exec(sys.argv[2])
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The files that two processes wrote of one run, whose first driver was killed."""
    run = tmp_path_factory.mktemp("wandb") / "run"
    env = os.environ | {"WANDB_MODE": "offline"}
    for part in (FIRST, SECOND):
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(run), part], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return sorted(run.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)


def of_kind(part: Path, kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records(part) if record.WhichOneof("record_type") == kind]


def test_the_curve_has_each_step_once_as_it_was_kept(parts: list[Path]) -> None:
    """Step 3 was saved before it was trained once more: of such a one the first stays."""
    curve = [(row["step"], round(row["train/loss"], 6)) for p in parts for row in history(p) if "train/loss" in row]
    assert curve == [(1, 7.01), (2, 7.01), (3, 7.02), (4, 7.03), (5, 7.03), (6, 7.03)]


def test_the_summary_has_the_newest_step_at_once(parts: list[Path]) -> None:
    for part, (step, loss) in zip(parts, ((4, 7.02), (7, 7.03)), strict=True):
        updates = [item for s in of_kind(part, "summary") for item in s.update]
        summary = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}
        assert (summary["newest/step"], round(summary["newest/train/loss"], 6)) == (step, loss)


@pytest.mark.full
def test_what_is_sent_at_once_is_there_twice(tmp_path: Path) -> None:
    """The negative control."""
    at_once = "from platform.monitor.sinks.wandb_sink import WandbSink\nWandbSink.replaces = True\n"
    env = os.environ | {"WANDB_MODE": "offline"}
    script = SCRIPT.replace("exec(", at_once + "exec(")
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run"), FIRST], env=env, check=True)
    [part] = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
    steps = [row["step"] for row in history(part) if "train/loss" in row]
    assert steps == [1, 2, 3, 4, 3, 4]


def test_both_parts_are_one_run_with_its_tags_group_and_notes(parts: list[Path]) -> None:
    assert len(parts) == 2 and len({part.name for part in parts}) == 1
    for part in parts:
        run = of_kind(part, "run")[0]
        assert (list(run.tags), run.run_group, run.notes, run.project) == (
            ["first", "long"],
            "mine",
            "as it is",
            "here",
        )


def test_each_alert_is_sent_once(parts: list[Path]) -> None:
    told = [(alert.title, alert.level) for part in parts for alert in of_kind(part, "alert")]
    assert told == [
        ("Loss spike: run", "WARN"),
        ("Worker lost: run", "ERROR"),
        ("Recovered: run", "INFO"),
        ("Slow worker: run", "WARN"),
    ]


def test_checkpoints_are_references_that_the_run_made_and_went_on_from(parts: list[Path]) -> None:
    def models(part: Path) -> list[tuple[str, bool, list[str], list[str]]]:
        artifacts = [artifact for artifact in of_kind(part, "artifact") if artifact.type == "model"]
        return [
            (a.digest, a.use_after_commit, sorted(a.aliases), [file.ref for file in a.manifest.contents])
            for a in artifacts
        ]

    folder = (parts[0].parents[2] / "checkpoints").as_uri()
    [second, third] = models(parts[0])
    assert second[1:] == (False, ["latest", "step-2"], [f"{folder}/step-2/manifest.json"])
    assert third[1:] == (False, ["latest", "step-3"], [f"{folder}/step-3"]) and third[0] != second[0]
    [used, _] = models(parts[1])
    assert used == (second[0], True, ["latest"], second[3])  # the same version of the same artifact


def test_the_tables_have_all_events_and_texts_of_the_run(parts: list[Path]) -> None:
    folder = parts[1].parent / "files" / "media" / "table"
    [journal], [samples] = ([*folder.glob(f"{name}_*.json")] for name in ("journal", "samples"))
    events = [row[2] for row in json.loads(journal.read_text())["data"]]
    assert events == [
        *("starting", "checkpoint", "spike", "failure", "checkpoint", "first_step", "slow"),
        *("starting", "restored", "checkpoint", "goodput"),
    ]
    assert json.loads(samples.read_text())["data"] == [[2, "A wolf", "A <b>wolf</b>"]]


def test_the_end_is_preempted_and_has_the_cost_of_failures(parts: list[Path]) -> None:
    assert len(of_kind(parts[1], "preempting")) == 1 and of_kind(parts[1], "exit")[0].exit_code == 75
    summary = {item.key or item.nested_key[0]: item for s in of_kind(parts[1], "summary") for item in s.update}
    assert json.loads(summary["elastic/failures"].value_json) == 1
