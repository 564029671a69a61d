"""Transformers: embedding and head, the base class of all, the ones with a single stack of blocks, and the one with an
encoder and a decoder.

`EncoderDecoder` is by configuration as in "Attention Is All You Need" (post-norm, sinusoidal positions, ReLU) or T5
(RMSNorm in front, relative positions, no biases). Each stack has `layers` blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.attention import Stack
from platform.model.feed_forward import ACTIVATIONS
from platform.model.layers import STD, Activations, Layer, Norm, StackSpecs, dim_sizes, slots_per_expert
from platform.model.multi_token import PredictionModule
from platform.plan.model_types import Parameter, Spec
from platform.plan.operations.registry import Ops

LOGITS = Spec.of("logits", "length batch vocab")
OF_TOKENS = Spec.of("logits", "length batch")


class Embedding(Layer):
    """Maps token ids to activations by the rows of `table`, which stacks may share, and adds learned or sinusoidal
    positions, or none, and the rows of a second table for the segments of the text (BERT), if there are any; then a
    norm, if the configuration has one there. Within documents, positions count from the document's beginning: learned
    ones are rows of a table too."""

    def __init__(self, prefix: str, c: ModelConfig, shapes: StackSpecs, table: Parameter):
        """Construct the token, position and segment tables of a Transformer's embedding. `prefix`: start of the
        weights' names; `shapes`: the Specs of its stack's activations; `table`: the token embedding, which stacks may
        share."""
        self.name, self.config, self.spec, self.table = f"{prefix}embedding", c, shapes.stream, table
        dims, position_sizes = ("length", "d_model"), shapes.stream.sizes
        if c.position_rows:  # of which a shorter sequence reads the first
            dims, position_sizes = ("positions", "d_model"), ()
        learned = Parameter(f"{prefix}position", dims, "vector", "normal", STD, True, position_sizes)
        restarting = Parameter(f"{prefix}position", ("positions", "d_model"), "in", std=STD, decay=True)
        self.position = learned if c.positions == "learned" and not has_restarting_positions(c) else None
        self.restarting = restarting if c.positions == "learned" and has_restarting_positions(c) else None
        segment = Parameter(f"{prefix}segment", ("segments", "d_model"), "in", std=STD, decay=True)
        self.segment = segment if c.segments else None
        self.norm = Norm.build_model_norm(f"{prefix}embedding.norm", c) if c.embedding_norm else None

    def __call__(self, ops: Ops, tokens: Any, segments: Any = None, positions: Any = None) -> Any:
        """Embed a Transformer's input: return the stream [length, batch, d_model] of the data tensors `tokens`,
        `segments` (rows of the segment table, None without one) and `positions` of tokens within their documents (None:
        within the sequence)."""
        x = ops.lookup(self.name, self.table, tokens, self.spec)
        x = ops.scale(x, self.spec, self.config.embedding_scale) if self.config.embedding_scale != 1 else x
        if self.position:
            x = ops.shift(x, self.spec, self.position)
        elif self.restarting:
            x = ops.pointwise("add", x, ops.lookup(self.restarting.name, self.restarting, positions, self.spec))
        elif self.config.positions == "sinusoidal":
            x = ops.sinusoid(self.name, x, self.spec, sqrt(self.config.d_model), positions)
        if self.segment:
            x = ops.pointwise("add", x, ops.lookup(self.segment.name, self.segment, segments, self.spec))
        x = self.norm(ops, x, self.spec) if self.norm else x
        return ops.dropout(self.name, x, self.spec)


def has_restarting_positions(c: ModelConfig) -> bool:
    """Return True if a model's learned or sinusoidal positions count from the beginning of each document, not of the
    sequence. Rotary and relative positions are differences, which are the same wherever a document stands."""
    return c.positions in ("learned", "sinusoidal") and c.within_documents


class Head(Layer):
    """Computes logits over vocab from the last block's output, by the embedding's table (model.tied) or a table of its
    own, and the loss against labels. `transform` (BERT): a layer with activation and norm in front of the table."""

    def __init__(self, c: ModelConfig, shapes: StackSpecs, embedding: Parameter):
        """Construct a Transformer's head: its table over vocab (`embedding` if model.tied), bias and transform."""
        self.config, self.spec = c, shapes.stream
        self.transform = HeadTransform(c, shapes) if c.head_transform else None
        self.table = embedding if c.tied else Parameter("head", ("vocab", "d_model"), "in", std=STD, decay=True)
        self.bias = Parameter("head_bias", ("vocab",), "in", "zeros") if c.head_bias else None

    def __call__(
        self, ops: Ops, x: Any, labels: Any, auxiliary: Any = None, ahead: Sequence[tuple[Any, Any]] = ()
    ) -> Activations:
        """Run a Transformer's head on its last stream x [length, batch, d_model]: return {"loss": cross-entropy summed
        over this rank's tokens} against the data tensor `labels`, or {"logits": [length, batch, vocab]} if `labels` is
        None, as when text is sampled. `auxiliary`: further losses of the tokens [length, batch], None for none;
        `ahead`: streams of multi-token prediction with their labels, whose losses are added."""
        x = self.prepare_stream(ops, x)
        if labels is None:
            return {"logits": self.compute_logits(ops, x)}
        loss = self.compute_loss(ops, x, labels)
        for depth, (stream, labels_ahead) in enumerate(ahead, 1):
            more = self.compute_loss(ops, self.prepare_stream(ops, stream), labels_ahead, f"loss_ahead_{depth}")
            loss = ops.add_loss_ahead(loss, more, depth)
        if auxiliary is not None:
            spec = replace(self.spec, dims=OF_TOKENS.dims)
            auxiliary = ops.relayout("auxiliary", auxiliary, spec, OF_TOKENS)
            loss = ops.token_loss("auxiliary", loss, auxiliary, OF_TOKENS, labels)
        return {"loss": loss}

    def prepare_stream(self, ops: Ops, x: Any) -> Any:
        """Return what the head multiplies with its table: the stream x, transformed and scaled as the model says."""
        x = self.transform(ops, x) if self.transform else x
        return ops.scale(x, self.spec, self.config.logit_scale) if self.config.logit_scale != 1 else x

    def compute_logits(self, ops: Ops, x: Any) -> Any:
        """Return the logits [length, batch, vocab] of the Transformer's last stream x [length, batch, d_model]."""
        (y,) = ops.project(x, self.spec, (self.table,), (LOGITS,), (self.bias,) if self.bias else ())
        if cap := self.config.logit_cap:
            y = ops.scale(ops.pointwise("tanh", ops.scale(y, LOGITS, 1 / cap)), LOGITS, cap)
        return y

    def compute_loss(self, ops: Ops, x: Any, labels: Any, name: str = "") -> Any:
        """Return the summed loss of a Transformer's stream x against the data tensor `labels`."""
        more = labels, self.config.label_smoothing, self.bias, self.config.logit_cap
        return ops.linear_cross_entropy(name or "loss", x, self.spec, self.table, LOGITS, *more, product=name)


