"""A plan is data: what it is written as gives the same plan back, and its digest tells every difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from platform.launch import compose_config
from platform.plan.plan_data import decode_plan, encode_plan, plan_digest, plan_summary
from platform.predict.make_plan import make_plan
from tests.fuzz.draw_data import write_files
from tests.fuzz.draw_plans import SCHEDULES, SCHEMES, draw_case
from tests.fuzz.plans import opened, planned


def plans(count: int):
    """Yield plans of every scheme and schedule, as the fuzzer draws them."""
    with TemporaryDirectory() as folder, opened():
        write_files(Path(folder))
        for seed in range(count):
            r = Random(seed)
            yield from planned(draw_case(r, r.choice(SCHEMES), r.choice(SCHEDULES), "", Path(folder)))


def test_random_plans_come_back_equal_and_have_digests_of_their_own():
    drawn = list(plans(60))
    assert len(drawn) > 30
    digests = {}
    for plan in drawn:
        again = decode_plan(json.loads(json.dumps(encode_plan(plan))))
        assert again == plan and plan_digest(again) == plan_digest(plan) == plan_summary(again)["digest"]
        digests.setdefault(plan_digest(plan), plan)
        assert digests[plan_digest(plan)] == plan, "one digest, two plans"


@pytest.mark.parametrize("capacity", [1.25, 0])
def test_a_plan_with_experts_comes_back(capacity):
    plan = make_plan(compose_config(["+experiment=moe_quick", f"model.capacity_factor={capacity}"]))
    assert decode_plan(json.loads(json.dumps(encode_plan(plan)))) == plan


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "fp64"},
        {"microbatches": 3},
        {"sharded": ("data",)},
        {"scatter_gather": False},
        {"parameters": ()},
        {"chunks": ()},
        {"sizes": {"batch": 1}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_difference_has_another_digest(change):
    plan = make_plan(compose_config(["+experiment=gpt_quick"]))
    assert plan_digest(replace(plan, **change)) != plan_digest(plan)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        {"is": "Plan"},
        {"is": "map", "items": []},
        {"is": "system"},
        {"is": "Plan", "more": 1},
        None,
        {"is": []},
        {"items": 3},
    ],
    ids=repr,
)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ValueError, match="is no plan"):
        decode_plan(data)
