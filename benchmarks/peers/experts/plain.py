"""A layer of experts as a careful user writes it in PyTorch: tokens sorted by expert, one all-to-all there and one
back with sizes exchanged before, and a loop over the experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.experts.layer import BALANCE, RANKS, Given, Layer, Size
from platform.runtime.communicator import Communicator


class _Exchange(torch.autograd.Function):
    """All-to-all of rows, so many to and from each rank; its gradient goes the other way."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), x.shape[-1])
        dist.all_to_all_single(out, x, received, sent)
        return out

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.sizes
        out = gradient.new_empty(sum(sent), gradient.shape[-1])
        dist.all_to_all_single(out, gradient.contiguous(), sent, received)
        return out, None, None


class Expert(nn.Module):
    """down(silu(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor):
        super().__init__()
        self.inner = nn.Parameter(torch.cat([gate, up]))
        self.down = nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.inner).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class PlainExperts(nn.Module):
    """A layer of experts, of which this rank has its share."""

    def __init__(self, size: Size, rank: int, weights: Mapping[str, Tensor], slots: int):
        super().__init__()
        self.size, self.slots, self.here = size, slots, size.experts // RANKS
        self.router = nn.Parameter(weights["router"].clone())
        names = ("gate", "up", "down")
        own = range(rank * self.here, (rank + 1) * self.here)
        self.experts = nn.ModuleList(Expert(*(weights[f"experts.{n}"][e] for n in names)) for e in own)
        self.shared = Expert(*(weights[f"shared.{n}"] for n in names)) if size.shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [length, batch, d_model] and the loss of uneven load, a mean over the sequences."""
        size, rows = self.size, x.flatten(0, 1)
        probabilities = F.linear(x, self.router).softmax(-1)
        weights, chosen = probabilities.topk(size.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        by_sequence = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
        load, mean = by_sequence.mean(0) / size.chosen, probabilities.mean(0)
        balance = size.experts * (load * mean).sum(-1).mean()
        expert, order = chosen.flatten().sort(stable=True)
        if size.capacity:
            taken = by_sequence.cumsum(0).gather(-1, chosen).flatten()[order] <= self.slots
            expert, order = expert[taken], order[taken]
        token = order // size.chosen
        counts = expert.bincount(minlength=size.experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(RANKS, -1).sum(-1).tolist()
        by_rank = theirs.view(RANKS, -1)
        arrived = _Exchange.apply(rows[token], sent, by_rank.sum(-1).tolist())
        pieces = arrived.split(by_rank.flatten().tolist())
        done = [f(torch.cat(pieces[i :: self.here])) for i, f in enumerate(self.experts)]
        parts = [y.split(n) for y, n in zip(done, by_rank.t().tolist(), strict=True)]
        back = torch.cat([parts[i][r] for r in range(RANKS) for i in range(self.here)])
        back = _Exchange.apply(back, by_rank.sum(-1).tolist(), sent)
        out = torch.zeros_like(rows).index_add(0, token, back * weights[order].unsqueeze(-1))
        if self.shared is not None:
            out = out + self.shared(rows)
        return x + out.view_as(x), balance


def plain(size: Size, communicator: Communicator, inputs: Given) -> Layer:
    """Build the plain layer on a rank."""
    x, gradient = inputs.x.clone().requires_grad_(), inputs.gradient
    slots = ceil(size.capacity * size.tokens * size.chosen / size.experts)
    layer = PlainExperts(size, communicator.rank, inputs.weights, slots)

    def step() -> Tensor:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out, balance = layer(x)
        torch.autograd.backward([out, BALANCE * balance], [gradient, None])
        return out.detach()

    def gradients() -> Mapping[str, Tensor]:
        named = {f"experts.{name}": torch.stack(parts) for name, parts in _parts(layer.experts).items()}
        if layer.shared is not None:
            named |= {f"shared.{name}": g for name, (g,) in _parts([layer.shared]).items()}
        return {"x": x.grad, "router": layer.router.grad, **named}

    return Layer(step, gradients)


def _parts(experts: Iterable[Any]) -> dict[str, list[Tensor]]:
    """Return the gradients of all experts, by the names of the weights."""
    gradients: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for expert in experts:
        gate, up = expert.inner.grad.chunk(2)
        for name, g in zip(gradients, (gate, up, expert.down.grad), strict=True):
            gradients[name].append(g)
    return gradients
