"""Keys that a search may choose: each is a part of a contender, one row of a table."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, replace
from random import Random

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.layout_rules import OPEN_KEYS
from platform.launch import compose_config
from platform.predict import contenders
from platform.predict.contender_grid import ContenderGrid
from platform.predict.contenders import CHOOSABLE, Contender, SearchSpace
from platform.predict.make_plan import make_plan, plan_quickly
from platform.predict.step_price import read_hardware
from tests.predict.search.test_estimates import draw_contender

CHOICE = Contender("1d", (2,), "interleaved", 2, 2, 4, 2, 2, "whole", 1, 8, "full")


def test_every_key_that_may_be_left_open_is_a_part_of_a_contender():
    typed = {row.key.removesuffix(".kind") for row in CHOOSABLE.values()}
    assert {*OPEN_KEYS} == typed | {"tensor", "tensor.axes"}
    assert [f.name for f in fields(Contender)] == ["scheme", "axes", *CHOOSABLE]


def test_a_contender_is_the_one_of_its_configuration_and_its_arguments_make_it():
    config = compose_config(["+experiment=moe_quick", "plan.search=[all]"])
    space, unchanged = SearchSpace(config), deepcopy(config)
    built = space.build_config(CHOICE)
    assert SearchSpace(built).read_contender() == CHOICE
    assert config == unchanged
    arguments = space.format_overrides(CHOICE)
    assert SearchSpace(compose_config(["+experiment=moe_quick", *arguments])).read_contender() == CHOICE
    assert " ".join(arguments) == (
        "tensor=1d tensor.axes.t=2 pipeline=interleaved pipeline.stages=2 pipeline.chunks=2 parallel.data=4"
        " parallel.context=2 parallel.experts=2 parallel.tensor_experts=whole parallel.zero=1 train.microbatch=8"
        " recompute=full"
    )


def draw_space(rng: Random) -> SearchSpace:
    """All keys open, of a model of few layers whose heads two ranks may not divide."""
    model = rng.choice(("model=llama_8b", "model=gpt3_13b", "model=t5_large_mod branch=none"))
    heads, width = rng.choice((3, 4, 9, 16)), rng.choice((64, 96, 256))
    sizes = f"model.layers=2 model.vocab=3072 model.heads={heads} model.d_kv={width} model.d_model={heads * width}"
    kernel = f"train.attention_kernel={rng.choice(('auto', 'math'))} model.dropout={rng.choice((0, 0, 0.1))}"
    sizes += f" model.kv_heads={rng.choice((1, heads))}" if "llama" in model else ""
    gpus = f"cluster.device=cuda cluster.gpu={rng.choice(('A100-80GB', 'H100-80GB'))} train.global_batch=36"
    return SearchSpace(compose_config(f"{model} {sizes} {kernel} {gpus} precision=bf16 plan.search=[all]".split()))


def offered_but_refused(seed: int, count: int) -> Iterator[tuple[Contender, list[str]]]:
    """Contenders that a launch refuses for their recomputation alone, among random ones."""
    rng, seen = Random(seed), set[tuple]()
    while len(seen) < count:
        space = draw_space(rng)
        grid = ContenderGrid(space, rng.choice((1, 2, 3, 4, 6, 9)), 80e9, read_hardware("h100"))
        choice = draw_contender(rng, grid)
        if choice is None or not plan_quickly(space.build_config(replace(choice, recompute="none"))):
            continue
        for recompute in space.list_recomputations(choice.scheme):
            config = space.build_config(replace(choice, recompute=recompute))
            try:
                make_plan(config)
            except ConfigError as error:
                assert plan_quickly(config) is None
                yield choice, error.violations
        seen.add((choice, *space.list_recomputations(choice.scheme)))


@pytest.mark.parametrize("count", [10, pytest.param(60, marks=pytest.mark.full)])
def test_contenders_never_offer_what_a_launch_refuses(count):
    assert not [*offered_but_refused(3, count)]


def test_negative_control_selective_is_always_offered(monkeypatch):
    """Plans refuse it, and so does a search's quick plan of it."""
    monkeypatch.setattr(contenders, "saves_scores", lambda *_: True)
    assert any("recompute=selective: saves nothing" in str(lines) for _, lines in offered_but_refused(3, 10))
