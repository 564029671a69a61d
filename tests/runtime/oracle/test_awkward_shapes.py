"""Shapes that no scheme likes: they work, or are refused with meshes of as many workers that do."""

from __future__ import annotations

import re
from math import prod

import pytest
import yaml

from platform.boundary.refusals import ConfigError
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from tests.harness.oracle import compare, configure, counted, run, serial

SEQUENCE = {"microbatch": 1, "global_batch": 1}
WORKS = {
    "batch below p^2": ("3d", {"x": 2, "y": 2, "z": 2}, {"microbatch": 2, "global_batch": 2}),
    "one sequence, 1d": ("1d", {"t": 4}, SEQUENCE),
    "one sequence, 1d_sp": ("1d_sp", {"t": 4}, SEQUENCE),
    "one sequence, 2d": ("2d", {"r": 1, "c": 4}, SEQUENCE),
    "one sequence, 3d": ("3d", {"x": 1, "y": 2, "z": 4}, SEQUENCE),
    "one sequence, 3d_literal": ("3d_literal", {"x": 1, "y": 4, "z": 1}, None),
    "one token, odd vocab": ("1d", {"t": 2}, {"length": 1, "vocab": 7}),
    "vocab below its axes": ("3d", {"x": 1, "y": 4, "z": 1}, {"vocab": 3}),
    "not square, 2d": ("2d", {"r": 4, "c": 2}, {}),
    "not square, 2d_gather": ("2d_gather", {"r": 1, "c": 8}, {}),
    "not square, 2p5d": ("2p5d", {"d": 2, "r": 1, "c": 4}, {}),
    "3 and 6 workers of 6 heads": ("2d", {"r": 2, "c": 3}, {"d_model": 24, "heads": 6}),
}
REFUSED = {
    "batch below p^2, 3d_literal": ("3d_literal", {"x": 2, "y": 2, "z": 1}, {"microbatch": 2, "global_batch": 2}),
    "one sequence, 2d": ("2d", {"r": 2, "c": 2}, SEQUENCE),
    "one sequence, 2p5d": ("2p5d", {"d": 2, "r": 2, "c": 1}, SEQUENCE),
    "heads not divisible, 2d": ("2d", {"r": 1, "c": 4}, {"heads": 6, "d_model": 24}),
    "heads not divisible, 3d": ("3d", {"x": 1, "y": 4, "z": 4}, {}),
}


def shaped(case):
    tensor, axes, more = case
    if more is None:  # 3d_literal splits the batch over y as well: one sequence per rank of it
        more = {"microbatch": 4, "global_batch": 4}
    return configure(tensor, axes, **{"layers": 1, **more})


@pytest.mark.parametrize("case", WORKS)
def test_works(case):
    c = shaped(WORKS[case])
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    assert counted(results) == communication(plan)


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_the_meshes_that_do(case):
    c = shaped(REFUSED[case])
    with pytest.raises(ConfigError) as error:
        make_plan(c)
    *_, last = error.value.violations
    listed = [yaml.safe_load(m) for m in re.findall(r"{.*?}", last.partition("tensor.axes of as many workers")[2])]
    workers = prod(c.tensor.axes.values())
    assert 1 <= len(listed) <= 4
    for axes in listed:
        c.tensor.axes = axes
        assert make_plan(c).mesh.world_size == workers


def test_no_mesh_is_listed_where_none_does():
    few = {"microbatch": 2, "global_batch": 2}
    for c, nearest in (
        (configure("1d", {"t": 3}), "tensor.axes.t=2 or 4"),
        (configure("3d_literal", {"x": 2, "y": 2, "z": 2}, **few), "train.microbatch=4"),
    ):
        with pytest.raises(ConfigError) as error:
            make_plan(c)
        assert any(nearest in line for line in error.value.violations)
        assert not any("as many workers" in line for line in error.value.violations)
