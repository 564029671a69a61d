"""The door for Python: the same runs as by command, watched by callbacks that cannot harm them, and resumed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from platform import api
from platform.api import Callbacks, Config, ConfigError, Result, compose, plan, resume, run
from platform.launch import main
from platform.monitor.json_records import plain_fields
from platform.predict.make_plan import make_plan

SMALL = ["data=synthetic", "model.layers=1", "model.d_model=16", "model.heads=2", "model.length=8", "model.vocab=32"]
BATCH = ["train.global_batch=4", "train.steps=4", "optimizer.warmup_steps=0", "eval.every=0", "monitor.every=100"]
INLINE = [*SMALL, *BATCH, "cluster=inline", "cluster.device=cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(*overrides: str) -> Config:
    return compose(*INLINE, "run.dir=run", *overrides)


def losses(result: Result) -> list[float]:
    return [row.loss for row in result.metrics]


def names(result: Result) -> list[str]:
    return [event.word for event in result.events]


def test_compose_is_that_of_the_command():
    config = compose("train.steps=7", "tensor=3d", "tensor.axes={x:1,y:2,z:2}", experiment="gpt_quick")
    assert (config.train.steps, config.tensor.axes, config.parallel.data) == (7, {"x": 1, "y": 2, "z": 2}, 2)
    assert Path(config.run.dir).name.startswith("gpt_quick-")


def test_compose_reads_own_files(folder):
    (folder / "own" / "model").mkdir(parents=True)
    (folder / "own" / "model" / "mine.yaml").write_text("layers: 3\n")
    assert compose("model=mine", config_dir=folder / "own").model.layers == 3


def test_all_mistakes_at_once():
    with pytest.raises(ValueError) as caught:
        compose("train.steps=0", "model.head=2", "pipeline=nonesuch")
    assert [line.split("=")[0] for line in caught.value.violations] == ["model.head", "pipeline", "train.steps"]


def test_plan_is_that_of_the_command(capsys):
    config = compose(*SMALL, "tensor=1d", "tensor.axes.t=2", "parallel.data=-1")
    assert plan(config, workers=6).mesh.axes["data"] == 3 and config.parallel.data == -1
    assert plan(config, workers=6).parameters == make_plan(config, 6).parameters


def test_changed_values_are_checked_again():
    config = small()
    config.train.steps, config.model.heads = 0, 3
    for door in (plan, run):
        with pytest.raises(ConfigError) as caught:
            door(config)
        assert [line.split("=")[0] for line in caught.value.violations] == ["train.steps", "model.heads"]
    assert not Path("run").exists()


def test_a_run_with_callbacks(folder):
    rows, events = [], []
    config = small()
    result = run(config, Callbacks(on_step=rows.append, on_event=events.append))
    assert (result.status, result.outcome, result.directory) == (0, "done", folder / "run")
    assert [row.step for row in rows] == [1, 2, 3, 4] and result.loss == rows[-1].loss
    assert result.metrics == rows and result.events == events
    assert names(result)[0] == "starting" and names(result)[-2:] == ["done", "goodput"]
    assert [plain_fields(row) for row in rows] == [
        json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()
    ]
    assert run(config).metrics == rows  # already done


def test_what_a_callback_does_to_its_row_stays_there():
    def on_step(row):
        row.seconds.clear()

    assert all(row.seconds for row in run(small(), Callbacks(on_step=on_step)).metrics)


def test_run_and_command_continue_each_other(capsys):
    command = ["+experiment=gpt_quick", *INLINE, "run.dir=run", "tensor=serial", "parallel.data=1"]
    run(compose(*command, "train.stop_at=1"))
    assert main([*command, "train.stop_at=2"]) == 0
    assert [row.step for row in resume("run", "train.stop_at=3").metrics] == [1, 2, 3]
    assert main(command) == 0
    assert capsys.readouterr().out.count("continues after step") == 3


class Mine(Exception):
    pass


def raising(at: str | int) -> Callbacks:
    """Callbacks that raise at a step or an event."""

    def callback(value):
        if at in (getattr(value, "step", None), getattr(value, "word", None)):
            raise Mine(at)

    return Callbacks(on_step=callback) if isinstance(at, int) else Callbacks(on_event=callback)


def test_after_an_exception_in_a_callback_the_run_is_saved_and_goes_on():
    whole = run(compose(*INLINE, "run.dir=whole"))
    with pytest.raises(Mine) as caught:
        run(small(), raising(2))
    assert "the run in " in caught.value.__notes__[0]
    assert [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()] == [1, 2]
    result = resume("run")
    assert losses(result) == losses(whole)
    assert [e for e in names(result) if e in ("checkpoint", "drained", "done")] == [
        "checkpoint", "drained", "checkpoint", "done",
    ]  # fmt: skip


@pytest.mark.parametrize("at, steps", [("starting", 0), ("formed", 0), ("first_step", 1), ("done", 4)])
def test_an_exception_at_any_event_harms_nothing(at, steps):
    with pytest.raises(Mine):
        run(small(), raising(at))
    path = Path("run/metrics.jsonl")
    assert len(path.read_text().splitlines()) == steps
    assert run(small()).outcome == "done"


def test_a_callback_may_ask_to_exit():
    def leave(row):
        sys.exit(3)

    with pytest.raises(SystemExit):
        run(small(), Callbacks(on_step=leave))
    assert resume("run").loss is not None


def test_a_run_that_fails(capsys, monkeypatch):
    def rate(o, step, steps):
        raise LookupError("in my own code")

    api.register_schedule("bad_rate", rate)
    result = run(small("optimizer.schedule=bad_rate", "elastic.attempts=1"))
    assert (result.status, result.outcome, result.loss) == (1, "failed", None)
    assert names(result)[-2:] == ["gave_up", "goodput"]
    assert f"from platform.api import resume; resume('{result.directory}')" in capsys.readouterr().out


def test_resume_under_another_layout_and_from_elsewhere(folder, monkeypatch):
    whole = run(compose(*INLINE, "run.dir=whole"))
    run(small("train.stop_at=2"))
    (folder / "run").rename(folder / "moved")
    result = resume(folder / "moved", "train.stop_at=0", "tensor=3d", "parallel.zero=1")
    assert result.directory == folder / "moved" and losses(result) == pytest.approx(losses(whole), rel=1e-5)
    assert yaml.safe_load((folder / "moved" / "config.yaml").read_text())["tensor"]["scheme"] == "3d"


def test_resume_ignores_how_the_run_once_started():
    run(small("train.stop_at=2", "checkpoint.resume=never"))
    assert "restored" in names(resume("run", "train.stop_at=0"))


def test_what_cannot_be_resumed(folder):
    with pytest.raises(ConfigError, match="run.dir=.*nothing: holds no run"):
        resume("nothing")
    run(small("train.stop_at=2"))
    with pytest.raises(ConfigError, match="train.stop: unknown key|train.stop=0: unknown key"):
        resume("run", "train.stop=0")
    with pytest.raises(ConfigError, match="model.length: 8 there, 4 here"):
        resume("run", "model.length=4")
    text = (folder / "run" / "config.yaml").read_text()
    assert "project: elastic-platform" in text
    (folder / "run" / "config.yaml").write_text(text.replace("project: elastic-platform", "project: '***'"))
    with pytest.raises(ConfigError, match=r"monitor.project=\*\*\*: a secret"):
        resume("run")
    assert resume("run", "monitor.project=mine", "train.stop_at=0").outcome == "done"
    (folder / "run" / "config.yaml").write_text("- no configuration\n")
    with pytest.raises(ConfigError, match="its config.yaml cannot be read"):
        resume("run")


def test_only_the_main_thread_runs():
    caught = []

    def work():
        with pytest.raises(RuntimeError, match="main thread") as error:
            run(small())
        caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught and not Path("run").exists()


def test_the_files_beside_the_code(root):
    for name in (
        "conf/config.yaml",
        "jobs/slurm/one_gpu.sbatch",
        "jobs/kubernetes/one_gpu/job.yaml",
        "dashboards/workspace.py",
    ):
        assert (api.FILES / name).is_file()


SCRIPT = """
from platform.api import Callbacks, compose, run

