"""Attention of a rank's queries to keys and values that come in panels: all at once, or around a ring of ranks of which
each has some (Liu et al. 2023).

Each panel gives a softmax over its own keys, and the log-sum-exp of each query's scores there. Two of them are one by

    lse = log(exp(lse_a) + exp(lse_b)),    out = out_a + (out_b - out_a) sigmoid(lse_b - lse_a)

in the type of statistics. A sink is one score more without a value, so it merges as a panel whose `out` is 0. In the
backward pass every panel's gradients come from the log-sum-exp of all keys, by itself.

Around a ring of n ranks, keys and values move n - 1 times in each pass, in one message, while the panel at hand is
computed. Gradients of a panel's keys and values follow it, each rank adding its own, and end at its owner: the owner's
part waits there, so they too move n - 1 times, in the type of keys, as in a reduce-scatter. The owner computes a half
of its part first, and the other half last, so that the first keys and the last gradients are under way meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from platform.plan.layout import (
    BLOCK,
    DIAGONAL,
    LEAST,
    MASKED,
    Pair,
    Stretch,
    mask_sharing_limit,
    pair_queries_with_keys,
)
from platform.plan.model_types import MATH
from platform.runtime import positions, residual
from platform.runtime.attention_pairs import (
    PRODUCTS,
    PairKernel,
    QueryKeyValue,
    Scores,
    choose_pair_kernel,
    document_pairs,
    finite_log_sum_exp,
)
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle, Communicator
from platform.runtime.residual import Drawing
from platform.runtime.statistics import widen_dtype

# messages of a ring, in a timeline
KEYS, AGAIN, GRADIENTS = "keys and values", "keys and values again", "gradients of keys and values"


class PanelAttention(NamedTuple):
    """Attention whose keys lie in panels, of each rank along the axes `over`. `queries`: the global positions of this
    rank's queries; `keys`: the positions of each rank's keys; `kernel`: its name (flash, cudnn, efficient, math);
    `window`: a query of a `causal` one sees so many keys, itself included; 0: all; `cap`: soft cap of scores, 0: no."""

    queries: Sequence[Stretch]
    keys: Sequence[Sequence[Stretch]]
    over: tuple[str, ...]
    kernel: str
    scale: float
    causal: bool
    window: int = 0
    cap: float = 0.0


class Hiding(NamedTuple):
    """Tensors that change scores: `begins` [length, batch], the positions at which the documents of this rank's queries
    begin; `padding`, bool [batch, memory_length] of all positions, True where a key is hidden; and the `drawing` of
    dropout, of dims [batch, heads, length, memory_length], the last of all positions."""

    begins: Tensor | None = None
    padding: Tensor | None = None
    drawing: Drawing | None = None


class _UntouchedPositions:
    """Positions of a block's sequences to which no pair has added anything yet."""

    def __init__(self, x: Tensor):
        """Note that nothing is added yet to the block x [batch, heads, length, ...]."""
        self._left = np.ones((x.shape[0], x.shape[2]), bool)

    def take_positions(self, sequences: Stretch | None, where: Stretch) -> tuple[bool, bool]:
        """Take positions to which a pair is added; return whether all were fresh, and whether the block has no more."""
        part = self._left if sequences is None else self._left[sequences.first : sequences.end]
        part = part[:, where.first : where.end]
        fresh = bool(part.all())
        part[:] = False
        return fresh, part.size == self._left.size


def _view_positions(x: Tensor, sequences: Stretch | None, where: Stretch) -> Tensor:
    """Return a view of the positions `where` in some sequences of x [batch, heads, length, ...]."""
    return (x if sequences is None else x.narrow(0, *sequences)).narrow(2, *where)


