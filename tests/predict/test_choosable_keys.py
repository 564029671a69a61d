"""Keys that a search may choose: each is a part of a contender, one row of a table."""

from copy import deepcopy
from dataclasses import fields

from platform.config.layout_rules import OPEN_KEYS
from platform.launch import compose_config
from platform.predict.contenders import CHOOSABLE, Contender, SearchSpace

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
