"""What plans share in a search (recordings of a model, planned operations, tables of schedules) changes no price: each
finalist, planned once more from nothing, has the same seconds and the same memory."""

from __future__ import annotations

import pytest

from platform.launch import compose_config
from platform.model import forget_models
from platform.plan.operations.recorder import Recorder
from platform.plan.plan_builder import forget_planned
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.search import Finalist, search_plans
from platform.predict.step_price import read_hardware, step_price

TINY = ("model.layers=4", "model.d_model=64", "model.d_ff=128", "model.length=32", "model.vocab=256", "data=synthetic")
OPEN = ("tensor=auto", "pipeline=auto", "parallel.data=-1", "recompute=auto")


def others_from_nothing(finalists: list[Finalist], hardware) -> list:
    """The choices of the finalists that have another price, or other memory, when nothing is shared."""
    differing = []
    for one in finalists:
        forget_planned()
        forget_models()
        plan = make_plan(one.config)
        if (step_price(one.config, plan, hardware), predict_peak_bytes(one.config, plan)) != (
            one.price,
            one.peak_memory,
        ):
            differing.append(one.choice)
    return differing


def finalists(*arguments: str, experiment: str, workers: int, memory: float, hardware: str) -> tuple[list, object]:
    kind = read_hardware(hardware)
    searched = search_plans(compose_config([f"+experiment={experiment}", *arguments]), workers, memory, kind)
    tried = [one.settle(memory) for one in searched.tried]
    [one.peak_memory for one in tried]  # measured now, with what the search shares
    return tried, kind


def test_prices_of_a_search_are_those_from_nothing():
    tried, kind = finalists(*TINY, *OPEN, experiment="gpt_quick", workers=4, memory=1e12, hardware="cpu")
    assert len(tried) > 10 and len({one.choice.recompute for one in tried}) > 1
    assert not others_from_nothing(tried, kind)


def test_recordings_of_other_settings_would_be_found(monkeypatch):
    monkeypatch.setattr(Recorder, "recording_key", property(lambda self: ()))
    tried, kind = finalists(*TINY, *OPEN, experiment="gpt_quick", workers=4, memory=1e12, hardware="cpu")
    assert others_from_nothing(tried, kind)


@pytest.mark.full
def test_prices_of_the_large_search_are_those_from_nothing():
    overrides = "model=gpt_1t", "plan.search=[all]", "train.global_batch=3072"
    tried, kind = finalists(*overrides, experiment="gpt175b", workers=3072, memory=80e9, hardware="a100_80g")
    assert len(tried) >= 8 and not others_from_nothing(tried, kind)
