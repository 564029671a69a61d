"""Rows of tokens at the ranks of their experts, packed expert after expert: copied, sent there, and summed on return.

Only the rows of chosen (token, expert) pairs are there. A rank reads how many once a pass, as messages have sizes in
host memory; ranks with the same tokens must find the same. No sum depends on the order in which threads add.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels.by_index.row_sums import products_of_rows, sum_of_rows, weighted_rows
from platform.parallel.kernels.statistics import widened
from platform.plan.language.lent import Lent

EMPTY = -1  # in place of the number of an expert, in a seat without one


class Seats(NamedTuple):
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
    def experts(self) -> list[int]:
        """Return the numbers of the experts in all seats, rank after rank, with -1 in an empty seat."""
        own = [[*range(first, first + self.each)] for first in self.first]
        every = [expert for there in own for expert in there]
        lent = [[every[i] for i in there] for there in self.lent] or [[] for _ in own]
        pairs = zip(own, lent, strict=True)
        return [e for here, more in pairs for e in (*here, *more, *[EMPTY] * (self.more - len(more)))]

    def places(self, experts: int) -> list[list[int]]:
        """Return for each of `experts` the seats that tokens of this rank may have there: its own alone, if there is
        one; [] for experts of none of these ranks."""
        found: list[list[int]] = [[] for _ in range(experts)]
        for seat, expert in enumerate(self.experts):
            if expert != EMPTY:
                found[expert].append(seat)
        width = self.each + self.more
        own = range(self.own * width, (self.own + 1) * width)
        return [[seat for seat in seats if seat in own] or seats for seats in found]


class Counts(NamedTuple):
    """Rows of a pass on a rank: how many, and of which tokens.

    `each`: rows of each of this rank's experts, and `ends`: where they end, int32 [experts]. `sent`, `received`: rows
    to and from each rank of the group along `axes`; `given`: rows for each expert of `Seats.experts`. Of the rows that
    this rank sends, `pair` is the (token, place) as an index of `lies` [tokens, chosen]: the row of each token's place,
    -1: none, whose expert is in `which`. `order`: which received row is where, and `back`: where each is, None if they
    lie expert by expert.
    """

    axes: tuple[str, ...]
    each: Sequence[int]
    ends: Tensor
    sent: Sequence[int]
    received: Sequence[int]
    given: Sequence[int]
    pair: Tensor
    lies: Tensor
    which: Tensor
    order: Tensor | None
    back: Tensor | None

    @property
    def token(self) -> Tensor:
        """Return the token of each row that this rank sends, int64 [rows]."""
        return self.pair.div(self.lies.shape[1], rounding_mode="floor")


def count(communicator: Communicator, weights: Tensor, seats: Seats, chosen: int) -> Counts:
    """Count the rows of tokens with `weights` [length, batch, experts] of their experts, at most `chosen`, where a
    weight is not 0, for the experts of `seats`. Ranks exchange the numbers of rows first."""
    goes, device = weights.flatten(0, 1) != 0, weights.device
    experts, n, each = goes.shape[1], len(seats.first), seats.each + seats.more
    place, places = _served(seats, experts, device)
    # the experts of a token in their order, so that what they make is added in it
    order, which = (goes * torch.arange(experts, 0, -1, device=device)).topk(min(chosen, experts), -1)
    if seats.lent:  # the rows of an expert go to each of its seats in turn
        turn = ((goes.cumsum(0) - 1).gather(-1, which) + seats.own) % places[which]
        taken = place[which, turn]
    else:
        taken = place[which, 0]
    taken = taken.masked_fill_(order == 0, n * each).flatten()
    _, pair = taken.sort(stable=True)
    given = torch.zeros(n * each + 1, dtype=torch.int64, device=device).index_add_(0, taken, torch.ones_like(taken))
    given = given[:-1].view(n, each)
    got = communicator.launch("all_to_all", given, seats.axes, name="rows of experts").wait() if seats.axes else given
    numbers = [int(number) for number in communicator.read(torch.cat([given, got]).flatten())]
    sent, received = ([numbers[i : i + each] for i in range(at, at + n * each, each)] for at in (0, n * each))
    rows, there = sum(numbers[: n * each]), sum(numbers[n * each :])
    mixed = min(n, each) > 1
    lies = torch.empty_like(pair).scatter_(0, pair, torch.arange(pair.numel(), device=device))
    return Counts(
        seats.axes,
        [sum(of_ranks) for of_ranks in zip(*received, strict=True)],
        got.sum(0).cumsum(0).to(torch.int32),
        list(map(sum, sent)),
        list(map(sum, received)),
        numbers[: n * each],
        pair[:rows].clone(),
        lies.masked_fill_(lies >= rows, -1).view(which.shape),
        which,
        _reordered(got, there) if mixed else None,
        _reordered(got.t(), there) if mixed else None,
    )


@lru_cache(maxsize=1024)
def _served(seats: Seats, experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the seats [experts, most] in which each expert has rows, and how many seats each has [experts]."""
    # made on the device, of few kernels: a table of the host's would make it wait
    places, width = seats.places(experts), seats.each + seats.more
    most = max(1, *map(len, places))
    at = torch.full((experts, most), len(seats.first) * width, device=device)
    count = torch.ones(experts, dtype=torch.int64, device=device)
    for rank, first in enumerate(seats.first):
        at[first : first + seats.each, 0] = torch.arange(rank * width, rank * width + seats.each, device=device)
        for expert in range(first, first + seats.each):
            if (found := places[expert]) != [rank * width + expert - first]:  # which is lent
                count[expert] = len(found)
                for number, seat in enumerate(found):
                    at[expert, number] = seat
    return at, count


