"""`python -m platform.data show`: of a configuration and of a run, also after failures; and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from platform.data.__main__ import main
from platform.launch import compose_config
from platform.plan.plan_data import plan_digest
from platform.predict.make_plan import make_plan
from platform.predict.replan import replan
from tests.data.show.test_step_view import folder  # noqa: F401
from tests.harness.commands import QUICK, SMALL


@pytest.fixture
def arguments(folder, monkeypatch):  # noqa: F811
    """The arguments of a small run on a text."""
    monkeypatch.setenv("LINES", "40")
    monkeypatch.chdir(folder)
    return [QUICK, *SMALL, "data=text", "data.path=texts", "data.cache=cache", "data.validation=0", "train.steps=9",
            "train.global_batch=8", "train.microbatch=2"]  # fmt: skip


@pytest.fixture
def run(arguments, tmp_path) -> Path:
    """A run that lost half of its workers after step 4, and whose steps after 6 are to come."""
    c = compose_config(arguments)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(c.to_dict()))
    fewer = replan(c, 2)
    assert fewer
    plans = {1: make_plan(c), 2: fewer.plan, 3: make_plan(c)}
    with (tmp_path / "journal.jsonl").open("w") as journal:
        for generation, plan in plans.items():
            said = {"world_size": plan.mesh.world_size, "mesh": dict(plan.mesh.axes), "reason": "", "alive": 4}
            named = plan_digest(plan) if generation < 3 else "another one"
            line = {"time": 1.0, "generation": generation, "event": "forming", "plan": named} | said
            journal.write(json.dumps(line) + "\n")
    with (tmp_path / "metrics.jsonl").open("w") as metrics:
        for step, generation in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (5, 2), (6, 3)):
            row = {"step": step, "samples": [8 * step - 8, 8 * step], "generation": generation}
            metrics.write(json.dumps(row) + "\n")
    return tmp_path


def printed(capsys, *words: str) -> tuple[int, list[str], list[str]]:
    status = main(["show", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out.splitlines(), err.splitlines()


def sequences(lines: list[str]) -> list[str]:
    return [line.partition("; microbatch")[0] for line in lines if line.startswith("  ")]


def test_a_run_is_shown_as_it_went(arguments, run, capsys):
    """Before and after it went on with half of the workers: the samples stay, who reads them does not."""
    listed = {step: printed(capsys, run, f"step={step}", "--all")[1] for step in (4, 5, 6, 7)}
    for step, lines in listed.items():
        assert sequences(lines) == sequences(printed(capsys, *arguments, f"step={step}", "--all")[1]), step
    who = {step: {line.partition("microbatch ")[2] for line in lines} - {""} for step, lines in listed.items()}
    assert "3, data 1 (ranks 2-3)" not in who[4] and "1, data 1 (ranks 2-3)" in who[4]
    assert "3, ranks 0-1" in who[5] and not any("data" in reader for reader in who[5])
    assert not who[6] and any("no plan of generation 3" in line for line in listed[6])
    assert "the run has not done step 7, and will take this" in listed[7] and who[7]
    assert printed(capsys, run)[1][0].startswith("step 6 of 9 ")


def test_what_is_wrong_is_said_in_a_line(arguments, run, capsys, tmp_path):
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    for words, line in (
        ([*arguments, "step=10"], "config: step=10: must be from 1 to train.steps=9; nearest legal: 9"),
        ([*arguments, "step=0"], "config: step=0: must be from 1 to train.steps=9; nearest legal: 1"),
        ([*arguments, "step=two"], "config: step=two: must be the number of a training step; nearest legal: 1"),
        ([*arguments, "--sample=8"], "config: --sample=8: must be from 0 to 7; nearest legal: 7"),
        ([run, "step=11"], "config: step=11: must be from 1 to train.steps=9; nearest legal: 9"),
        (
            [run, "train.steps=4"],
            f"config: argument=train.steps=4: {run} says all but the step; nearest legal: {run} step=N",
        ),
        ([nothing], f"config: run.dir={nothing}: holds no run"),
        ([*arguments, "--html", nothing / "no" / "page"], "--html"),
    ):
        status, out, err = printed(capsys, *words)
        assert (status, len(err), out) == (2, 1, []) and err[0].startswith("config: ") and line in err[0], err
    (run / "metrics.jsonl").write_text('{"step": 4, "samples": [1, "<b>"]}\n')
    status, _, err = printed(capsys, run, "step=4")
    assert status == 2 and "is not a run's" in err[0]


def test_a_page_is_written(arguments, capsys, tmp_path):
    status, out, _ = printed(capsys, *arguments, "--html", tmp_path / "page.html")
    assert (status, out) == (0, [str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").read_text().count("<article>") == 8


def test_it_does_not_wait_for_torch(arguments):
    code = f"import sys; from platform.data.__main__ import main; main({['show', *arguments]!r})"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
