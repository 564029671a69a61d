"""Documents of packed sequences, whose hidden scores are not computed, against one process that masks them, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from platform.plan.operations import fused_attention
from platform.predict.make_plan import make_plan
from platform.runtime import attention_pairs, panels
from tests.harness import oracle
from tests.harness.live import count
from tests.harness.oracle import Tokens, compare, configure, prove, run, serial
from tests.harness.planned_memory import predict_training

PACKED = {"positions": "rope", "tied": False, "kv_heads": 2, "within_documents": True, "microbatch": 3,
          "global_batch": 6}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, math": {"heads": 4, "d_kv": 8, "d_rope": 4, "kv_latent": 12, "d_value": 6, "rope_pairs": "neighbours",
                       "kv_heads": 0},
    "one rank, selective": {"recompute": "selective"},
    "one rank, windows": {"window": 5, "window_layers": [1], "recompute": "full"},
    "1d_sp": {"tensor": "1d_sp", "axes": {"t": 2}},
    "gather": {"context": 2, "context_kind": "gather"},
    "heads": {"context": 2, "context_kind": "heads"},
    "ring": {"context": 2, "context_kind": "ring"},
    "ring of four, sinks": {"context": 4, "context_kind": "ring", "attention_sinks": True},
    "nested, zero 3": {"context": 4, "context_kind": "nested", "context_heads": 2, "data": 2, "zero": 3,
                       "microbatch": 6, "window": 7},
}  # fmt: skip
BORDERS = [[4, 8, 12], [8], [1, 13], [], list(range(16)), [3, 4, 5, 15]]  # of blocks, spanning them, of one token


def sample(of_tokens):
    """Documents of every kind, of which the sequences of a batch have others."""

    def drawn(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        arrays, place = of_tokens(self, draw), np.arange(self.model.length)
        first = np.isin(place, BORDERS[draw.integers(len(BORDERS))])
        begins = np.maximum.accumulate(np.where(first, place, 0))
        return arrays | {"begins": begins, "positions": place - begins}

    return drawn


@pytest.fixture
def drawn(monkeypatch):
    """Blocks of as few tokens as documents have here; one process masks the whole, as one on a GPU does."""
    monkeypatch.setattr(oracle, "_serial", {})
    monkeypatch.setattr(Tokens, "sample", sample(Tokens.sample))

    def configured(name: str, short: int):
        c = configure(**{**PACKED, **PLANS[name]})
        serial(c)
        monkeypatch.setattr(fused_attention, "LEAST", short)
        monkeypatch.setattr(panels, "mask_sharing_limit", lambda device: short)
        return c

    return configured


@pytest.mark.parametrize("name", PLANS)
def test_equals_one_process(name, drawn):
    prove(drawn(name, 4))


@pytest.mark.parametrize("name", ["one rank", "ring"])
def test_equals_one_process_without_masks(name, drawn, monkeypatch):
    c = drawn(name, 1)
    monkeypatch.setattr(panels.positions, "unseen_mask", None)
    prove(c)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["one rank", "heads"])
def test_memory_is_as_planned(name, precision):
    """Of rows as long as are not masked whole: without the mask of all pairs, of 1 or 2 MB a sequence."""
    c = configure(**{**PACKED, **PLANS[name], "length": 512, "microbatch": 4, "global_batch": 4, "layers": 1, "d_ff": 8,
                     "precision": precision})  # fmt: skip
    plan = make_plan(c)
    needed = max(f.total_bytes for f in predict_training(c, plan))
    assert needed / max(rank.peak for rank in count(c, plan)) == pytest.approx(1.03, abs=0.06)


@pytest.mark.parametrize("name", ["one rank", "gather", "ring"])
def test_negative_control_a_block_that_its_last_query_sees(name, drawn, monkeypatch):
    c, cut = drawn(name, 4), attention_pairs._cut_queries_at_documents
    monkeypatch.setattr(
        attention_pairs,
        "_cut_queries_at_documents",
        lambda *x: [(rows, q, (last, last)) for rows, q, (_, last) in cut(*x)],
    )
    with pytest.raises(AssertionError):
        compare(c, *run(c), serial(c))


WINDOWS: dict[str, dict[str, Any]] = {
    "one rank": {"window": 5},
    "grouped": {"window": 4, "kv_heads": 2},
    "1d_sp": {"window": 7, "tensor": "1d_sp", "axes": {"t": 2}},
    "stages, full": {"window": 3, "pipeline": "1f1b", "stages": 2, "recompute": "full"},
}


def windowed(name: str, monkeypatch, mutant: bool = False):
    """One process masks the whole; then blocks of as few tokens as windows have here."""
    c = configure(**{"positions": "rope", "length": 32, "layers": 2, **WINDOWS[name]})
    monkeypatch.setattr(oracle, "_serial", {})
    expected = serial(c)
    monkeypatch.setattr(fused_attention, "LEAST", 1)
    monkeypatch.setattr(fused_attention, "_computes_pair_by_pair", lambda *arguments: True)
    monkeypatch.setattr(panels, "LEAST", 1)
    if mutant:
        attention, shorten = panels.PanelAttention, lambda plan: plan._replace(window=plan.window - 1)
        monkeypatch.setattr(panels, "PanelAttention", lambda *arguments: shorten(attention(*arguments)))
    compare(c, *run(c), expected)


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_a_long_sequence_pair_by_pair(name, monkeypatch):
    windowed(name, monkeypatch)


def test_negative_control_a_window_that_is_too_short(monkeypatch):
    with pytest.raises(AssertionError):
        windowed("one rank", monkeypatch, mutant=True)
