"""Gradients that are kept: each owns its storage and is laid out as its parameter, whatever computed it."""

from __future__ import annotations

import pytest

from platform.config import Config
from tests.oracle import configure, prove


def strided(pipeline: str, precision: str = "fp64", **more) -> Config:
    """Configure parameters that are split over an axis which no activation has: their gradients are slices."""
    stages = 1 if pipeline == "none" else 2
    sizes = {"length": 8, "vocab": 64, "microbatch": 2, "global_batch": 8, **more}
    c = configure("layout", {"a": 2}, pipeline=pipeline, stages=stages, precision=precision, **sizes)
    c.tensor.regions, c.tensor.parameters = {"stream": {}}, {"all": {"d_ff": "a"}}
    return c


def one_token(pipeline: str, length: int = 1, **more) -> Config:
    """Configure biases of activations that have one token per rank: a bias' gradient is a view of the activation's."""
    stages = 1 if pipeline == "none" else 2
    chunks = 2 if pipeline == "interleaved" else 1
    axes, rules = ({"a": length}, {"length": "a"}) if length > 1 else ({}, None)
    scheme = "layout" if rules else "serial"
    sizes = {"length": length, "microbatch": 1, "global_batch": 7, "layers": 2 * chunks, **more}
    return configure(scheme, axes, rules=rules, pipeline=pipeline, stages=stages, chunks=chunks, **sizes)


def test_slices_of_gradients_update_the_right_elements():
    prove(strided("zb_h1"))


@pytest.mark.xfail(strict=True, reason="a bias' gradient is a view of the output gradient that is kept for later")
@pytest.mark.parametrize("length", [1, 2])
def test_one_token_per_rank(length):
    prove(one_token("zb_h1", length))