class HeadTransform(Layer):
    """Transform in front of BERT's head: norm(f(x w + bias)), where w maps d_model to as many elements, here named
    d_ff."""

    def __init__(self, c: ModelConfig, shapes: StackSpecs):
        """Construct the weight [d_model, d_model], bias and norm of the transform in front of a BERT model's head."""
        self.spec, width = shapes.stream, (("d_ff", c.d_model),)
        self.inside = replace(shapes.hidden, sizes=(*shapes.hidden.sizes, *width))
        self.function, gated = ACTIVATIONS[c.activation]
        assert not gated, "platform.config.validation refuses it"
        more: dict[str, Any] = {"std": STD, "decay": True, "sizes": width}
        self.weight = Parameter("head_transform", ("d_ff", "d_model"), "in", **more)
        self.bias = Parameter("head_transform_bias", ("d_ff",), "in", "zeros", sizes=width)
        self.norm = Norm.build_model_norm("head_transform.norm", c)

    def __call__(self, ops: Ops, x: Any) -> Any:
        """Apply the transform in front of a BERT model's head, norm(f(x w + bias)), to the stream x; return that."""
        (h,) = ops.project(x, self.spec, (self.weight,), (self.inside,), (self.bias,))
        h = ops.relayout("head_transform", ops.pointwise(self.function, h), self.inside, self.spec)
        return self.norm(ops, h, self.spec)


