"""What a run with eval.tasks needs is what its workers hold while they score texts, counted storage by storage."""

from __future__ import annotations

from typing import Any

import pytest

from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from tests.harness.live import count_answering
from tests.harness.oracle import MODELS, configure

SIZES: dict[str, Any] = {"layers": 2, "d_model": 32, "heads": 4, "length": 64, "vocab": 4096, "precision": "fp32",
                         "microbatch": 8, "global_batch": 8, "recompute": "full"}  # fmt: skip
# what scores are computed of is most of it, or keys and values
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "bf16": {"precision": "bf16"},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "cache": {"vocab": 64, "length": 512, "d_kv": 64, "layers": 8, "d_model": 16, "d_ff": 16},
    "llama": {**MODELS["llama"], "vocab": 4096, "tied": True},
}


@pytest.mark.parametrize("name", PLANS)
def test_tasks_count(name):
    c = configure(**{**SIZES, **PLANS[name]})
    plan = make_plan(c)
    without, peak = predict_peak_bytes(c, plan), count_answering(c, plan)
    c.eval.tasks, c.eval.every = ["a_task"], 1
    assert peak > 1.05 * without
    assert abs(predict_peak_bytes(c, plan) - peak) <= 0.05 * peak
