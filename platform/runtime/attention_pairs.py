"""Kernels of one pair of queries and keys, which give the log-sum-exp of each row, so that pairs can be merged: torch's
fused ones, and products for what these do not take.

Every kernel computes out = softmax(scale q k^T + ...) v and the log-sum-exp of each row of scores, -inf where a query
sees no key; and, given the result and the log-sum-exp of *all* keys, the gradients that come from these keys alone:
P = exp(scores - lse), dS = P (dP - rowsum(dO O)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from platform.plan.layout import NONE, Pair, Stretch, place_stretches
from platform.plan.model_types import FLASH_PACKAGES, MATH, AttentionTraits, resolve_auto_kernel
from platform.runtime.positions import additive_mask
from platform.runtime.statistics import cap_softly, slope_of_cap, widen_dtype

_ATEN = torch.ops.aten
_PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# torch's kernel of CPUs computes the scores of 512 keys, seen or not, of fewer queries at once where these are few
HALVES = range(257, 768)
_ROWS_OF_STATISTICS = 32  # the efficient kernel's log-sum-exp has a multiple of so many rows
_ROWS_OF_MASK = 16  # and its mask begins every row at a multiple of so many numbers


class Scores(NamedTuple):
    """All that makes the scores of a pair beside q and k: `scale`; `causal`: a query sees the keys up to its own place,
    and there are as many; `hidden`, bool, True where a key is not seen; a learned `bias` added to them; and `factor`,
    by which dropout multiplies their probabilities; `cap`: soft cap of scores, before a bias is added; 0: none. Each
    tensor broadcasts to [batch, heads, length, memory_length]."""

    scale: float
    causal: bool = False
    hidden: Tensor | None = None
    bias: Tensor | None = None
    factor: Tensor | None = None
    cap: float = 0.0


QueryKeyValue = tuple[Tensor, Tensor, Tensor]  # q, k, v: [batch, heads, length, d_kv], k and v perhaps of fewer heads
Result = tuple[Tensor, Tensor]  # of q's shape, with the d_kv of v; log-sum-exp [batch, heads, length]
Gradients = tuple[Tensor, ...]  # of q, k, v, and of a bias if there is one


class PairKernel(NamedTuple):
    """Kernel of a pair: its forward and its backward pass. `halves`: numbers of queries with which a causal pair takes
    longer than its parts, as the kernel computes much that it then hides."""

    forward: Callable[[QueryKeyValue, Scores], Result]
    backward: Callable[[Tensor, QueryKeyValue, Result, Scores], Gradients]
    halves: range = NONE


def choose_pair_kernel(name: str, qkv: QueryKeyValue, masks_scores: bool) -> PairKernel:
    """Return the kernel `name`, or the preferred one under `auto`; `masks_scores`: some scores are hidden."""
    q, k, v = qkv
    traits = AttentionTraits(
        _PRECISIONS[q.dtype],
        q.shape[-1],
        mask=masks_scores,
        grouped=q.shape[1] != k.shape[1],
        deterministic=torch.are_deterministic_algorithms_enabled(),
        d_value=0 if q.shape[-1] == v.shape[-1] else v.shape[-1],
    )
    device = "cpu" if q.device.type == "cpu" else "cuda"
    name = resolve_auto_kernel(name, device, traits)
    kernel = PRODUCTS if name == MATH else FUSED[device, name]
    return kernel._replace(halves=NONE) if q.element_size() < 4 else kernel  # it packs operands of 16 bits by call


def _blank_unseen_queries(result: Result, scores: Scores) -> Result:
    """Return the result of a kernel with a log-sum-exp of -inf, and 0, for queries that see no key."""
    out, lse = result
    if scores.hidden is not None:
        nothing = scores.hidden.all(-1).expand(lse.shape)
        out, lse = out.masked_fill(nothing.unsqueeze(-1), 0), lse.masked_fill(nothing, -inf)
    return out, lse


def _additive_mask(q: Tensor, k: Tensor, scores: Scores) -> Tensor | None:
    """Return the mask that a fused kernel of CUDA adds to scores, in q's dtype and of their shape."""
    if scores.hidden is None:
        return None
    n = k.shape[2]
    added = F.pad(additive_mask(scores.hidden, q.dtype), (0, -n % _ROWS_OF_MASK))[..., :n]
    return added.expand(*q.shape[:3], n)


