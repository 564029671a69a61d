"""Commands that a run prints are run as they are printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from platform.api import _FromPython
from platform.cluster.shown_commands import Command, list_next_commands
from platform.evaluate import main as evaluate
from platform.generate import main as generate
from platform.launch import compose_config, main
from platform.monitor import MetricsLog
from platform.report.__main__ import main as write_page
from platform.weights.__main__ import main as convert
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


PROGRAMS = {"launch": main, "generate": generate, "evaluate": evaluate, "weights": convert, "report": write_page}


def printed(out: str, name: str = "launch") -> list[str]:
    """The words of the line that starts this program, without what its comment says."""
    [line] = [line.strip() for line in out.splitlines() if f"python -m platform.{name}" in line]
    words = shlex.split(line, comments=True)
    assert words[:3] == ["python", "-m", f"platform.{name}"]
    return words[3:]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in MetricsLog.read_rows(run / "metrics.jsonl")}


def test_what_comes_next_is_run_as_printed(folder, monkeypatch, capsys):
    """It used to be the same run again, under the same layout's other name."""
    monkeypatch.chdir(folder)
    own = ["--config-dir", "my conf", "extend=[mine_for_commands]", "optimizer.kind=plain"]
    text = ["data.kind=text", "data.path=a poem.txt", "data.cache=${oc.env:STORE_OF_MINE}", "model.vocab=300"]
    run = folder / "runs" / "my run"
    done = in_this_process(QUICK, *own, *text, *INLINE, *SIZES, *SHORT, "run.dir=runs/my run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    head = done.stdout.partition("   step      loss")[0].splitlines()
    assert len(head) <= 4, "what to know before the first loss; it used to be a table of layouts and collectives"
    assert head[-1].endswith(f": 2 steps of 16 tokens of text, written to {run}")
    [saved] = run.glob("checkpoints/step-00000002*")
    assert done.stdout.partition(f"run directory: {run}\n")[2].startswith(f"saved: step 2: {saved}\nnext:\n")
    words = {name: printed(done.stdout, name) for name in PROGRAMS}
    assert {*own, *text, *SIZES, "cluster=inline"} <= {*words["launch"]}, "what was typed is typed again"
    shown = {}
    for name in ("generate", "evaluate", "weights", "report", "launch"):
        assert PROGRAMS[name](words[name]) == 0, name
        shown[name] = capsys.readouterr().out
    assert shown["generate"].strip() and "bits/byte" in shown["evaluate"] and (run / "report.html").exists()
    assert (run / "transformers" / "model.safetensors").exists()
    assert "continues after step 2" in shown["launch"] and losses(run).keys() == {1, 2, 3, 4}


@pytest.mark.full
def test_a_shell_runs_the_next_lines(folder):
    done = in_this_process(QUICK, "data=synthetic", *INLINE, *SIZES, *SHORT, "run.dir=it's a run", cwd=folder)
    assert done.returncode == 0, done.stderr
    script = done.stdout.partition("next:\n")[2]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = subprocess.run(
        ["sh", "-ec", script], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert losses(folder / "it's a run").keys() == {1, 2, 3, 4}


NEXT = {  # what a run has -> programs that are of use for it
    ("data=text", "data.path=."): ["generate", "evaluate", "weights", "report", "launch"],
    ("data=text", "data.path=.", "data.validation=0", "eval.every=0"): ["generate", "weights", "report", "launch"],
    ("data=synthetic",): ["weights", "report", "launch"],  # no tokenizer
    ("checkpoint.last=false",): ["report"],
    ("checkpoint.last=false", "train.stop_at=2"): ["generate", "evaluate", "weights", "report", "launch"],
    ("model.kind=encoder", "monitor.sample=0"): ["report", "launch"],
    ("model.experts=2", "model.capacity_factor=1.5"): ["generate", "evaluate", "report", "launch"],  # of no family
    ("checkpoint.url=s3://me:hunter2@bucket/x",): ["report", "launch"],  # who reads it needs the secret again
}


@pytest.mark.parametrize("typed", NEXT, ids=" ".join)
def test_next_is_what_such_a_run_has_a_use_for(typed, monkeypatch):
    command, vocabulary = (
        Command([QUICK, *typed]),
        None if "data=synthetic" in typed else SimpleNamespace(has_chat=True),
    )
    lines = list_next_commands(compose_config(command.arguments), command, vocabulary)
    assert [line.split()[2].removeprefix("platform.") for line in lines] == NEXT[typed]
    drawn = [line for line in lines if " --temperature 0.8 --top-p 0.9  # ask it for text" in line]
    assert drawn == [line for line in lines if "platform.generate" in line], "its likeliest tokens repeat themselves"
    if "launch" in NEXT[typed]:
        config = compose_config(printed(lines[-1]))
        assert config.train.stop_at or config.train.steps == (300 if "train.stop_at=2" in typed else 600)


@pytest.mark.parametrize(
    ("kind", "programs"), [("instructions", ["generate", "evaluate"]), ("preferences", ["generate"])]
)
def test_what_learned_to_answer_is_asked_as_a_chat(kind, programs):
    config = compose_config([QUICK, f"data={kind}", "data.path=x.jsonl"])
    lines = list_next_commands(config, Command([QUICK]), SimpleNamespace(has_chat=True))
    assert [line.split()[2].removeprefix("platform.") for line in lines[: len(programs)]] == programs
    assert " The --chat " in lines[0] and lines[len(programs)].startswith("python -m platform.weights export")


@pytest.mark.parametrize(("nodes", "first"), [(1, "torchrun --nproc-per-node 4 -m"), (2, "python -m")])
def test_what_torchrun_started_goes_on_under_torchrun(monkeypatch, nodes, first):
    """On several machines each has a command of its own, which this one does not know."""
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": str(4 * nodes)}.items():
        monkeypatch.setenv(name, value)
    assert Command(["seed=3"]).resume_line() == f"{first} platform.launch seed=3"


def test_what_comes_next_from_python_is_python():
    [*_, line] = list_next_commands(compose_config([QUICK, "run.dir=r"]), _FromPython([f"{os.getcwd()}/r"]), None)
    assert line.startswith(f"from platform.api import resume; resume('{os.getcwd()}/r', 'train.steps=600', ")


def test_a_secret_is_not_printed_and_the_line_says_so(monkeypatch):
    monkeypatch.setenv("A_PASSWORD", "kept-very-secret")
    typed = [QUICK, "parallel.data=1", "checkpoint.url=s3://me:hun/ter@2@bucket/x", "data.cache=/tmp/kept-very-secret"]
    typed += ["checkpoint.resume=s3://me:${oc.env:A_PASSWORD}@bucket/x/step-00000004-000001-be2e22"]
    compose_config(typed)  # registers them
    for line in (Command(typed).format_with_overrides(["train.steps=2"]), Command(typed).resume_line()):
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
