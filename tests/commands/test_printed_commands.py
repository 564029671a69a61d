"""Commands that a run prints are run as they are printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from platform.launch import compose_config, main
from platform.monitor import MetricsLog
from platform.predict.make_plan import make_plan
from tests.commands.test_extend import MODULE, SCHEME
from tests.harness.commands import QUICK, in_this_process

INLINE = ["cluster=inline", "tensor=serial", "parallel.data=1", "cluster.device=cpu"]
SIZES = ["train.global_batch=2", "train.microbatch=2", "model.d_model=12", "model.heads=3", "model.length=8"]
SHORT = ["train.steps=2", "model.layers=1", "eval.every=0", "monitor.sample=0", "optimizer.warmup_steps=0"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A place with a module, a scheme, data and a secret of the user's own."""
    (tmp_path / "mine_for_commands.py").write_text(MODULE)
    (tmp_path / "my conf" / "tensor").mkdir(parents=True)
    (tmp_path / "my conf" / "tensor" / "heads_only.yaml").write_text(SCHEME)
    (tmp_path / "a poem.txt").write_text("so much depends upon a red wheel barrow\n" * 200)
    monkeypatch.setenv("STORE_OF_MINE", "kept-somewhere-secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def printed(out: str, mark: str = "next: ") -> list[str]:
    [line] = [line.strip().removeprefix(mark) for line in out.splitlines() if "python -m platform.launch" in line]
    words = shlex.split(line, comments=True)
    assert words[:3] == ["python", "-m", "platform.launch"]
    return words[3:]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in MetricsLog.read_rows(run / "metrics.jsonl")}