def _flash_cpu_forward(qkv: QueryKeyValue, scores: Scores) -> Result:
    """Compute a pair by torch's flash kernel of CPUs."""
    added = None if scores.hidden is None else _view_four_dims(additive_mask(scores.hidden, qkv[0].dtype))
    attend = _ATEN._scaled_dot_product_flash_attention_for_cpu
    return _blank_unseen_queries(attend(*qkv, 0.0, scores.causal, attn_mask=added, scale=scores.scale), scores)


def _flash_cpu_backward(gradient: Tensor, qkv: QueryKeyValue, result: Result, scores: Scores) -> Gradients:
    """Return the gradients of a pair by torch's flash kernel of CPUs."""
    added = None if scores.hidden is None else _view_four_dims(additive_mask(scores.hidden, qkv[0].dtype))
    differentiate = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return differentiate(gradient, *qkv, *result, 0.0, scores.causal, attn_mask=added, scale=scores.scale)


def _view_four_dims(x: Tensor) -> Tensor:
    """Return x [..., length, memory_length] with four dims, the first of one index."""
    return x.view(*[1] * (4 - x.dim()), *x.shape)


def _pad_head_dim(qkv: QueryKeyValue) -> QueryKeyValue:
    """Return q, k and v with zeros behind their last dim, where CUDA's flash kernel wants a multiple of 8."""
    q, k, v = (F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in qkv)
    return q, k, v


def _flash_forward(qkv: QueryKeyValue, scores: Scores) -> Result:
    """Compute a pair by torch's flash kernel of CUDA, which takes no mask."""
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention(
        *_pad_head_dim(qkv), 0.0, scores.causal, False, scale=scores.scale
    )
    return out[..., : qkv[2].shape[-1]], lse


def _flash_backward(gradient: Tensor, qkv: QueryKeyValue, result: Result, scores: Scores) -> Gradients:
    """Return the gradients of a pair by torch's flash kernel of CUDA."""
    out, lse = result
    extra = -gradient.shape[-1] % 8
    gradient, out = (F.pad(x, (0, extra)) if extra else x for x in (gradient, out))
    state = gradient.new_empty(2, dtype=torch.uint64), gradient.new_empty((), dtype=torch.uint64)  # nothing is drawn
    lengths = None, None, qkv[0].shape[2], qkv[1].shape[2]
    padded_gradients = _ATEN._scaled_dot_product_flash_attention_backward(
        gradient, *_pad_head_dim(qkv), out, lse.contiguous(), *lengths, 0.0, scores.causal, *state, scale=scores.scale
    )
    return tuple(x[..., : y.shape[-1]] for x, y in zip(padded_gradients, qkv, strict=True))


def _efficient_forward(qkv: QueryKeyValue, scores: Scores) -> Result:
    """Compute a pair by torch's memory-efficient kernel of CUDA."""
    out, lse, *_ = _ATEN._scaled_dot_product_efficient_attention(
        *qkv, _additive_mask(*qkv[:2], scores), True, 0.0, scores.causal, scale=scores.scale
    )
    return _blank_unseen_queries((out, lse[..., : qkv[0].shape[2]]), scores)


def _efficient_backward(gradient: Tensor, qkv: QueryKeyValue, result: Result, scores: Scores) -> Gradients:
    """Return the gradients of a pair by torch's memory-efficient kernel of CUDA."""
    out, lse = result
    lse = F.pad(lse, (0, -lse.shape[-1] % _ROWS_OF_STATISTICS), value=inf)
    state = [gradient.new_empty((), dtype=torch.int64) for _ in range(2)]  # nothing is drawn
    needs_gradients = [True, True, True, False]
    added = _additive_mask(*qkv[:2], scores)
    all_gradients = _ATEN._scaled_dot_product_efficient_attention_backward(
        gradient, *qkv, added, out, lse, *state, 0.0, needs_gradients, scores.causal, scale=scores.scale
    )
    return all_gradients[:3]


def _cudnn_forward(qkv: QueryKeyValue, scores: Scores) -> Result:
    """Compute a pair by cuDNN's kernel."""
    out, lse, *_ = _ATEN._scaled_dot_product_cudnn_attention(
        *qkv, _additive_mask(*qkv[:2], scores), True, 0.0, scores.causal, False, scale=scores.scale
    )
    return _blank_unseen_queries((out, lse.view(qkv[0].shape[:3])), scores)


