"""Attention, in whichever operations the scheme allows: its cache of keys and values where a text is written in several
passes (`KeyValueCache`), the data that hides scores (`hiding_attributes`: causality, a window, padding, borders of
documents), softmax over any dim, and its memory by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

from platform.plan.layout import BLOCK, Layout, mask_sharing_limit
from platform.plan.model_types import Operation, Parameter, Spec, resize_dim, scores_spec
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import BlockOp, Gradients, Op, Saved, Value, plan_with_vectors, token_fields
from platform.plan.planner import Planner
from platform.plan.scheme import ModelMistake


class AttentionOp(Op):
    """softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v are of type `kv`, of a
    length of their own in cross-attention. With a `width`, v and the result have a d_kv of that size. Scores are
    hidden, `bias` is added, and a parameter `sink` [heads] counts, as in softmax; a `cap` bends scores s to
    cap * tanh(s / cap) before (Gemma Team 2024). Runs one fused kernel (`fuses_attention`), which knows neither sink
    nor cap, or two einsums and a softmax over split dims; `remember`s if causal. Where length is split, keys and values
    go around its ranks (`rings`), or each rank gathers all of them, before they are repeated; where it is whole,
    attention with a sink or a cap is a ring of one rank, whose panels merge. Ranks that keep a part each of the keys of
    earlier passes attend to it, and their results merge."""

    def compose_operation(
        self, ops, name, q, k, v, spec, kv, sink=None, *, scale, causal, width=0, window=0, mask=None, begins=None,
        bias=None, cap=0.0,
    ):  # fmt: skip
        """Compose attention from one fused kernel's operation, or two einsums and a softmax, perhaps recomputed."""
        values, out = (resize_dim(t, "d_kv", width) if width else t for t in (kv, spec))
        if causal:
            k, v = ops.remember(name, k, v, kv, values)
            kv, values = ops.remembered(kv), ops.remembered(values)
        rings = ops.uses_ring_attention(name, spec, kv, sink is not None or cap > 0)
        apart = "memory_length" in kv.dims and not ops.is_dim_split(spec, "d_kv")
        parted = apart and all(t is None for t in (sink, bias, mask))
        fused = parted or (sink is None and not cap and ops.fuses_attention(name, spec))
        # the gradient of all positions' keys is left partial: it is summed as it is split over them again
        gathered = not rings and not parted and (not fused or ops.is_dim_split(spec, "length"))
        memory, read = (replace(t.rename_dim("length", "memory_length"), open="gradient") for t in (kv, values))
        memory, read = (memory, read) if gathered else (kv, values)
        dims = (spec.rename_dim("length", "memory_length") if "memory_length" in memory.dims else spec).dims
        heads, of_values = (replace(t, dims=dims) for t in (memory, read))
        sinks = () if sink is None else (sink,)
        masks = bool(window) or not all(t is None for t in (mask, begins, bias))
        grouped = rings or parted or (fused and not masks)  # other kernels that take masks want every head

        def compute_core_attention(q, k, v, bias):
            """Compute attention from q, k and v by one fused kernel or by einsums and a softmax."""
            if gathered:
                k, v = ops.relayout_each((f"{name}.key", k, kv, memory), (f"{name}.value", v, values, read))
            if kv.dims != spec.dims:
                k = ops.expand_kv(f"{name}.key", k, memory, heads, grouped=grouped)
                v = ops.expand_kv(f"{name}.value", v, read, of_values, grouped=grouped)
            hidden = {"causal": causal, "window": window, "mask": mask, "begins": begins, "bias": bias}
            one = {"scale": scale, **({"cap": cap} if cap else {}), **hidden}
            if rings:
                ring_options = {"shared": kv.dims != spec.dims, **one}
                return ops.ring_attention(name, q, k, v, spec, heads, of_values, out, *sinks, **ring_options)
            if fused:
                return ops.fused_attention(name, q, k, v, spec, heads, of_values, out, **one)
            scores = scores_spec(spec, heads)
            s = ops.einsum(f"{name}.scores", q, spec, k, heads, scores)
            if cap:
                s = ops.scale(ops.pointwise("tanh", ops.scale(s, scores, scale / cap)), scores, cap)
            p = ops.softmax(name, s, scores, sink, scale=1.0 if cap else scale, **hidden)
            p = ops.dropout(f"{name}.probabilities", p, scores)
            return ops.einsum(f"{name}.context", p, scores, v, of_values, out)

        return ops.recomputed("selective", name, compute_core_attention, spec, q, k, v, bias)


