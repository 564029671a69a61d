"""Memory model of attention by kernel: one that is fused keeps a statistic per row of the scores, torch's math path the
probabilities, and under dropout what it multiplied them by and the product too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from platform.plan.memory.meter import Meter
from platform.plan.memory.storages import Gradients, MeteredStorage, Saved, Value


@dataclass(frozen=True)
class AttentionBlock:
    """Extents of a worker's block of an attention, and what hides scores in it: `causal`, `masked` (padding); `biased`:
    a learned bias is added to them."""

    batch: int
    heads: int
    length: int
    memory_length: int
    d_kv: int
    causal: bool
    masked: bool
    biased: bool

    @classmethod
    def of(cls, query: Mapping[str, int], key: Mapping[str, int], **hides: bool) -> AttentionBlock:
        """Make it of the local extents of Q and K by dim."""
        return cls(query["batch"], query["heads"], query["length"], key["length"], query["d_kv"], **hides)

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.length

    @property
    def scores(self) -> int:
        return self.rows * self.memory_length


def hidden(meter: Meter, a: AttentionBlock, bias: Value | None) -> Value | None:
    """Count what is added to the scores, as `platform.parallel.kernels.positions.attention_mask` makes it; None where
    the kernel itself hides what is ahead, and nothing else is hidden."""
    if bias is None and not a.masked:
        return None
    n = (a.batch if a.masked else 1) * (a.length if a.causal else 1) * a.memory_length
    unseen = meter.integers(n, 1)
    if bias is None:
        seen = meter.integers(n, 1)
        floats = Value(meter.new(n), n)  # torch makes floats of booleans
        del seen
        return floats
    n = (a.batch if a.masked else 1) * bias.elements
    return meter.plain(Value(meter.new(n), n), [bias], (unseen,), n if a.masked else 0)


def in_one_kernel(meter: Meter, a: AttentionBlock, out: Value, operands: Sequence[Value], added: Value | None) -> Value:
    """Count an attention of Q, K and V, the `operands`, that one kernel computes: it keeps these, its result `out`, the
    log-sum-exp of each row and what is `added` to the scores."""
    saved = [*(x.storage for x in operands), out.storage, meter.new(a.rows, meter.wide)]
    if added is None:
        return meter.plain(out, operands, tuple(saved))
    ins = [*operands, added] if a.biased else operands
    return meter.plain(out, ins, (*saved, added.storage), a.scores if a.biased else 0)


def by_math(meter: Meter, a: AttentionBlock, operands: Sequence[Value], added: Value | None, dropout: float) -> Value:
    """Count an attention of Q, K and V, the `operands`, that torch's math path computes operation by operation, in the
    type of statistics; return its result."""
    narrow, (q, k, v) = meter.wide != meter.plan.itemsize["compute"], operands
    if narrow:
        q, k, v = (meter.plain(Value(meter.new(x.elements, meter.wide), x.elements), [x]) for x in operands)
    scaled = [_step(meter, q.elements, [q])]
    ahead = [meter.new(a.length * a.memory_length, meter.wide)] if a.causal and not added else []
    whole = a.batch * a.heads * a.memory_length * a.d_kv
    if k.elements < whole:  # every head's own copy of K and V
        k, v = (_step(meter, whole, [x]) for x in (k, v))
    scaled.append(_step(meter, whole, [k]))
    scores = _step(meter, a.scores, scaled, [x.storage for x in scaled])
    if a.causal or added:
        scores = _sum(meter, scores, added if a.biased else None)
    scores = _step(meter, a.scores, [scores], keeps=True)  # softmax
    if dropout:
        scores = _step(meter, a.scores, [scores], [meter.new(a.scores, meter.wide)])
    # values that are a slice of a larger tensor do not lie as their matrix product wants them: it copies them
    sliced = not narrow and v.storage is not None and v.storage.counted > v.elements
    values = meter.new(v.elements) if sliced else v.storage
    probabilities = meter.new(a.scores) if narrow else None  # which torch returns beside the result
    out = _step(meter, a.rows * a.d_kv, [scores, v], [scores.storage, values])
    del ahead, probabilities
    return _narrowed(meter, out) if narrow else out


def _step(
    meter: Meter,
    elements: int,
    ins: Sequence[Value],
    saved: Sequence[MeteredStorage | None] = (),
    *,
    keeps: bool = False,
) -> Value:
    """Record an operation whose result and gradients are of the type of statistics. `keeps`: it keeps its result."""
    out, sizes = Value(meter.new(elements, meter.wide), elements), [x.elements for x in ins]
    kept = (*saved, out.storage) if keeps else tuple(saved)
    meter.note([out], ins, kept, lambda gs, _: [meter.new(n, meter.wide) for n in sizes])
    return out


def _sum(meter: Meter, scores: Value, bias: Value | None) -> Value:
    """Record the sum of scores and what is added to them, of which a `bias` has a gradient."""
    n, ins = scores.elements, [scores, bias] if bias else [scores]
    out, sizes = Value(meter.new(n, meter.wide), n), [x.elements for x in ins]  # its gradient is that of the scores

    def backward(gs: Gradients, _: Saved) -> Gradients:
        return [gs[0] if size == n else meter.new(size) for size in sizes]

    meter.note([out], ins, (), backward)
    return out


def _narrowed(meter: Meter, x: Value) -> Value:
    """Record the cast of a result back to the compute type."""
    out, n = Value(meter.new(x.elements), x.elements), x.elements
    meter.note([out], [x], (), lambda gs, _: [meter.new(n, meter.wide)])
    return out