def _cudnn_backward(gradient: Tensor, qkv: QueryKeyValue, result: Result, scores: Scores) -> Gradients:
    """Return the gradients of a pair by cuDNN's kernel, whose log-sum-exp has one dim more."""
    out, lse = result
    state = [gradient.new_empty((), dtype=torch.int64) for _ in range(2)]  # nothing is drawn
    lengths = None, None, qkv[0].shape[2], qkv[1].shape[2]
    return _ATEN._scaled_dot_product_cudnn_attention_backward(
        gradient, *qkv, out, lse.contiguous().unsqueeze(-1), *state, _additive_mask(*qkv[:2], scores), *lengths, 0.0,
        scores.causal, scale=scores.scale,
    )  # fmt: skip


def _rows_by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """Return x [batch, heads, length, n] with the heads that share a head of k as more rows of it."""
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _compute_products(qkv: QueryKeyValue, scores: Scores) -> Tensor:
    """Return the capped products of a pair [batch, heads, length, memory_length], in the type of statistics."""
    q, k, _ = qkv
    products = _rows_by_key_head(widen_dtype(q) * scores.scale, k) @ widen_dtype(k).mT
    return cap_softly(products.view(*q.shape[:3], k.shape[2]), scores.cap)


def _compute_scores(qkv: QueryKeyValue, scores: Scores) -> Tensor:
    """Return the scores of a pair [batch, heads, length, memory_length], in the type of statistics."""
    q, score_matrix = qkv[0], _compute_products(qkv, scores)
    if scores.bias is not None:
        score_matrix += widen_dtype(scores.bias)
    if scores.causal:
        score_matrix.masked_fill_(torch.ones(score_matrix.shape[2:], dtype=torch.bool, device=q.device).triu_(1), -inf)
    return score_matrix if scores.hidden is None else score_matrix.masked_fill_(scores.hidden, -inf)


def _math_forward(qkv: QueryKeyValue, scores: Scores) -> Result:
    """Compute a pair by two products, in the type of statistics."""
    q, k, v = qkv
    score_matrix = _compute_scores(qkv, scores)
    lse = score_matrix.logsumexp(-1)
    p = score_matrix.sub_(finite_log_sum_exp(lse).unsqueeze(-1)).exp_()
    if scores.factor is not None:
        p *= scores.factor
    out = _rows_by_key_head(p, k) @ widen_dtype(v)
    return out.view(*q.shape[:3], v.shape[-1]).to(q.dtype), lse


def _math_backward(gradient: Tensor, qkv: QueryKeyValue, result: Result, scores: Scores) -> Gradients:
    """Return the gradients of a pair by five products, in the type of statistics."""
    q, k, v = qkv
    out, lse = result
    wide = widen_dtype(gradient)
    p = _compute_scores(qkv, scores).sub_(lse.unsqueeze(-1)).exp_()
    dp = (_rows_by_key_head(wide, k) @ widen_dtype(v).mT).view(p.shape)
    dropped = p if scores.factor is None else p * scores.factor
    dv = _rows_by_key_head(dropped, k).mT @ _rows_by_key_head(wide, k)
    if scores.factor is not None:
        dp *= scores.factor
    ds = p.mul_(dp.sub_((wide * out).sum(-1, keepdim=True)))
    dbias = () if scores.bias is None else (ds.sum_to_size(scores.bias.shape),)
    if scores.cap:
        ds = slope_of_cap(_compute_products(qkv, scores), scores.cap).mul_(ds)
    dq = (_rows_by_key_head(ds, k) @ widen_dtype(k)).view(q.shape).mul_(scores.scale)
    dk = (_rows_by_key_head(ds, k).mT @ _rows_by_key_head(widen_dtype(q), k)).mul_(scores.scale)
    return dq, dk, dv, *dbias


def finite_log_sum_exp(lse: Tensor) -> Tensor:
    """Return the log-sum-exp of rows, 0 where a query sees no key: then exp(-inf - 0) is the probability of each, 0."""
    return lse.masked_fill(lse == -inf, 0)


PRODUCTS = PairKernel(_math_forward, _math_backward)
FUSED = {
    ("cpu", "flash"): PairKernel(_flash_cpu_forward, _flash_cpu_backward, HALVES),
    **{("cuda", name): PairKernel(_flash_forward, _flash_backward) for name in ("flash", *FLASH_PACKAGES)},
    ("cuda", "efficient"): PairKernel(_efficient_forward, _efficient_backward),
    ("cuda", "cudnn"): PairKernel(_cudnn_forward, _cudnn_backward),
}


