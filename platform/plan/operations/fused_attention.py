"""Attention in one fused kernel: of keys and values gathered before (`FusedAttentionOp`), or of ones that go around the
ranks that split length, or lie on one (`RingAttentionOp`)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

from platform.plan.layout import BLOCK, LEAST, Cut, Stretch
from platform.plan.model_types import MATH, Operation, Spec, scores_spec
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.operations.attention import (
    KEEP_ORDER,
    AttentionBlock,
    hiding_attributes,
    hiding_token_fields,
    meter_added_mask,
    meter_math_path,
    meter_one_kernel,
    meter_pair_by_pair,
    meter_permuted_operand,
    piece_pair_scratch_elements,
)
from platform.plan.operations.op import BlockOp, Gradients, Saved, Value, assemble_plan, enter_vectors, global_extents
from platform.plan.planner import Planner


def length_dim(kv: Spec) -> str:
    """Return the dim along which the positions of an attention's keys or values lie."""
    return "memory_length" if "memory_length" in kv.dims else "length"


def hides_most(device: str, length: int, window: int, documents: bool) -> bool:
    """Return True if a window or, on a CPU, borders of documents hide most scores of a sequence of some `length`."""
    # a GPU would launch more kernels than it saves for less
    windowed = window > 0 and length >= 8 * max(window, LEAST if device == "cpu" else BLOCK)
    return windowed or (documents and device == "cpu" and length >= 4 * LEAST)


def _computes_pair_by_pair(ops, kv: Spec, device: str, length: int, window: int, begins: Any, bias: Any) -> bool:
    """Return True if an attention is computed by pairs of queries and keys: its queries are some of all positions, or
    most scores are hidden (`hides_most`), and nothing is added to scores, or drawn by a kernel. Else one mask of all
    scores hides. `length`: the number of its queries."""
    hidden = not ops.cache and hides_most(device, length, window, begins is not None)
    return (length_dim(kv) == "memory_length" or hidden) and bias is None and not ops.dropout_rate


