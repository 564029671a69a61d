"""Layouts of the user's own, typed or in a file."""

import pytest

from platform.config.layout_rules import parse_layout
from platform.launch import compose_config
from tests.harness.commands import QUICK, mistakes

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
    assert set(regions) == {"stream", "attention", "core", "mlp", "experts", "logits"}
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
    violations = mistakes("tensor=layout", "tensor.axes.rows=2", "tensor.axes.cols=2", f"tensor.layout={layout}")
    assert len(violations) == len(lines)
    assert all(line in violation for violation, line in zip(violations, lines, strict=True))


def test_the_axes_of_a_layout_are_ordered_as_written():
    layout = ["tensor=layout", "tensor.axes.b=2", "tensor.axes.a=2", "tensor.layout=heads:a;batch:b"]
    assert compose_config([QUICK, *layout]).tensor.order == ["b", "a"]
