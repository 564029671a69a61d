"""Routings that no data gives: all tokens to the same experts."""

from __future__ import annotations

import torch

from platform.runtime import expert_rows


def to_the_first(monkeypatch, experts: int, chosen: int, first: int = 0) -> None:
    """Every token chooses the experts from number `first` on, as many as it chooses, by its own scores otherwise."""
    bias = torch.zeros(experts, dtype=torch.float64)
    bias[first : first + chosen] = 20.0
    route = expert_rows.route_tokens
    monkeypatch.setattr(expert_rows, "route_tokens", lambda scores, *more: route(scores + bias.to(scores), *more))