class _MergedResult:
    """Result of an attention of queries q over the keys that were merged so far, with values of `width`."""

    def __init__(self, q: Tensor, width: int):
        """Prepare the result of queries q that have seen no key yet."""
        self.q, self.width = q, width
        self.out: Tensor | None = None
        self.fresh = _UntouchedPositions(q)  # queries of which there is no result
        self.lse = q.new_empty(0)

    def result_so_far(self) -> Tensor:
        """Return the merged result so far, 0 for queries that have seen no key."""
        if self.out is None:
            wide = widen_dtype(self.q[:0]).dtype
            self.out = self.q.new_zeros((*self.q.shape[:3], self.width), dtype=wide)
            self.lse = self.q.new_full(self.q.shape[:3], -inf, dtype=wide)
        return self.out

    def merge_pair(self, pair: Pair, out: Tensor, lse: Tensor) -> None:
        """Merge the result of one pair, for its queries, into the attention's result."""
        all_fresh, covers_all = self.fresh.take_positions(pair.sequences, pair.rows)
        if all_fresh and covers_all:
            self.out, self.lse = widen_dtype(out), lse
            return
        into, of_all = (_view_positions(x, pair.sequences, pair.rows) for x in (self.result_so_far(), self.lse))
        if all_fresh:
            into.copy_(out)
            of_all.copy_(lse)
        else:
            merge_attention(into, of_all, widen_dtype(out), lse)

    def finish_result(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the attention's result in q's dtype and the log-sum-exp of its rows, merged with a `sink` [heads]."""
        out = self.result_so_far()
        if sink is not None:
            merge_attention(out, self.lse, torch.zeros_like(out), widen_dtype(sink)[:, None].expand_as(self.lse))
        return out.to(self.q.dtype), self.lse


def merge_attention(out: Tensor, log_sum_exp: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the attention `other` over keys of its own, with its log-sum-exp, into the attention `out`, in place."""
    share = torch.sigmoid(other_lse - log_sum_exp).nan_to_num_(0)  # not a number where neither sees a key
    out.lerp_(other, share.unsqueeze(-1))
    log_sum_exp.copy_(torch.logaddexp(log_sum_exp, other_lse))


class _PairGradientSum:
    """Gradient of a block shaped as `x`, summed in the type of statistics over the pairs that read a part of it."""

    def __init__(self, x: Tensor):
        """Prepare the gradient of x, of which no pair has given any part."""
        self.x, self.fresh = x, _UntouchedPositions(x)
        self.total: Tensor | None = None

    def add_gradient(self, sequences: Stretch | None, where: Stretch, part: Tensor) -> None:
        """Add the gradient of the stretch `where` of some sequences' positions."""
        all_fresh, covers_all = self.fresh.take_positions(sequences, where)
        if all_fresh and covers_all:
            self.total = widen_dtype(part)
            return
        self.total = self.gradient_sum()
        into = _view_positions(self.total, sequences, where)
        (into.copy_ if all_fresh else into.add_)(part)

    def gradient_sum(self) -> Tensor:
        """Return the sum of the block's gradients so far, 0 without any."""
        if self.total is None:
            return torch.zeros(self.x.shape, dtype=widen_dtype(self.x[:0]).dtype, device=self.x.device)
        return self.total


class _PanelPairs:
    """Pairs of one rank's queries with panels, and the kernel that computes them."""

    def __init__(self, plan: PanelAttention, qkv: QueryKeyValue, bias: Tensor | None, hiding: Hiding):
        """Prepare the attention `plan` of q to panels such as k and v, whose scores `bias` and `hiding` change."""
        self.plan, self.bias, self.hiding = plan, bias, hiding
        q, masked = qkv[0], plan.window > 0 or hiding.begins is not None or hiding.padding is not None
        # which no kernel bends, adds, or draws, panel by panel
        products = plan.cap > 0 or bias is not None or hiding.drawing is not None
        self.kernel: PairKernel = choose_pair_kernel(MATH if products else plan.kernel, qkv, masked)
        makes_scores = plan.window > 0 or hiding.padding is not None or self.kernel is PRODUCTS
        narrow = plan.window and q.device.type == "cpu"  # elsewhere, few large kernels are worth more
        most = min(BLOCK, max(plan.window, LEAST)) if narrow else BLOCK  # of which a narrow window hides less
        self.block, self.device, self.dtype = most if makes_scores else 0, q.device, widen_dtype(q[:0]).dtype
        self.batch = q.shape[0]

    def panel_pairs(self, owner: int) -> list[Pair]:
        """Return the pairs of this rank's queries with the panel of rank `owner` along the axes of the attention."""
        plan, begins = self.plan, self.hiding.begins
        keys, block, short = tuple(plan.keys[owner]), self.block, mask_sharing_limit(self.device.type)
        how = plan.causal, plan.window, self.kernel.halves

        def pairs_of_queries(queries: Sequence[Stretch], document_starts: tuple[int, int] = (0, 0)) -> list[Pair]:
            """Return the pairs of some queries, whose documents start between two positions, `document_starts`."""
            most = block or (short if document_starts[0] < document_starts[1] else 0)  # several documents make a mask
            return pair_queries_with_keys(queries, keys, *how, most, document_starts)

        if begins is None:
            return pairs_of_queries(plan.queries)
        return document_pairs(begins, plan.queries, short, (keys, how, block), pairs_of_queries)

    def build_score_terms(self, pair: Pair) -> Scores:
        """Return what makes the scores of a pair, beside its queries and keys."""
        (row, rows), keys = pair.rows, (pair.start, pair.columns.size)
        begins, padding, drawing = self.hiding
        some = pair.sequences or Stretch(0, self.batch)
        hidden = bias = factor = None
        if pair.relation == MASKED or (pair.relation == DIAGONAL and padding is not None):
            at, memory = (torch.arange(first, first + n, device=self.device) for first, n in ((pair.at, rows), keys))
            begins = None if begins is None else begins.narrow(0, row, rows).narrow(1, *some)
            hidden = positions.unseen_mask(at, memory, self.plan.window, begins)
        if padding is not None:
            padding = padding.narrow(0, *some).narrow(1, *keys)[:, None, None]
            hidden = padding if hidden is None else hidden | padding
        if self.bias is not None:
            bias = self.bias.narrow(2, row, rows).narrow(3, *keys)
        if drawing is not None:
            batch, heads, length, memory = drawing.counters
            counters = batch.narrow(0, *some), heads, length.narrow(2, row, rows), memory.narrow(3, *keys)
            keep_mask = residual.draw_dropout_mask(counters, drawing.start, drawing.rate)
            factor = keep_mask.to(self.dtype) * (1 / (1 - drawing.rate))
        causal = pair.relation == DIAGONAL and hidden is None
        return Scores(self.plan.scale, causal, hidden, bias, factor, self.plan.cap)


def _pair_operands(pair: Pair, qkv: QueryKeyValue) -> QueryKeyValue:
    """Return the queries, keys and values of a pair as views of their blocks."""
    q, k, v = qkv
    k, v = (_view_positions(x, pair.sequences, pair.columns) for x in (k, v))
    return _view_positions(q, pair.sequences, pair.rows), k, v


def _iterate_panels(
    communicator: Communicator, plan: PanelAttention, k: Tensor, v: Tensor, name: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (owner, keys, values) of every panel, this rank's own first, then those before it around the ring. The next
    one is on its way while one is used, called `name`."""
    n = len(plan.keys)
    me = communicator.group_index(plan.over) if n > 1 else 0
    message = _pack_message(k, v) if n > 1 else k
    for step in range(n):
        coming = communicator.launch("rotate", message, plan.over, name=name) if step + 1 < n else None
        yield (me - step) % n, k, v
        if coming:
            message = coming.wait()
            k, v = _unpack_message(message, k, v)


def _pack_message(k: Tensor, v: Tensor) -> Tensor:
    """Return a panel's keys and values, or their gradients, as one message."""
    return torch.cat((k.flatten(), v.flatten()))


def _unpack_message(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two tensors of a message of a ring, shaped as k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)


def _attend_all_panels(
    communicator: Communicator, plan: PanelAttention, qkv: QueryKeyValue, hiding: Hiding, bias: Tensor | None = None
) -> _MergedResult:
    """Attend to the panels of all ranks, of which k and v are this rank's."""
    q, k, v = qkv
    reader, merged_result = _PanelPairs(plan, qkv, bias, hiding), _MergedResult(q, v.shape[-1])
    for owner, keys, values in _iterate_panels(communicator, plan, k, v, KEYS):
        for pair in reader.panel_pairs(owner):
            merged_result.merge_pair(
                pair, *reader.kernel.forward(_pair_operands(pair, (q, keys, values)), reader.build_score_terms(pair))
            )
    return merged_result


def _add_pair_gradients(
    reader: _PanelPairs,
    panel_pairs: Sequence[Pair],
    results: QueryKeyValue,
    qkv: QueryKeyValue,
    sums: Sequence[_PairGradientSum],
    dbias: Tensor | None,
) -> None:
    """Add the gradients of some pairs to the `sums` of queries, keys and values, and to a bias's. `results`: the
    gradient of the attention's result, the result, and the log-sum-exp of all its keys; `qkv`: queries, a panel's keys
    and values."""
    for pair in panel_pairs:
        gradient, out, lse = (_view_positions(x, pair.sequences, pair.rows) for x in results)
        parts = reader.kernel.backward(gradient, _pair_operands(pair, qkv), (out, lse), reader.build_score_terms(pair))
        for total, where, part in zip(sums, (pair.rows, pair.columns, pair.columns), parts, strict=False):
            total.add_gradient(pair.sequences, where, part)
        if dbias is not None:
            dbias.narrow(2, *pair.rows).narrow(3, pair.start, pair.columns.size).add_(parts[3])


def _split_pairs_by_work(panel_pairs: Sequence[Pair]) -> tuple[Sequence[Pair], Sequence[Pair]]:
    """Return the first pairs that have half of the products of all, or just more, and the others."""
    all_products = sum(pair.score_count for pair in panel_pairs)
    cut = 1 + sum(2 * done < all_products for done in accumulate(pair.score_count for pair in panel_pairs))
    return panel_pairs[:cut], panel_pairs[cut:]


class _Panels(torch.autograd.Function):
    """Attention of local queries to panels of keys and values; it keeps its operands, its result and one number a row.
    The gradient of a sink, and of a bias, is the part that comes from this rank's queries."""

    @staticmethod
    def forward(ctx, communicator, plan, hiding, q, k, v, sink, bias):
        """Return the attention of q to the panels of all ranks, k and v being this rank's."""
        out, lse = _attend_all_panels(communicator, plan, (q, k, v), hiding, bias).finish_result(sink)
        ctx.save_for_backward(q, k, v, sink, bias, out, lse)
        ctx.options = communicator, plan, hiding
        return out

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of q, k, v, sink and bias; the parts of k and v have come from all ranks."""
        q, k, v, sink, bias, out, lse = ctx.saved_tensors
        communicator, plan, hiding = ctx.options
        reader, sums = _PanelPairs(plan, (q, k, v), bias, hiding), [_PairGradientSum(x) for x in (q, k, v)]
        gradient = _join_last_dim(gradient)
        dbias = None if bias is None else torch.zeros_like(bias)
        results = gradient, out, finite_log_sum_exp(lse)
        turns = _iterate_panels(communicator, plan, k, v, AGAIN)
        owner, *mine = next(turns)
        # under the first message of keys, and the last one of gradients
        now, later = _split_pairs_by_work(reader.panel_pairs(owner))
        _add_pair_gradients(reader, now, results, (q, *mine), sums, dbias)
        coming: CollectiveHandle | ArrivedCollective | None = None
        for owner, *panel in turns:
            panel_sums = [_PairGradientSum(x) for x in panel]
            _add_pair_gradients(reader, reader.panel_pairs(owner), results, (q, *panel), (sums[0], *panel_sums), dbias)
            message = _pack_message(*[x.gradient_sum() for x in panel_sums])
            if coming:
                message += coming.wait()
            coming = communicator.launch("rotate", message.to(k.dtype), plan.over, name=GRADIENTS)
        _add_pair_gradients(reader, later, results, (q, *mine), sums, dbias)
        dq, *dkv = [x.gradient_sum() for x in sums]
        if coming:
            dkv = [x + part for x, part in zip(dkv, _unpack_message(coming.wait(), k, v), strict=True)]
        dsink = None
        if sink is not None:
            share = torch.exp(widen_dtype(sink)[:, None] - lse) * (widen_dtype(gradient) * out).sum(-1)
            dsink = share.sum((0, 2)).neg_().to(sink.dtype)
        dk, dv = dkv
        return None, None, None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, dbias


def attend_panels(
    communicator: Communicator,
    plan: PanelAttention,
    qkv: QueryKeyValue,
    hiding: Hiding | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention of q [batch, heads, length, d_kv], whose positions are `plan.queries`, to the keys and values
    of all ranks of the plan, of which k and v, of perhaps fewer heads, are this rank's. `sink` [heads]: a score of each
    query without a value; `bias` [1, heads, length, memory_length of all positions]: added to the scores."""
    return _Panels.apply(communicator, plan, hiding or Hiding(), *map(_join_last_dim, qkv), sink, bias)


def attend_split_keys(
    communicator: Communicator, plan: PanelAttention, qkv: QueryKeyValue, hiding: Hiding, over: Sequence[str]
) -> Tensor:
    """Compute attention of q, which all ranks along the axes `over` have, to keys and values of which each has a part,
    without a gradient. The greatest log-sum-exp of each row, then the rows' weighted results with their weights, are
    reduced over the ranks: their bytes grow with the rows, not with the keys."""
    q, k, v = map(_join_last_dim, qkv)
    merged_result = _attend_all_panels(communicator, plan, (q, k, v), hiding)
    out, lse = merged_result.result_so_far(), merged_result.lse
    top = communicator.launch("all_reduce", lse.clone(), over, reduce="max", owned=True).wait()
    weight = torch.exp(lse - top).unsqueeze(-1)
    weighted_sums = communicator.launch("all_reduce", torch.cat((out * weight, weight), -1), over, owned=True).wait()
    return (weighted_sums[..., :-1] / weighted_sums[..., -1:]).to(q.dtype)


def _join_last_dim(x: Tensor) -> Tensor:
    """Return x with its last dim in one piece: torch's kernels, called past its own checks, read no other rightly."""
    return x if x.stride(-1) == 1 else x.contiguous()
