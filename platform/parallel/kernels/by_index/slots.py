"""Experts on local blocks: which compute a token, in which of their slots it lies, and the sum of what they make of it.

Each is one function of autograd, which keeps little: integers for places and choices, and scores, of which the
weights are computed again.
No sum depends on the order in which threads add.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from platform.parallel.kernels.by_index.row_sums import products_of_rows, sum_of_rows
from platform.parallel.kernels.statistics import widened
from platform.plan.language.functions import Router

Rows = Mapping[str, Tensor]  # states of a layer [experts] by role, see `platform.plan.language.ops.STATES`


def route(
    scores: Tensor, real: Tensor, router: Router, slots: int, rows: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [length, batch, experts] of each token's experts, its auxiliary loss [length, batch], both in
    the type of the scores, and how many tokens chose each expert and how many of these it took, int64 [2, experts].
    `rows`: the states of the layer."""
    return _Route.apply(scores, real, router, slots, rows or {})


@torch.no_grad()
def settle(router: Router, rows: Rows, load: Tensor) -> None:
    """Update the states of a layer in place after a step in which `load` [experts] tokens chose each expert."""
    mean = load.sum() / len(load)
    if "choice" in rows:
        rows["choice"].add_((load.sum() - load * len(load)).sign(), alpha=router.rate)
    if "load" in rows:
        rows["load"].copy_(torch.where(mean > 0, load / mean, 1.0))


class _Route(torch.autograd.Function):
    """Autograd function of `route`, which keeps the scores [length, batch, experts] and the choice, by which it routes
    again in its backward pass. `real`: True where a token is no padding; `slots`: tokens of a sequence that an expert
    takes; `rows`: states, which stay as they are until the end of a step."""

    @staticmethod
    def forward(ctx, scores, real, router, slots, rows):
        """Return the weights of the experts and the auxiliary loss of each token."""
        best = _best(scores, router, rows)
        ctx.save_for_backward(scores, real, best)
        ctx.rules = router, slots, rows
        *results, counts = _routed(scores, real, router, slots, rows, best)
        ctx.mark_non_differentiable(counts)
        return *results, counts

    @staticmethod
    def backward(ctx, of_weights, of_losses, _):
        """Return the gradient of the scores."""
        scores, real, best = ctx.saved_tensors
        router, slots, rows = ctx.rules
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            *found, _ = _routed(scores, real, router, slots, rows, best)
        (gradient,) = torch.autograd.grad(found, scores, (of_weights, of_losses))
        return gradient, None, None, None, None


def _probabilities(scores: Tensor, router: Router) -> Tensor:
    """Return what a router's `scores` say of experts: the probabilities of all, or a sigmoid of each."""
    return scores.sigmoid() if router.function == "sigmoid" else scores.softmax(-1)


def _routed(scores: Tensor, real: Tensor, router: Router, slots: int, rows: Rows, best: Tensor) -> tuple[Tensor, ...]:
    """Compute `route` from the `best` experts of each token, by torch's functions, which autograd knows."""
    experts, counted = scores.shape[-1], real.unsqueeze(-1)
    probabilities = _probabilities(scores, router)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, counted.expand_as(best))
    weights = probabilities * chosen
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(~counted, 1)
    kept, each = chosen, chosen.sum(0)
    if slots < len(scores):
        kept = chosen & (chosen.cumsum(0) <= slots)
        weights = weights * kept
    weights = weights if router.scale == 1 else weights * router.scale
    shares = probabilities
    if router.function == "sigmoid":
        shares = probabilities / probabilities.sum(-1, keepdim=True)
    if "load" in rows:
        even = (rows["load"] * shares).sum(-1)
    else:
        tokens = real.sum(0).clamp_min(1).unsqueeze(-1)
        load = each.to(scores.dtype) / tokens  # of each sequence: [batch, experts]
        even = (load * (shares * counted).sum(0) / tokens).sum(-1) * (experts / router.chosen)
    loss = router.balance * even
    if router.z:
        loss = loss + router.z * scores.logsumexp(-1).square()
    counts = torch.stack([each.sum(0), each.sum(0) if kept is chosen else kept.sum((0, 1))])
    return weights, loss * real, counts


def _best(scores: Tensor, router: Router, rows: Rows) -> Tensor:
    """Return the indices [length, batch, chosen] of the experts that are the most likely by the `scores` [length,
    batch, experts] and by what a layer's states `rows` add for the choice alone, in the groups that are."""
    likely = _probabilities(scores, router)
    likely = likely + rows["choice"] if "choice" in rows else likely
    if router.groups_kept < router.groups:
        by_group = likely.unflatten(-1, (router.groups, -1))
        groups = by_group.topk(router.group_best, -1).values.sum(-1)
        kept = groups.topk(router.groups_kept, -1).indices
        left = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, kept, False)
        likely = by_group.masked_fill(left.unsqueeze(-1), -torch.inf).flatten(-2)
    return likely.topk(router.chosen, -1).indices