# Pairs of queries and keys that documents of packed sequences leave: scores that a document hides are not computed.
#
# Queries are cut where a document begins, in each sequence by itself. A query of one document sees all its keys before
# the cut, and a diagonal behind it: no mask is needed, and no other key is read. Only documents that are short together
# share a mask. All of this is found on the host, where a block of data on a GPU has left its numbers
# (`note_host_copy`), so no layer waits for the device.

Begins = np.ndarray[Any, Any]  # [length, batch]: the position at which the document of each query begins
Cut = tuple[Stretch, Stretch, tuple[int, int]]  # rows, their positions, where the first and last of documents begin


class _HostCopy(NamedTuple):
    """Data tensor as the host knows it: its numbers, and the pairs found so far, which all layers share."""

    begins: Begins
    pairs: dict[Any, list[Pair]]


_ON_HOST, _KNOWN = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()


def note_host_copy(tensor: Tensor, on_host: Begins | Tensor) -> None:
    """Note a data tensor of a device as the host has it."""
    _ON_HOST[tensor] = on_host


def _find_host_copy(begins: Tensor) -> _HostCopy:
    """Return a data tensor as the host knows it; of one on a device, `note_host_copy` has noted the numbers."""
    if begins not in _KNOWN:
        host_copy = begins if begins.device.type == "cpu" else _ON_HOST[begins]
        _KNOWN[begins] = _HostCopy(np.asarray(host_copy), {})
    return _KNOWN[begins]


def document_pairs(
    document_starts: Tensor,
    queries: Sequence[Stretch],
    max_short_positions: int,
    cache_key: Any,
    build_pairs: Callable[..., list[Pair]],
) -> list[Pair]:
    """Return the pairs in which `queries`, at these positions, see keys of their documents, which begin at
    `document_starts`. `build_pairs`: function of consecutive queries and of where their first and last document begins,
    as `platform.plan.layout.pair_queries_with_keys`; `cache_key`: all on which its result depends;
    `max_short_positions`: the most positions of documents that share a mask."""
    known, cache_key = _find_host_copy(document_starts), (tuple(queries), max_short_positions, cache_key)
    if cache_key not in known.pairs:
        cut_pairs = (
            pair._replace(rows=Stretch(rows.first + pair.rows.first, pair.rows.size), sequences=sequences)
            for sequences, (rows, positions, borders) in _cut_sequences(known.begins, queries, max_short_positions)
            for pair in build_pairs([positions], borders)
        )
        known.pairs[cache_key] = list(cut_pairs)
    return known.pairs[cache_key]


def _cut_sequences(
    document_starts: Begins, queries: Sequence[Stretch], max_short_positions: int
) -> Iterator[tuple[Stretch, Cut]]:
    """Yield (sequences, cut) for queries to compute together: sequences cut alike whose long documents begin alike."""

    def cut_sequence(column: Begins) -> list[Cut]:
        """Return the cuts of one sequence."""
        return [
            cut
            for row, q in place_stretches(queries)
            for cut in _cut_queries_at_documents(column, row, q, max_short_positions)
        ]

    def sequence_key(cuts: list[Cut]) -> list[Any]:
        """Return the key of a sequence, by which its neighbours are computed together with it."""
        return [(rows, document_starts if rows.size > max_short_positions else ()) for rows, _, document_starts in cuts]

    first = 0
    for _, group in groupby(map(cut_sequence, document_starts.T), sequence_key):
        alike = list(group)
        for cuts in zip(*alike, strict=True):
            rows, q, _ = cuts[0]
            earliest, latest = zip(*(borders for *_, borders in cuts), strict=True)
            yield Stretch(first, len(alike)), (rows, q, (min(earliest), max(latest)))
        first += len(alike)


def _cut_queries_at_documents(document_starts: Begins, row: int, q: Stretch, max_short_positions: int) -> list[Cut]:
    """Return a stretch of one sequence's queries, from `row` on, cut between documents that are not short together."""
    document_begins = document_starts[row : row + q.size]
    borders = [0, *(int(i) + 1 for i in np.flatnonzero(np.diff(document_begins))), q.size]
    cuts: list[Cut] = []
    for start, end in zip(borders, borders[1:], strict=False):
        begin = int(document_begins[start])
        cut_before = cuts[-1] if cuts else None
        if cut_before and q.first + end - min(cut_before[2][0], begin) <= max_short_positions:
            start = cut_before[0].first - row
            borders_of = min(cut_before[2][0], begin), max(cut_before[2][1], begin)
            cuts.pop()
        else:
            borders_of = begin, begin
        cuts.append((Stretch(row + start, end - start), Stretch(q.first + start, end - start), borders_of))
    return cuts
