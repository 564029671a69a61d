"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from platform.checks import allow
from platform.config import Optimizer


@dataclass(frozen=True)
class OptimizerKind:
    """`make(groups, config.optimizer)`: a torch optimizer of parameter groups [{"params", "weight_decay"}], which are
    local blocks: it must treat every element by itself. `moments`: numbers of state per parameter."""

    make: Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer]
    moments: int


def _adamw(groups: list[dict[str, Any]], o: Optimizer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, o.lr, (o.betas[0], o.betas[1]), o.eps, fused=True)


OPTIMIZERS = {"adamw": OptimizerKind(_adamw, moments=2)}


def state_of(o: Optimizer, dtype: torch.dtype, device: torch.device) -> tuple[list[str], dict[str, Any]]:
    """What an optimizer keeps per parameter of `dtype`: the names of its moments, which are shaped as the parameter,
    and its numbers by name, as they are after one step. Found by taking it."""
    w = torch.zeros(2, dtype=dtype, device=device, requires_grad=True)
    w.grad = torch.zeros_like(w)
    optimizer = OPTIMIZERS[o.kind].make([{"params": [w], "weight_decay": 0.0}], o)
    optimizer.step()
    found = {name: value for name, value in optimizer.state[w].items() if value is not None}
    moments = [name for name, value in found.items() if isinstance(value, torch.Tensor) and value.shape == w.shape]
    return moments, {name: value for name, value in found.items() if name not in moments}


def warm(o: Optimizer) -> None:
    """Has torch import what it does for the first step of any optimizer, most of a second of work, while nobody waits
    for it: before a spare is ready, and before the driver looks for a state to recover."""
    state_of(o, torch.float32, torch.device("cpu"))


def register_optimizer(
    name: str, make: Callable[[list[dict[str, Any]], Optimizer], torch.optim.Optimizer], moments: int
) -> None:
    """Makes `optimizer.kind=NAME` known; see `OptimizerKind`."""
    OPTIMIZERS[name] = OptimizerKind(make, moments)
    allow("optimizer.kind", name)
