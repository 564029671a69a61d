"""What users may type, and what an experiment becomes with it."""

import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from platform.config.arguments import parse_typed_values, rewrite_argument
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


@given(TEXT)
def test_a_layout_reaches_us_as_it_was_typed(text):
    assert parse_typed_values([f"tensor.layout={text}"]) == {"tensor.layout": text}


@given(TEXT)
def test_any_value_is_taken_and_one_that_is_no_grammar_is_text(text):
    argument = f"data.path={text}"
    assert set(parse_typed_values([argument])) == {"data.path"}
    if rewrite_argument(argument) != argument:
        assert parse_typed_values([argument]) == {"data.path": text}


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
    here = compose_config([QUICK]).run.dir
    assert here.startswith(f"{tmp_path}/runs/gpt_quick-")
    assert compose_config(["experiment=gpt_quick", "train.steps=300"]).run.dir == here
    others = [
        compose_config([QUICK, a]).run.dir for a in ("seed=1", "tensor=1d_sp", "tensor.axes.t=4", "monitor=wandb")
    ]
    assert len({here, *others}) == 5
    assert compose_config([QUICK, "run.dir=there"]).run.dir == f"{tmp_path}/there"
    assert compose_config([QUICK, "data=text", "data.path=~/a"]).data.path == os.path.expanduser("~/a")
