"""A run goes on under another kind of context, or on a mesh that heads, sequences or vocabulary do not divide, from
storage or from survivors' memory: each part equals the same steps of one process."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from tests.fuzz import passages, plans
from tests.harness.oracle import configure
from tests.harness.suite import suite

SIZES = {"d_model": 16, "heads": 8, "d_kv": 4, "d_ff": 24, "vocab": 61, "length": 16, "microbatch": 2}
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "gather": {"context": 4, "context_kind": "gather"},
    "ring, zero 3": {"context": 2, "context_kind": "ring", "data": 2, "zero": 3},
    "heads, 1d": {"context": 2, "context_kind": "heads", "tensor": "1d", "axes": {"t": 2}},
    "nested": {"context": 4, "context_kind": "nested", "context_heads": 2},
    "nested ring": {"context": 4, "context_kind": "nested_ring", "context_heads": 2},
    "ring, 1f1b": {"context": 2, "context_kind": "ring", "pipeline": "1f1b", "stages": 2},
    "3 ranks": {"tensor": "1d", "axes": {"t": 3}, "zero": 1},
    "5 ranks": {"tensor": "1d_sp", "axes": {"t": 5}, "length": 20},
    "7 replicas": {"data": 7, "zero": 2},
}
PAIRS = [(a, b) for a in PLANS for b in PLANS if a != b]
NAMES = list(PLANS)
FEW = list(zip(NAMES, NAMES[3:] + NAMES[:3], strict=True))[::2]
FACTORS = [{"pair": pair, "seed": seed} for seed in range(2) for pair in PAIRS]


def configured(name: str) -> Config:
    c = configure(**{**SIZES, **PLANS[name], "length": 40})
    c.tensor.uneven = True
    c.model.kind, c.data.kind, c.train.steps = "decoder", "synthetic", 3
    return c


def moved(a: str, b: str, seed: int) -> None:
    configs = [configured(a), configured(b)]
    plans.check(Random(seed), configs, [make_plan(c) for c in configs])


@suite("moves between contexts and uneven meshes", FACTORS, [c for c in FACTORS if not c["seed"] and c["pair"] in FEW])
def test_a_run_goes_on(case):
    moved(*case["pair"], case["seed"])


@pytest.mark.parametrize("passage", [passages.OnStorage, passages.InMemory])
def test_negative_control_a_rank_of_a_context_that_keeps_its_own_weights(passage, monkeypatch):
    restore = passage.restore

    def restored(self, trainer):
        kept = {name: weight.detach().clone() for name, weight in trainer.weights.master.items()}
        restore(self, trainer)
        for name, weight in trainer.weights.master.items() if trainer.communicator.rank == 1 else []:
            weight.data.copy_(kept[name])

    monkeypatch.setattr(passage, "restore", restored)
    seed = next(n for n in range(9) if passage_of(n) is passage)
    with pytest.raises(AssertionError):
        moved("ring, 1f1b", "gather", seed)


def passage_of(seed: int) -> type:
    """The passage that `plans.check` draws."""
    r = Random(seed)
    r.choice(plans.ENDS[2])
    return passages.OnStorage if r.random() < 0.5 else passages.InMemory
