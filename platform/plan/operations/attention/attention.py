"""Attention, in whichever operations the scheme allows."""

from __future__ import annotations

from dataclasses import replace

from platform.plan.language.ops import scores_of
from platform.plan.operations.op import Op


class AttentionOp(Op):
    """softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v are of type `kv`, of a
    length of their own in cross-attention. Scores are hidden, `bias` is added, and a parameter `sink` [heads] counts,
    as in softmax. Runs one fused kernel (`fuses_attention`), which knows no sink, or two einsums and a softmax over
    split dims; `remember`s if causal."""

    def compose(
        self, ops, name, q, k, v, spec, kv, sink=None, *, scale, causal, window=0, mask=None, begins=None, bias=None
    ):
        """Compose attention from one fused kernel's operation, or from two einsums and a softmax, perhaps
        recomputed."""
        if causal:
            k, v, kv = ops.remember(name, k, v, kv)
        heads = replace(kv, dims=spec.dims)
        fused = sink is None and ops.fuses_attention(name, spec)
        masks = bool(window) or not all(t is None for t in (mask, begins, bias))
        grouped = fused and not masks  # kernels that take masks want every head

        def core(q, k, v, bias):
            """Compute attention from q, k and v by one fused kernel or by einsums and a softmax."""
            if kv.dims != spec.dims:
                k = ops.expand_kv(f"{name}.key", k, kv, heads, grouped=grouped)
                v = ops.expand_kv(f"{name}.value", v, kv, heads, grouped=grouped)
            hidden = {"causal": causal, "window": window, "mask": mask, "begins": begins, "bias": bias}
            if fused:
                return ops.fused_attention(name, q, k, v, spec, heads, scale=scale, **hidden)
            memory, scores = heads.renamed("length", "memory_length"), scores_of(spec, heads)
            k = ops.relayout(f"{name}.key", k, heads, memory)
            v = ops.relayout(f"{name}.value", v, heads, memory)
            s = ops.einsum(f"{name}.scores", q, spec, k, memory, scores)
            p = ops.softmax(name, s, scores, sink, scale=scale, **hidden)
            p = ops.dropout(f"{name}.probabilities", p, scores)
            return ops.einsum(f"{name}.context", p, scores, v, memory, spec)

        return ops.recomputed("selective", name, core, spec, q, k, v, bias)
