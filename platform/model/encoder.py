"""Bidirectional Transformer encoder with a masked-token objective: BERT (Devlin et al. 2018) without its segments, its
second objective and its transform in front of the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.blocks import Embedding, Flow, Head, Shapes, Stack, embedding_table, sizes
from platform.plan.language.ops import Ops, Parameter


class Encoder:
    """Masked-token model: `forward` maps `tokens` to the summed cross-entropy of the `labels` to be predicted (the
    others are padding), both data tensors [length, batch]."""

    inputs = ("tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.config, self.sizes, shapes = c, sizes(c), Shapes()
        self.table = embedding_table(c)
        self.embedding = Embedding("", c, shapes, self.table)
        self.stack = Stack("", c, shapes, causal=False)
        self.head = Head(c, shapes, self.table)
        self.units = ("embedding", *self.stack.units, "head")

    def parameters(self) -> list[Parameter]:
        parts = (self.embedding, self.stack, self.head)
        return [self.table, *(p for part in parts for p in part.parameters())]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.part(ops, inputs, {}, self.units)["loss"]

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Flow:
        """Run some of the `units`: see Decoder.part."""
        x = self.embedding(ops, inputs["tokens"]) if "embedding" in units else flow["stream"]
        x = self.stack(ops, x, units, mask=inputs.get("tokens"))
        return self.head(ops, x, inputs.get("labels")) if "head" in units else {"stream": x}
