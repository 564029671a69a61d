"""What a plan with products in 8 bits needs is what its workers hold, operands and scales included."""

from __future__ import annotations

from typing import Any

import pytest

from platform.plan.operations import einsums
from tests.predict.memory.test_needed_bytes import ROUTED, STAGES, configured, holds

full = pytest.mark.full
WIDE: dict[str, Any] = {"d_model": 128, "d_ff": 512, "layers": 2, "heads": 8, "length": 64, "precision": "bf16"}
PLANS: dict[str, dict[str, Any]] = {
    "serial": {},
    "serial, fp32": {"precision": "fp32"},
    "one microbatch": {"microbatch": 8},
    "1d": {"tensor": "1d", "axes": {"t": 2}},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}},
    "2d": {"tensor": "2d", "axes": {"r": 2, "c": 2}},
    "3d": {"tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}},
    "zero 3": {"data": 2, "zero": 3, "microbatch": 2},
    "zb_h1": {"pipeline": "zb_h1", **STAGES},
    "recomputed": {"recompute": "full"},
    "experts": ROUTED,
    "rows of experts": {**ROUTED, "capacity_factor": 0.0},
}
FEW = {("one microbatch", "block"), ("1d", "tensor"), ("zero 3", "block")}
CASES = [(n, s) for n in PLANS for s in ("block", "tensor", "row") if n != "2d" or s == "block"]


def quantised(name: str, scale: str):
    c = configured(**{**WIDE, **PLANS[name]})
    c.quantise.scale, c.quantise.block = scale, 32
    return c


@pytest.mark.parametrize(("name", "scale"), [c if c in FEW else pytest.param(*c, marks=full) for c in CASES])
def test_what_is_needed_is_what_is_held(name, scale):
    holds(quantised(name, scale))


def test_negative_control_operands_in_8_bits_count(monkeypatch):
    monkeypatch.setattr(einsums, "_meter_scaled_operands", lambda *_: [])
    with pytest.raises(AssertionError):
        holds(quantised("one microbatch", "block"))
