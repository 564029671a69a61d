"""What a layer keeps for its backward pass, against closed formulas (Korthikanti et al. 2022, table 2, per scheme).

In elements of b s h, without dropout: the inputs of two norms (2), what the linear layers read (1 + 1 + 1 + 4), Q, K
and V (3), and what the activation reads (4): 16. Split evenly that is 16/P, the 3-D paper's O(1/P).
"""

from __future__ import annotations

from math import prod

import pytest

from platform.model import build_model, forget_models
from platform.plan import operation_plan
from platform.predict.footprint import count_saved_elements
from platform.predict.make_plan import make_plan
from tests.harness.oracle import MODELS, configure

B, S, H, HEADS = 8, 16, 32, 8
CUBE = {"x": 2, "y": 2, "z": 2}
CASES = [
    ("serial", {}, "keep", 16),
    ("1d", {"t": 4}, "keep", 4 + 12 / 4),  # norms are replicated
    ("1d_sp", {"t": 4}, "again", 16 / 4),
    ("2d", {"r": 2, "c": 2}, "panels", 16 / 4),
    ("2d_gather", {"r": 2, "c": 2}, "again", 16 / 4),
    ("2p5d", {"d": 2, "r": 2, "c": 2}, "again", 16 / 8),
    ("3d", CUBE, "again", 16 / 8),
    ("3d_literal", CUBE, "again", 16 / 8),
    # What linear layers read is kept gathered, p times larger; attention keeps its result once more, as it made it.
    ("3d", CUBE, "keep", (10 + 7 * 2) / 8),
    ("3d_literal", CUBE, "keep", (10 + 7 * 2) / 8),
]


@pytest.mark.parametrize(("scheme", "axes", "gathered", "expected"), CASES, ids=str)
def test_a_layer_keeps_what_the_formula_says(scheme, axes, gathered, expected):
    def saved(layers: int) -> int:
        c = configure(scheme, axes, layers=layers, microbatch=B, global_batch=B, length=S, d_model=H, heads=HEADS)
        c.tensor.gathered = gathered
        return count_saved_elements(make_plan(c), build_model(c.model)).activations

    workers = prod(axes.values())
    sharing = {"serial": 1, "1d": workers, "1d_sp": 1}.get(scheme, 2)  # ranks that have statistics of one row
    statistics = (4 * sharing + HEADS) * B * S // workers  # two numbers a row of each norm; one a row of attention
    assert saved(2) - saved(1) == expected * B * S * H + statistics


@pytest.mark.parametrize("wide", [False, True])
def test_a_gated_layer_with_rotations(wide, monkeypatch):
    """Inputs of two norms, rotated queries and keys, values, attention's result, gate and gated; of a narrow model also
    what the norms and the gated function have made. Nothing of the queries and keys before they were rotated."""
    monkeypatch.setattr(operation_plan, "REBUILT_FROM", 0 if wide else 1000)
    kv, f = H // 4, 40

    def saved(layers: int) -> int:
        forget_models()
        model = {**MODELS["llama"], "kv_heads": 2, "d_ff": f, "d_model": H, "heads": HEADS, "layers": layers}
        c = configure(microbatch=B, global_batch=B, length=S, **model)
        return count_saved_elements(make_plan(c), build_model(c.model)).activations

    numbers = 2 + HEADS  # of a row: one of each norm, and of attention
    computed = 0 if wide else 2 * H + f
    assert saved(2) - saved(1) == (2 * H + H + 2 * kv + H + 2 * f + computed + numbers) * B * S
    forget_models()
