"""Attention, in whichever operations the scheme allows."""

from __future__ import annotations

from dataclasses import replace

from platform.plan.language.ops import resized, scores_of
from platform.plan.operations.op import Op


class AttentionOp(Op):
    """softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v are of type `kv`, of a
    length of their own in cross-attention. With a `width`, v and the result have a d_kv of that size. Scores are
    hidden, `bias` is added, and a parameter `sink` [heads] counts, as in softmax. Runs one fused kernel
    (`fuses_attention`), which knows no sink, or two einsums and a softmax over split dims; `remember`s if causal.
    Where length is split, keys and values go around its ranks (`rings`), or each rank gathers all of them, before they
    are repeated; where it is whole, attention with a sink is a ring of one rank, whose panels merge with it. Ranks that
    keep a part each of the keys of earlier passes attend to it, and their results merge."""

    def compose(
        self,
        ops,
        name,
        q,
        k,
        v,
        spec,
        kv,
        sink=None,
        *,
        scale,
        causal,
        width=0,
        window=0,
        mask=None,
        begins=None,
        bias=None,
    ):
        """Compose attention from one fused kernel's operation, or two einsums and a softmax, perhaps recomputed."""
        values, out = (resized(t, "d_kv", width) if width else t for t in (kv, spec))
        if causal:
            k, v = ops.remember(name, k, v, kv, values)
            kv, values = ops.remembered(kv), ops.remembered(values)
        rings = ops.rings(name, spec, kv, sink is not None)
        apart = "memory_length" in kv.dims and not ops.splits(spec, "d_kv")
        parted = apart and all(t is None for t in (sink, bias, mask))
        fused = parted or (sink is None and ops.fuses_attention(name, spec))
        # the gradient of all positions' keys is left partial: it is summed as it is split over them again
        gathered = not rings and not parted and (not fused or ops.splits(spec, "length"))
        memory, read = (replace(t.renamed("length", "memory_length"), open="gradient") for t in (kv, values))
        memory, read = (memory, read) if gathered else (kv, values)
        dims = (spec.renamed("length", "memory_length") if "memory_length" in memory.dims else spec).dims
        heads, of_values = (replace(t, dims=dims) for t in (memory, read))
        sinks = () if sink is None else (sink,)
        masks = bool(window) or not all(t is None for t in (mask, begins, bias))
        grouped = rings or parted or (fused and not masks)  # other kernels that take masks want every head

        def core(q, k, v, bias):
            """Compute attention from q, k and v by one fused kernel or by einsums and a softmax."""
            if gathered:
                k, v = ops.relayout_each((f"{name}.key", k, kv, memory), (f"{name}.value", v, values, read))
            if kv.dims != spec.dims:
                k = ops.expand_kv(f"{name}.key", k, memory, heads, grouped=grouped)
                v = ops.expand_kv(f"{name}.value", v, read, of_values, grouped=grouped)
            hidden = {"causal": causal, "window": window, "mask": mask, "begins": begins, "bias": bias}
            if rings:
                more = {"scale": scale, "shared": kv.dims != spec.dims, **hidden}
                return ops.ring_attention(name, q, k, v, spec, heads, of_values, out, *sinks, **more)
            if fused:
                return ops.fused_attention(name, q, k, v, spec, heads, of_values, out, scale=scale, **hidden)
            scores = scores_of(spec, heads)
            s = ops.einsum(f"{name}.scores", q, spec, k, heads, scores)
            p = ops.softmax(name, s, scores, sink, scale=scale, **hidden)
            p = ops.dropout(f"{name}.probabilities", p, scores)
            return ops.einsum(f"{name}.context", p, scores, v, of_values, out)

        return ops.recomputed("selective", name, core, spec, q, k, v, bias)