@dataclass
class KeyValueCache:
    """Keys and values of the sequences under way: this rank's blocks [length, batch, ...] by the attention that reads
    them, with room for `capacity` tokens under causal attention, of which ranks that share these have a part each; and
    states along the sequence [..., batch, ...]. `first`: the sequence at which each block begins."""

    capacity: int
    blocks: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def reorder_sequences(self, rows: Any) -> None:
        """Let attention operations go on in sequence i from keys and values of sequence `rows[i]` on the same ranks."""
        for name, first in self.first.items():
            blocks = self.blocks[name]
            mine = (rows[first : first + blocks[0].shape[1]] - first).to(blocks[0].device)
            self.blocks[name] = tuple(x.index_select(1, mine) for x in blocks)


class RememberOp(Op):
    """Keys and values of all positions so far for the causal attention `name`, `Ops.remembered`: this pass's k and v,
    of types `kv` and `values`, behind the keys and values of the passes before; k and v themselves in a pass that reads
    a whole text, as in training."""

    memory_accesses = (0, 0)

    def record_operation(self, ops, name, k, v, kv, values):
        out = [ops.remembered(kv), ops.remembered(values)]
        return ops.record_operation(self.kind, name, [k, v], [kv, values], out) if ops.cache else (k, v)

    def run_on_blocks(self, ops, name, k, v, kv, values):
        """Append k and v to the key-value cache of the attention `name`, and return all that it holds."""
        cache = ops.cache
        if cache is None or ops.absent(k):
            return k, v
        if name not in cache.blocks:
            shapes = [[n for _, n in ops.blocks[ops.remembered(t)]] for t in (kv, values)]
            cache.blocks[name] = k.new_zeros(shapes[0]), v.new_zeros(shapes[1])
            cache.first[name] = _first_sequence(ops, ops.remembered(kv))
        pair, (begin, room) = cache.blocks[name], ops.blocks[ops.remembered(kv)][0]
        first, end = max(ops.offset, begin), min(ops.offset + len(k), begin + room)
        for mine, new in zip(pair, (k, v), strict=True):
            if first < end:
                mine[first - begin : end - begin].copy_(new[first - ops.offset : end - ops.offset])
        return pair

    def meter_memory(self, ops, name, k, v, kv, values) -> tuple[Value, Value]:
        """Count the memory of all keys and values in the cache, allocated by the first use of the attention."""
        if ops.cache is None or ops.absent(k):
            return k, v
        if name not in ops.cache.blocks:
            ops.cache.blocks[name] = ops.block(ops.remembered(kv)), ops.block(ops.remembered(values))
        return ops.cache.blocks[name]


class RecallOp(Op):
    """Keys and values of type `kv` of the cross-attention `name`: k and v, or where these are None, the pair of the
    first of several passes with the same memory."""

    memory_accesses = (0, 0)

    def record_operation(self, ops, name, k, v, kv):
        if not ops.cache:
            return k, v
        keys_and_values = [] if k is None else [k, v]
        return ops.record_operation(self.kind, name, keys_and_values, [kv for _ in keys_and_values], [kv, kv])

    def run_on_blocks(self, ops, name, k, v, kv):
        """Store k and v of the cross-attention `name` in the cache, if given, and return the stored ones."""
        if ops.cache and k is not None and not ops.absent(k):
            ops.cache.first[name] = _first_sequence(ops, kv)
        return self.meter_memory(ops, name, k, v, kv)

    def meter_memory(self, ops, name, k, v, kv) -> tuple[Value, Value]:
        """Return k and v, cached if they are given, which takes no new memory."""
        if ops.cache is None:
            return k, v
        if k is not None:
            ops.cache.blocks[name] = k, v
        return ops.cache.blocks[name]


