"""Tokens of experts whose d_ff several ranks split: each of these sends a part of every token to the ranks of other
experts, and the parts are joined there; what is made goes back likewise."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from platform.model import build_model
from platform.plan.operations import experts
from platform.plan.plan_builder import forget_planned
from platform.plan.step_collectives import step_collectives
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from tests.harness.oracle import prove
from tests.runtime.oracle.test_experts import configured

LAYOUTS: dict[str, dict[str, Any]] = {
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}},
    "1d_sp again": {"tensor": "1d_sp", "axes": {"t": 2}, "gathered": "again"},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 1, "y": 2, "z": 2}},
    "branches": {"branch": "dsp", "branch_axes": {"g": 2}},
    "1d_sp branches": {"tensor": "1d_sp", "axes": {"t": 2}, "branch": "dsp", "branch_axes": {"g": 2}},
    "sub-grid 0": {"branch": "dsp_csub", "branch_axes": {"g": 2}},
    "contexts": {"tensor": "1d_sp", "axes": {"t": 2}, "context": 2},
}
KINDS = ("shared", "all tokens", "gpt_oss")


@pytest.fixture
def plans_of(monkeypatch):
    """Function that gives the configuration of a kind of experts over two replicas, its plan, and the plan under which
    each rank sends whole tokens."""

    def make_both(kind: str, groups: int = 2, **more: Any):
        c = configured(kind, groups, **{"data": 2, "layers": 1, **more})
        plan = make_plan(c)
        forget_planned()
        monkeypatch.setattr(experts, "find_sharing_axes", lambda *_: ())
        return c, plan, make_plan(c)

    yield make_both
    forget_planned()


def sent(plan) -> Counter[str]:
    """Bytes that all workers send in a step on the way to experts and back: over `expert`, and over other axes."""
    nbytes: Counter[str] = Counter()
    for place, c, launches in step_collectives(plan):
        if place.startswith(("dispatch", "combine")) and c.dtype == "compute":
            nbytes["expert" if c.axes == ("expert",) else "others"] += launches * plan.traffic_bytes(c)
    return nbytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout, kind):
    more = {"microbatch": 2} if "branches" in layout or "sub-grid" in layout else {}
    prove(configured(kind, 2, data=2, layers=1, **LAYOUTS[layout], **more))


def test_stages_and_recomputation():
    stages = {"pipeline": "1f1b", "stages": 2, "microbatch": 2, "layers": 2, "recompute": "full"}
    prove(configured("all tokens", 2, data=2, **LAYOUTS["1d_sp"], **stages))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["1d_sp", "1d", "3d"])
def test_a_rank_sends_a_part(layout, kind, plans_of):
    """Over all axes no more is moved, where no more experts compute a token than half of their ranks: what a gather
    moves in place of an exchange is as much, but for a rank's own."""
    _, plan, whole = plans_of(kind, 4, data=4, global_batch=16, **LAYOUTS[layout])
    assert 2 * sent(plan)["expert"] == sent(whole)["expert"]
    assert sent(plan).total() <= sent(whole).total() or kind != "shared"  # of rows the most that there can be


def test_of_what_comes_back_a_rank_keeps_its_part(plans_of):
    c, plan, whole = plans_of("all tokens", **LAYOUTS["1d_sp"])
    kept = [count_saved_elements(p, build_model(c.model)).activations for p in (plan, whole)]
    rows = 2 * 4 * 16 * 2 * 32  # ranks that may send all x tokens x experts of each x d_model
    assert kept[1] - kept[0] == rows // 2


@pytest.mark.parametrize(
    "more", [{"groups": 1}, {"tensor_experts": "whole"}, {"d_model": 30, "d_kv": 8, "axes": {"t": 4}}], ids=str
)
def test_whole_tokens_elsewhere(more, plans_of):
    """Without an exchange, for whole experts, and where ranks do not divide the width."""
    _, plan, whole = plans_of("all tokens", **{**LAYOUTS["1d_sp"], **more})
    assert plan.operations == whole.operations
