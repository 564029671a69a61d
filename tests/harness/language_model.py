"""A model that says everything the language of models has words for, here and in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from platform.config.fields import Model as ModelConfig
from platform.model import register_model
from platform.model.layers import dim_sizes
from platform.model.transformer import LOGITS
from platform.plan.model_types import Parameter, Spec

OWN = {"topic": 4, "width": 4}  # dims that no other model has; topic x width = d_model
FUNCTIONS = ("gelu", "relu", "tanh", "identity")
LEFT, RIGHT = (("d_ff", 24),), (("d_ff", 40),)

STREAM = Spec.of("stream", "length batch d_model")
TOKENS = Spec.of("stream", "length batch")
WIDE = Spec.of("mlp", "length batch d_ff")
INSIDE = Spec.of("mlp", "length batch d_model")
MEAN = Spec.of("mlp", "batch d_ff")
SUM = Spec.of("mlp", "batch length")  # another order
ROWS = Spec.of("mlp", "length batch topic width")
QUERY = Spec.of("attention", "length batch topic width")
MEMORY = QUERY.rename_dim("length", "memory_length")
SCORES = Spec.of("attention", "batch topic length memory_length")
PER_TOKEN = Spec.of("logits", "length batch")


def matrix(name: str, dims: str, role: str = "in", sizes: tuple[tuple[str, int], ...] = ()) -> Parameter:
    return Parameter(name, tuple(dims.split()), role, std=0.5, decay=True, sizes=sizes)


class Language:
    inputs = ("tokens", "labels")

    def __init__(self, c: ModelConfig):
        self.sizes = {**dim_sizes(c), **OWN}
        self.embedding = matrix("embedding", "vocab d_model")
        self.rows = matrix("rows", "d_ff topic width")
        self.single = matrix("single", "vocab")
        self.third = matrix("third", "d_ff d_model")
        self.left, self.right = matrix("left", "d_model d_ff", sizes=LEFT), matrix("right", "d_model d_ff", sizes=RIGHT)
        self.down = matrix("down", "d_model d_ff", "out")
        self.stream_gain = Parameter("stream_gain", ("d_model",), "vector", "ones")
        self.wide_gain = Parameter("wide_gain", ("d_ff",), "in", "ones")
        self.wide_bias = Parameter("wide_bias", ("d_ff",), "in", "zeros")

    def parameters(self):
        matrices = [self.embedding, self.rows, self.single, self.third, self.left, self.right, self.down]
        return [*matrices, self.stream_gain, self.wide_gain, self.wide_bias]

    def forward(self, ops, inputs):
        add = lambda x, y: ops.pointwise("add", x, y)  # noqa: E731
        tokens = inputs["tokens"]
        x = ops.lookup("embedding", self.embedding, tokens, STREAM)
        rows = ops.lookup("rows", self.rows, tokens, ROWS)
        x = add(x, ops.reshape("rows", rows, ROWS, STREAM))
        x = ops.norm(x, STREAM, "rmsnorm", self.stream_gain, None)
        x = add(x, self.three_operands(ops, x, tokens))
        x = add(x, self.gated(ops, x))
        x = add(x, self.attention(ops, x))
        x = add(x, ops.recurrence("decayed", ops.pointwise("sigmoid", x), x, STREAM))
        total = ops.reduce("total", "sum", x, STREAM, SUM)
        x = ops.einsum("scaled", x, STREAM, total, SUM, STREAM)
        single = ops.lookup("single", self.single, tokens, TOKENS)
        x = ops.einsum("single", x, STREAM, single, TOKENS, STREAM)
        (logits,) = ops.project(x, STREAM, (self.embedding,), (LOGITS,))
        return ops.cross_entropy("loss", self.over_vocab(ops, logits), LOGITS, inputs["labels"])

    def three_operands(self, ops, x, tokens):
        hot = ops.one_hot("hot", tokens, WIDE)
        inside = ops.relayout("inside", x, STREAM, INSIDE)
        y = ops.product("triple", hot, WIDE, [(inside, INSIDE), self.third], INSIDE)
        return ops.relayout("outside", ops.dropout("triple", y, INSIDE), INSIDE, STREAM)

    def gated(self, ops, x):
        specs = [Spec.of("mlp", "length batch d_ff", own) for own in (LEFT, RIGHT)]
        parts = ops.project(x, STREAM, (self.left, self.right), specs)
        f = ops.concatenate("wide", parts, specs, WIDE, "d_ff")
        f = ops.norm(f, WIDE, "layernorm", self.wide_gain, self.wide_bias)
        f = ops.softmax("wide", f, WIDE, dim="d_ff", scale=0.5)
        mean = ops.reduce("mean", "mean", f, WIDE, MEAN)
        top = ops.reduce("top", "max", f, WIDE, TOKENS)
        f = ops.product("gates", f, WIDE, [(mean, MEAN), (top, TOKENS)], WIDE)
        return ops.project(f, WIDE, (self.down,), (STREAM,))[0]

    def attention(self, ops, x):
        q = ops.reshape("query", x, STREAM, QUERY)
        q = ops.pointwise_each(FUNCTIONS, q, QUERY, "topic")
        q = ops.softmax("topics", q, QUERY, dim="topic")
        k = ops.relayout("memory", q, QUERY, MEMORY)
        scores = ops.einsum("scores", q, QUERY, k, MEMORY, SCORES)
        p = ops.dropout("scores", ops.softmax("scores", scores, SCORES), SCORES)
        y = ops.einsum("context", p, SCORES, k, MEMORY, QUERY)
        return ops.reshape("context", y, QUERY, STREAM)

    def over_vocab(self, ops, logits):
        p = ops.softmax("vocab", logits, LOGITS, dim="vocab")
        mean = ops.reduce("vocab mean", "mean", logits, LOGITS, PER_TOKEN)
        top = ops.reduce("vocab max", "max", logits, LOGITS, PER_TOKEN)
        both = ops.pointwise("add", mean, top)
        return ops.pointwise("add", logits, ops.einsum("vocab", p, LOGITS, both, PER_TOKEN, LOGITS))


register_model("language", Language, dims=OWN)


def reference(w: dict[str, Any], tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss without dropout; tokens and labels [length, batch]."""
    x = w["embedding"][tokens] + w["rows"].flatten(1)[tokens]
    x = F.rms_norm(x, x.shape[-1:], w["stream_gain"], 1e-5)
    x = x + x * w["third"][tokens]
    f = torch.cat((x @ w["left"], x @ w["right"]), -1)
    f = torch.softmax(0.5 * F.layer_norm(f, f.shape[-1:], w["wide_gain"], w["wide_bias"], 1e-5), -1)
    f = f * f.mean(0) * f.amax(-1, keepdim=True)
    x = x + f @ w["down"].t()
    q = x.unflatten(-1, (4, 4))
    functions = [F.gelu, torch.relu, torch.tanh, lambda part: part]
    q = torch.stack([f(part) for f, part in zip(functions, q.unbind(2), strict=True)], 2).softmax(2)
    p = torch.einsum("lbtw,mbtw->btlm", q, q).softmax(-1)
    x = x + torch.einsum("btlm,mbtw->lbtw", p, q).flatten(2)
    h, gates, decayed = torch.zeros_like(x[0]), x.sigmoid(), []
    for gate, step in zip(gates, x, strict=True):
        decayed.append(h := gate * h + step)
    x = x + torch.stack(decayed)
    x = x * x.sum(-1, keepdim=True) * w["single"][tokens].unsqueeze(-1)
    logits = x @ w["embedding"].t()
    logits = logits + logits.softmax(-1) * (logits.mean(-1, keepdim=True) + logits.amax(-1, keepdim=True))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
