"""Attention, in whichever operations the scheme allows."""

from __future__ import annotations

from dataclasses import replace

from platform.plan.language.ops import resized, scores_of
from platform.plan.operations.op import Op


class AttentionOp(Op):
    """softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v are of type `kv`, of a
    length of their own in cross-attention. With a `width`, v and the result have a d_kv of that size. Scores are
    hidden, `bias` is added, and a parameter `sink` [heads] counts, as in softmax. Runs one fused kernel
    (`fuses_attention`), which knows no sink, or two einsums and a softmax over split dims; `remember`s if causal."""

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
        """Compose attention from one fused kernel's operation, or from two einsums and a softmax, perhaps
        recomputed."""
        values, out = (resized(t, "d_kv", width) if width else t for t in (kv, spec))
        if causal:
            k, v = ops.remember(name, k, v, kv, values)
            kv, values = ops.remembered(kv), ops.remembered(values)
        heads, of_values = (replace(t, dims=spec.dims) for t in (kv, values))
        fused = sink is None and ops.fuses_attention(name, spec)
        masks = bool(window) or not all(t is None for t in (mask, begins, bias))
        grouped = fused and not masks  # kernels that take masks want every head

        def core(q, k, v, bias):
            """Compute attention from q, k and v by one fused kernel or by einsums and a softmax."""
            if kv.dims != spec.dims:
                k = ops.expand_kv(f"{name}.key", k, kv, heads, grouped=grouped)
                v = ops.expand_kv(f"{name}.value", v, values, of_values, grouped=grouped)
            hidden = {"causal": causal, "window": window, "mask": mask, "begins": begins, "bias": bias}
            if fused:
                return ops.fused_attention(name, q, k, v, spec, heads, of_values, out, scale=scale, **hidden)
            memory, read = (t.renamed("length", "memory_length") for t in (heads, of_values))
            scores = scores_of(spec, heads)
            k = ops.relayout(f"{name}.key", k, heads, memory)
            v = ops.relayout(f"{name}.value", v, of_values, read)
            s = ops.einsum(f"{name}.scores", q, spec, k, memory, scores)
            p = ops.softmax(name, s, scores, sink, scale=scale, **hidden)
            p = ops.dropout(f"{name}.probabilities", p, scores)
            return ops.einsum(f"{name}.context", p, scores, v, read, out)

        return ops.recomputed("selective", name, core, spec, q, k, v, bias)
