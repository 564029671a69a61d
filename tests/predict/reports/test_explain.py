"""What `python -m platform.plan` prints is what the counters measure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from platform.model import build_model
from platform.plan.layout import is_at_index_zero
from platform.plan.plan_summary import describe
from platform.plan.step_collectives import communication, step_collectives
from platform.predict.make_plan import make_plan
from platform.predict.plan_report import bytes_per_layer, explain_plan, render_explanation
from tests.harness.oracle import compare, configure, counted, run, serial

CASES = [
    ("1d", {"t": 2}, {"g": 2}),
    ("1d_sp", {"t": 2}, {}),
    ("2d_gather", {"r": 2, "c": 2}, {}),
    ("3d", {"x": 1, "y": 2, "z": 2}, {"g": 2}),
]


def configured(scheme, axes, branch_axes, **more):
    branch = "dsp" if branch_axes else "none"
    return configure(scheme, axes, branch=branch, branch_axes=branch_axes, **more)


def explained(c, plan):
    return explain_plan(plan, build_model(c.model), moments=2, tiers={"node": 2})


@pytest.mark.parametrize(("case", "zero"), [*((case, 0) for case in CASES), (CASES[0], 1), (CASES[1], 3)], ids=str)
def test_the_rows_add_up_to_what_is_counted(case, zero):
    c = configured(*case, data=2 if len(case[1]) == 1 else 1, zero=zero)
    plan, results = run(c)
    report = explained(c, plan)
    total: Counter[str] = Counter()
    for row in report["collectives"]:
        total[f"{row['op']}/{row['axes']}"] += row["bytes"]
    assert dict(total) == report["communication"] == counted(results)
    launched = Counter((x.op, "+".join(x.axes), x.elements) for x in results[0].log)
    rows: Counter[tuple[str, str, int]] = Counter()
    for row in report["collectives"]:
        rows[row["op"], row["axes"], row["elements"]] += row["launches"]
    assert rows == launched


def test_what_sub_grid_zero_holds_and_launches():
    """D&SP-cSub: the rows add up to the counted bytes, every rank launches its rows, and the others hold less."""
    c = configure("1d", {"t": 2}, branch="dsp_csub", branch_axes={"g": 2}, data=2)
    plan, results = run(c)
    report = explained(c, plan)
    assert report["communication"] == counted(results)
    assert sum(row["bytes"] for row in report["collectives"]) == sum(counted(results).values())
    elsewhere = report["elsewhere"]
    assert elsewhere["parameters_per_worker"] < report["parameters_per_worker"]
    assert elsewhere["saved_elements_per_worker"]["activations"] < report["saved_elements_per_worker"]["activations"]
    for r in results:
        rows: Counter[str] = Counter()
        for _, x, launches in step_collectives(plan):
            rows[x.op] += launches if is_at_index_zero(x.only, plan.mesh.rank_coordinates(r.rank)) else 0
        assert rows == Counter(x.op for x in r.log)
    text = render_explanation(plan, report)
    assert "only at" in text and "g=0" in text and "per worker of another sub-grid" in text
    assert report["branch_messages"] == {
        "order": "inner",
        "inner": {"inside a node": 8, "between nodes": 0}, "outer": {"inside a node": 4, "between nodes": 4},
    }  # fmt: skip


def test_layers_are_folded():
    rows = {}
    for layers in (2, 6):
        c = configure("1d", {"t": 2}, layers=layers)
        rows[layers] = explained(c, make_plan(c))["collectives"]
    assert len(rows[2]) == len(rows[6])
    up = {n: next(r for r in table if r["operation"] == "project layers.*.mlp.up") for n, table in rows.items()}
    assert (up[2]["times"], up[6]["times"]) == (2, 6)
    assert up[6]["bytes"] == 3 * up[2]["bytes"]
    assert up[6]["phase"] == "backward"


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layers_bytes_are_what_one_layer_more_moves(case, recompute):
    """Its activations, its gathered weights, what it keeps in parts, and its part of the gradients' reduction."""
    plans = [make_plan(configured(*case, data=2, layers=layers, recompute=recompute)) for layers in (2, 3)]
    two, three = (sum(communication(plan).values()) for plan in plans)
    assert [bytes_per_layer(plan) for plan in plans] == [three - two] * 2 and three > two