{guard}
    config = compose({arguments}, "run.dir=run")
    result = run(config, Callbacks(on_step=lambda row: print("row", row.step, row.world_size)))
    print(result.status, result.outcome, len(result.metrics))
"""
GUARD, NONE = 'if __name__ == "__main__":', "if True:"


def script(folder: Path, *arguments: str, guard: str = GUARD) -> subprocess.CompletedProcess[str]:
    words = ", ".join(map(repr, [*SMALL, *BATCH, "cluster.device=cpu", *arguments]))
    (folder / "script.py").write_text(SCRIPT.format(guard=guard, arguments=words))
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.full  # the examples run two and four
def test_two_processes(folder):
    done = script(folder, "cluster=processes", "tensor=1d", "tensor.axes.t=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "row 4 2" in done.stdout and "0 done 4" in done.stdout


@pytest.mark.full
def test_a_script_needs_no_guard(folder):
    """Workers import what `extend` names, and not the script that started them."""
    done = script(folder, "cluster=processes", "tensor=1d", "tensor.axes.t=2", guard=NONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 done 4" in done.stdout


@pytest.mark.ray
@pytest.mark.full
def test_two_workers_on_ray(folder):
    done = script(folder, "cluster=local", "tensor=1d", "tensor.axes.t=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "row 4 2" in done.stdout and "0 done 4" in done.stdout


def test_docs_and_examples_import_from_the_door_alone(root):
    generators = {root / "docs" / name for name in ("papers.py", "predictions.py")}  # of pages on the planner itself
    own_code = {*root.glob("docs/*.py"), *root.glob("examples/*.py")} - generators
    pages = [root / "README.md", *root.glob("docs/*.md"), *own_code]
    modules = {m for page in pages for m in re.findall(r"^(?:from|import) (platform\.[\w.]+)", page.read_text(), re.M)}
    assert modules == {"platform.api"}


def test_the_door_imports_torch_only_for_what_executes_a_plan():
    text = "import sys, platform.api; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], timeout=100)
    assert done.returncode == 0
    assert all(hasattr(api, name) for name in api.__all__) and not hasattr(api, "nonesuch")