class FusedAttentionOp(BlockOp):
    """scaled_dot_product_attention of local heads: q is [length batch heads d_kv], k and v (`kv`, `values`) have the
    same dims with a length of their own, called memory_length where ranks split the queries; v and the result `out`
    perhaps another d_kv; what hides scores, and `bias`, as in softmax. Dropout of its probabilities is drawn by the
    kernel itself. The gradients of k and v may stay partial. In a pass of generation ranks may have some of the keys
    each: their results merge, by two sums."""

    open = {"inputs": "gradient"}
    memory_accesses = (4, 8)
    keys_input = 1
    chooses_kernel = True

    def record_operation(
        self, ops, name, q, k, v, spec, kv, values, out, *, scale, causal, window=0, mask=None, begins=None,
        bias=None, cap=0.0,
    ):  # fmt: skip
        """Record attention in one kernel, with the data that it reads to hide scores."""
        if bias:
            ops.check_activation(bias, scores_spec(spec, kv))
        attributes = {"scale": scale, "biased": bias is not None, "kernel": ops.attention_kernel}
        attributes |= hiding_attributes(name, causal, window, mask, begins) | ({"cap": cap} if cap else {})
        return ops.record_operation(self.kind, name, [q, k, v], [spec, kv, values], [out], [mask, begins], **attributes)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the attention in the layout of its result, with the data tensor that hides scores laid out alike."""
        layout, memory = planner.layout(operation.outputs[0]), operation.inputs[1]
        enter = [planner.operand_conversion(t, planner.layout(t), layout.axes) for t in operation.inputs]
        read = hiding_token_fields(planner, operation, layout, memory, length_dim(memory))
        over, merged = planner.layout(memory)["memory_length"], list[Collective]()
        if over:
            out = operation.outputs[0]
            elements, width = prod(planner.local_shape(out)), planner.local_shape(out)[out.dims.index("d_kv")]
            cuts = planner.cuts_among_dims(out, layout, out.dims)
            for n in (elements // width, elements // width * (width + 1)):
                merged += planner.statistics_collectives(over, layout.only, n, "forward", cuts=cuts)
        return assemble_plan(planner, operation, layout, enter, merged, over=over, **read)

    def count_flops(self, operation, sizes) -> float:
        """Return the FLOPs of attention's two products, of all ranks together."""
        query, key, value = (global_extents(t, sizes) for t in operation.inputs)
        scores = prod(query[d] for d in ("batch", "heads", "length")) * key[length_dim(operation.inputs[1])]
        return 2 * scores * (query["d_kv"] + value["d_kv"])

    def run_on_blocks(
        self, ops, planned, name, q, k, v, spec, kv, values, out, *, scale, causal, window=0, mask=None, begins=None,
        bias=None, cap=0.0,
    ):  # fmt: skip
        """Compute attention by torch's fused kernel, whose mask is made only if causality is not all that hides. Where
        queries are some of all positions, or of documents, pair by pair, so that what none sees is not computed."""
        from torch.nn.functional import scaled_dot_product_attention

        order = [spec.dims.index(d) for d in ("batch", "heads", "length", "d_kv")]
        back = [("batch", "heads", "length", "d_kv").index(d) for d in spec.dims]
        q, k, v = (t.permute(order) for t in (q, k, v))
        starts = None if begins is None else begins[self.kind, name]
        if _computes_pair_by_pair(ops, kv, q.device.type, q.shape[2], window, begins, bias):
            panels = ops.kernels.panels
            queries = [Stretch(first + ops.offset, n) for first, n in ops.block_stretches(spec, "length")]
            keys = [ops.block_stretches(kv, length_dim(kv))]
            plan = panels.PanelAttention(queries, keys, (), planned.operation["kernel"], scale, causal, window, cap)
            hiding = panels.Hiding(starts, None if mask is None else (mask[self.kind, name] < 0).t())
            if planned.over:
                return panels.attend_split_keys(ops.communicator, plan, (q, k, v), hiding, planned.over).permute(back)
            return panels.attend_panels(ops.communicator, plan, (q, k, v), hiding).permute(back)
        positions = ops.kernels.positions
        padding = None if mask is None else positions.mask_padded_keys(mask[self.kind, name])
        queries_are_all = not causal or q.shape[2] == k.shape[2]  # else q's are some of all positions
        if bias is None and padding is None and starts is None and not window and queries_are_all:
            seen = None
        elif bias is None and padding is None:
            of_documents = begins and (planned.operation.reads[0], (self.kind, name))
            seen, causal = ops.additive_attention_mask(spec, q, k, window, of_documents), False
        else:
            where = ops.query_key_positions(spec, k.shape[2], q.device)
            behind = positions.unseen_mask(*where, window, starts) if causal else None
            seen, causal = positions.attention_mask(q, behind, padding, bias), False
        rate = ops.dropout_rate if ops.position.training else 0.0
        kernel_options = {"is_causal": causal, "scale": scale, "enable_gqa": k.shape[1] != q.shape[1]}
        dropout = ops.use_dropout_key(name, spec, q.device) if rate else nullcontext()
        with dropout, ops.in_kernel(planned.operation["kernel"]):
            return scaled_dot_product_attention(q, k, v, seen, rate, **kernel_options).permute(back)

    def meter_memory(
        self, ops, planned, name, q, k, v, spec, kv, values, out, *, scale, causal, window=0, mask=None, begins=None,
        bias=None, cap=0.0,
    ) -> Value:  # fmt: skip
        """Count the memory of attention's mask, and of all that the planned kernel of torch allocates and keeps."""
        query, key, value = (dict(zip(s.dims, ops.plan.local_shape(s), strict=True)) for s in (spec, kv, values))
        documents = begins is not None
        sizes = query["batch"], query["heads"], query["length"], key[length_dim(kv)], query["d_kv"], value["d_kv"]
        block = AttentionBlock(*sizes, causal, masked=mask is not None or documents, biased=bias is not None)
        if _computes_pair_by_pair(ops, kv, ops.device, block.length, window, begins, bias):
            math = planned.operation["kernel"] == MATH or cap > 0
            scratch = piece_pair_scratch_elements(ops, block, window, documents, math)
            if planned.over:
                ops.new(2 * block.score_row_count * (block.d_value + 1), ops.wide)  # what is summed, and what comes
            return meter_pair_by_pair(ops, block, ops.block(out), (q, k, v), scratch)
        if bias is None and mask is None and (window or documents or (causal and block.length < block.memory_length)):
            added: Value | None = ops.additive_attention_mask(block, window, documents)
        else:
            added = meter_added_mask(ops, block, bias)
        kernel = planned.operation["kernel"]
        if block.batch > 1 and block.length > 1 and not (ops.device == "cuda" and kernel in KEEP_ORDER):
            q, k, v = (meter_permuted_operand(ops, x) for x in (q, k, v))
        if kernel == MATH:
            return meter_math_path(ops, block, (q, k, v), added, ops.dropout_rate)
        return meter_one_kernel(ops, block, ops.block(out), (q, k, v), added)


