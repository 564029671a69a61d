"""What `python -m platform.launch` answers, starts and refuses."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest

from platform import launch
from platform.boundary.refusals import ConfigError
from platform.config.arguments import find_experiment_name
from platform.config.groups import Eval
from platform.launch import main
from tests.harness.commands import QUICK, command


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Stands in for the driver: records what would run. Where a test calls it, nothing else may start a process."""
    from platform.cluster import driver

    def no_process(*_, **__):
        raise AssertionError("a process was started")

    runs = []
    statuses = []

    def run(config, plan, *, command, phases):
        runs.append((find_experiment_name(command.arguments), config))
        status = statuses.pop(0) if statuses else 0
        if isinstance(status, Exception):
            raise status
        return status

    monkeypatch.setattr(driver, "drive_run", run)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.chdir(tmp_path)
    run.runs, run.statuses = runs, statuses
    return run


def test_the_configuration_is_shown(capsys):
    assert main(["--cfg", "job", "--resolve", QUICK, "train.steps=7"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out
    assert main([QUICK, "--cfg", "job", "--package", "eval", "seed=3"]) == 0  # flags and keys in any order
    shown = capsys.readouterr().out
    assert shown.startswith("every: 50\nbatches: 4\naveraged: false\n")
    assert [line.partition(":")[0] for line in shown.splitlines()] == [f.name for f in fields(Eval)]
    assert main(["--cfg", "job", "-p", "trian", QUICK]) == 2
    assert capsys.readouterr().err.startswith("config: --package=trian: no such part; nearest legal: train")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["--help"],
            [
                "+experiment=gpt_quick",
                "tensor: 1d, 1d_sp, 2d, 2d_gather, 2p5d, 3d, 3d_literal, auto, layout, mesh_tf_2d, mesh_tf_3d,",
                "--config-dir",
                "  train.steps=100                   updates; the learning-rate schedule spans them (>= 1)\n",
            ],
        ),
        (["--hydra-help"], ["Hydra"]),
        (["--info", "defaults", QUICK, "tensor.axes.t=1"], ["experiment/gpt_quick"]),
        (["--cfg", "hydra", "--package", "hydra.job"], ["name: launch"]),
        (["--version"], ["Hydra"]),
    ],
)
def test_hydras_answers(tmp_path, arguments, shown):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in shown), done.stdout
    assert list(tmp_path.iterdir()) == []


def test_one_run(driver):
    assert main([QUICK, "train.steps=5", "parallel.data=1"]) == 0
    assert [(name, config.train.steps) for name, config in driver.runs] == [("gpt_quick", 5)]


@pytest.mark.parametrize("status", [0, 1, 2, 75])
def test_the_drivers_status_is_the_commands(driver, status):
    driver.statuses.append(status)
    assert main([QUICK]) == status


def test_what_the_driver_refuses(driver, capsys):
    driver.statuses.append(ConfigError(["data.path=x: no such file", "run.dir=y: not writable"]))
    assert main([QUICK]) == 2
    assert capsys.readouterr().err == "config: data.path=x: no such file\nconfig: run.dir=y: not writable\n"


def test_a_sweep(driver, capsys):
    assert main(["-m", QUICK, "seed=1,2", "tensor=serial,1d"]) == 0
    assert [(c.seed, c.tensor.scheme) for _, c in driver.runs] == [(1, "serial"), (1, "1d"), (2, "serial"), (2, "1d")]
    assert len({config.run.dir for _, config in driver.runs}) == 4
    assert "job 4 of 4: +experiment=gpt_quick seed=2 tensor=1d" in capsys.readouterr().out
    assert os.listdir() == []


