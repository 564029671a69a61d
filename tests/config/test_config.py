"""The configuration: what users may type, what is refused and how, and what makes a run this run."""

import os
import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from platform import launch
from platform.composition.arguments import experiment_of, rewrite, typed_values
from platform.config.bounds import KEYS, flat_values
from platform.config.checks import wrong_configuration
from platform.config.fields import Branch, Config, ConfigError, Tensor
from platform.config.identity import identity
from platform.config.layout_map import parse_layout
from platform.launch import compose, main
from tests.conftest import ROOT

QUICK = "+experiment=gpt_quick"


def refused(*arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        compose([QUICK, *arguments])
    return error.value.violations


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Stands in for the driver: records what would run. Where a test calls it, nothing else may start a process."""
    from platform.cluster import driver

    def no_process(*_, **__):
        raise AssertionError("a process was started")

    runs = []
    statuses = []

    def run(config, plan, *, command):
        runs.append((experiment_of(command.arguments), config))
        status = statuses.pop(0) if statuses else 0
        if isinstance(status, Exception):
            raise status
        return status

    monkeypatch.setattr(driver, "run", run)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    monkeypatch.chdir(tmp_path)
    run.runs, run.statuses = runs, statuses
    return run


# What users type.


@pytest.mark.parametrize(
    ("typed", "hydra"),
    [
        ("experiment=a", "+experiment=a"),
        ("+experiment=a", "+experiment=a"),
        ("train.steps=3", "train.steps=3"),
        ("tensor.axes.t=2", "++tensor.axes.t=2"),
        ("+tensor.axes.t=2", "++tensor.axes.t=2"),
        ("branch.axes.g=1,2", "++branch.axes.g=1,2"),
        ("tensor.axes={x: 2}", "++tensor.axes={x: 2}"),
        ("tensor.layout=batch:rows;heads:cols", "tensor.layout='batch:rows;heads:cols'"),
        ("++tensor.layout='batch:rows;heads:cols'", "tensor.layout='batch:rows;heads:cols'"),
        ('tensor.layout="batch:rows"', 'tensor.layout="batch:rows"'),
        ("run.dir=/data/lr=1", "run.dir='/data/lr=1'"),
        ("data.path=~/it's", r"data.path='~/it\'s'"),
        ("tensor.scheme=3d", "tensor=3d"),
        ("branch.kind=dsp", "branch=dsp"),
        ("train.steps", "train.steps"),
        ("~optimizer", "~optimizer"),
    ],
)
def test_rewriting(typed, hydra):
    assert rewrite(typed) == hydra
    assert rewrite(hydra) == hydra


TEXT = st.text(string.ascii_letters + string.digits + string.punctuation + " ").filter(
    lambda text: "${" not in text and text[:1] not in ("'", '"')
)


@given(TEXT)
def test_a_layout_reaches_us_as_it_was_typed(text):
    assert typed_values([f"tensor.layout={text}"]) == {"tensor.layout": text}


@given(TEXT)
def test_any_value_is_taken_and_one_that_is_no_grammar_is_text(text):
    argument = f"data.path={text}"
    assert set(typed_values([argument])) == {"data.path"}
    if rewrite(argument) != argument:
        assert typed_values([argument]) == {"data.path": text}


def test_typed_axes_replace_or_join():
    assert compose([QUICK, "tensor.axes.t=4"]).tensor.axes == {"t": 4}
    assert compose([QUICK, "tensor.axes={t: 1}"]).tensor.axes == {"t": 1}
    three = compose([QUICK, "tensor=3d", "tensor.axes={z: 2, y: 2}", "tensor.axes.x=1"])
    assert three.tensor.axes == {"z": 2, "y": 2, "x": 1}
    assert three.tensor.order == ["x", "y", "z"]


def test_axes_of_another_scheme_are_dropped():
    axes = ["tensor.axes.x=1", "tensor.axes.y=2", "tensor.axes.z=2", "parallel.data=1"]
    assert compose([QUICK, "tensor=3d", *axes]).tensor.axes == {"x": 1, "y": 2, "z": 2}
    assert compose([QUICK, "tensor=serial"]).tensor.axes == {}
    assert compose([QUICK, "tensor=1d_sp"]).tensor.axes == {"t": 2}


def test_an_experiment_is_fitted_to_what_was_chosen(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /tensor: layout}, {override /branch: dsp}, _self_]\n"
        "tensor: {axes: {rows: 2, spare: 2}, layout: {batch: rows}}\n"
        "branch: {axes: {g: 2}, slice_via: all_gather}\n"
        "pipeline: {stages: 4, chunks: 2, file: mine.csv}\n"
        "optimizer: {warmup_steps: 50}\n"
    )
    mine = compose(["+experiment=mine", "train.steps=5"], config_dir=str(tmp_path))
    assert (mine.tensor.axes, mine.branch.axes) == ({"rows": 2}, {"g": 2})
    assert (mine.pipeline.stages, mine.pipeline.chunks, mine.pipeline.file) == (1, 1, "")
    assert mine.optimizer.warmup_steps == 50  # five steps of the same warm-up: the same run, cut short
    sliced = compose(["+experiment=mine", "branch=dsp_slice"], config_dir=str(tmp_path))
    assert (mine.branch.slice_via, sliced.branch.slice_via) == ("all_to_all", "all_gather")
    plain = compose(["+experiment=mine", "tensor=1d", "branch=none"], config_dir=str(tmp_path))
    assert (plain.tensor.axes, plain.tensor.layout, plain.branch.axes) == ({}, None, {})
    typed = compose(["+experiment=mine", "tensor.layout=heads:spare"], config_dir=str(tmp_path))
    assert typed.tensor.axes == {"spare": 2}
    assert typed.tensor.regions["attention"] == {"heads": ["spare"]}


def test_the_experiment_names_the_run_and_every_value_its_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = compose([QUICK]).run.dir
    assert here.startswith(f"{tmp_path}/runs/gpt_quick-")
    assert compose(["experiment=gpt_quick", "train.steps=300"]).run.dir == here
    others = [compose([QUICK, a]).run.dir for a in ("seed=1", "tensor=1d_sp", "tensor.axes.t=4", "monitor=wandb")]
    assert len({here, *others}) == 5
    assert compose([QUICK, "run.dir=there"]).run.dir == f"{tmp_path}/there"
    assert compose([QUICK, "data=text", "data.path=~/a"]).data.path == os.path.expanduser("~/a")


# Layouts of the user's own.

MAP = {"batch": ["rows"], "heads": ["cols", "rows"]}


@pytest.mark.parametrize(
    "layout",
    [
        "batch:rows;heads:cols+rows",
        "batch:rows,heads:cols+rows",
        "batch:rows|heads:cols+rows",
        " batch : rows  heads: cols + rows; ",
        "{batch: rows, heads: [cols, rows]}",
        {"batch": "rows", "heads": "cols+rows"},
    ],
)
def test_one_map_for_every_tensor(layout):
    regions, parameters = parse_layout(layout, ["rows", "cols"])
    assert set(regions) == {"stream", "attention", "core", "mlp", "logits"}
    assert all(table == MAP for table in regions.values())
    assert parameters == {"all": MAP}


def test_one_map_per_region():
    layout = {"stream": {"batch": "rows"}, "mlp": None, "parameters": {"d_ff": "cols"}}
    regions, parameters = parse_layout(layout, ["rows", "cols"])
    assert regions == {"stream": {"batch": ["rows"]}, "mlp": {}}
    assert parameters == {"all": {"d_ff": ["cols"]}}


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        ("batch:row;head:cols", ["batch:row: no such axis in tensor.axes; nearest legal: rows", "head: no such dim"]),
        ("batch", ["batch: must be dim:axis"]),
        ("batch:rows:cols", ["batch:rows:cols: must be dim:axis"]),
        ("{batch: [rows", ["not YAML"]),
        ("{streem: {batch: rows}}", ["streem: no such region; nearest legal: stream"]),
    ],
)  # fmt: skip
def test_what_a_layout_gets_wrong(layout, lines):
    found = refused("tensor=layout", "tensor.axes.rows=2", "tensor.axes.cols=2", f"tensor.layout={layout}")
    assert len(found) == len(lines)
    assert all(line in violation for violation, line in zip(found, lines, strict=True))


def test_the_axes_of_a_layout_are_ordered_as_written():
    layout = ["tensor=layout", "tensor.axes.b=2", "tensor.axes.a=2", "tensor.layout=heads:a;batch:b"]
    assert compose([QUICK, *layout]).tensor.order == ["b", "a"]


# What is refused.

WRONG = [
    ("train.stepz=5", "train.stepz=5: unknown key; nearest legal: train.steps"),
    ("+train.stepz=5", "train.stepz=5: unknown key; nearest legal: train.steps"),
    ("++model.widht=5", "model.widht=5: unknown key"),
    ("lr=1", "lr=1: unknown key; nearest legal: optimizer.lr"),
    ("tensr=1d", "tensr=1d: unknown key; nearest legal: tensor"),
    ("model=gpt_tinny", "model=gpt_tinny: unknown; nearest legal: gpt_tiny"),
    ("cluster=slurm", "cluster=slurm: unknown; nearest legal: "),
    ("train.steps=many", "train.steps=many: must be an integer"),
    ("train.steps=1.5", "train.steps=1.5: must be an integer"),
    ("train.steps=1e3", "train.steps=1e3: must be an integer; nearest legal: 1000"),
    ("train.steps=inf", "train.steps=inf: must be an integer"),
    ("train.steps=null", "train.steps=null: "),
    ("train.steps=[1]", "train.steps=[1]: must be an integer"),
    ("train.steps=1,2", "train.steps=1,2: several values: a sweep needs -m"),
    ("train.steps=${nope}", "train.steps=${nope}: "),
    ("optimizer.lr=fast", "optimizer.lr=fast: must be a number"),
    ("model.bias=maybe", "model.bias=maybe: must be true or false"),
    ("train=5", "train=5: "),
    ("train.steps", "train.steps: must be KEY=VALUE"),
    ("~train.steps", "~train.steps: must be KEY=VALUE"),
    ("tensor.axes=x:2", "tensor.axes=x:2: "),
    ("tensor.axes.t=two", "tensor.axes.t=two: must be an integer"),
    ("seed=-1", "seed=-1: must be >= 0; nearest legal: 0"),
    ("train.steps=-3", "train.steps=-3: must be >= 1; nearest legal: 1"),
    ("train.steps=0", "train.steps=0: must be >= 1; nearest legal: 1"),
    ("train.microbatch=0", "train.microbatch=0: must be >= 1; nearest legal: 1"),
    ("model.dropout=1", "model.dropout=1.0: must be >= 0 and < 1"),
    ("optimizer.lr=-1", "optimizer.lr=-1.0: must be >= 0 and < inf; nearest legal: 0"),
    ("optimizer.lr=nan", "optimizer.lr=nan: must be >= 0 and < inf"),
    ("optimizer.betas=[0.9,1]", "optimizer.betas.1=1.0: must be >= 0 and < 1"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be two numbers"),
    ("optimizer.warmup_steps=400", "optimizer.warmup_steps=400: must be <= train.steps=300; nearest legal: 300"),
    ("optimizer.schedule=linear", "optimizer.schedule=linear: unknown; nearest legal: "),
    ("precision=fp8", "precision=fp8: unknown; nearest legal: "),
    ("precision=fp16", "precision=fp16: not built yet (float16 with a loss scale); nearest legal: "),
    ("recompute=some", "recompute=some: unknown; nearest legal: "),
    ("recompute_every=0", "recompute_every=0: must be >= 1"),
    ("model.norm=batchnorm", "model.norm=batchnorm: unknown; nearest legal: "),
    ("model.fused_dropout=true", "model.fused_dropout=true: not built yet"),
    ("parallel.data=0", "parallel.data=0: must be >= 1, or -1"),
    ("parallel.zero=2", "parallel.zero=2: unknown; nearest legal: 1, 3, 0"),
    ("pipeline.file=/mine.csv", "pipeline.file=/mine.csv: only for pipeline=file"),
    ("pipeline.kind=1f1c", "pipeline.kind=1f1c: unknown; nearest legal: 1f1b"),
    ("pipeline=2f2b", "pipeline=2f2b: unknown; nearest legal: "),
    ("pipeline.stages=4", "pipeline.stages=4: pipeline=none has one; nearest legal: 1"),
    ("branch.slice_via=all_gather", "branch.slice_via=all_gather: branch=none has no all-to-all that it would replace"),
    ("branch.slice_via=p2p", "branch.slice_via=p2p: unknown; nearest legal: all_to_all, all_gather"),
    ("branch.axes.g=2", "branch.axes.g=2: branch=none has no axes"),
    ("checkpoint.every=-1", "checkpoint.every=-1: must be >= 0; nearest legal: 0"),
    ("checkpoint.every=30min", "checkpoint.every=30min: must be a number of steps, or a duration like 45s, 30m or "
     "1h30m; nearest legal: 30, 30m"),
    ("checkpoint.every=-30m", "checkpoint.every=-30m: must be a number of steps, or a duration"),
    ("checkpoint.every=0m", "checkpoint.every=0m: must be a number of steps, or a duration"),
    ("checkpoint.every=2.5", "checkpoint.every=2.5: must be a number of steps, or a duration"),
    ("checkpoint.every=1h30", "checkpoint.every=1h30: must be a number of steps, or a duration"),
    ("checkpoint.keep=0", "checkpoint.keep=0: must be >= 1; nearest legal: 1"),
    ("train.stop_at=-1", "train.stop_at=-1: must be >= 0; nearest legal: 0"),
    ("train.stop_at=301", "train.stop_at=301: must be <= train.steps=300; nearest legal: 300"),
    ("elastic.spares=-1", "elastic.spares=-1: must be >= 0; nearest legal: 0"),
    ("elastic.min_workers=-1", "elastic.min_workers=-1: must be >= 0; nearest legal: 0"),
    ("elastic.max_workers=-1", "elastic.max_workers=-1: must be >= 0; nearest legal: 0"),
    ("elastic.hang_seconds=0", "elastic.hang_seconds=0.0: must be > 0"),
    ("elastic.faults=[3:burn:1]", "elastic.faults=3:burn:1: must be STEP:KIND:RANK[:SECTION], KIND kill|"),
    ("run.time_limit=soon", "run.time_limit=soon: must be seconds or H:MM:SS; nearest legal: 3600, 1:00:00"),
    ("train.on_spike=pray", "train.on_spike=pray: unknown; nearest legal: "),
    ("model.heads=5", "model.heads=5: must divide model.d_model=128"),
    ("model.kv_heads=3", "model.kv_heads=3: must divide model.heads=4; nearest legal: 2, 4, 1"),
    ("train.global_batch=0", "train.global_batch=0: must be >= 1"),
    ("tensor.axes.q=2", "tensor.axes.q=2: tensor=1d has no such axis; nearest legal: t"),
    ("tensor.axes.t=0", "tensor.axes.t=0: must be >= 1; nearest legal: 1"),
    ("tensor.layout=batch:t", "tensor.layout=batch:t: only for tensor=layout"),
    ("data=text", "data.path=: data=text needs a file, a folder or a glob"),
    ("data.validation=0", "data.validation=0: eval.every=50 needs a held-out split"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "line"), WRONG, ids=[argument for argument, _ in WRONG])
def test_one_mistake_is_one_line(argument, line):
    found = refused(argument)
    assert len(found) == 1 and found[0].startswith(line) and "\n" not in found[0], found


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tensor=serial", "tensor.axes.t=2"], "tensor.axes.t=2: tensor=serial has no such axis; nearest legal: none"),
        (["tensor=3d", "tensor.axes.t=2"], "tensor.axes.t=2: tensor=3d has no such axis; nearest legal: x, y, z"),
        (["branch=dsp", "branch.axes.t=2"], "branch.axes.t=2: tensor=1d has an axis t already"),
        (["branch=dsp", "branch.axes.data=2"], "branch.axes.data=2: the names stage and data are reserved"),
        (["tensor=layout", "tensor.axes.stage=2"], "tensor.axes.stage=2: the names stage and data are reserved"),
        (["tensor=layout", "tensor.axes={a-b: 2}"], "tensor.axes.a-b=2: an axis is named by letters"),
        (["model.positions=rope", "model.d_kv=17"], "model.d_kv=17: model.positions=rope needs an even d_kv"),
        (["model.positions=rope", "model.heads=128"], "model.heads=128: model.positions=rope needs an even"),
        (["branch=dsp_csub", "branch.slice_via=all_gather"], "branch.slice_via=all_gather: branch=dsp_csub has no all"),
    ],
)  # fmt: skip
def test_one_mistake_in_context_is_one_line(arguments, line):
    found = refused(*arguments)
    assert len(found) == 1 and found[0].startswith(line), found


@pytest.mark.parametrize("name", ["gpt_quik", "gpt176b", ""])
def test_an_unknown_experiment(name):
    with pytest.raises(ConfigError) as error:
        compose([f"+experiment={name}", "train.steps=0", "tensor.axes.t=2"])
    first, *others = error.value.violations
    assert first.startswith(f"experiment={name}: unknown; nearest legal: ") and "gpt_quick" in first
    assert others == ["train.steps=0: must be >= 1; nearest legal: 1"]  # the axes hang on the experiment


def test_all_mistakes_at_once():
    wrong = ["train.stepz=1", "model=nope", "optimizer.lr=fast", "~seed.x", "train.steps=-3", "precision=fp16"]
    assert [line.split("=")[0].split(":")[0] for line in refused(*wrong)] == [
        "train.stepz",
        "model",
        "optimizer.lr",
        "~seed.x",
        "precision",
        "train.steps",
    ]
    related = refused("train.stepz=1", "train.global_batch=0", "model.heads=5", "tensor.axes.q=2", "parallel.zero=2")
    assert len(related) == 5


NEUTRAL = """
parallel.zero=0 pipeline=none pipeline.stages=1 pipeline.chunks=1 branch=none branch.axes.g=1 recompute=none
checkpoint.every=0 checkpoint.resume=auto elastic.spares=0 elastic.min_workers=0 elastic.max_workers=0 train.stop_at=0
model.fused_dropout=false tensor=serial tensor.axes.t=1 eval.every=0 pipeline.scatter_gather=true
elastic.snapshot_every=0
""".split()


def test_neutral_values_are_accepted():
    assert compose([QUICK, *NEUTRAL]).tensor.axes == {}


def test_every_key_declares_what_it_means_and_its_default_is_legal():
    assert list(KEYS) == list(flat_values(Config()))
    assert all(key.guidance and "\n" not in key.guidance for key in KEYS.values())
    assert wrong_configuration(Config()) == []


def test_the_page_of_all_keys_is_what_is_declared():
    done = subprocess.run([sys.executable, "-m", "platform.config.reference"], capture_output=True, text=True)
    assert done.stdout == (ROOT / "docs" / "configuration.md").read_text(), done.stderr


def test_violations_knows_schemes_by_their_tables():
    assert wrong_configuration(Config(tensor=Tensor(scheme="foo")))[0].startswith("tensor.scheme=foo: ")
    assert wrong_configuration(Config(branch=Branch(kind="dsp_csub")))[0].startswith(
        "branch.kind=dsp_csub: a branch's name with"
    )
    mine = Tensor(scheme="foo", axes={"u": 2}, regions={"mlp": {"d_ff": ["u"]}})
    assert wrong_configuration(Config(tensor=mine)) == []
    mine.order = ["v"]
    assert "tensor.regions.mlp.d_ff=u: no such axis in tensor.order; nearest legal: v" in wrong_configuration(
        Config(tensor=mine)
    )


# The command.


def test_the_configuration_is_shown(capsys):
    assert main(["--cfg", "job", "--resolve", QUICK, "train.steps=7"]) == 0
    assert "steps: 7\n" in capsys.readouterr().out
    assert main([QUICK, "--cfg", "job", "--package", "eval", "seed=3"]) == 0  # flags and keys in any order
    assert capsys.readouterr().out == "every: 50\nbatches: 4\n"
    assert main(["--cfg", "job", "-p", "trian", QUICK]) == 2
    assert capsys.readouterr().err.startswith("config: --package=trian: no such part; nearest legal: train")


def command(*arguments: str, cwd) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "platform.launch", *arguments], cwd=cwd, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["--help"],
            [
                "+experiment=gpt_quick",
                "tensor: 1d, 1d_sp, 2d, 2d_gather, 2p5d, 3d, 3d_literal, layout, mesh_tf_2d, mesh_tf_3d,",
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
    (own / "experiment" / "later.yaml").write_text("# @package _global_\nprecision: fp16\n")
    (own / "experiment" / "broken.yaml").write_text("# @package _global_\ntrain: {steps: 9\n")
    (own / "model").mkdir()
    (own / "model" / "my_model.yaml").write_text("layers: 1\nheads: 2\n")
    files = ["--config-dir", str(own)]
    assert main([*files, "+experiment=my_run"]) == 0
    [(name, config)] = driver.runs
    assert (name, config.train.steps, config.model.layers, config.tensor.axes) == ("my_run", 9, 1, {"t": 2})
    for name, line in [
        ("typo", "experiment=typo: train.stepz: unknown key; nearest legal: train.steps"),
        ("later", "precision=fp16: not built yet"),
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


@pytest.mark.parametrize("arguments", ["['--cfg', 'job']", "['--help']", f"['{QUICK}', 'train.steps=0']",
                                       f"['{QUICK}', 'data=text', 'data.path=/nowhere']",
                                       f"['{QUICK}', 'parallel.data=-1', 'tensor.axes.t=3']",
                                       f"['{QUICK}', 'elastic.max_workers=1']"])  # fmt: skip
def test_short_answers_import_nothing_heavy(tmp_path, arguments):
    heavy = "bool({'torch', 'ray', 'wandb'} & set(sys.modules))"
    script = f"import sys, platform.launch; platform.launch.main({arguments}); sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=tmp_path).returncode == 0


# What makes a run this run.


def test_plain_data_and_back():
    config = compose([QUICK, "tensor=3d", "branch=dsp", "branch.axes.g=2"])
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(ConfigError, match="train.stepz: unknown key"):
        Config.from_dict({"train": {"stepz": 3}})


def test_identity():
    here = identity(compose([QUICK]))
    same = [
        "tensor=3d",
        "parallel.data=1",
        "cluster=processes",
        "train.steps=7",
        "train.microbatch=2",
        "precision=fp64",
    ]
    assert identity(compose([QUICK, *same, "data.cache=x", "eval.every=1"])) == here
    for other in ("seed=1", "model.dropout=0.1", "optimizer.lr=1", "train.global_batch=8", "data=synthetic"):
        assert identity(compose([QUICK, other])) != here, other


def test_conf_is_found():
    assert (launch.CONF / "config.yaml").is_file()
