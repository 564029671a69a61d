"""A Transformer decoder: GPT-2/3 (learned positions, LayerNorm, GELU, tied head) and Llama (rotary positions, RMSNorm,
SwiGLU, grouped queries) by configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from platform.config import Model as ModelConfig
from platform.model.blocks import Embedding, Head, Shapes, Stack, embedding_table, sizes
from platform.plan.ops import Ops, Parameter


class Decoder:
    """`forward` maps `tokens` to the summed cross-entropy of `labels`: data tensors [length, batch]."""

    inputs = ("tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.config, self.sizes, shapes = c, sizes(c), Shapes()
        self.table = embedding_table(c)
        self.embedding = Embedding("", c, shapes, self.table)
        self.stack = Stack("", c, shapes, causal=True)
        self.head = Head(c, shapes, self.table)

    def parameters(self) -> list[Parameter]:
        parts = (self.embedding, self.stack, self.head)
        return [self.table, *(p for part in parts for p in part.parameters())]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.head.loss(ops, self._hidden(ops, inputs), inputs["labels"])

    def logits(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """[length, batch, vocab], in the layout of the logits region."""
        return self.head.logits(ops, self._hidden(ops, inputs))

    def _hidden(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.stack(ops, self.embedding(ops, inputs["tokens"]))
