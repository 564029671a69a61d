"""Encoders and encoder-decoders as plain functions of the whole weights, written from the papers; no platform code."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.config.fields import Model

Weights = Mapping[str, Tensor]
HIDDEN = -1e30


def norm(c: Model, w: Weights, name: str, x: Tensor) -> Tensor:
    if c.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.gain"] + w[f"{name}.bias"]
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.gain"]


def bucket(offset: int, buckets: int, distance: int, bidirectional: bool) -> int:
    """T5's bucket of one offset, key position - query position."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
        back = abs(offset)
    else:
        back = max(-offset, 0)
    if back < buckets // 2:
        return first + back
    exact = buckets // 2
    step = math.log(back / exact) / math.log(distance / exact) * (buckets - exact)
    return first + min(exact + int(step + 1e-9), buckets - 1)


def attention(c: Model, w: Weights, name: str, x: Tensor, memory: Tensor, scores_more: Tensor) -> Tensor:
    """x, memory [batch, length, d_model]; `scores_more` is added to the scores [batch, heads, length, length]."""

    def heads(kind: str, y: Tensor) -> Tensor:
        weight = w[f"{name}.{kind}"]
        z = y @ weight.flatten(0, 1).t()
        z = z + w[f"{name}.{kind}_bias"].flatten() if c.bias else z
        return z.view(*y.shape[:2], *weight.shape[:-1]).transpose(1, 2)

    q, k, v = heads("query", x), heads("key", memory), heads("value", memory)
    p = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + scores_more, -1)
    y = (p @ v).transpose(1, 2).flatten(2) @ w[f"{name}.output"].flatten(1).t()
    return y + w[f"{name}.output_bias"] if c.bias else y


def feed_forward(c: Model, w: Weights, name: str, x: Tensor) -> Tensor:
    def inner(kind: str) -> Tensor:
        return x @ w[f"{name}.{kind}"].t() + (w[f"{name}.{kind}_bias"] if c.bias else 0)

    if c.activation == "geglu":
        h = F.gelu(inner("gate")) * inner("up")
    else:
        h = {"gelu": F.gelu, "relu": torch.relu}[c.activation](inner("up"))
    y = h @ w[f"{name}.down"].t()
    return y + w[f"{name}.down_bias"] if c.bias else y


def embed(c: Model, w: Weights, prefix: str, tokens: Tensor) -> Tensor:
    x = F.embedding(tokens.clamp(min=0), w["embedding"])
    if c.positions == "learned":
        return x + w[f"{prefix}position"]
    if c.positions == "sinusoidal":
        table = torch.empty(tokens.shape[1], c.d_model, dtype=x.dtype)
        for position in range(tokens.shape[1]):
            for i in range(0, c.d_model, 2):
                angle = position / 10000 ** (i / c.d_model)
                table[position, i], table[position, i + 1] = math.sin(angle), math.cos(angle)
        return x * math.sqrt(c.d_model) + table
    return x


def stack(c: Model, w: Weights, prefix: str, x: Tensor, padding: Tensor | None, memory=None, memory_padding=None):
    """`padding` [batch, length] is hidden; None: causal."""
    n = x.shape[1]
    if padding is None:
        more = torch.full((n, n), HIDDEN, dtype=x.dtype).triu(1)
    else:
        more = HIDDEN * padding[:, None, None].to(x.dtype)
    if c.positions == "relative":
        rows = [[bucket(j - i, c.buckets, c.distance, padding is not None) for j in range(n)] for i in range(n)]
        more = more + w[f"{prefix}relative_bias"][torch.tensor(rows)].permute(2, 0, 1)

    def layer(name, x, f):
        return norm(c, w, f"{name}.norm", x + f(x)) if c.post_norm else x + f(norm(c, w, f"{name}.norm", x))

    for i in range(c.layers):
        name = f"{prefix}layers.{i}"
        x = layer(f"{name}.attention", x, lambda y: attention(c, w, f"{name}.attention", y, y, more))  # noqa: B023
        if memory is not None:
            unseen = HIDDEN * memory_padding[:, None, None].to(x.dtype)
            x = layer(f"{name}.cross", x, lambda y: attention(c, w, f"{name}.cross", y, memory, unseen))  # noqa: B023
        x = layer(f"{name}.mlp", x, lambda y: feed_forward(c, w, f"{name}.mlp", y))  # noqa: B023
    return x if c.post_norm else norm(c, w, f"{prefix}norm", x)


def loss(c: Model, w: Weights, data: Mapping[str, Tensor]) -> Tensor:
    """Mean loss over the labels that count; data tensors [batch, length]."""
    tokens, labels = data["tokens"], data["labels"]
    if c.kind == "encoder":
        x = stack(c, w, "", embed(c, w, "", tokens), tokens < 0)
    else:
        source = data["source"]
        memory = stack(c, w, "encoder.", embed(c, w, "encoder.", source), source < 0)
        x = stack(c, w, "decoder.", embed(c, w, "decoder.", tokens), None, memory, source < 0)
    log_p = torch.log_softmax(x @ w["embedding" if c.tied else "head"].t(), -1)[labels >= 0]
    picked = log_p.gather(1, labels[labels >= 0].unsqueeze(1)).squeeze(1)
    return -((1 - c.label_smoothing) * picked + c.label_smoothing * log_p.mean(-1)).mean()