def _first_sequence(ops, kv) -> int:
    """Return the global number of the first sequence in this rank's block of the key-value cache of type `kv`."""
    assert kv.dims[1] == "batch"
    return ops.blocks[kv][1][0]


def hiding_attributes(name: str, causal: bool, window: int, mask: str | None, begins: str | None) -> dict[str, Any]:
    """Return the attributes of the attention `name` on its mask. Raises ModelMistake for a window or
    beginnings without causality, and for two data tensors."""
    if (window or begins) and not causal:
        raise ModelMistake(name, "a window, or where documents begin, hides what lies behind: with causal=True")
    if mask and begins:
        raise ModelMistake(name, "an attention reads one data tensor: a mask, or where documents begin")
    return {"causal": causal, "window": window, "begins": begins is not None}


def hiding_token_fields(
    planner: Planner, operation: Operation, layout: Layout, keys: Spec | Parameter, length: str
) -> dict[str, Any]:
    """Return the fields `tokens` and `token_count` for the plan of an attention that computes in `layout`, by the data
    tensor that it reads: where the documents of its queries begin, or a mask of the keys, whose length is split as
    memory_length, and which is as long as dim `length` of `keys`."""
    if operation["begins"]:
        return token_fields(planner, operation.outputs[0], layout.restrict_dims(("length", "batch")))
    mask = Layout.build_canonical({"batch": layout["batch"], "length": layout["memory_length"]}, layout.only)
    return token_fields(planner, keys, mask, length)


_PHASES = "forward", "backward"


