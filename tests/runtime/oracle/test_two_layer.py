"""Mesh-TensorFlow's two layers: its layouts by name equal one process, and cost what its Table 1 says."""

from __future__ import annotations

import pytest

from platform.launch import compose_config, main
from platform.plan.step_collectives import WORLD_SUMS, communication
from platform.predict.make_plan import make_plan
from tests.harness.oracle import compare, configure, counted, prove, run, serial

B, IO, H = 16, 8, 24
R, C, P = 2, 2, 2
N = 4

# scheme -> (axes, all-reduced elements per process as Table 1 prints them, those of the bias, which it drops)
TABLE_1 = {
    "mesh_tf_empty": ({"all": N}, 0, 0),
    "mesh_tf_data": ({"all": N}, IO * H, H),
    "mesh_tf_model": ({"all": N}, IO * B, 0),
    "mesh_tf_2d": ({"rows": R, "cols": C}, IO * (B // R + H // C), H // C),
    "mesh_tf_3d": (
        {"rows": R, "cols": C, "planes": P},
        B // R * IO // P + B // R * H // C + IO // P * H // C,
        H // C,
    ),
}


def two_layer(scheme: str = "serial", axes: dict | None = None, microbatch: int = B, **more):
    model = {"kind": "two_layer", "length": 1, "io": IO, "hidden": H, "vocab": 1000}
    return configure(scheme, axes, microbatch=microbatch, global_batch=B, **model, **more)


@pytest.mark.parametrize("scheme", TABLE_1)
def test_table_1(scheme):
    """Elements that every rank all-reduces in a step: Table 1's column, once for the forward pass and once more for
    the backward pass."""
    axes, printed, bias = TABLE_1[scheme]
    c = two_layer(scheme, axes)
    _, results = prove(c)
    for r in results:
        *model, metrics = r.log
        assert metrics.elements == WORLD_SUMS
        assert {launch.op for launch in model} <= {"all_reduce"}
        assert sum(launch.elements for launch in model) == 2 * printed + bias


@pytest.mark.parametrize("scheme", TABLE_1)
def test_with_accumulation_and_data_parallel(scheme):
    axes = TABLE_1[scheme][0]
    c = two_layer(scheme, axes, microbatch=4, data=1 if len(axes) == 3 else 2)
    plan, results = run(c)
    compare(c, plan, results, serial(c))
    assert counted(results) == communication(plan)


def planned(scheme: str, *arguments: str):
    return make_plan(compose_config(["+experiment=two_layer", f"tensor={scheme}", *arguments]))


def test_the_inefficient_layout_works_and_warns():
    (warning,) = planned("mesh_tf_empty", "tensor.axes.all=4").warnings
    assert warning == "axes all split no dim of w, v: computed 4 times over"
    for scheme, (axes, _, _) in TABLE_1.items():
        if scheme != "mesh_tf_empty":
            assert not planned(scheme, *(f"tensor.axes.{a}={n}" for a, n in axes.items())).warnings


def test_the_illegal_layout_is_refused(capsys, monkeypatch):
    """By einsum, both dims, axis and what would be legal; before any process starts."""
    from platform.cluster import driver

    monkeypatch.setattr(driver, "drive_run", lambda *_, **__: pytest.fail("the driver was called"))
    assert main(["+experiment=two_layer", "tensor=mesh_tf_illegal", "tensor.axes.all=2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "config: tensor: illegal layout: axis all would split both batch and hidden in project w:"
        " mlp[length batch hidden] and 2 more; legal: batch or hidden on another axis, or on none"
    )


def test_an_odd_width_names_its_key(capsys):
    assert main(["+experiment=two_layer", "model.io=7", "tensor=mesh_tf_3d", "tensor.axes.planes=2"]) == 2
    assert "model.io=7 is not divisible by tensor.axes.planes=2" in capsys.readouterr().err


def test_it_generates_no_text(capsys):
    assert main(["+experiment=two_layer", "monitor.sample=5"]) == 2
    assert "monitor.sample=5: model.kind=two_layer generates no text" in capsys.readouterr().err