def test_a_layer_has_its_share_of_a_buffer_s_padding():
    """Of buffers that ZeRO pads, counted in a run: what they move is as their elements, padding too."""
    c = configure(data=3, zero=1, d_model=10, heads=2, d_ff=7, microbatch=4, global_batch=12, layers=3)
    plan, results = run(c)
    assert any(b.elements > sum(b.sizes) for b in plan.buckets)
    moved = counted(results)["reduce_scatter/data"] + counted(results)["all_gather/data"]
    share = sum(
        b.elements * sum(n for p, n in zip(b.parameters, b.sizes, strict=True) if p.name.startswith("layers."))
        / sum(b.sizes) for b in plan.buckets
    )  # fmt: skip
    assert bytes_per_layer(plan) == pytest.approx(moved * share / sum(b.elements for b in plan.buckets) / 3, rel=1e-9)


def test_groups_partition_the_ranks():
    c = configured(*CASES[0], data=2)
    groups = explained(c, make_plan(c))["groups"]
    assert groups["t"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert all(sorted(r for g in members for r in g) == list(range(8)) for members in groups.values())


def test_text():
    c = configured(*CASES[0], data=2)
    plan = make_plan(c)
    text = render_explanation(plan, explained(c, plan))
    assert text.startswith(describe(plan))
    for key, n in communication(plan).items():
        assert f"  {key}" in text and f"{n:,}" in text
    assert "layers.*.attention.query" in text and "layers.1." not in text


def test_stages_and_ranks_beyond_a_few_are_folded():
    c = configure("serial", pipeline="1f1b", stages=12, layers=12, data=10, microbatch=1, global_batch=120)
    plan = make_plan(c)
    text = render_explanation(plan, explained(c, plan))
    assert [line.split()[:2] for line in describe(plan).splitlines() if "stage" in line.split()[:1]] == [
        ["stage", "0"], ["stage", "1"], ["stage", "11"],
    ]  # fmt: skip
    assert "  ...             9 more" in describe(plan)
    assert "  stage        12  [0 10 20 .. 110] [1 11 21 .. 111]" in text and "] and 8 more" in text


def test_the_order_of_the_branch_axes_decides_the_messages_and_nothing_else():
    inner, outer = (configured("1d", {"t": 2}, {"g": 2}, data=2) for _ in range(2))
    outer.branch.order = "outer"
    plan, results = run(outer)
    assert list(make_plan(inner).mesh.axes) == ["stage", "data", "t", "g"]
    assert list(plan.mesh.axes) == ["stage", "g", "data", "t"]
    compare(outer, plan, results, serial(outer))
    assert sum(counted(results).values()) == sum(communication(make_plan(inner)).values())
    messages = [explained(c, make_plan(c))["branch_messages"] for c in (inner, outer)]
    assert [m.pop("order") for m in messages] == ["inner", "outer"]
    assert messages[0] == messages[1] == {
        "inner": {"inside a node": 16, "between nodes": 0}, "outer": {"inside a node": 8, "between nodes": 8}
    }  # fmt: skip


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "platform.plan", *arguments], capture_output=True, text=True)


def test_the_command():
    tiers = "--tiers", "node=4,rack=8"
    done = command("+experiment=gpt_quick", "branch=dsp", "branch.axes.g=2", "parallel.data=4", *tiers, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mesh"] == {"stage": 1, "data": 4, "t": 2, "g": 2}
    assert report["branch_messages"]["inner"] == {"inside a node": 32, "between nodes": 0, "between racks": 0}
    assert sum(row["bytes"] for row in report["tiers"]["rows"]) == sum(report["communication"].values())


@pytest.mark.parametrize(
    ("tiers", "why"),
    [("node=2,rack=3", "rack=3 must be a multiple of node=2"), ("node=0", "node=0 must be"), ("8", "such as node=8")],
)
def test_tiers_that_are_none_are_refused(tiers, why):
    done = command("+experiment=gpt_quick", "--tiers", tiers)
    assert done.returncode == 2 and why in done.stderr


def test_the_command_refuses():
    done = command("+experiment=gpt_quick", "model.d_ff=511")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("config: model.d_ff=511 is not divisible by tensor.axes.t=2")


def test_a_reader_may_leave():
    line = f"{sys.executable} -m platform.plan +experiment=gpt_quick --shrink | true"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_unused_axes_are_named():
    done = command("+experiment=two_layer", "tensor=mesh_tf_empty", "tensor.axes.all=4")
    assert "warning         axes all split no dim of w, v: computed 4 times over" in done.stdout