def test_next_is_run_as_printed(folder):
    own = ["--config-dir", "my conf", "extend=[mine_for_commands]", "model.kind=loud", "optimizer.kind=plain"]
    text = ["data.kind=text", "data.path=a poem.txt", "data.cache=${oc.env:STORE_OF_MINE}", "model.vocab=300"]
    done = in_this_process(QUICK, *own, *text, *INLINE, *SIZES, *SHORT, "run.dir=runs/my run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    words = printed(done.stdout)
    kept = {*own, *text, *SIZES, *SHORT, "cluster=inline"} - {"tensor=serial"}
    assert kept <= {*words}, "what was typed is typed again"
    assert any(w.startswith("tensor=") for w in words) and "tensor=serial" not in words
    again = in_this_process(*words, cwd=folder)
    assert again.returncode == 0 and "already done" not in again.stdout, again.stdout + again.stderr
    [other] = [path for path in (folder / "runs").iterdir() if path.name != "my run"]
    assert losses(other) == pytest.approx(losses(folder / "runs" / "my run"), rel=1e-4)


@pytest.mark.full
def test_a_shell_runs_the_next_line(folder):
    done = in_this_process(QUICK, "data=synthetic", *INLINE, *SIZES, *SHORT, "run.dir=it's a run", cwd=folder)
    assert done.returncode == 0, done.stderr
    [line] = [line.removeprefix("next: ") for line in done.stdout.splitlines() if line.startswith("next: ")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.run(
        ["sh", "-c", line], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert len(list(folder.glob("it's a run*"))) == 2


TYPED = [
    [QUICK, "parallel.data=1"],
    [QUICK, "tensor=1d_sp", "tensor.axes.t=4"],
    [QUICK, "model.heads=3", "model.d_model=48", "tensor=1d", "tensor.axes.t=3"],  # no power of 2 in sight
    [QUICK, "model.heads=1", "tensor=layout", "tensor.axes.a=2", "tensor.layout=d_ff:a"],  # heads cannot be split
    [QUICK, "tensor=layout", "tensor.axes.a=2", "tensor.layout=d_ff:a"],
    [QUICK, "tensor=layout", "tensor.axes.a=2", "tensor.layout={stream: {}, parameters: {d_ff: a}}", "parallel.data=1"],
    [QUICK, "branch=dsp", "branch.axes.g=2", "tensor=serial"],
    [QUICK, "pipeline=1f1b", "pipeline.stages=2", "cluster=processes"],
    [QUICK, "tensor=heads_only", "tensor.axes.h=2"],
    [QUICK, "cluster=inline", "tensor=serial", "parallel.data=1", "checkpoint.resume=must", "checkpoint.url=x y"],
    ["+experiment=two_layer"],
    ["+experiment=cube_bert"],
    ["+experiment=gpt175b", "checkpoint.url=s3://bucket/x"],
]


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_next_is_legal_for_the_model_at_hand(folder, monkeypatch, typed):
    from platform.launch import build_command

    monkeypatch.chdir(folder)
    config = compose_config(typed, "my conf")
    plan = make_plan(config)
    words = printed(build_command(typed, "my conf").suggest_other_layout(config, plan.mesh.world_size))
    assert words[:2] == ["--config-dir", "my conf"]
    other = compose_config(words[2:], words[1])
    assert make_plan(other).mesh.world_size == plan.mesh.world_size, "there are as many workers as there were"
    assert other.tensor.scheme != config.tensor.scheme and other.model == config.model
    assert other.run.dir != config.run.dir
    assert not config.checkpoint.url or other.checkpoint.url not in ("", config.checkpoint.url)
    assert other.checkpoint.resume != "must", "there is nothing in the new place"


def test_a_secret_is_not_printed_and_the_line_says_so(monkeypatch):
    from platform.launch import build_command

    monkeypatch.setenv("A_PASSWORD", "kept-very-secret")
    typed = [QUICK, "parallel.data=1", "checkpoint.url=s3://me:hun/ter@2@bucket/x", "data.cache=/tmp/kept-very-secret"]
    typed += ["checkpoint.resume=s3://me:${oc.env:A_PASSWORD}@bucket/x/step-00000004-000001-be2e22"]
    config = compose_config(typed)
    for line in (build_command(typed).suggest_other_layout(config, 2), build_command(typed).resume_line()):
        assert "hun" not in line and "ter@2" not in line and "kept-very" not in line
        assert "checkpoint.url=***" in line or "'checkpoint.url=***'" in line
        assert "me:${oc.env:A_PASSWORD}@bucket" in line, "a reference is no secret"
        assert "'data.cache=/tmp/${oc.env:A_PASSWORD}'" in line
        assert line.endswith("# *** stands for a secret: type it again")


def test_the_resume_command_is_run_as_printed(folder, monkeypatch):
    """After a failure that no recovery survives: what is printed goes on, its own quotes, files and modules kept."""
    (folder / "breaks_once.py").write_text(
        "import os\nfrom platform.data.text_sources import register_source\n"
        "from platform.optimizer.learning_rate import register_schedule\n"
        "def rate(o, step, steps):\n"
        "    if step == 3 and not os.path.exists('mended'):\n        raise RuntimeError('not yet')\n    return 0.5\n"
        "register_schedule('brittle', rate)\n"
    )
    typed = [QUICK, "--config-dir", "my conf", "extend=[breaks_once]", "optimizer.schedule=brittle", "data=synthetic"]
    typed += [*INLINE, *SIZES, *SHORT[1:], "train.steps=4", "checkpoint.every=1", "run.dir=my run"]
    done = in_this_process(*typed, "elastic.attempts=1", cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    (folder / "mended").touch()
    again = in_this_process(*printed(done.stdout), cwd=folder)
    assert again.returncode == 0 and "continues after step" in again.stdout, again.stdout + again.stderr
    assert losses(folder / "my run").keys() == {1, 2, 3, 4}


def test_a_job_of_a_sweep_prints_its_own_command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    typed = [QUICK, "data=synthetic", *INLINE, *SIZES, *SHORT]
    assert main(["-m", *typed, "seed=1,2"]) == 0
    first, second = (line for line in capsys.readouterr().out.splitlines() if line.startswith("next: "))
    assert "seed=1" in first and "seed=2" in second and "-m" not in first.split()[3:]
