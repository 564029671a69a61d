"""Attention whose keys and values go around the ranks that split length, or lie on one."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from platform.plan.communication.planned import Collective
from platform.plan.communication.planner import Planner
from platform.plan.language.attention_kernels import MATH
from platform.plan.language.layout import Cut
from platform.plan.language.ops import Operation, Spec, scores_of
from platform.plan.operations.attention.hiding import hides, reads_of
from platform.plan.operations.attention.kernel_memory import AttentionBlock, mask_of_pair
from platform.plan.operations.op import BlockOp, extents, planned
from platform.plan.operations.storages import Gradients, Saved


def ring_message(planner: Planner, operation: Operation) -> int:
    """Return the elements of a rank's keys and values, as a ring attention sends them: of KV heads that are `shared` by
    heads, where the rank has whole groups of these, else of heads."""
    found, each = 0, planner.sizes["heads"] // planner.sizes.get("kv_heads", planner.sizes["heads"])
    for tensor in operation.inputs[1:3]:
        assert isinstance(tensor, Spec)
        shape, place = list(planner.shape(tensor)), tensor.dims.index("heads")
        if operation["shared"]:
            dims = tuple("kv_heads" if d == "heads" else d for d in tensor.dims)
            groups = planner.shape(replace(tensor, dims=dims))[place]
            shape[place] = groups if shape[place] == groups * each else shape[place]
        found += prod(shape)
    return found


def rotations(planner: Planner, operation: Operation) -> list[Collective]:
    """Return the collectives of a ring attention: each panel goes around in both passes, and its gradient in one."""
    layout = planner.layout(operation.outputs[0])
    over, elements = layout["length"], ring_message(planner, operation)
    phases = ["forward", "backward", "backward"] * (planner.mesh.extent(over) - 1)
    cuts = ring_cuts(planner, operation)
    return [Collective("rotate", over, elements, "compute", phase, layout.only, 0, cuts) for phase in phases]


def ring_cuts(planner: Planner, operation: Operation) -> tuple[Cut, ...]:
    """Return how batch and heads of what a ring attention sends are cut, if their blocks differ."""
    sent = operation.inputs[1]
    assert isinstance(sent, Spec)
    if operation["shared"] and planner.units:
        sent = replace(sent, dims=tuple("kv_heads" if d == "heads" else d for d in sent.dims))
    return planner.cuts_of(sent, planner.layout(sent), ("batch", "heads", "kv_heads"))


class RingAttentionOp(BlockOp):
    """Attention of local heads whose queries and keys are split over the same axes of length, or over none: as
    `fused_attention`, with keys and values of other ranks in panels that go around, and merged log-sum-exps. `sink`
    [heads] as in softmax; `shared`: True where k and v have heads that several of q's may share."""

    def record(
        self, ops, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0, mask=None,
        begins=None, bias=None,
    ):  # fmt: skip
        """Record attention whose keys and values go around the ranks that split its length."""
        if bias:
            ops.check(bias, scores_of(spec, kv))
        more = {"scale": scale, "biased": bias is not None, "kernel": ops.attention_kernel, "shared": shared}
        more |= hides(name, causal, window, mask, begins)
        inputs = [spec, kv, values, *([] if sink is None else [sink])]
        return ops.record(self.kind, name, [q, k, v], inputs, [out], [mask, begins], **more)

    def plan(self, planner, operation):
        """Plan the attention where its queries lie, with all rotations; a data tensor is read as of softmax."""
        layout = planner.layout(operation.outputs[0])
        sinks = [planner.enter(p, layout.restrict(p.dims), layout.axes) for p in operation.parameters]
        sinks = [
            planner.parameter_conversion(operation, p, c) for p, c in zip(operation.parameters, sinks, strict=True)
        ]
        read = reads_of(planner, operation, layout, operation.inputs[1], "length") if operation.reads else {}
        return planned(planner, operation, layout, sinks, rotations(planner, operation), **read)

    def flops(self, operation, sizes):
        """Return the FLOPs of attention's two products, of all ranks together."""
        query, key, value = (extents(t, sizes) for t in operation.inputs[:3])
        scores = prod(query[d] for d in ("batch", "heads", "length")) * key["length"]
        return 2 * scores * (query["d_kv"] + value["d_kv"])

    def run(
        self, ops, found, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0,
        mask=None, begins=None, bias=None,
    ):  # fmt: skip
        """Compute attention panel by panel, as the keys and values of every rank come by."""
        panels = ops.kernels.panels
        order = [spec.dims.index(d) for d in ("batch", "heads", "length", "d_kv")]
        back = [("batch", "heads", "length", "d_kv").index(d) for d in spec.dims]
        over, at = ops.plan.layout(spec)["length"], ops.communicator.coordinates
        there = [{**at, **dict.fromkeys(over, i)} for i in range(ops.plan.mesh.extent(over))]
        keys = [ops.plan.stretches(kv, "length", coordinates) for coordinates in there]
        queries, kernel = ops.stretches(spec, "length"), found.operation["kernel"]
        plan = panels.PanelAttention(queries, keys, over, kernel, scale, causal, window)
        padding = None if mask is None else (mask[self.kind, name] < 0).t()
        hiding = panels.Hiding(None if begins is None else begins[self.kind, name], padding)
        given = [t.permute(order) for t in (q, k, v)]
        bias = None if bias is None else bias.unsqueeze(0)
        return panels.attend_panels(ops.communicator, plan, given, hiding, sink, bias).permute(back)

    def meter(
        self, ops, found, name, q, k, v, spec, kv, values, out, sink=None, *, scale, causal, shared, window=0,
        mask=None, begins=None, bias=None,
    ):  # fmt: skip
        """Count the memory of all that is kept, of two panels and, in the backward pass, of their gradients."""
        size, query = k.elements + v.elements, dict(zip(spec.dims, ops.plan.local_shape(spec), strict=True))
        rows = query["batch"] * query["heads"] * query["length"]
        made, documents = found.operation["kernel"] == MATH or bias is not None, begins is not None
        here = query["batch"], query["heads"], query["length"], query["length"], query["d_kv"], query["d_kv"]
        block = AttentionBlock(*here, causal, masked=mask is not None or documents, biased=bias is not None)
        scratch = mask_of_pair(ops, block, window, documents, made)
        moving = size if found.collectives else 0  # else there is one panel
        result = ops.block(out)
        held = [ops.new(n) for n in (moving, moving, result.elements)]
        held += [ops.new(n, ops.wide) for n in (2 * rows, scratch, result.elements)]
        lse = ops.new(rows, ops.wide)
        del held
        ins = [q, k, v, *(x for x in (sink, bias) if x is not None)]
        sizes = [(x.elements, x.itemsize) for x in ins]
        saved = [x.storage for x in (q, k, v, result)]

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Allocate the gradients, while panels and their gradients are on their way."""
            held = [ops.new(n) for n in (moving, moving, moving, moving)]
            held += [ops.new(n, ops.wide) for n in (size, moving, scratch, q.elements)]
            held += [ops.new(moving, ops.wide)] if ops.wide != ops.plan.itemsize["compute"] else []  # message, wide
            found = [ops.new(*n) for n in sizes]
            del held
            return found

        ops.note([result], ins, (*saved, lse), backward)
        return result