class SoftmaxOp(BlockOp):
    """softmax(scale * x + bias) of an activation over `dim`. For attention scores [... length memory_length] only:
    `causal` hides positions memory_length > length, and with it `window`, if not 0, those at or before length - window
    (Beltagy et al. 2020), and `begins`, a data tensor [length, batch], those before the position that it gives; `mask`
    is a data tensor [memory_length, batch] whose padding is hidden: a row of it alone is 0. `bias` comes from
    `relative_bias`. It reads `mask` or `begins`, not both. A parameter `sink`, of dims of x other than `dim`, is one
    score more in the sum, whose own probability is left out (Xiao et al. 2023): where a head attends to nothing."""

    keys_input = 0

    def record_operation(
        self, ops, name, x, spec, sink=None, *, dim="memory_length", scale=1.0, causal=False, window=0, mask=None,
        begins=None, bias=None,
    ):  # fmt: skip
        """Record a softmax. Raises ModelMistake in a pass of generation if it is causal and `dim` lacks cached keys."""
        ops.check_activation(bias or x, spec)
        if causal and ops.cache and dict(spec.sizes).get(dim) != ops.cache.capacity:
            raise ModelMistake(name, "causal attention that is not of Ops.attention does not see the passes before")
        hidden = hiding_attributes(name, causal, window, mask, begins)
        types = [spec] if sink is None else [spec, sink]
        return ops.record_operation(self.kind, name, [x], types, [spec], [mask, begins], dim=dim, scale=scale, **hidden)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan a softmax's collectives over a split dim: maximum and sum all-reduced forward, one sum backward."""
        spec, dim = operation.inputs[0], operation["dim"]
        layout, shape = planner.layout(spec), planner.local_shape(spec)
        rows = prod(shape) // shape[spec.dims.index(dim)]
        over, only = layout[dim], layout.only
        cuts = planner.cuts_among_dims(spec, layout, [d for d in spec.dims if d != dim])
        forward, backward = (planner.statistics_collectives(over, only, rows, phase, cuts=cuts) for phase in _PHASES)
        read = hiding_token_fields(planner, operation, layout, spec, "memory_length")
        return plan_with_vectors(planner, operation, [*forward * 2, *backward], over=over, **read)

    def run_on_blocks(
        self, ops, planned, name, x, spec, sink=None, *, dim="memory_length", scale=1.0, causal=False, window=0,
        mask=None, begins=None, bias=None,
    ):  # fmt: skip
        """Compute scaled, biased and masked scores, and their softmax over a dim that ranks may split."""
        positions = ops.kernels.positions
        x = x * scale
        if bias is not None:
            x = x + bias
        if causal:
            length, memory = (ops.global_positions(spec, d, x.device) for d in ("length", "memory_length"))
            starts = None if begins is None else begins[self.kind, name]
            x = x.masked_fill(positions.unseen_mask(length, memory, window, starts), -inf)
        if mask is not None:
            x = x.masked_fill(positions.mask_padded_keys(mask[self.kind, name]), -inf)
        x = ops.fill_padding(x, spec, [dim], -inf)
        if sink is not None:
            (dims,) = (p.dims for p in planned.operation.parameters)
            sink = sink.view([n if d in dims else 1 for d, n in zip(spec.dims, x.shape, strict=True)])
        over, blank = planned.over, mask is not None
        return ops.kernels.statistics.softmax(x, spec.dims.index(dim), ops.communicator, over, sink, blank=blank)

    def meter_memory(
        self, ops, planned, name, x, spec, sink=None, *, dim="memory_length", causal=False, mask=None, begins=None,
        bias=None, **_,
    ) -> Value:  # fmt: skip
        """Count the memory of the scores that scaling, bias and masks make, and of the probabilities, which are
        kept."""
        n, shape = x.elements, dict(zip(spec.dims, ops.plan.local_shape(spec), strict=True))
        x = ops.plain(ops.tensor(n), [x])  # scaled
        if bias is not None:
            x = ops.sum(ops.tensor(n), [x, bias])
        if causal:
            positions = shape["length"] * shape["memory_length"]
            x = ops.plain(ops.tensor(n), [x], (ops.integers(positions * (1 if begins is None else shape["batch"]), 1),))
        if mask is not None:
            x = ops.plain(ops.tensor(n), [x], (ops.integers(shape["batch"] * shape["memory_length"], 1),))
        is_own_function = planned.over or sink is not None or mask is not None  # no function of torch
        if is_own_function:
            ops.new(n, ops.wide)
        out = ops.block(spec)
        if sink is None:
            return ops.plain(out, [x], (out.storage,), n if is_own_function else 0)
        share = ops.new(n // shape[dim], ops.wide)
        return ops.plain(out, [x, sink], (out.storage, share), n)


# Memory model of attention by kernel: one that is fused keeps a statistic per row of the scores, torch's math path the
# probabilities, and under dropout what it multiplied them by and the product too.

KEEP_ORDER = ("flash", "flash3", "flash4", "cudnn")  # kernels of CUDA whose gradients lie in memory as Q, K and V do


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
    def score_row_count(self) -> int:
        """Return the rows of scores that an attention operation has in a worker's block: one per query and head."""
        return self.batch * self.heads * self.length

    @property
    def score_count(self) -> int:
        """Return the number of scores that an attention operation has in a worker's block."""
        return self.score_row_count * self.memory_length


def meter_permuted_operand(ops, x: Value) -> Value:
    """Return a stand-in for an operand of attention, in a memory forecast, whose gradient will lie in the kernel's
    order of dims."""
    out = Value(x.storage, x.elements)

    def mark_permuted(gs: Gradients, _: Saved) -> Gradients:
        """Mark the gradient as lying in the attention kernel's order of dims."""
        if gs[0]:
            gs[0].permuted = True
        return gs

    ops.note_operation([out], [x], (), mark_permuted)
    return out


def meter_added_mask(ops, a: AttentionBlock, bias: Value | None) -> Value | None:
    """Count the memory of the tensor added to the scores, as `platform.runtime.positions.attention_mask` makes
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


def meter_one_kernel(ops, a: AttentionBlock, out: Value, operands: Sequence[Value], added: Value | None) -> Value:
    """Count the memory of an attention of Q, K and V, the `operands`, that one kernel computes: it keeps these, its
    result `out`, the log-sum-exp of each row and the tensor `added` to the scores."""
    saved = [*(x.storage for x in operands), out.storage, ops.new(a.score_row_count, ops.wide)]
    if added is None:
        return ops.plain(out, operands, tuple(saved))
    ins = [*operands, added] if a.biased else operands
    return ops.plain(out, ins, (*saved, added.storage), a.score_count if a.biased else 0)


def meter_math_path(ops, a: AttentionBlock, operands: Sequence[Value], added: Value | None, dropout: float) -> Value:
    """Count the bytes of an attention of Q, K and V, the `operands`, on torch's math path, operation by operation, in
    the type of statistics; return the metered value of its result."""
    narrow, (q, k, v) = ops.wide != ops.plan.itemsize["compute"], operands

    def meter_operation(elements: int, ins: Sequence[Value], saved: Saved = (), *, keeps_result: bool = False) -> Value:
        """Count an operation of attention with a result in the type of statistics, kept if it `keeps_result` it."""
        out = ops.tensor(elements, ops.wide)
        return ops.plain(out, ins, (*saved, out.storage) if keeps_result else saved)

    if narrow:
        q, k, v = (meter_operation(x.elements, [x]) for x in operands)
    scaled = [meter_operation(q.elements, [q])]
    ahead = [ops.new(a.length * a.memory_length, ops.wide)] if a.causal and not added else []
    key_rows = a.batch * a.heads * a.memory_length
    if k.elements < key_rows * a.d_kv:  # every head's own copy of K and V
        k, v = meter_operation(key_rows * a.d_kv, [k]), meter_operation(key_rows * a.d_value, [v])
    scaled.append(meter_operation(key_rows * a.d_kv, [k]))
    scores = meter_operation(a.score_count, scaled, tuple(x.storage for x in scaled))
    if a.causal or added:
        scores = ops.sum(ops.tensor(a.score_count, ops.wide), [scores, added] if a.biased else [scores])
    scores = meter_operation(a.score_count, [scores], keeps_result=True)  # softmax
    if dropout:
        scores = meter_operation(a.score_count, [scores], (ops.new(a.score_count, ops.wide),))
    # values that are a slice of a larger tensor do not lie as the products of several heads and sequences want them
    sliced = not narrow and min(a.batch, a.heads) > 1 and v.storage is not None and v.storage.counted > v.elements
    values = ops.new(v.elements) if sliced else v.storage
    probabilities = ops.new(a.score_count) if narrow else None  # which torch returns beside the result
    out = meter_operation(a.score_row_count * a.d_value, [scores, v], (scores.storage, values))
    del ahead, probabilities
    return ops.plain(ops.tensor(out.elements), [out]) if narrow else out


def piece_pair_scratch_elements(ops, a: AttentionBlock, window: int, documents: bool, makes_scores: bool) -> int:
    """Return the elements that one pair of pieces takes: of its mask, or its scores in all heads if `makes_scores`."""
    most = mask_sharing_limit(ops.device) if documents and not (window or makes_scores) else BLOCK
    piece = min(most, a.length) * min(most, a.memory_length)
    if makes_scores:
        return piece * a.batch * a.heads
    return piece * (a.batch if a.masked else 1) if window or a.masked else 0


def meter_pair_by_pair(ops, a: AttentionBlock, out: Value, operands: Sequence[Value], scratch: int) -> Value:
    """Count the memory of an attention whose queries and keys are computed pair by pair, each with `scratch` elements
    for itself: its result and one statistic a row are kept."""
    rows = a.score_row_count
    held = [ops.new(out.elements, ops.wide), ops.new(scratch, ops.wide)]
    lse = ops.new(rows, ops.wide)
    del held
    q, k, v = operands
    sizes = [(x.elements, x.itemsize) for x in operands]

    def meter_backward(_: Gradients, __: Saved) -> Gradients:
        """Allocate the gradients, summed over pairs in the type of statistics, while a pair's are there."""
        held = [ops.new(n, ops.wide) for n in (q.elements, k.elements, v.elements, scratch)]
        operand_gradients = [ops.new(*n) for n in sizes] if ops.wide != ops.plan.itemsize["compute"] else held[:3]
        del held
        return operand_gradients

    ops.note_operation([out], list(operands), (*(x.storage for x in operands), out.storage, lse), meter_backward)
    return out
