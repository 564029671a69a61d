"""Memory model of attention by kernel: one that is fused keeps a statistic per row of the scores, torch's math path the
probabilities, and under dropout what it multiplied them by and the product too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from platform.plan.language.stretches import BLOCK, shared
from platform.plan.operations.storages import Gradients, Saved, Value

KEEP_ORDER = ("flash", "cudnn")  # kernels of CUDA whose gradients lie in memory as Q, K and V do


@dataclass(frozen=True)
class AttentionBlock:
    """Extents of a worker's block of an attention (`d_value`: the d_kv of values), and what hides scores in it:
    `causal`, `masked` (padding); `biased`: a learned bias is added to them."""

    batch: int
    heads: int
    length: int
    memory_length: int
    d_kv: int
    d_value: int
    causal: bool
    masked: bool
    biased: bool

    @property
    def rows(self) -> int:
        """Return the number of rows of scores in a worker's block of the attention: one per query and head."""
        return self.batch * self.heads * self.length

    @property
    def scores(self) -> int:
        """Return the number of attention scores in a worker's block."""
        return self.rows * self.memory_length


def permuted(ops, x: Value) -> Value:
    """Return a stand-in for an operand of attention, in a memory forecast, whose gradient will lie in the kernel's
    order of dims."""
    out = Value(x.storage, x.elements)

    def backward(gs: Gradients, _: Saved) -> Gradients:
        """Mark the gradient as lying in the attention kernel's order of dims."""
        if gs[0]:
            gs[0].permuted = True
        return gs

    ops.note([out], [x], (), backward)
    return out


def hidden(ops, a: AttentionBlock, bias: Value | None) -> Value | None:
    """Count the memory of the tensor added to the scores, as `platform.parallel.kernels.positions.attention_mask` makes
    it; None without bias where only later positions are hidden, by the kernel itself."""
    if bias is None and not a.masked:
        return None
    n = (a.batch if a.masked else 1) * (a.length if a.causal else 1) * a.memory_length
    unseen = ops.integers(n, 1)
    if bias is None:
        seen = ops.integers(n, 1)
        floats = Value(ops.new(n), n)  # torch makes floats of booleans
        del seen
        return floats
    n = (a.batch if a.masked else 1) * bias.elements
    return ops.plain(Value(ops.new(n), n), [bias], (unseen,), n if a.masked else 0)


def in_one_kernel(ops, a: AttentionBlock, out: Value, operands: Sequence[Value], added: Value | None) -> Value:
    """Count the memory of an attention of Q, K and V, the `operands`, that one kernel computes: it keeps these, its
    result `out`, the log-sum-exp of each row and the tensor `added` to the scores."""
    saved = [*(x.storage for x in operands), out.storage, ops.new(a.rows, ops.wide)]
    if added is None:
        return ops.plain(out, operands, tuple(saved))
    ins = [*operands, added] if a.biased else operands
    return ops.plain(out, ins, (*saved, added.storage), a.scores if a.biased else 0)


def by_math(ops, a: AttentionBlock, operands: Sequence[Value], added: Value | None, dropout: float) -> Value:
    """Count the bytes of an attention of Q, K and V, the `operands`, on torch's math path, operation by operation, in
    the type of statistics; return the metered value of its result."""
    narrow, (q, k, v) = ops.wide != ops.plan.itemsize["compute"], operands

    def step(elements: int, ins: Sequence[Value], saved: Saved = (), *, keeps: bool = False) -> Value:
        """Count an operation of attention with a result in the type of statistics, kept if it `keeps` it."""
        out = ops.tensor(elements, ops.wide)
        return ops.plain(out, ins, (*saved, out.storage) if keeps else saved)

    if narrow:
        q, k, v = (step(x.elements, [x]) for x in operands)
    scaled = [step(q.elements, [q])]
    ahead = [ops.new(a.length * a.memory_length, ops.wide)] if a.causal and not added else []
    whole = a.batch * a.heads * a.memory_length
    if k.elements < whole * a.d_kv:  # every head's own copy of K and V
        k, v = step(whole * a.d_kv, [k]), step(whole * a.d_value, [v])
    scaled.append(step(whole * a.d_kv, [k]))
    scores = step(a.scores, scaled, tuple(x.storage for x in scaled))
    if a.causal or added:
        scores = ops.sum(ops.tensor(a.scores, ops.wide), [scores, added] if a.biased else [scores])
    scores = step(a.scores, [scores], keeps=True)  # softmax
    if dropout:
        scores = step(a.scores, [scores], (ops.new(a.scores, ops.wide),))
    # values that are a slice of a larger tensor do not lie as the products of several heads and sequences want them
    sliced = not narrow and min(a.batch, a.heads) > 1 and v.storage is not None and v.storage.counted > v.elements
    values = ops.new(v.elements) if sliced else v.storage
    probabilities = ops.new(a.scores) if narrow else None  # which torch returns beside the result
    out = step(a.rows * a.d_value, [scores, v], (scores.storage, values))
    del ahead, probabilities
    return ops.plain(ops.tensor(out.elements), [out]) if narrow else out


def mask_of_pair(ops, a: AttentionBlock, window: int, documents: bool, math: bool) -> int:
    """Return the elements of a mask of one pair in an attention, or of its scores in all heads if `math` makes them."""
    most = shared(ops.device) if documents and not (window or math) else BLOCK
    piece = min(most, a.length) * min(most, a.memory_length)
    if math:
        return piece * a.batch * a.heads
    return piece * (a.batch if a.masked else 1) if window or a.masked else 0


def pair_by_pair(ops, a: AttentionBlock, out: Value, operands: Sequence[Value], scratch: int) -> Value:
    """Count the memory of an attention whose queries and keys are computed pair by pair, each with `scratch` elements
    for itself: its result and one statistic a row are kept."""
    rows = a.rows
    held = [ops.new(out.elements, ops.wide), ops.new(scratch, ops.wide)]
    lse = ops.new(rows, ops.wide)
    del held
    q, k, v = operands
    sizes = [(x.elements, x.itemsize) for x in operands]

    def backward(_: Gradients, __: Saved) -> Gradients:
        """Allocate the gradients, summed over pairs in the type of statistics, while a pair's are there."""
        held = [ops.new(n, ops.wide) for n in (q.elements, k.elements, v.elements, scratch)]
        found = [ops.new(*n) for n in sizes] if ops.wide != ops.plan.itemsize["compute"] else held[:3]
        del held
        return found

    ops.note([out], list(operands), (*(x.storage for x in operands), out.storage, lse), backward)
    return out