def test_a_sweep_over_experiments_ranges_axes_and_globs(driver):
    assert main(["+experiment=gpt_quick,one_gpu", "cluster.device=cpu", "seed=range(2)", "-m"]) == 0
    assert [name for name, _ in driver.runs] == ["gpt_quick", "gpt_quick", "one_gpu", "one_gpu"]
    driver.runs.clear()
    assert main(["-m", QUICK, "tensor.axes.t=1,2,4", "branch=glob(*)"]) == 0
    assert sorted((c.tensor.axes["t"], c.branch.kind) for _, c in driver.runs) == [
        (t, branch) for t in (1, 2, 4) for branch in ("dsp", "dsp_csub", "dsp_slice", "none")
    ]


@pytest.fixture
def own(tmp_path):
    """Writes an experiment `mine`, and returns what a command needs to find it."""

    def write(*defaults, text=""):
        (tmp_path / "experiment").mkdir()
        listed = "".join(f"  - {line}\n" for line in ("gpt_quick", *defaults))
        (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\ndefaults:\n{listed}{text}")
        return ["--config-dir", str(tmp_path), "+experiment=mine"]

    return write


def test_a_sweep_that_an_experiment_describes(driver, own):
    mine = own(text="hydra:\n  sweeper:\n    params:\n      seed: 1,2\n      optimizer.lr: choice(1e-3,2e-3)\n")
    assert main(["-m", *mine, "seed=7"]) == 0  # what is typed counts
    assert [(c.seed, c.optimizer.lr) for _, c in driver.runs] == [(7, 1e-3), (7, 2e-3)]
    driver.runs.clear()
    assert main(["-m", *mine, "tensor=serial,1d"]) == 0
    assert len({(c.seed, c.optimizer.lr, c.tensor.scheme) for _, c in driver.runs}) == 8
    driver.runs.clear()
    assert main(mine) == 0 and len(driver.runs) == 1  # without -m nothing is swept, as with Hydra


def test_hydras_own_launcher_and_sweeper_may_be_named(driver):
    assert main(["-m", QUICK, "hydra/launcher=basic", "hydra/sweeper=basic", "seed=1,2"]) == 0
    assert [config.seed for _, config in driver.runs] == [1, 2]


@pytest.mark.parametrize("plugin", ["launcher", "sweeper"])
@pytest.mark.parametrize("flags", [[], ["-m"]])
def test_another_launcher_or_sweeper_is_refused_by_name_wherever_it_is_chosen(
    driver, own, tmp_path, capsys, plugin, flags
):
    """One that is there, as an installed plugin is: its file in the group."""
    folder = tmp_path / "hydra" / plugin
    folder.mkdir(parents=True)
    (folder / "third.yaml").write_text("_target_: third.party.Plugin\n")
    assert main([*flags, *own(f"override /hydra/{plugin}: third")]) == 2
    said = f"config: hydra/{plugin}=third: only Hydra's basic {plugin} is there: "
    assert capsys.readouterr().err.startswith(said) and not driver.runs


def test_a_plugin_that_is_not_there_is_refused_by_name_too(driver, own, capsys):
    assert main(["-m", *own("override /hydra/sweeper: optuna")]) == 2
    assert capsys.readouterr().err == "config: hydra/sweeper=optuna: unknown; nearest legal: basic\n"


def test_a_table_that_cannot_be_written_does_not_fail_a_sweep(driver, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("platform.predict.measured_runs.write_run_table", full)
    assert main(["-m", QUICK, "seed=1,2"]) == 0
    assert "cannot be written: [Errno 28] No space left on device" in capsys.readouterr().out


def test_the_worst_status_of_a_sweep(driver, capsys):
    driver.statuses += [0, RuntimeError("broken"), 2, 0]
    assert main(["-m", QUICK, "seed=1,2,3,4"]) == 1
    assert len(driver.runs) == 4 and "broken" in capsys.readouterr().err
    driver.statuses += [2, 0]
    assert main(["-m", QUICK, "seed=1,2"]) == 2


def test_a_stopped_sweep_stops(driver):
    driver.statuses += [0, 75, 0]
    assert main(["-m", QUICK, "seed=1,2,3"]) == 75
    assert len(driver.runs) == 2


def test_a_sweep_is_judged_as_a_whole_before_it_starts(driver, capsys):
    assert main(["-m", QUICK, "tensor.axes.t=1,2,3", "train.steps=5,0"]) == 2
    assert driver.runs == []
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("config: train.steps=0: ") for line in lines)
    assert any("=3" in line and "heads" in line for line in lines)  # four heads over three
    assert len(lines) == len(set(lines))
    assert main(["-m", QUICK, "seed=1,2", "run.dir=same"]) == 2
    assert "several jobs of the sweep share it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [QUICK, "train.stepz=1", "train.steps=-1"],
        [QUICK, "tensor.axes.t=3"],
        ["+experiment=nope"],
        [QUICK, "--config-dir", "missing"],
        [QUICK, "--config-path", "elsewhere"],
        ["--cfg", "job", QUICK, "seed=-1"],
        ["--info", "defaults", "seed=-1"],
        ["-m", QUICK, "seed=1,-2"],
    ],
)
def test_a_refused_command_starts_nothing_and_leaves_nothing(driver, capsys, arguments):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err and all(line.startswith("config: ") for line in err.splitlines())
    assert driver.runs == [] and os.listdir() == []