def _reordered(got: Tensor, rows: int) -> Tensor:
    """Return the index [rows] that orders rows by expert; `got` [ranks, experts]: numbers in which they lie by rank."""
    ends = got.flatten().cumsum(0).view(got.shape).t().flatten()
    lengths = got.t().flatten()
    first = ends - lengths.cumsum(0)  # of a stretch: where it came, less where it goes
    return torch.arange(rows, device=got.device) + first.repeat_interleave(lengths, output_size=rows)


def _there(communicator: Communicator, rows: Tensor, counts: Counts) -> Tensor:
    """Send rows from the ranks of tokens to the ranks of experts; return rows in the order of the experts."""
    if counts.axes:
        rows = communicator.deal(rows, counts.sent, counts.received, counts.axes, name="rows to experts").wait()
    return rows if counts.order is None else rows.index_select(0, counts.order)


def _back(communicator: Communicator, rows: Tensor, counts: Counts) -> Tensor:
    """Send rows back to the ranks of their tokens, the reverse of `_there` and its adjoint."""
    if counts.back is not None:
        rows = rows.index_select(0, counts.back)
    if counts.axes:
        rows = communicator.deal(rows, counts.received, counts.sent, counts.axes, name="rows of tokens").wait()
    return rows


def _some(rows: Tensor) -> Tensor:
    """Return the rows, or one of zeros for a rank that has none, where no index means one."""
    return rows if len(rows) else rows.new_zeros(1, rows.shape[1])


class _Dispatch(torch.autograd.Function):
    """Autograd function of `to_experts`."""

    @staticmethod
    def forward(ctx, x, communicator, counts):
        """Return the rows of this rank's experts."""
        ctx.communicator, ctx.counts, ctx.shape = communicator, counts, x.shape
        return _there(communicator, x.flatten(0, 1).index_select(0, counts.token), counts)

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of a token's gradients from all its rows."""
        rows = _back(ctx.communicator, gradient.contiguous(), ctx.counts)
        lies = ctx.counts.lies
        return sum_of_rows(_some(rows), lies, (lies >= 0).to(rows.dtype)).view(ctx.shape), None, None


def to_experts(communicator: Communicator, x: Tensor, counts: Counts) -> Tensor:
    """Return the tokens x [length, batch, d] as rows of this rank's experts [rows, d], expert after expert."""
    return _Dispatch.apply(x, communicator, counts)


class _Combine(torch.autograd.Function):
    """Autograd function of `from_experts`, which adds in the type of statistics, in the order of the experts."""

    @staticmethod
    def forward(ctx, y, weights, communicator, counts):
        """Return the weighted sum, for each token, of its rows."""
        rows = _back(communicator, y, counts)
        ctx.communicator, ctx.counts = communicator, counts
        ctx.save_for_backward(rows, weights)
        by_place = widened(weights.flatten(0, 1).gather(-1, counts.which)).masked_fill_(counts.lies < 0, 0)
        return sum_of_rows(_some(rows), counts.lies, by_place).view(*weights.shape[:2], -1)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the rows and of the weights."""
        rows, weights = ctx.saved_tensors
        counts, gradient = ctx.counts, gradient.flatten(0, 1)
        found = products_of_rows(_some(rows), counts.lies, gradient).masked_fill_(counts.lies < 0, 0)
        of_weights = torch.zeros(weights.shape, dtype=found.dtype, device=rows.device)
        of_weights.flatten(0, 1).scatter_add_(-1, counts.which, found)
        by_place = weights.flatten(0, 1).gather(-1, counts.which).flatten()
        of_rows = weighted_rows(gradient, counts.token, by_place.index_select(0, counts.pair))
        return _there(ctx.communicator, of_rows, counts), of_weights.to(weights.dtype), None, None


def from_experts(communicator: Communicator, y: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Return the sum [length, batch, d] of each token's rows in y [rows, d], times their `weights`."""
    return _Combine.apply(y, weights, communicator, counts)
