"""What users may type, and what an experiment becomes with it."""

import os
import re
import string
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from platform.config.arguments import expand_sweep_jobs, parse_typed_values, rewrite_argument
from platform.config.composition import open_composer
from platform.launch import compose_config
from tests.harness.commands import QUICK


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
    assert rewrite_argument(typed) == hydra
    assert rewrite_argument(hydra) == hydra


TEXT = st.text(string.ascii_letters + string.digits + string.punctuation + " ").filter(
    lambda text: "${" not in text and text[:1] not in ("'", '"')
)


@given(TEXT.filter(lambda text: text.strip().lower() != "null"))  # its default is null
def test_a_layout_reaches_us_as_it_was_typed(text):
    assert parse_typed_values([f"tensor.layout={text}"]) == {"tensor.layout": text}


@given(TEXT)
def test_any_value_is_taken_and_one_that_is_no_grammar_is_text(text):
    argument = f"data.path={text}"
    assert set(parse_typed_values([argument])) == {"data.path"}
    if rewrite_argument(argument) != argument:
        assert parse_typed_values([argument]) == {"data.path": text}


# What a parser of YAML 1.1, or of Hydra's grammar, takes for a number, a truth value or a date.
NUMBERS = st.one_of(
    st.sampled_from(
        "on off yes No y true False TRUE nan .NaN inf -.inf null NULL 1:30:00 2026-10-01 0o17 -0 +5 1__0".split()
    ),
    st.from_regex(r"[+-]?(0|[1-9][0-9_]{0,6})(\.[0-9_]{0,4})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
    st.from_regex(r"0[0-7]{1,4}|0x[0-9a-f]{1,4}|0b[01]{1,4}|[0-9]{4}-[0-9]{2}-[0-9]{2}", fullmatch=True),
)


@given(NUMBERS.filter(lambda word: ":" not in word), NUMBERS)
def test_a_text_takes_the_characters_as_typed(one, two):
    arguments = [f"run.dir={one}", f"data.sources.web.path={two}", f"eval.prompts=[{one}, {two}]"]
    arguments += [f"cluster.labels={{{one}: {two}}}", f"branch.append={{b: [{two}]}}"]
    typed = {"run.dir": one, "data.sources.web.path": two, "eval.prompts": [one, two]}
    assert parse_typed_values(arguments) == typed | {"cluster.labels": {one: two}, "branch.append": {"b": [two]}}
    jobs = expand_sweep_jobs([f"data.field={one},{two}"], multirun=True)
    assert [parse_typed_values(job) for job in jobs] == [{"data.field": one}, {"data.field": two}]


@settings(max_examples=3, phases=[Phase.generate])
@given(st.lists(NUMBERS, min_size=40, max_size=60, unique=True))
def test_a_text_in_a_file_is_what_is_written(words):
    with TemporaryDirectory() as folder:
        for name in ("experiment", "data"):
            os.mkdir(f"{folder}/{name}")
        names = {word: word for word in words if re.fullmatch(r"[\w.-]+", word) and word.lower() != "null"}
        labels = "\n".join(f"    {name}: {label}" for name, label in names.items())
        with open(f"{folder}/experiment/mine.yaml", "w") as file:
            file.write("# @package _global_\nseed: 1_0\n")
            file.write("defaults: [gpt_quick, override /data: mine, override /cluster: ray, _self_]\n")
            file.write(f"eval: {{prompts: [{', '.join(words)}]}}\ncluster:\n  labels:\n{labels}\nhydra:\n  sweeper:\n")
            file.write(f"    params:\n      monitor.group: {words[1]}\n")
        with open(f"{folder}/data/mine.yaml", "w") as file:
            file.write(f"kind: text\npath: /x\nfield: {words[0]}\n")
        config = compose_config(["+experiment=mine", "eval.every=1"], config_dir=folder)
        with open_composer(folder) as composer:
            assert composer.find_sweep_arguments(["+experiment=mine"]) == ([f"monitor.group={words[1]}"], [[]])
    assert (config.data.field, config.eval.prompts, config.seed) == (words[0], words, 10)
    assert config.cluster.labels == names


def test_what_hydra_means_keeps_its_meaning():
    typed = parse_typed_values(["run.dir='1e5'", 'data.field="1_0"', "monitor.group=${seed}", "train.steps=1_0"])
    assert typed == {"run.dir": "1e5", "data.field": "1_0", "monitor.group": "${seed}", "train.steps": 10}
    assert parse_typed_values(["run.dir=str(1e5)", "train.steps=null"]) == {"run.dir": "100000.0", "train.steps": None}
    for sweep in ("range(9,11)", "choice(9,10)", "sort(10,9,reverse=false)", "tag(a,choice(9,10))"):
        jobs = expand_sweep_jobs([f"run.dir={sweep}"], multirun=True)
        assert sorted(map(str, jobs)) == ["['run.dir=10']", "['run.dir=9']"]
    assert compose_config([QUICK, "tensor=layout", "tensor.layout=null", "tensor.axes={t: 1}"]).tensor.layout is None


def test_typed_axes_replace_or_join():
    assert compose_config([QUICK, "tensor.axes.t=4"]).tensor.axes == {"t": 4}
    assert compose_config([QUICK, "tensor.axes={t: 1}"]).tensor.axes == {"t": 1}
    three = compose_config([QUICK, "tensor=3d", "tensor.axes={z: 2, y: 2}", "tensor.axes.x=1"])
    assert three.tensor.axes == {"z": 2, "y": 2, "x": 1}
    assert three.tensor.order == ["x", "y", "z"]


def test_axes_of_another_scheme_are_dropped():
    axes = ["tensor.axes.x=1", "tensor.axes.y=2", "tensor.axes.z=2", "parallel.data=1"]
    assert compose_config([QUICK, "tensor=3d", *axes]).tensor.axes == {"x": 1, "y": 2, "z": 2}
    assert compose_config([QUICK, "tensor=serial"]).tensor.axes == {}
    assert compose_config([QUICK, "tensor=1d_sp"]).tensor.axes == {"t": 2}


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
    mine = compose_config(["+experiment=mine", "train.steps=5"], config_dir=str(tmp_path))
    assert (mine.tensor.axes, mine.branch.axes) == ({"rows": 2}, {"g": 2})
    assert (mine.pipeline.stages, mine.pipeline.chunks, mine.pipeline.file) == (1, 1, "")
    assert mine.optimizer.warmup_steps == 50  # five steps of the same warm-up: the same run, cut short
    sliced = compose_config(["+experiment=mine", "branch=dsp_slice"], config_dir=str(tmp_path))
    assert (mine.branch.slice_via, sliced.branch.slice_via) == ("all_to_all", "all_gather")
    plain = compose_config(["+experiment=mine", "tensor=1d", "branch=none"], config_dir=str(tmp_path))
    assert (plain.tensor.axes, plain.tensor.layout, plain.branch.axes) == ({}, None, {})
    typed = compose_config(["+experiment=mine", "tensor.layout=heads:spare"], config_dir=str(tmp_path))
    assert typed.tensor.axes == {"spare": 2}
    assert typed.tensor.regions["attention"] == {"heads": ["spare"]}


def test_the_experiment_names_the_run_and_every_value_its_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = compose_config([QUICK]).run.dir
    assert run_dir.startswith(f"{tmp_path}/runs/gpt_quick-")
    assert compose_config(["experiment=gpt_quick", "train.steps=300"]).run.dir == run_dir
    others = [
        compose_config([QUICK, a]).run.dir for a in ("seed=1", "tensor=1d_sp", "tensor.axes.t=4", "monitor=wandb")
    ]
    assert len({run_dir, *others}) == 5
    assert compose_config([QUICK, "checkpoint.last=false", "checkpoint.on_stop=false"]).run.dir == run_dir, "same steps"
    assert compose_config([QUICK, "run.dir=there"]).run.dir == f"{tmp_path}/there"
    assert compose_config([QUICK, "data=text", "data.path=~/a"]).data.path == os.path.expanduser("~/a")
