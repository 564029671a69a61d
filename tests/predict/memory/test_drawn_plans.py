"""What drawn plans of over 2 MB need is what their workers hold, counted storage by storage, within 5 %."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config
from platform.config.validation import violations_of_configuration
from platform.predict.footprint import Footprint
from platform.predict.make_plan import make_plan
from tests.fuzz.draw_training import SETTINGS
from tests.harness.live import count, count_answering
from tests.harness.oracle import MODELS, configure
from tests.harness.planned_memory import predict_answering, predict_training

LEAST = 2_000_000  # bytes: below, what is not modelled (masks, counters) weighs
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": "1d", "axes": {"t": 2}},
    {"tensor": "1d_sp", "axes": {"t": 2}},
    {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    {"tensor": "2d_gather", "axes": {"r": 2, "c": 2}},
    {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"pipeline": "1f1b", "stages": 2},
    {"pipeline": "gpipe", "stages": 2},
    {"pipeline": "zb_h1", "stages": 2},
    {"pipeline": "interleaved", "stages": 2, "chunks": 2},
    {"pipeline": "1f1b", "stages": 2, "tensor": "1d", "axes": {"t": 2}},
]
KINDS = ("gpt", "gpt_untied", "llama", "gqa_tied", "bert", "original", "t5", "latent")


def drawn(r: Random) -> Config:
    """A plan of any layout, model, optimizer and recomputation, most of whose memory is weights or activations."""
    model = {k: v for k, v in MODELS[r.choice(KINDS)].items() if k not in ("source_length", "d_ff", "vocab")}
    width = r.choice((32, 64, 96, 128))
    sizes = {"layers": r.choice((1, 2, 4)), "d_model": width, "d_ff": r.choice((2, 4)) * width, "heads": 4}
    sizes |= {"length": r.choice((16, 32, 64)), "vocab": r.choice((64, 256, 1024))}
    layout = r.choice(LAYOUTS)
    if layout.get("stages"):
        sizes["layers"] = 4
    micro = r.choice((2, 4))
    c = configure(
        **{**model, **sizes, **layout},
        precision=r.choice(("fp32", "fp32", "bf16")),
        recompute=r.choice(("none", "selective", "full")),
        dropout=r.choice((0.0, 0.1)),
        microbatch=micro,
        global_batch=2 * micro * layout.get("data", 1),
    )
    c.optimizer.kind = r.choice(("adamw", "adamw", *SETTINGS))
    for name, value in r.choice(SETTINGS.get(c.optimizer.kind, ({},))).items():
        setattr(c.optimizer, name, value)
    c.train.ema = r.choice((0.0, 0.0, 0.9))
    if r.random() < 0.25:
        c.eval.tasks, c.eval.every = ["a_task"], 1
    return c


def errors_of(seed: int) -> list[float]:
    """How far what the first legal plan of over 2 MB that a seed draws is said to need is from what it holds: in a
    training step, and while it answers texts, if it does."""
    r = Random(seed)
    while True:
        c = drawn(r)
        try:
            if violations_of_configuration(c):
                continue
            footprints = predict_training(c, plan := make_plan(c))
        except ConfigError:
            continue
        if (needed := most(footprints)) > LEAST:
            error = needed / max(rank.peak for rank in count(c, plan)) - 1
            return (
                [error, most(predict_answering(c, plan, footprints)) / count_answering(c, plan) - 1]
                if c.eval.tasks
                else [error]
            )


def most(footprints: Sequence[Footprint]) -> int:
    return max(f.total_bytes for f in footprints)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.full) for n in range(5, 60))])
def test_a_drawn_plan_needs_what_it_holds(seed):
    assert all(abs(error) <= 0.05 for error in errors_of(seed))