def test_own_files(driver, tmp_path, capsys):
    own = tmp_path / "own files"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "my_run.yaml").write_text(
        "# @package _global_\ndefaults: [gpt_quick, {override /model: my_model}, _self_]\ntrain: {steps: 9}\n"
    )
    (own / "experiment" / "typo.yaml").write_text("# @package _global_\ntrain: {stepz: 9}\n")
    (own / "experiment" / "later.yaml").write_text("# @package _global_\ntrain: {compile: later}\n")
    (own / "experiment" / "broken.yaml").write_text("# @package _global_\ntrain: {steps: 9\n")
    (own / "model").mkdir()
    (own / "model" / "my_model.yaml").write_text("layers: 1\nheads: 2\n")
    files = ["--config-dir", str(own)]
    assert main([*files, "+experiment=my_run"]) == 0
    [(name, config)] = driver.runs
    assert (name, config.train.steps, config.model.layers, config.tensor.axes) == ("my_run", 9, 1, {"t": 2})
    for name, line in [
        ("typo", "experiment=typo: train.stepz: unknown key; nearest legal: train.steps"),
        ("later", "train.compile=later: unknown; nearest legal: "),
        ("broken", "experiment=broken: while parsing"),
    ]:
        assert main([*files, f"+experiment={name}"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"config: {line}") and err.count("\n") == 1


def test_the_command_itself(tmp_path):
    """As a user runs it: the module's own entry, the exit status, no traceback, nothing left."""
    done = command(QUICK, "train.stepz=1", "tensor.axes.t=3", "train.steps=0", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert [line.split("=")[0] for line in done.stderr.splitlines()] == [
        "config: train.stepz",
        "config: train.steps",
        "config: model.heads",
        "config: model.d_ff",
    ]
    assert command("--no-such-flag", cwd=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "['--help']",
        "['--cfg', 'job']",
        f"['{QUICK}', 'train.steps=0']",
        f"['{QUICK}', 'elastic.max_workers=1']",
        f"['{QUICK}', 'data=text', 'data.path=/nowhere']",
        f"['{QUICK}', 'parallel.data=-1', 'tensor.axes.t=3']",
        f"['{QUICK}', 'checkpoint.resume=/nowhere', 'cluster=processes']",
    ],
)
def test_short_answers_import_nothing_heavy(tmp_path, arguments):
    heavy = "bool({'torch', 'ray', 'wandb'} & set(sys.modules))"
    script = f"import sys, platform.launch; platform.launch.main({arguments}); sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path).returncode == 0


def test_a_plan_is_explained_without_torch(tmp_path):
    line = [sys.executable, "-X", "importtime", "-m", "platform.plan", QUICK]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "data 2 x t 2" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "omegaconf" in imported and not {"torch", "ray", "wandb"} & imported


def test_conf_is_found():
    assert (launch.CONF / "config.yaml").is_file()
