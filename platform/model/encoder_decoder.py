"""Encoder-decoder Transformer: by configuration as in "Attention Is All You Need" (post-norm, sinusoidal positions,
ReLU) or T5 (RMSNorm in front, relative positions, no biases). Each stack has `layers` blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.blocks import Stack
from platform.model.layers import Activations, StackSpecs, slots_of
from platform.model.transformer import OF_TOKENS, Embedding, Head, Transformer
from platform.plan.operations.words import Ops


class EncoderDecoder(Transformer):
    """Sequence-to-sequence model: `forward` maps the data tensors `source` [source_length, batch] and `tokens` [length,
    batch], the target so far, to the summed cross-entropy of `labels` [length, batch]. Both stacks and, if tied, the
    head share one embedding table."""

    inputs = ("source", "tokens", "labels")

    def __init__(self, c: ModelConfig):
        """Construct the embeddings, both stacks and the head of an encoder-decoder Transformer from its configuration
        `c`."""
        super().__init__(c)
        slots = slots_of(c, c.source_length) if c.experts else 0
        source, target = StackSpecs(c.source_length or None, slots), StackSpecs()
        self.source = Embedding("encoder.", replace(c, within_documents=False), source, self.table)
        self.encoder = Stack("encoder.", c, source, causal=False)
        self.target = Embedding("decoder.", c, target, self.table)
        self.decoder = Stack("decoder.", c, target, causal=True, memory=source)
        self.head = Head(c, target, self.table)
        encoder = ("encoder.embedding", *self.encoder.units)
        self.units = (*encoder, "decoder.embedding", *self.decoder.units, "head")

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Activations:
        """Run the layers of the encoder-decoder named in `units`, one pipeline chunk, as `Transformer.part` does;
        return the activations for the next chunk. The encoder's output flows on to later chunks as `memory` beside the
        decoder's `stream`; if it is None, cross-attention uses the keys and values that an earlier pass has cached."""
        source, flow = inputs.get("source"), dict(flow)
        if "encoder.embedding" in units:
            flow["stream"] = self.source(ops, source)
        auxiliary = flow.pop("auxiliary", None)
        if "memory" not in flow:
            more = {"mask": source, "tokens": source, "auxiliary": auxiliary}
            flow["stream"], auxiliary = self.encoder(ops, flow["stream"], units, **more)
        if "decoder.embedding" in units:  # no mask: the target's padding is at its end, hidden by causality
            places = inputs.get("positions")
            flow = {"memory": flow.get("stream"), "stream": self.target(ops, inputs["tokens"], positions=places)}
            auxiliary = self.handed_over(ops, auxiliary, source)
        if "memory" in flow:
            more = {"memory": flow["memory"], "memory_mask": source, "auxiliary": auxiliary}
            flow["stream"], auxiliary = self.decoder(ops, flow["stream"], units, tokens=inputs.get("tokens"), **more)
        if self.decoder.units[-1] in units:
            del flow["memory"]
        if "head" in units:
            return self.head(ops, flow["stream"], inputs.get("labels"), auxiliary)
        return flow if auxiliary is None else {**flow, "auxiliary": auxiliary}

    def handed_over(self, ops: Ops, auxiliary: Any, source: Any) -> Any:
        """Return, for each token of a target, the mean of the losses `auxiliary` in its source; None for none."""
        if auxiliary is None:
            return None
        specs = [replace(stack.shapes.stream, dims=OF_TOKENS.dims) for stack in (self.encoder, self.decoder)]
        return ops.sequence_mean("auxiliary", auxiliary, specs[0], source, specs[1])