def ring_message_elements(planner: Planner, operation: Operation) -> int:
    """Return the elements of a rank's keys and values, as a ring attention sends them: of KV heads that are `shared` by
    heads, where the rank has whole groups of these, else of heads."""
    elements, each = 0, planner.count_group_heads(operation.inputs[1])
    for tensor in operation.inputs[1:3]:
        assert isinstance(tensor, Spec)
        shape, heads_position = list(planner.local_shape(tensor)), tensor.dims.index("heads")
        if operation["shared"]:
            dims = tuple("kv_heads" if d == "heads" else d for d in tensor.dims)
            groups = planner.local_shape(replace(tensor, dims=dims))[heads_position]
            shape[heads_position] = groups if shape[heads_position] == groups * each else shape[heads_position]
        elements += prod(shape)
    return elements


def ring_rotations(planner: Planner, operation: Operation) -> list[Collective]:
    """Return the collectives of a ring attention: each panel goes around in both passes, and its gradient in one."""
    layout = planner.layout(operation.outputs[0])
    over, elements = layout["length"], ring_message_elements(planner, operation)
    phases = ["forward", "backward", "backward"] * (planner.mesh.count_ranks(over) - 1)
    cuts = ring_cuts(planner, operation)
    return [Collective("rotate", over, elements, "compute", phase, layout.only, 0, cuts) for phase in phases]


def ring_cuts(planner: Planner, operation: Operation) -> tuple[Cut, ...]:
    """Return how batch and heads of what a ring attention sends are cut, if their blocks differ."""
    sent = operation.inputs[1]
    assert isinstance(sent, Spec)
    if operation["shared"] and planner.cut_units:
        sent = replace(sent, dims=tuple("kv_heads" if d == "heads" else d for d in sent.dims))
    return planner.cuts_among_dims(sent, planner.layout(sent), ("batch", "heads", "kv_heads"))


