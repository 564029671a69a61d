"""What a plan with a base in 4 bits (tune=qlora) needs is what its workers hold."""

from __future__ import annotations

from typing import Any

import pytest

from tests.predict.memory.test_needed_bytes import configured, holds

full = pytest.mark.full
WIDE: dict[str, Any] = {"d_model": 256, "d_ff": 512, "length": 16, "global_batch": 4, "microbatch": 2}
PLANS: dict[str, dict[str, Any]] = {
    "serial, bf16": {"precision": "bf16"},
    "full, fp32": {"recompute": "full"},
    "1d_sp, zero 1, bf16": {"tensor": "1d_sp", "axes": {"t": 2}, "data": 2, "zero": 1, "precision": "bf16"},
    "zero 3, bf16": {"data": 2, "zero": 3, "precision": "bf16"},
    "zero 3, full": {"data": 2, "zero": 3, "recompute": "full"},
    "1f1b": {"pipeline": "1f1b", "stages": 2, "layers": 4},
}


def tuned(name: str, kind: str = "qlora", double: bool = False):
    c = configured(**{**WIDE, **PLANS[name]})
    c.tune.kind, c.tune.rank, c.tune.double = kind, 4, double
    return c


@pytest.mark.parametrize(
    "name", [n if n in ("serial, bf16", "zero 3, bf16") else pytest.param(n, marks=full) for n in PLANS]
)
def test_what_is_needed_is_what_is_held(name):
    holds(tuned(name))


@pytest.mark.parametrize("name", [pytest.param(n, marks=full) for n in PLANS if "1d_sp" not in n])
def test_scales_in_8_bits_are_counted(name):
    holds(tuned(name, double=True))
