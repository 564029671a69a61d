"""An encoder-decoder Transformer: that of "Attention Is All You Need" (post-norm, sinusoidal positions, ReLU) and T5
(RMSNorm in front, relative positions, no biases) by configuration. Each stack has `layers` blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from platform.config import Model as ModelConfig
from platform.model.blocks import Embedding, Head, Shapes, Stack, embedding_table, sizes
from platform.plan.ops import Ops, Parameter


class EncoderDecoder:
    """`forward` maps `source` [source_length, batch] and `tokens` [length, batch], the target so far, to the summed
    cross-entropy of `labels` [length, batch]: data tensors. One embedding serves both stacks and, if tied, the head."""

    inputs = ("source", "tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.config, self.sizes = c, sizes(c)
        source, target = Shapes(c.source_length or None), Shapes()
        self.table = embedding_table(c)
        self.source = Embedding("encoder.", c, source, self.table)
        self.encoder = Stack("encoder.", c, source, causal=False)
        self.target = Embedding("decoder.", c, target, self.table)
        self.decoder = Stack("decoder.", c, target, causal=True, memory=source)
        self.head = Head(c, target, self.table)

    def parameters(self) -> list[Parameter]:
        parts = (self.source, self.encoder, self.target, self.decoder, self.head)
        return [self.table, *(p for part in parts for p in part.parameters())]

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        return self.head.loss(ops, self._hidden(ops, inputs), inputs["labels"])

    def logits(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """[length, batch, vocab], in the layout of the logits region."""
        return self.head.logits(ops, self._hidden(ops, inputs))

    def _hidden(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        memory = self.encoder(ops, self.source(ops, inputs["source"]), mask=inputs["source"])
        x = self.target(ops, inputs["tokens"])  # its padding is at the end, which no token before it sees
        return self.decoder(ops, x, memory=memory, memory_mask=inputs["source"])