def embedding_table(c: ModelConfig) -> Parameter:
    """Construct a Transformer's token embedding [vocab, d_model]. With sinusoidal positions it starts as N(0, 1 /
    d_model), scaled by sqrt(d_model) on use (`Embedding`), so that tokens are as large as positions."""
    std = 1 / sqrt(c.d_model) if c.positions == "sinusoidal" else STD
    return Parameter("embedding", ("vocab", "d_model"), "in", std=std, decay=True)


class Transformer(Layer):
    """Base of Transformers with one table of token embeddings. `units`: the names of the smallest parts (embeddings,
    blocks, head) that pipeline stages are made of, in order."""

    inputs: tuple[str, ...] = ("tokens", "labels")
    units: tuple[str, ...]

    def __init__(self, c: ModelConfig):
        """Construct the parts that all Transformers have: sizes of their dims, and the table of token embeddings."""
        self.config, self.sizes, self.table = c, dim_sizes(c), embedding_table(c)
        self.recordings: dict[tuple, dict] = {}  # see `platform.plan.chunks.find_recordings`

    @cached_property
    def _declared(self) -> list[Parameter]:
        """Return the declared weights, of which a search asks for each plan."""
        return super().parameters()

    def parameters(self) -> list[Parameter]:
        return self._declared

    def describe_unit(self, unit: str) -> tuple | None:
        """Return a key that alike blocks share; None for other units, and for a block before its stack's final norm."""
        for stack in (part for part in vars(self).values() if isinstance(part, Stack)):
            if unit in stack.blocks and not (stack.norm and unit == stack.units[-1]):
                return id(stack), *stack.blocks[unit].describe(unit)
        return None

    def forward(self, ops: Ops, inputs: Mapping[str, Any]) -> Any:
        """Return the summed loss of the whole model's forward pass on the data tensors `inputs`, by name."""
        return self.part(ops, inputs, {}, self.units)["loss"]

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Activations:
        """Run the layers of this Transformer that are named in `units`, one pipeline chunk, on `flow`, the activations
        (name -> tensor) of the preceding units; return the activations for the next units. The head returns the
        `compute_loss` if `inputs`, the data tensors by name, have labels, else `compute_logits` [length, batch,
        vocab]."""
        raise NotImplementedError


