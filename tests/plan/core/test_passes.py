"""Passes of generation: how many texts they take at least."""

from __future__ import annotations

import pytest

from platform.plan.generation_passes import generation_batch_unit, generation_groups
from platform.predict.choose_schedule import build_generation_model
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure

EXPERTS = {**MODELS["experts"], "layers": 1, "data": 4, "experts_of": 4}
PLANS = {
    "batch over replicas": ({"data": 3}, {}, 3),
    "length over t": ({"tensor": "1d_sp", "axes": {"t": 2}, "data": 3}, {}, 6),
    "contexts": ({"context": 4, "context_kind": "nested", "context_heads": 2, "data": 2}, {}, 8),
    # whose batch is not split over the axis expert: each replica has a text for both ranks of a
    "experts over another axis": ({**EXPERTS, "tensor": "layout", "axes": {"a": 2}, "rules": {}}, {"batch": ["a"]}, 8),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_fewest_texts_of_a_pass_can_be_planned(name):
    more, experts, texts = PLANS[name]
    c = configure(**{"microbatch": 4, "global_batch": 48, **more})
    c.tensor.regions.update({"experts": experts} if experts else {})
    plan = make_plan(c)
    assert generation_batch_unit(plan.scheme, plan.mesh) == texts
    assert generation_groups(plan, build_generation_model(c))
