"""Attention whose queries have another length than its keys is metered with both, in every operation that it can be."""

from __future__ import annotations

from typing import Any

import pytest

from platform.plan.operations import fused_attention
from platform.predict.make_plan import make_plan
from platform.predict.memory_budget import predict_peak_bytes
from tests.harness.oracle import configure

SOURCE, TARGET = 48, 16
TWO: dict[str, Any] = {"kind": "encoder_decoder", "source_length": SOURCE, "length": TARGET, "layers": 1}
OPERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "one kernel": ("fused_attention", {}),
    "sinks": ("ring_attention", {"attention_sinks": True}),
    "sinks, 1d": ("ring_attention", {"attention_sinks": True, "tensor": "1d", "axes": {"t": 2}}),
    "soft caps": ("ring_attention", {"attention_cap": 1.0}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_both_lengths_are_metered(name, monkeypatch):
    kind, more = OPERATIONS[name]
    c = configure(**TWO, **more, precision="fp32")
    plan, block, lengths = make_plan(c), fused_attention.AttentionBlock, set()
    assert kind in {kind for kind, _ in plan.operations}

    def recorded(batch, heads, length, memory_length, *rest, **flags):
        lengths.add((length, memory_length))
        return block(batch, heads, length, memory_length, *rest, **flags)

    monkeypatch.setattr(fused_attention, "AttentionBlock", recorded)
    assert predict_peak_bytes(c, plan) > 0
    assert lengths == {(SOURCE, SOURCE), (TARGET, TARGET), (TARGET, SOURCE)}
