"""Rows of tokens at their experts: packed for the ranks that compute them, in slots, and by index of a table.

`dispatch_rows` and `combine_rows` pack rows expert after expert, send them, and sum them on return. Only the rows of
chosen (token, expert) pairs are there. A rank reads how many once a pass, as messages have sizes in host memory; ranks
with the same tokens must find the same. `route_tokens` chooses experts; `dispatch_slots` and `combine_slots` use a
fixed number of slots instead. `look_up_rows` reads rows of a parameter, whose gradient is added to few rows of a large
table, and to no other memory.

No sum depends on the order in which threads add: in `sum_weighted_rows`, the places of a token come one after the
other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.model_types import Router
from platform.plan.operations.experts import sends_copies
from platform.plan.scheme import Lent
from platform.runtime.communicator import Communicator
from platform.runtime.statistics import can_accumulate, compute_and_add_gradient, widen_dtype


def sum_weighted_rows(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [.., d] of the `rows` [n, d] at the indices `indices` [.., places], times `weights` [.., places],
    in whose type they are added, one place after the other. Where an index is -1, the weight is 0."""
    indices = indices.clamp_min(0)
    if weights.dtype == rows.dtype:
        sums = F.embedding_bag(indices.flatten(0, -2), rows, mode="sum", per_sample_weights=weights.flatten(0, -2))
        return sums.view(*indices.shape[:-1], rows.shape[-1])
    total = torch.zeros((*indices.shape[:-1], rows.shape[-1]), dtype=weights.dtype, device=rows.device)
    for index, weight in zip(indices.unbind(-1), weights.unbind(-1), strict=True):
        total.addcmul_(_select_rows(rows, index).to(total.dtype), weight.unsqueeze(-1))
    return total.to(rows.dtype)