class SingleStack(Transformer):
    """Base of Transformers with one stack of blocks, `causal` or reading in both directions except for padding. Beside
    tokens and labels it may read `begins`, where the document of each token begins, `positions`, how far from there the
    token is, `segments`, and tokens and labels further on, of its modules of multi-token prediction."""

    causal: bool

    def __init__(self, c: ModelConfig):
        """Construct the embedding, the stack of blocks and the head of a Transformer from its configuration `c`."""
        super().__init__(c)
        more = {"begins": c.within_documents, "positions": has_restarting_positions(c), "segments": bool(c.segments)}
        shapes, read = StackSpecs(), [name for name, is_read in more.items() if is_read]
        self.embedding = Embedding("", c, shapes, self.table)
        self.stack = Stack("", c, shapes, causal=self.causal)
        self.ahead = [PredictionModule(depth, c, shapes, self.table) for depth in range(1, c.predict_ahead + 1)]
        self.inputs = (*Transformer.inputs, *read, *(name for m in self.ahead for name in (m.tokens, m.labels)))
        self.head = Head(c, shapes, self.table)
        self.units = ("embedding", *self.stack.units, *(module.name for module in self.ahead), "head")

    def part(self, ops: Ops, inputs: Mapping[str, Any], flow: Mapping[str, Any], units: Sequence[str]) -> Activations:
        """Run the layers named in `units`, as `Transformer.part` does; prediction modules follow."""
        beside = inputs.get("segments"), inputs.get("positions")
        x = self.embedding(ops, inputs["tokens"], *beside) if "embedding" in units else flow["stream"]
        tokens, begins = inputs.get("tokens"), inputs.get("begins")
        mask = None if self.causal else tokens
        more: dict[str, Any] = {"mask": mask, "begins": begins, "tokens": tokens, "auxiliary": flow.get("auxiliary")}
        x, auxiliary = self.stack(ops, x, units, **more)
        streams = {"stream": x, **{m.name: flow[m.name] for m in self.ahead if m.name in flow}}
        for module in (m for m in self.ahead if m.name in units):
            *_, before = streams.values()
            more = {"begins": begins, "auxiliary": auxiliary}
            streams[module.name], auxiliary = module(ops, before, inputs[module.tokens], **more)
        if "head" in units:
            ahead = [(streams[m.name], inputs[m.labels]) for m in self.ahead if m.name in streams]
            return self.head(ops, x, inputs.get("labels"), auxiliary, ahead)
        return streams if auxiliary is None else {**streams, "auxiliary": auxiliary}


class Decoder(SingleStack):
    """Causal language model: `forward` maps `tokens` to the summed cross-entropy of `labels`, both data tensors
    [length, batch]. By configuration GPT-2/3 (learned positions, LayerNorm, GELU, tied head) or Llama (rotary
    positions, RMSNorm, SwiGLU, grouped queries)."""

    causal = True


class Encoder(SingleStack):
    """Masked-token model that reads in both directions: `forward` maps `tokens` to the summed cross-entropy of the
    `labels` to be predicted (the others are padding), both data tensors [length, batch]. BERT (Devlin et al. 2018), by
    configuration with its segments and the transform in front of its head, and always without its second objective."""

    causal = False


class EncoderDecoder(Transformer):
    """Sequence-to-sequence model: `forward` maps the data tensors `source` [source_length, batch] and `tokens` [length,
    batch], the target so far, to the summed cross-entropy of `labels` [length, batch]. Both stacks and, if tied, the
    head share one embedding table."""

    inputs = ("source", "tokens", "labels")

    def __init__(self, c: ModelConfig):
        """Construct the embeddings, both stacks and the head of an encoder-decoder Transformer from its configuration
        `c`."""
        super().__init__(c)
        slots = slots_per_expert(c, c.source_length) if c.experts else 0
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
            positions = inputs.get("positions")
            flow = {"memory": flow.get("stream"), "stream": self.target(ops, inputs["tokens"], positions=positions)}
            auxiliary = self.average_source_losses(ops, auxiliary, source)
        if "memory" in flow:
            more = {"memory": flow["memory"], "memory_mask": source, "auxiliary": auxiliary}
            flow["stream"], auxiliary = self.decoder(ops, flow["stream"], units, tokens=inputs.get("tokens"), **more)
        if self.decoder.units[-1] in units:
            del flow["memory"]
        if "head" in units:
            return self.head(ops, flow["stream"], inputs.get("labels"), auxiliary)
        return flow if auxiliary is None else {**flow, "auxiliary": auxiliary}

    def average_source_losses(self, ops: Ops, auxiliary: Any, source: Any) -> Any:
        """Return, for each token of a target, the mean of the losses `auxiliary` in its source; None for none."""
        if auxiliary is None:
            return None
        specs = [replace(stack.shapes.stream, dims=OF_TOKENS.dims) for stack in (self.encoder, self.decoder)]
        return ops.sequence_mean("auxiliary", auxiliary, specs[0], source, specs[1])
