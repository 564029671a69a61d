"""Multi-token prediction of DeepSeek-V3 (DeepSeek-AI 2024, section 2.2): modules behind the last layer, of which each
makes the stream predict one token further."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.attention import Stack
from platform.model.layers import STD, Layer, Norm, StackSpecs
from platform.plan.model_types import Parameter, label_tensor, token_tensor
from platform.plan.operations.registry import Ops


class PredictionModule(Layer):
    """Module `depth` k of multi-token prediction: h_k = norm(block(M [norm(h_{k-1}(i)); norm(Emb(t_{i+k}))])), whose
    logits, by the model's own head, are of token i + k + 1. Its block is one more layer, with the number behind the
    model's; h_0 is what the head reads. M is two matrices, one of each half of its input."""

    def __init__(self, depth: int, c: ModelConfig, shapes: StackSpecs, table: Parameter):
        """Construct the norms, the projection and the block of a module; `table`: the model's token embedding."""
        self.depth, self.config, self.spec, self.table = depth, c, shapes.stream, table
        self.stack = Stack("", c, shapes, causal=True, only=c.layers + depth - 1)
        (self.name,) = self.stack.units
        self.hidden_norm, self.embedding_norm = (
            Norm.build_model_norm(f"{self.name}.{part}_norm", c) for part in ("hidden", "embedding")
        )
        width = (("d_ff", c.d_model),)  # the elements that M makes, under another name
        self.inside = replace(shapes.hidden, sizes=(*shapes.hidden.sizes, *width))
        self.merge_embedding, self.merge_hidden = (
            Parameter(f"{self.name}.merge_{part}", ("d_ff", "d_model"), "in", "normal", STD, True, width)
            for part in ("embedding", "hidden")
        )
        self.tokens, self.labels = token_tensor(depth), label_tensor(depth)

    def __call__(self, ops: Ops, x: Any, tokens: Any, begins: Any, auxiliary: Any) -> tuple[Any, Any]:
        """Run the module on the stream x of the depth before; return its stream, and the sum of auxiliary losses."""
        e = ops.lookup(f"{self.name}.embedding", self.table, tokens, self.spec)
        e = ops.scale(e, self.spec, self.config.embedding_scale) if self.config.embedding_scale != 1 else e
        pairs = (e, self.embedding_norm, self.merge_embedding), (x, self.hidden_norm, self.merge_hidden)
        halves = [ops.project(norm(ops, y, self.spec), self.spec, (w,), (self.inside,))[0] for y, norm, w in pairs]
        x = ops.relayout(f"{self.name}.join", ops.pointwise("add", *halves), self.inside, self.spec)
        return self.stack(ops, x, self.stack.units, begins=begins, tokens=tokens, auxiliary=auxiliary)