def weigh_rows(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Return the `rows` [n, d] at the indices `indices` [m], times `weights` [m], in the type of the rows."""
    if weights.dtype == rows.dtype:
        return sum_weighted_rows(rows, indices.unsqueeze(-1), weights.unsqueeze(-1))
    products = rows.index_select(0, indices)
    products *= weights.unsqueeze(-1)
    return products


def products_of_rows(rows: Tensor, indices: Tensor, sum_gradient: Tensor) -> Tensor:
    """Return the gradient [.., places] of the weights of `sum_weighted_rows`, in the type of statistics: scalar
    products of the rows at the indices `indices` with `sum_gradient` [.., d], the sum's gradient; index -1 stands for
    any row."""
    indices = indices.clamp_min(0)
    if widen_dtype(rows) is not rows:
        products = [
            (widen_dtype(_select_rows(rows, index)) * widen_dtype(sum_gradient)).sum(-1) for index in indices.unbind(-1)
        ]
        return torch.stack(products, -1)
    begins = torch.arange(0, indices.numel(), indices.shape[-1], device=indices.device)
    owner = torch.arange(len(begins), device=indices.device).repeat_interleave(
        indices.shape[-1], output_size=indices.numel()
    )
    kernel = torch.ops.aten._embedding_bag_per_sample_weights_backward  # torch differentiates its own sum by it
    return kernel(sum_gradient.reshape(-1, rows.shape[-1]), rows, indices.flatten(), begins, owner, 0).view(
        indices.shape
    )


def _select_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """Return the rows [n, d] at the indices `indices`, as a tensor [*at, d]."""
    return rows.index_select(0, indices.flatten()).view(*indices.shape, rows.shape[-1])


EMPTY = -1  # in place of the number of an expert, in a seat without one


class ExpertSeats(NamedTuple):
    """Experts of the ranks that exchange rows along `axes`, () for one rank alone: `first`, the number of the first
    expert of each, in the group's order, of `each` experts. This rank is number `own`. Each has `more` seats for lent
    experts: the first ones are for those `lent` to it, by their places among all experts here."""

    axes: tuple[str, ...]
    first: tuple[int, ...]
    each: int
    own: int = 0
    more: int = 0
    lent: Lent = ()

    @property
    def experts_by_seat(self) -> list[int]:
        """Return the numbers of the experts in all seats, rank after rank, with -1 in an empty seat."""
        experts_by_rank = [[*range(first, first + self.each)] for first in self.first]
        every = [expert for rank_experts in experts_by_rank for expert in rank_experts]
        lent = [[every[i] for i in rank_experts] for rank_experts in self.lent] or [[] for _ in experts_by_rank]
        pairs = zip(experts_by_rank, lent, strict=True)
        return [e for own_experts, more in pairs for e in (*own_experts, *more, *[EMPTY] * (self.more - len(more)))]

    def seats_by_expert(self, experts: int) -> list[list[int]]:
        """Return for each of `experts` the seats that tokens of this rank may have there: its own alone, if there is
        one; [] for experts of none of these ranks."""
        expert_seats: list[list[int]] = [[] for _ in range(experts)]
        for seat, expert in enumerate(self.experts_by_seat):
            if expert != EMPTY:
                expert_seats[expert].append(seat)
        width = self.each + self.more
        own_seats = range(self.own * width, (self.own + 1) * width)
        return [[seat for seat in seats if seat in own_seats] or seats for seats in expert_seats]


Sizes = Sequence[list[int]]  # numbers of rows, by rank and expert


class Counts(NamedTuple):
    """Rows of a pass on a rank: how many, and of which tokens.

    `each`: rows of each of this rank's experts, and `ends`: where they end, int32 [experts]. `sent`, `received`: rows
    to and from each rank of the group along `axes`; `by_expert`: rows for each expert of `ExpertSeats.experts_by_seat`.
    Of the rows that this rank sends, `pair` is the (token, place) as an index of `lies` [tokens, chosen]: the row of
    each token's place, -1: none, whose expert is in `which`. `order`: which received row is where, and `back`: where
    each is, None if they lie expert by expert. With `copies`, rows are of tokens that came here, `sent` counts the
    copies that left, and nothing else is exchanged."""

    axes: tuple[str, ...]
    each: Sequence[int]
    ends: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    by_expert: Sequence[int]
    pair: Tensor
    lies: Tensor
    which: Tensor
    order: Tensor | None
    back: Tensor | None
    copies: Copies | None = None

    @property
    def row_tokens(self) -> Tensor:
        """Return the token of each row that this rank sends, int64 [rows]."""
        return self.pair.div(self.lies.shape[1], rounding_mode="floor")


class Copies(NamedTuple):
    """Copies of tokens, one for each rank with experts of them (DeepEP's dispatch), before each rank makes its rows.

    `ranks`: the copies as rows, ranks in place of experts. `weights` [received copies, 1, seats]: of each that came
    here, the weights in this rank's seats, 0 where it has no row. `blocks`: which of all tokens' weights, one for each
    rank, go with the copies sent; and `which` experts of a token have `taken` which seats, [tokens, chosen]."""

    ranks: Counts
    weights: Tensor
    blocks: Tensor
    which: Tensor
    taken: Tensor


@torch.no_grad()
def count_rows(communicator: Communicator, weights: Tensor, seats: ExpertSeats, max_experts_per_token: int) -> Counts:
    """Count the rows of tokens with `weights` [length, batch, experts] of their experts, at most
    `max_experts_per_token`, where a weight is not 0, for the experts of `seats`. Ranks exchange the numbers of rows
    first."""
    goes, device = weights.flatten(0, 1) != 0, weights.device
    experts, n, each = goes.shape[1], len(seats.first), seats.each + seats.more
    seats_of_expert, seat_counts = _serving_seats(seats, experts, device)
    which, chosen = _list_chosen(goes, max_experts_per_token)
    if seats.lent:  # the rows of an expert go to each of its seats in turn
        turn = ((goes.cumsum(0) - 1).gather(-1, which) + seats.own) % seat_counts[which]
        taken = seats_of_expert[which, turn]
    else:
        taken = seats_of_expert[which, 0]
    taken = taken.masked_fill_(chosen == experts, n * each)
    counts = torch.zeros(n * each + 1, dtype=torch.int64, device=device)
    counts = counts.index_add_(0, taken.flatten(), torch.ones_like(taken).flatten())[:-1].view(n, each)
    if not sends_copies(seats.axes, each, max_experts_per_token):
        return _place_rows(seats.axes, which, taken, _exchange_counts(communicator, counts, seats.axes))
    by_seat = _weights_by_seat(weights, which, taken, n, each)
    is_sent = (by_seat != 0).any(-1).view(-1, n)
    counts = torch.cat([counts, is_sent.sum(0).unsqueeze(1)], 1)
    received_counts, *sizes = _exchange_counts(communicator, counts, seats.axes)
    sent, received = ([row[each:] for row in of_ranks] for of_ranks in sizes)
    copies = received_counts[:, each:], sent, received
    ranks = _place_rows(seats.axes, *_list_chosen(is_sent, max_experts_per_token), copies)
    blocks = ranks.row_tokens * n + ranks.which.flatten().index_select(0, ranks.pair)
    came = _send_rows_to_experts(communicator, by_seat.index_select(0, blocks), ranks)
    sent, received = ([row[:each] for row in of_ranks] for of_ranks in sizes)
    rows_by_seat = [list(map(sum, zip(*received, strict=True)))]
    numbers = received_counts[:, :each].sum(0, keepdim=True), rows_by_seat, rows_by_seat
    local = _place_rows((), *_list_chosen(came != 0, max_experts_per_token), numbers)
    copies_of_tokens = Copies(ranks, came.unsqueeze(1), blocks, which, taken)
    return local._replace(sent=ranks.sent, by_expert=[*chain(*sent)], copies=copies_of_tokens)


def _list_chosen(goes: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the experts or ranks, at most `most`, of tokens by `goes` [tokens, n]; again, n where there is none."""
    # in their order, so that what they make is added in it
    order, which = (goes * torch.arange(goes.shape[1], 0, -1, device=goes.device)).topk(min(most, goes.shape[1]), -1)
    return which, which.masked_fill(order == 0, goes.shape[1])


def _weights_by_seat(weights: Tensor, which: Tensor, taken: Tensor, n: int, each: int) -> Tensor:
    """Return the weights [tokens * n, each] of each token in the seats of each rank, of its experts that have them."""
    by_seat = weights.new_zeros(len(taken), n * each + 1).scatter(1, taken, weights.flatten(0, 1).gather(1, which))
    return by_seat[:, :-1].reshape(-1, each)


def _exchange_counts(communicator: Communicator, counts: Tensor, axes: Sequence[str]) -> tuple[Tensor, Sizes, Sizes]:
    """Exchange numbers of rows [ranks, kinds] along `axes`; return the received ones, and both as read: sent first."""
    received = counts
    if axes:
        received = communicator.launch("all_to_all", counts, axes, name="rows of experts").wait()
    numbers = iter(map(int, communicator.read_numbers(torch.cat([counts, received]).flatten())))
    sent_sizes, received_sizes = ([[*islice(numbers, counts.shape[1])] for _ in counts] for _ in range(2))
    return received, sent_sizes, received_sizes


def _place_rows(axes: tuple[str, ...], which: Tensor, taken: Tensor, numbers: tuple[Tensor, Sizes, Sizes]) -> Counts:
    """Return where rows lie of tokens whose experts `which` have the seats `taken` [tokens, chosen], of all ranks along
    `axes`. `numbers`: the result of `_exchange_counts`."""
    received_counts, sent, received = numbers
    (n, each), rows, received_rows = received_counts.shape, sum(map(sum, sent)), sum(map(sum, received))
    _, pair = taken.flatten().sort(stable=True)
    mixed = min(n, each) > 1
    lies = torch.empty_like(pair).scatter_(0, pair, torch.arange(pair.numel(), device=pair.device))
    return Counts(
        axes,
        [sum(of_ranks) for of_ranks in zip(*received, strict=True)],
        received_counts.sum(0).cumsum(0).to(torch.int32),
        list(map(sum, sent)),
        list(map(sum, received)),
        [*chain(*sent)],
        pair[:rows].clone(),
        lies.masked_fill_(lies >= rows, -1).view(which.shape),
        which,
        _order_rows_by_expert(received_counts, received_rows) if mixed else None,
        _order_rows_by_expert(received_counts.t(), received_rows) if mixed else None,
    )


@lru_cache(maxsize=1024)
def _serving_seats(seats: ExpertSeats, experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the seats [experts, most] in which each expert has rows, and how many seats each has [experts]."""
    # made on the device, of few kernels: a table of the host's would make it wait
    places, width = seats.seats_by_expert(experts), seats.each + seats.more
    most = max(1, *map(len, places))
    at = torch.full((experts, most), len(seats.first) * width, device=device)
    count = torch.ones(experts, dtype=torch.int64, device=device)
    for rank, first in enumerate(seats.first):
        at[first : first + seats.each, 0] = torch.arange(rank * width, rank * width + seats.each, device=device)
        for expert in range(first, first + seats.each):
            if (expert_seats := places[expert]) != [rank * width + expert - first]:  # which is lent
                count[expert] = len(expert_seats)
                for number, seat in enumerate(expert_seats):
                    at[expert, number] = seat
    return at, count


def _order_rows_by_expert(received_counts: Tensor, rows: int) -> Tensor:
    """Return the index [rows] that orders rows by expert; `received_counts` [ranks, experts]: numbers in which they lie
    by rank."""
    ends = received_counts.flatten().cumsum(0).view(received_counts.shape).t().flatten()
    lengths = received_counts.t().flatten()
    first = ends - lengths.cumsum(0)  # of a stretch: where it came, less where it goes
    return torch.arange(rows, device=received_counts.device) + first.repeat_interleave(lengths, output_size=rows)


def _send_rows_to_experts(communicator: Communicator, rows: Tensor, counts: Counts) -> Tensor:
    """Send rows from the ranks of tokens to the ranks of experts; return rows in the order of the experts."""
    if counts.axes:
        sizes = counts.sent, counts.received
        rows = communicator.launch_all_to_allv(rows, *sizes, counts.axes, name="rows to experts").wait()
    return rows if counts.order is None else rows.index_select(0, counts.order)


def _send_rows_back(communicator: Communicator, rows: Tensor, counts: Counts) -> Tensor:
    """Send rows back to the ranks of their tokens, the reverse of `_send_rows_to_experts` and its adjoint."""
    if counts.back is not None:
        rows = rows.index_select(0, counts.back)
    if counts.axes:
        sizes = counts.received, counts.sent
        rows = communicator.launch_all_to_allv(rows, *sizes, counts.axes, name="rows of tokens").wait()
    return rows


def _rows_or_zeros(rows: Tensor) -> Tensor:
    """Return the rows, or one of zeros for a rank that has none, where no index means one."""
    return rows if len(rows) else rows.new_zeros(1, rows.shape[1])


def _copy_rows(communicator: Communicator, counts: Counts, x: Tensor) -> Tensor:
    """Return the rows that the tokens x [length, batch, d] of all ranks have here."""
    return _send_rows_to_experts(communicator, x.flatten(0, -2).index_select(0, counts.row_tokens), counts)


def _add_rows(communicator: Communicator, counts: Counts, rows: Tensor) -> Tensor:
    """Return the sum [tokens, d] of each token's rows on all ranks, the adjoint of `_copy_rows`."""
    rows, lies = _send_rows_back(communicator, rows.contiguous(), counts), counts.lies
    return sum_weighted_rows(_rows_or_zeros(rows), lies, (lies >= 0).to(rows.dtype))


class _Move(torch.autograd.Function):
    """Autograd function that copies rows, or adds them up if it `adds`; each is the adjoint of the other."""

    @staticmethod
    def forward(ctx, x, communicator, counts, adds):
        """Return the rows that came here, or the sums of rows that came back."""
        ctx.shape, ctx.adjoint = x.shape, partial(_copy_rows if adds else _add_rows, communicator, counts)
        return (_add_rows if adds else _copy_rows)(communicator, counts, x)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of each rank's sum, or the sum of a token's gradients from all its rows."""
        return ctx.adjoint(gradient).view(ctx.shape), None, None, None


class _Weights(torch.autograd.Function):
    """Autograd function of the weights that came with the copies of tokens, whose gradients go back."""

    @staticmethod
    def forward(ctx, sent_weights, communicator, copies):
        """Return the weights [copies, 1, seats] that came here."""
        ctx.communicator, ctx.counts = communicator, copies.ranks
        return copies.weights.view_as(copies.weights)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the weights that were sent."""
        with ctx.communicator.keep_turn():
            return _send_rows_back(ctx.communicator, gradient.flatten(0, 1).contiguous(), ctx.counts), None, None


def dispatch_rows(communicator: Communicator, x: Tensor, counts: Counts) -> Tensor:
    """Return the tokens x [length, batch, d] as rows of this rank's experts [rows, d], expert after expert."""
    x = _Move.apply(x, communicator, counts.copies.ranks, False) if counts.copies else x
    return _Move.apply(x, communicator, counts, False)


class _Combine(torch.autograd.Function):
    """Autograd function of `combine_rows`, which adds in the type of statistics, in the order of the experts."""

    @staticmethod
    def forward(ctx, y, weights, communicator, counts):
        """Return the weighted sum, for each token, of its rows."""
        rows = _send_rows_back(communicator, y, counts)
        ctx.communicator, ctx.counts = communicator, counts
        ctx.save_for_backward(rows, weights)
        by_place = widen_dtype(weights.flatten(0, 1).gather(-1, counts.which)).masked_fill_(counts.lies < 0, 0)
        sums = sum_weighted_rows(_rows_or_zeros(rows), counts.lies, by_place)
        return sums.view(*weights.shape[:2], y.shape[1])

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the rows and of the weights."""
        rows, weights = ctx.saved_tensors
        counts, gradient = ctx.counts, gradient.flatten(0, 1)
        place_gradients = products_of_rows(_rows_or_zeros(rows), counts.lies, gradient).masked_fill_(counts.lies < 0, 0)
        of_weights = torch.zeros(weights.shape, dtype=place_gradients.dtype, device=rows.device)
        of_weights.flatten(0, 1).scatter_add_(-1, counts.which, place_gradients)
        by_place = weights.flatten(0, 1).gather(-1, counts.which).flatten()
        of_rows = weigh_rows(gradient, counts.row_tokens, by_place.index_select(0, counts.pair))
        return _send_rows_to_experts(ctx.communicator, of_rows, counts), of_weights.to(weights.dtype), None, None


def combine_rows(communicator: Communicator, y: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Return the sum [length, batch, d] of each token's rows in y [rows, d], times their `weights`."""
    if not (copies := counts.copies):
        return _Combine.apply(y, weights, communicator, counts)
    n, each = len(copies.ranks.sent), copies.weights.shape[-1]
    sent_weights = _weights_by_seat(weights, copies.which, copies.taken, n, each).index_select(0, copies.blocks)
    sums = _Combine.apply(y, _Weights.apply(sent_weights, communicator, copies), communicator, counts).flatten(0, 1)
    return _Move.apply(sums, communicator, copies.ranks, True).view(*weights.shape[:2], y.shape[1])


# Experts on local blocks: which compute a token, in which of their slots it lies, and the sum of what they make of it.
#
# Each is one function of autograd, which keeps little: integers for places and choices, and scores, of which the
# weights are computed again.
# No sum depends on the order in which threads add.

Rows = Mapping[str, Tensor]  # states of a layer [experts] by role, see `platform.plan.model_types.STATES`


def route_tokens(
    scores: Tensor, is_real: Tensor, router: Router, slots_per_expert: int, router_states: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [length, batch, experts] of each token's experts, its auxiliary loss [length, batch], both in
    the type of the scores, and how many tokens chose each expert and how many of these it took, int64 [2, experts].
    `router_states`: the states of the layer."""
    return _Route.apply(scores, is_real, router, slots_per_expert, router_states or {})


@torch.no_grad()
def update_router_states(router: Router, router_states: Rows, load: Tensor, skipped: Tensor | None = None) -> None:
    """Update the states of a layer in place after a step in which `load` tokens chose each expert, unless `skipped`."""
    mean = load.sum() / len(load)
    changes = {"choice": (load.sum() - load * len(load)).sign(), "load": torch.where(mean > 0, load / mean, 1.0)}
    for name, state in router_states.items():
        new = state.add(changes[name], alpha=router.rate) if name == "choice" else changes[name]
        state.copy_(new if skipped is None else torch.where(skipped.bool(), state, new.to(state.dtype)))


class _Route(torch.autograd.Function):
    """Autograd function of `route_tokens`, which keeps the scores [length, batch, experts] and the choice, by which it
    routes again in its backward pass. `real`: True where a token is no padding; `slots`: tokens of a sequence that an
    expert takes; `rows`: states, which stay as they are until the end of a step."""

    @staticmethod
    def forward(ctx, scores, real, router, slots, rows):
        """Return the weights of the experts and the auxiliary loss of each token."""
        best = _best_experts(scores, router, rows)
        ctx.save_for_backward(scores, real, best)
        ctx.rules = router, slots, rows
        *results, counts = _compute_routing(scores, real, router, slots, rows, best)
        ctx.mark_non_differentiable(counts)
        return *results, counts

    @staticmethod
    def backward(ctx, of_weights, of_losses, _):
        """Return the gradient of the scores."""
        scores, real, best = ctx.saved_tensors
        router, slots, rows = ctx.rules
        with torch.enable_grad():
            scores = scores.detach().requires_grad_()
            *outputs, _ = _compute_routing(scores, real, router, slots, rows, best)
        (gradient,) = torch.autograd.grad(outputs, scores, (of_weights, of_losses))
        return gradient, None, None, None, None


def _expert_probabilities(scores: Tensor, router: Router) -> Tensor:
    """Return what a router's `scores` say of experts: the probabilities of all, or a sigmoid of each."""
    return scores.sigmoid() if router.function == "sigmoid" else scores.softmax(-1)


def _compute_routing(
    scores: Tensor, is_real: Tensor, router: Router, slots_per_expert: int, router_states: Rows, best: Tensor
) -> tuple[Tensor, ...]:
    """Compute `route_tokens` from the `best` experts of each token, by torch's functions, which autograd knows."""
    experts, counted = scores.shape[-1], is_real.unsqueeze(-1)
    probabilities = _expert_probabilities(scores, router)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, counted.expand_as(best))
    weights = probabilities * chosen
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(~counted, 1)
    accepted, tokens_per_expert = chosen, chosen.sum(0)
    if slots_per_expert < len(scores):
        accepted = chosen & (chosen.cumsum(0) <= slots_per_expert)
        weights = weights * accepted
    weights = weights if router.scale == 1 else weights * router.scale
    shares = probabilities
    if router.function == "sigmoid":
        shares = probabilities / probabilities.sum(-1, keepdim=True)
    if "load" in router_states:
        even = (router_states["load"] * shares).sum(-1)
    else:
        tokens = is_real.sum(0).clamp_min(1).unsqueeze(-1)
        load = tokens_per_expert.to(scores.dtype) / tokens  # of each sequence: [batch, experts]
        even = (load * (shares * counted).sum(0) / tokens).sum(-1) * (experts / router.chosen)
    loss = router.balance * even
    if router.z:
        loss = loss + router.z * scores.logsumexp(-1).square()
    choices = tokens_per_expert.sum(0)
    counts = torch.stack([choices, choices if accepted is chosen else accepted.sum((0, 1))])
    return weights, loss * is_real, counts


def _best_experts(scores: Tensor, router: Router, router_states: Rows) -> Tensor:
    """Return the indices [length, batch, chosen] of the experts that are the most likely by the `scores` [length,
    batch, experts] and by what a layer's states `router_states` add for the choice alone, in the groups that are."""
    likely = _expert_probabilities(scores, router)
    likely = likely + router_states["choice"] if "choice" in router_states else likely
    if router.groups_kept < router.groups:
        by_group = likely.unflatten(-1, (router.groups, -1))
        groups = by_group.topk(router.group_best, -1).values.sum(-1)
        best_groups = groups.topk(router.groups_kept, -1).indices
        is_left_out = torch.ones_like(groups, dtype=torch.bool).scatter_(-1, best_groups, False)
        likely = by_group.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return likely.topk(router.chosen, -1).indices


def _slot_places(weights: Tensor, slots: int, max_experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Return which token lies in each slot, int64 [experts, batch, slots], and in which slots each token lies, int64
    [length, batch, chosen] as indices of the former's elements; -1 for none. `weights`: [length, batch, experts]."""
    length, batch, experts = weights.shape
    goes = weights != 0
    # the experts of a token in their order, so that what they make is added in it
    order, which = (goes * torch.arange(experts, 0, -1, device=weights.device)).topk(max_experts_per_token, -1)
    slot = (goes.cumsum(0) - 1).gather(-1, which)
    sequence = torch.arange(batch, device=weights.device).unsqueeze(-1)
    lies = torch.where(order > 0, (which * batch + sequence) * slots + slot, -1)
    token = torch.arange(length, device=weights.device).view(-1, 1, 1).expand_as(lies)
    held = torch.full((experts * batch * slots + 1,), -1, device=weights.device)  # the last takes what lies nowhere
    held[lies] = token
    return held[:-1].view(experts, batch, slots), lies


def _slot_tokens(token_in_slot: Tensor) -> Tensor:
    """Return the token in each slot [experts, batch, slots] as its row among the tokens [length, batch], -1: none."""
    batch = token_in_slot.shape[1]
    return torch.where(
        token_in_slot < 0, -1, token_in_slot * batch + torch.arange(batch, device=token_in_slot.device).view(1, -1, 1)
    )


class _SlotsDispatch(torch.autograd.Function):
    """Autograd function of `dispatch_slots`. `weights`: [length, batch, experts], of which a token has at most
    `chosen`."""

    @staticmethod
    def forward(ctx, x, weights, slots, chosen):
        """Return the tokens in the slots of their experts."""
        held, lies = _slot_places(weights, slots, chosen)
        ctx.save_for_backward(lies)
        rows = x.reshape(-1, x.shape[-1])
        return sum_weighted_rows(rows, _slot_tokens(held).unsqueeze(-1), (held >= 0).unsqueeze(-1).to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of a token's gradients from all slots in which it lies."""
        (lies,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        return sum_weighted_rows(rows, lies, (lies >= 0).to(rows.dtype)), None, None, None


def dispatch_slots(x: Tensor, weights: Tensor, slots: int, max_experts_per_token: int) -> Tensor:
    """Return the tokens x [length, batch, d] in the slots of their experts [experts, batch, slots, d], empty ones 0."""
    return _SlotsDispatch.apply(x, weights, slots, max_experts_per_token)


class _SlotsCombine(torch.autograd.Function):
    """Autograd function of `combine_slots`, which adds in the type of statistics, in the order of the experts."""

    @staticmethod
    def forward(ctx, y, weights, chosen):
        """Return the weighted sum, for each token, of the slots in which it lies."""
        held, lies = _slot_places(weights, y.shape[2], chosen)
        ctx.save_for_backward(y, weights, held, lies)
        by_place = widen_dtype(weights.gather(-1, _find_experts_of_slots(lies, y))).masked_fill_(lies < 0, 0)
        return sum_weighted_rows(y.reshape(-1, y.shape[-1]), lies, by_place)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the slots and of the weights."""
        y, weights, held, lies = ctx.saved_tensors
        place_gradients = products_of_rows(y.reshape(-1, y.shape[-1]), lies, gradient).masked_fill_(lies < 0, 0)
        of_weights = torch.zeros(weights.shape, dtype=place_gradients.dtype, device=y.device)
        of_weights.scatter_add_(-1, _find_experts_of_slots(lies, y), place_gradients)
        tokens, expert = _slot_tokens(held), torch.arange(weights.shape[-1], device=y.device).view(-1, 1, 1)
        by_slot = weights.flatten()[tokens.clamp_min(0) * weights.shape[-1] + expert].masked_fill_(held < 0, 0)
        rows = gradient.reshape(-1, y.shape[-1])
        of_slots = sum_weighted_rows(rows, tokens.unsqueeze(-1), by_slot.unsqueeze(-1))
        return of_slots, of_weights.to(weights.dtype), None


def _find_experts_of_slots(slot_indices: Tensor, y: Tensor) -> Tensor:
    """Return the expert at each index in `slot_indices` of the slots y [experts, batch, slots, d], 0 for -1."""
    return slot_indices.clamp_min(0).div(y.shape[1] * y.shape[2], rounding_mode="floor")


def combine_slots(y: Tensor, weights: Tensor, max_experts_per_token: int) -> Tensor:
    """Return the sum [length, batch, d] of what each token's experts made of it, in slots y, times their `weights`."""
    return _SlotsCombine.apply(y, weights, max_experts_per_token)


class _Rows(torch.autograd.Function):
    """Autograd function behind `look_up_rows` where the table is a leaf: its gradient is added where that stays. Rows
    of a frozen table take a gradient too, as if there were layers below: `anchor` does."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, anchor: Tensor):
        """Return the rows of the embedding table at `ids`."""
        ctx.table = table
        ctx.save_for_backward(ids)
        return F.embedding(ids, table.reshape(table.shape[0], -1)).view(*ids.shape, *table.shape[1:])

    @staticmethod
    def backward(ctx, gradient):
        """Add the rows' gradient to the sum of the table's gradients, at `ids`."""
        (ids,) = ctx.saved_tensors
        compute_and_add_gradient(ctx.table, partial(_scatter_gradient, ctx.table, ids, gradient))
        return None, None, None


def _scatter_gradient(table: Tensor, ids: Tensor, gradient: Tensor, into: Tensor | None, fresh: bool) -> Tensor:
    """Add the gradient of an embedding table's rows at `ids` to `into` (zeros if `fresh` or None); return it."""
    if into is None:
        into = torch.zeros_like(table, requires_grad=False)
    elif fresh:
        into.zero_()
    into.view(len(table), -1).index_add_(0, ids.flatten(), gradient.reshape(ids.numel(), -1).to(into.dtype))
    return into


def look_up_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of an embedding `table` [rows, ...] at the indices `ids`, as a tensor [*ids, ...]."""
    # on a GPU, torch's kernel adds in a fixed order and in fp32
    frozen = table.is_leaf and not table.requires_grad
    if frozen or (can_accumulate(table) and table.device.type == "cpu"):
        return _Rows.apply(table, ids, table.new_empty(0, requires_grad=True) if frozen else table)
    return F.embedding(ids, table.reshape(table.shape[0], -1)).view(*ids.shape, *table.shape[1:])
