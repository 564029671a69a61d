"""Transformer decoder: by configuration GPT-2/3 (learned positions, LayerNorm, GELU, tied head) or Llama (rotary
positions, RMSNorm, SwiGLU, grouped queries)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.blocks import Embedding, Flow, Head, Shapes, Stack, embedding_table, sizes
from platform.plan.language.ops import Ops, Parameter


class Decoder:
    """Causal language model: `forward` maps `tokens` to the summed cross-entropy of `labels`, both data tensors
    [length, batch].

    `part` runs some of the `units` (embedding, blocks, head), which pipeline stages are made of.
    """

    inputs = ("tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.config, self.sizes, shapes = c, sizes(c), Shapes()
        self.table = embedding_table(c)
        self.embedding = Embedding("", c, shapes, self.table)
        self.stack = Stack("", c, shapes, causal=True)
        self.head = Head(c, shapes, self.table)
        self.units = ("embedding", *self.stack.units, "head")

    def parameters(self) -> list[Parameter]:
        parts = (self.embedding, self.stack, self.head)
        return [self.table, *(p for part in parts for p in part.parameters())]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.part(ops, inputs, {}, self.units)["loss"]

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Flow:
        """Run `units` on `flow`, the activations by name from the units before; return those for the units after. The
        head returns the `loss` if there are labels, else `logits` [length, batch, vocab] in its region's layout."""
        x = self.embedding(ops, inputs["tokens"]) if "embedding" in units else flow["stream"]
        x = self.stack(ops, x, units)
        return self.head(ops, x, inputs.get("labels")) if "head" in units else {"stream": x}
