"""Experts that tensor ranks divide, each whole (parallel.tensor_experts), under every scheme, against one process."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest

from platform.config.layout_rules import expert_axis_sizes
from platform.plan.layout import Layout
from platform.plan.operations.experts import RowEnds
from platform.predict.make_plan import make_plan
from tests.harness.oracle import configure, prove
from tests.harness.pairwise import cover, product
from tests.harness.suite import suite
from tests.runtime.oracle import test_experts
from tests.runtime.oracle.test_experts import FACTORS, KINDS, SCHEMES, configured


@cache
def inside(scheme: str, branch: str) -> int:
    """The ranks that divide whole experts."""
    tensor, axes = SCHEMES[scheme]
    sizes = {} if branch == "none" else {"g": 2}
    c = configure(tensor=tensor, axes=axes, branch=branch, branch_axes=sizes, tensor_experts="whole")
    return prod(expert_axis_sizes(c).values())


def legal(case) -> bool:
    ranks, (_, experts) = inside(case["scheme"], case["branch"]), case["split"]
    return ranks > 1 and KINDS[case["kind"]]["experts"] % (ranks * experts) == 0 and test_experts.legal(case)


WHOLE = product({**FACTORS, "tensor_experts": ["whole"]}, legal)


@suite("oracle of whole experts on tensor ranks (threads)", WHOLE, cover(WHOLE)[:10])
def test_equals_one_process(case):
    test_experts.test_equals_one_process(case)


def test_a_table_says_what_the_key_does():
    """One plan, also of what is no expert; and an axis still splits no batch beside experts."""
    by_key = configured("shared", tensor="1d", axes={"t": 2}, data=2, tensor_experts="whole")
    c = configured("shared", tensor="1d", axes={"t": 2}, data=2)
    c.tensor.regions["experts"] = {"experts": ["t"]}
    widths = {"heads": ["t"], "d_ff": ["t"], "vocab": ["t"]}
    c.tensor.parameters = {"vector": {}, "all": {**widths, "experts": ["t"]}}
    plan, _ = prove(c)
    assert plan.scheme.regions["experts"].restrict_dims(["experts", "d_ff"]) == Layout.build_canonical(
        {"experts": ["t"]}
    )
    shapes = {p.name: plan.local_shape(p) for p in plan.parameters}
    assert shapes["layers.0.mlp.experts.up"] == (2, 24, 32) and shapes["layers.0.mlp.shared.up"] == (12, 32)
    assert plan.operations == make_plan(by_key).operations
    c.tensor.regions["experts"] = {"experts": ["t"], "batch": ["t"]}
    with pytest.raises(Exception, match="axis t would split both"):
        make_plan(c)


def test_negative_control_rows_of_another_rank(monkeypatch):
    """Where tensor ranks make rows of each other's experts, one process must notice."""
    c = configured("shared", 2, tensor="1d_sp", axes={"t": 2}, data=2, tensor_experts="whole", capacity_factor=0.0)
    prove(c)
    whole = RowEnds.exchange_seats

    def seats(*arguments):
        axes, first, each = whole(*arguments)
        return axes, tuple(e ^ each for e in first), each

    monkeypatch.setattr(RowEnds, "exchange_seats", seats)
    with pytest.raises(AssertionError):
        prove(c)
