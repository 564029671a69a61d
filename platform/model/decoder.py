"""A Transformer decoder in named dims: GPT-2/3 (learned positions, LayerNorm, GELU, tied head) and Llama (rotary
positions, RMSNorm, SwiGLU, grouped queries) by configuration. No collective and no rank in sight."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from platform.config import Model as ModelConfig
from platform.plan.ops import Ops, Parameter, Spec

STREAM = Spec.of("stream", "length batch d_model")
QUERY = Spec.of("attention", "length batch heads d_kv")
KEY = Spec.of("attention", "length batch kv_heads d_kv")
CORE_QUERY = Spec("core", QUERY.dims)
CORE_KEY = Spec("core", KEY.dims)
HIDDEN = Spec.of("mlp", "length batch d_ff")
LOGITS = Spec.of("logits", "length batch vocab")

STD = 0.02  # of every normal initialisation; residual projections divide it by sqrt(2 layers) (GPT-2)


@dataclass(frozen=True)
class Norm:
    kind: str
    gain: Parameter
    bias: Parameter | None

    @classmethod
    def of(cls, name: str, kind: str) -> Norm:
        bias = Parameter(f"{name}.bias", ("d_model",), "vector", "zeros") if kind == "layernorm" else None
        return cls(kind, Parameter(f"{name}.gain", ("d_model",), "vector", "ones"), bias)

    def parameters(self) -> list[Parameter]:
        return [p for p in (self.gain, self.bias) if p]

    def __call__(self, ops: Ops, x: Any) -> Any:
        return ops.norm(x, STREAM, self.kind, self.gain, self.bias)


class Attention:
    """Causal self-attention. Weights put d_model, the dim that is gathered, first in memory."""

    def __init__(self, name: str, c: ModelConfig):
        self.name, self.config = name, c
        self.scale = 1 / sqrt(c.d_kv or c.d_model // c.heads)
        out = STD / sqrt(2 * c.layers)
        self.norm = Norm.of(f"{name}.norm", c.norm)
        q, kv = ("d_model", "heads", "d_kv"), ("d_model", "kv_heads", "d_kv")
        self.query = Parameter(f"{name}.query", q, "in", std=STD, decay=True)
        self.key = Parameter(f"{name}.key", kv, "in", std=STD, decay=True)
        self.value = Parameter(f"{name}.value", kv, "in", std=STD, decay=True)
        self.output = Parameter(f"{name}.output", q, "out", std=out, decay=True)
        inner = [Parameter(f"{p.name}_bias", p.dims[1:], "in", "zeros") for p in (self.query, self.key, self.value)]
        self.inner_biases = inner if c.bias else []
        self.output_bias = [Parameter(f"{name}.output_bias", ("d_model",), "vector", "zeros")] if c.bias else []

    def parameters(self) -> list[Parameter]:
        weights = [self.query, self.key, self.value, self.output]
        return [*self.norm.parameters(), *weights, *self.inner_biases, *self.output_bias]

    def __call__(self, ops: Ops, x: Any) -> Any:
        specs = (QUERY, KEY, KEY)
        weights = (self.query, self.key, self.value)
        q, k, v = ops.project(self.norm(ops, x), STREAM, weights, specs, self.inner_biases)
        if self.config.positions == "rope":
            q = ops.rotate(f"{self.name}.query", q, QUERY, self.config.rope_theta)
            k = ops.rotate(f"{self.name}.key", k, KEY, self.config.rope_theta)
        q = ops.relayout(f"{self.name}.query_core", q, QUERY, CORE_QUERY)
        k = ops.relayout(f"{self.name}.key_core", k, KEY, CORE_KEY)
        v = ops.relayout(f"{self.name}.value_core", v, KEY, CORE_KEY)
        a = ops.attention(self.name, q, k, v, CORE_QUERY, CORE_KEY, scale=self.scale, causal=True)
        a = ops.relayout(f"{self.name}.context", a, CORE_QUERY, QUERY)
        (y,) = ops.project(a, QUERY, (self.output,), (STREAM,), self.output_bias)
        return ops.pointwise("add", x, ops.dropout(f"{self.name}.residual", y, STREAM))


class FeedForward:
    """GELU or SwiGLU (Shazeer 2020) between two projections."""

    def __init__(self, name: str, c: ModelConfig):
        self.name = name
        self.norm = Norm.of(f"{name}.norm", c.norm)
        dims = ("d_model", "d_ff")
        names = ["up", "gate"] if c.activation == "swiglu" else ["up"]
        self.inner = [Parameter(f"{name}.{n}", dims, "in", std=STD, decay=True) for n in names]
        self.down = Parameter(f"{name}.down", dims, "out", std=STD / sqrt(2 * c.layers), decay=True)
        self.inner_biases = (
            [Parameter(f"{p.name}_bias", ("d_ff",), "in", "zeros") for p in self.inner] if c.bias else []
        )
        self.down_bias = [Parameter(f"{name}.down_bias", ("d_model",), "vector", "zeros")] if c.bias else []

    def parameters(self) -> list[Parameter]:
        return [
            *self.norm.parameters(), *self.inner, self.down, *self.inner_biases, *self.down_bias
        ]  # fmt: skip

    def __call__(self, ops: Ops, x: Any) -> Any:
        h = ops.project(self.norm(ops, x), STREAM, self.inner, [HIDDEN] * len(self.inner), self.inner_biases)
        if len(h) == 2:
            up, gate = h
            hidden = ops.pointwise("multiply", ops.pointwise("silu", gate), up)
        else:
            hidden = ops.pointwise("gelu", h[0])
        (y,) = ops.project(hidden, HIDDEN, (self.down,), (STREAM,), self.down_bias)
        return ops.pointwise("add", x, ops.dropout(f"{self.name}.residual", y, STREAM))


class Decoder:
    """`forward` maps token ids [length, batch] to the summed cross-entropy of labels [length, batch], or to logits
    where labels are None."""

    def __init__(self, c: ModelConfig):
        d_kv = c.d_kv or c.d_model // c.heads
        self.config = c
        self.sizes = {
            "length": c.length,
            "d_model": c.d_model,
            "heads": c.heads,
            "kv_heads": c.kv_heads or c.heads,
            "d_kv": d_kv,
            "d_ff": c.d_ff or 4 * c.d_model,
            "vocab": c.vocab,
        }
        self.embedding = Parameter("embedding", ("vocab", "d_model"), "in", std=STD, decay=True)
        learned = c.positions == "learned"
        self.position = Parameter("position", ("length", "d_model"), "vector", "normal", STD, True) if learned else None
        self.blocks = [
            (Attention(f"layers.{i}.attention", c), FeedForward(f"layers.{i}.mlp", c)) for i in range(c.layers)
        ]
        self.norm = Norm.of("norm", c.norm)
        head = Parameter("head", ("vocab", "d_model"), "in", std=STD, decay=True)
        self.head = self.embedding if c.tied else head

    def parameters(self) -> list[Parameter]:
        ends = [self.embedding, *filter(None, [self.position])]
        layers = [p for block in self.blocks for layer in block for p in layer.parameters()]
        return [*ends, *layers, *self.norm.parameters(), *([] if self.config.tied else [self.head])]

    def forward(self, ops: Ops, tokens: Any, labels: Any) -> Any:
        (logits,) = ops.project(self.hidden(ops, tokens), STREAM, (self.head,), (LOGITS,))
        return ops.cross_entropy("loss", logits, LOGITS, labels)

    def logits(self, ops: Ops, tokens: Any) -> Any:
        """[length, batch, vocab], in the layout of the logits region."""
        return ops.project(self.hidden(ops, tokens), STREAM, (self.head,), (LOGITS,))[0]

    def hidden(self, ops: Ops, tokens: Any) -> Any:
        x = ops.lookup(self.embedding, tokens, STREAM)
        x = ops.shift(x, STREAM, self.position) if self.position else x
        x = ops.dropout("embedding", x, STREAM)
        for attention, mlp in self.blocks:
            x = mlp(ops, attention(ops, x))
        return self.norm(ops, x)
