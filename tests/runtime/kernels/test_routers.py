"""Routers against the modules of transformers: the same experts with the same weights."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from platform.plan.model_types import Router
from platform.runtime import expert_rows
from tests.weights.peer import in_double, transformers

LENGTH, BATCH, EXPERTS, CHOSEN, WIDTH = 7, 5, 12, 3, 8
SIZES = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_experts_per_tok": CHOSEN, "routed_scaling_factor": 2.5}
V3: dict[str, Any] = {**SIZES, "n_routed_experts": EXPERTS}
GROUPED = {"n_group": 4, "topk_group": 2}
CASES: dict[str, tuple[Router, str, dict[str, Any]]] = {
    "v2": (Router("softmax", CHOSEN, False, 2.5), "V2", {**V3, "topk_method": "greedy"}),
    "v2, groups": (
        Router("softmax", CHOSEN, False, 2.5, groups=4, groups_kept=2),
        "V2",
        {**V3, **GROUPED, "topk_method": "group_limited_greedy"},
    ),
    "v3, groups": (
        Router("sigmoid", CHOSEN, True, 2.5, groups=4, groups_kept=2, group_best=2),
        "V3",
        {**V3, **GROUPED},
    ),
    "v3, one group": (Router("sigmoid", CHOSEN, False, 2.5), "V3", {**V3, "n_group": 1, "topk_group": 1,
                      "norm_topk_prob": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name):
    """DeepSeek-V2's and V3's, in fp64."""
    router, version, keys = CASES[name]
    library = transformers()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, BATCH, WIDTH, generator=draw, dtype=torch.float64)
    with in_double():
        config = getattr(library, f"Deepseek{version}Config")(**keys)
        kind = f"deepseek_{version.lower()}"
        module = import_module(f"transformers.models.{kind}.modeling_{kind}")
        theirs = getattr(module, f"Deepseek{version}TopkRouter")(config)
        with torch.no_grad():
            theirs.weight.copy_(torch.randn(theirs.weight.shape, generator=draw, dtype=torch.float64))
            scores, weights, best = theirs(x)
    expected = torch.zeros(LENGTH * BATCH, EXPERTS, dtype=torch.float64).scatter_(1, best, weights)
    real = torch.ones(LENGTH, BATCH, dtype=torch.bool)
    ours, _, _ = expert_rows.route_tokens(scores.view(LENGTH, BATCH, EXPERTS), real, router, LENGTH)
    assert torch.allclose(ours.flatten(0, 1), expected, rtol=1e-12, atol=0)
    assert (ours > 0).sum() == CHOSEN * LENGTH * BATCH
    if router.groups > 1:
        free = torch.topk(scores, CHOSEN).indices
        assert (best.sort().values != free.sort().values).any(), "negative control: groups matter"


def test_loads_are_shares_in_the_type_of_the_scores():
    """Of 7 tokens: a share in fp32 would be off by 1e-8 in an fp64 loss."""
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(LENGTH, BATCH, EXPERTS, generator=draw, dtype=torch.float64)
    router = Router("softmax", CHOSEN, balance=1.0)
    _, loads, _ = expert_rows.route_tokens(scores, torch.ones(LENGTH, BATCH, dtype=torch.bool), router, LENGTH)
    shares = scores.softmax(-1)
    chosen = torch.zeros_like(scores).scatter_(-1, shares.topk(CHOSEN, -1).indices, 1.0)
    wanted = (chosen.mean(0) * shares.mean(0)).sum(-1) * EXPERTS / CHOSEN
    assert torch.allclose(loads, wanted.expand_as(loads), rtol=1e-14, atol=0.0)