def _places(weights: Tensor, slots: int, chosen: int) -> tuple[Tensor, Tensor]:
    """Return which token lies in each slot, int64 [experts, batch, slots], and in which slots each token lies, int64
    [length, batch, chosen] as indices of the former's elements; -1 for none. `weights`: [length, batch, experts]."""
    length, batch, experts = weights.shape
    goes = weights != 0
    # the experts of a token in their order, so that what they make is added in it
    order, which = (goes * torch.arange(experts, 0, -1, device=weights.device)).topk(chosen, -1)
    slot = (goes.cumsum(0) - 1).gather(-1, which)
    sequence = torch.arange(batch, device=weights.device).unsqueeze(-1)
    lies = torch.where(order > 0, (which * batch + sequence) * slots + slot, -1)
    token = torch.arange(length, device=weights.device).view(-1, 1, 1).expand_as(lies)
    held = torch.full((experts * batch * slots + 1,), -1, device=weights.device)  # the last takes what lies nowhere
    held[lies] = token
    return held[:-1].view(experts, batch, slots), lies


def _tokens(held: Tensor) -> Tensor:
    """Return the token in each slot [experts, batch, slots] as its row among the tokens [length, batch], -1: none."""
    batch = held.shape[1]
    return torch.where(held < 0, -1, held * batch + torch.arange(batch, device=held.device).view(1, -1, 1))


class _Dispatch(torch.autograd.Function):
    """Autograd function of `dispatch`. `weights`: [length, batch, experts], of which a token has at most `chosen`."""

    @staticmethod
    def forward(ctx, x, weights, slots, chosen):
        """Return the tokens in the slots of their experts."""
        held, lies = _places(weights, slots, chosen)
        ctx.save_for_backward(lies)
        rows = x.reshape(-1, x.shape[-1])
        return sum_of_rows(rows, _tokens(held).unsqueeze(-1), (held >= 0).unsqueeze(-1).to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of a token's gradients from all slots in which it lies."""
        (lies,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return sum_of_rows(rows, lies, (lies >= 0).to(rows.dtype)), None, None, None


def dispatch(x: Tensor, weights: Tensor, slots: int, chosen: int) -> Tensor:
    """Return the tokens x [length, batch, d] in the slots of their experts [experts, batch, slots, d], empty ones 0."""
    return _Dispatch.apply(x, weights, slots, chosen)


class _Combine(torch.autograd.Function):
    """Autograd function of `combine`, which adds in the type of statistics, in the order of the experts."""

    @staticmethod
    def forward(ctx, y, weights, chosen):
        """Return the weighted sum, for each token, of the slots in which it lies."""
        held, lies = _places(weights, y.shape[2], chosen)
        ctx.save_for_backward(y, weights, held, lies)
        by_place = widened(weights.gather(-1, _experts(lies, y))).masked_fill_(lies < 0, 0)
        return sum_of_rows(y.reshape(-1, y.shape[-1]), lies, by_place)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the slots and of the weights."""
        y, weights, held, lies = ctx.saved_tensors
        found = products_of_rows(y.reshape(-1, y.shape[-1]), lies, gradient).masked_fill_(lies < 0, 0)
        of_weights = torch.zeros(weights.shape, dtype=found.dtype, device=y.device)
        of_weights.scatter_add_(-1, _experts(lies, y), found)
        tokens, expert = _tokens(held), torch.arange(weights.shape[-1], device=y.device).view(-1, 1, 1)
        by_slot = weights.flatten()[tokens.clamp_min(0) * weights.shape[-1] + expert].masked_fill_(held < 0, 0)
        rows = gradient.reshape(-1, y.shape[-1])
        of_slots = sum_of_rows(rows, tokens.unsqueeze(-1), by_slot.unsqueeze(-1))
        return of_slots, of_weights.to(weights.dtype), None


def _experts(lies: Tensor, y: Tensor) -> Tensor:
    """Return the expert at each index in `lies` of the slots y [experts, batch, slots, d], 0 where that is -1."""
    return lies.clamp_min(0).div(y.shape[1] * y.shape[2], rounding_mode="floor")


def combine(y: Tensor, weights: Tensor, chosen: int) -> Tensor:
    """Return the sum [length, batch, d] of what each token's experts made of it, in slots y, times their `weights`."""
    return _Combine.apply(y, weights, chosen)