class RingAttentionOp(BlockOp):
    """Attention of local heads whose queries and keys are split over the same axes of length, or over none: as
    `fused_attention`, with keys and values of other ranks in panels that go around, and merged log-sum-exps. `sink`
    [heads] as in softmax; `shared`: True where k and v have heads that several of q's may share."""

    memory_accesses = (4, 8)
    keys_input = 1
    chooses_kernel = True
    is_traceable = False  # it attends pair by pair

    def record_operation(
        self, ops, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0, mask=None,
        begins=None, bias=None, cap=0.0,
    ):  # fmt: skip
        """Record attention whose keys and values go around the ranks that split its length."""
        if bias:
            ops.check_activation(bias, scores_spec(spec, kv))
        attributes = {"scale": scale, "biased": bias is not None, "kernel": ops.attention_kernel, "shared": shared}
        attributes |= hiding_attributes(name, causal, window, mask, begins) | ({"cap": cap} if cap else {})
        inputs = [spec, kv, values, *([] if sink is None else [sink])]
        return ops.record_operation(self.kind, name, [q, k, v], inputs, [out], [mask, begins], **attributes)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the attention where its queries lie, with all rotations; a data tensor is read as of softmax."""
        layout = planner.layout(operation.outputs[0])
        sinks = enter_vectors(planner, operation, layout, layout.axes)
        read = hiding_token_fields(planner, operation, layout, operation.inputs[1], "length") if operation.reads else {}
        return assemble_plan(planner, operation, layout, sinks, ring_rotations(planner, operation), **read)

    def count_flops(self, operation, sizes) -> float:
        """Return the FLOPs of attention's two products, of all ranks together."""
        query, key, value = (global_extents(t, sizes) for t in operation.inputs[:3])
        scores = prod(query[d] for d in ("batch", "heads", "length")) * key["length"]
        return 2 * scores * (query["d_kv"] + value["d_kv"])

    def run_on_blocks(
        self, ops, planned, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0,
        mask=None, begins=None, bias=None, cap=0.0,
    ):  # fmt: skip
        """Compute attention panel by panel, as the keys and values of every rank come by."""
        panels = ops.kernels.panels
        order = [spec.dims.index(d) for d in ("batch", "heads", "length", "d_kv")]
        back = [("batch", "heads", "length", "d_kv").index(d) for d in spec.dims]
        over, at = ops.plan.layout(spec)["length"], ops.communicator.coordinates
        ring_coordinates = [{**at, **dict.fromkeys(over, i)} for i in range(ops.plan.mesh.count_ranks(over))]
        keys = [ops.plan.stretches_of_rank(kv, "length", coordinates) for coordinates in ring_coordinates]
        queries, kernel = ops.block_stretches(spec, "length"), planned.operation["kernel"]
        plan = panels.PanelAttention(queries, keys, over, kernel, scale, causal, window, cap)
        padding = None if mask is None else (mask[self.kind, name] < 0).t()
        hiding = panels.Hiding(None if begins is None else begins[self.kind, name], padding)
        operands = [t.permute(order) for t in (q, k, v)]
        bias = None if bias is None else bias.unsqueeze(0)
        return panels.attend_panels(ops.communicator, plan, operands, hiding, sink, bias).permute(back)

    def meter_memory(
        self, ops, planned, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0,
        mask=None, begins=None, bias=None, cap=0.0,
    ) -> Value:  # fmt: skip
        """Count the memory of all that is kept, of two panels and, in the backward pass, of their gradients."""
        query, key, value = (dict(zip(s.dims, ops.plan.local_shape(s), strict=True)) for s in (spec, kv, values))
        size = k.elements + v.elements
        rows = query["batch"] * query["heads"] * query["length"]
        makes_scores = planned.operation["kernel"] == MATH or bias is not None or cap > 0
        documents = begins is not None
        block_extents = query["batch"], query["heads"], query["length"], key["length"], query["d_kv"], value["d_kv"]
        block = AttentionBlock(*block_extents, causal, masked=mask is not None or documents, biased=bias is not None)
        scratch = piece_pair_scratch_elements(ops, block, window, documents, makes_scores)
        moving = size if planned.collectives else 0  # else there is one panel
        result = ops.block(out)
        held = [ops.new(n) for n in (moving, moving, result.elements)]
        held += [ops.new(n, ops.wide) for n in (2 * rows, scratch, result.elements)]
        lse = ops.new(rows, ops.wide)
        del held
        ins = [q, k, v, *(x for x in (sink, bias) if x is not None)]
        sizes = [(x.elements, x.itemsize) for x in ins]
        saved = [x.storage for x in (q, k, v, result)]

        def meter_backward(_: Gradients, __: Saved) -> Gradients:
            """Allocate the gradients, while panels and their gradients are on their way."""
            held = [ops.new(n) for n in (moving, moving, moving, moving)]
            held += [ops.new(n, ops.wide) for n in (size, moving, scratch, q.elements)]
            held += [ops.new(moving, ops.wide)] if ops.wide != ops.plan.itemsize["compute"] else []  # message, wide
            operand_gradients = [ops.new(*n) for n in sizes]
            del held
            return operand_gradients

        ops.note_operation([result], ins, (*saved, lse), meter_backward)
        return result
