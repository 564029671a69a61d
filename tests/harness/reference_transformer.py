"""Transformers of every kind as plain functions of the whole weights, written from the papers; no platform code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.config.fields import Model
from tests.harness import reference_experts

Weights = Mapping[str, Tensor]
HIDDEN = -1e30


def norm(c: Model, w: Weights, name: str, x: Tensor) -> Tensor:
    if f"{name}.bias" in w:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[f"{name}.gain"] + w[f"{name}.bias"]
    return x / (x.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * gain_of(c, w[f"{name}.gain"])


def gain_of(c: Model, gain: Tensor) -> Tensor:
    return 1 + gain if c.norm == "rmsnorm_centred" else gain


def capped(cap: float, x: Tensor) -> Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"gelu": lambda x: x * torch.special.ndtr(x), "gelu_tanh": gelu_tanh, "relu": lambda x: x.clamp(min=0),
               "silu": lambda x: x / (1 + torch.exp(-x))}  # fmt: skip
GATES = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "swiglu": "silu"}


def rotated(c: Model, x: Tensor) -> Tensor:
    """Rotary positions of the first elements of [batch, heads, length, d_kv], with angles scaled pair by pair."""
    pairs, out = int(x.shape[-1] * c.rope_share) // 2, x.clone()
    turned, pairs = pairs, x.shape[-1] // 2 if c.rope_scaling == "proportional" else pairs
    for i in range(turned):
        angle = c.rope_theta ** (-i / pairs)
        if c.rope_scaling in ("linear", "proportional"):
            angle /= c.rope_factor
        elif c.rope_scaling == "llama3":
            length = 2 * math.pi / angle
            if length > c.rope_original_length / c.rope_low:
                angle /= c.rope_factor
            elif length > c.rope_original_length / c.rope_high:
                share = (c.rope_original_length / length - c.rope_low) / (c.rope_high - c.rope_low)
                angle = (1 - share) * angle / c.rope_factor + share * angle
        for position in range(x.shape[2]):
            cos, sin = math.cos(position * angle), math.sin(position * angle)
            a, b = x[:, :, position, i], x[:, :, position, pairs + i]
            out[:, :, position, i], out[:, :, position, pairs + i] = a * cos - b * sin, b * cos + a * sin
    return out


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

    def heads(kind: str, y: Tensor, product: str = "") -> Tensor:
        product = product or kind
        weight = w[f"{name}.{product}"]
        z = y @ weight.flatten(0, 1).t()
        z = z + w[f"{name}.{product}_bias"].flatten() if f"{name}.{product}_bias" in w else z
        z = z.view(*y.shape[:2], *weight.shape[:-1])
        if kind != "value" and c.query_key_norm:
            gain = gain_of(c, w[f"{name}.{kind}_norm.gain"])  # of each head, or of all heads
            z = F.rms_norm(z, gain.shape, gain, c.norm_eps)
        if kind == "value" and c.value_norm:
            z = z / (z.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
        z = z.transpose(1, 2)
        z = rotated(c, z) if kind != "value" and c.positions == "rope" else z
        return z.repeat_interleave(c.heads // weight.shape[0], 1) if kind != "query" else z

    q, k, v = heads("query", x), heads("key", memory), heads("value", memory, "key" if c.values_are_keys else "")
    scale = c.attention_scale or 1 / math.sqrt(q.shape[-1])
    s = capped(c.attention_cap, scale * q @ k.transpose(2, 3)) + scores_more
    if c.attention_sinks:
        s = torch.cat([s, w[f"{name}.sink"].view(-1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[2]]
    y = (p @ v).transpose(1, 2).flatten(2)
    y = y * torch.sigmoid(x @ w[f"{name}.gate"].flatten(0, 1).t()) if c.attention_gate else y
    y = y @ w[f"{name}.output"].flatten(1).t()
    return y + w[f"{name}.output_bias"] if f"{name}.output_bias" in w else y


def delta(c: Model, w: Weights, name: str, x: Tensor, begins: Tensor | None) -> Tensor:
    """A gated delta rule and its convolutions, one token after another; x [batch, length, d_model]."""

    def project_input(kind: str) -> Tensor:
        weight = w[f"{name}.{kind}"]
        y = (x @ weight.flatten(0, -2).t()).unflatten(-1, weight.shape[:-1])
        if (taps := w.get(f"{name}.{kind}_taps")) is None:
            return y
        rows = []
        for t in range(x.shape[1]):
            row = torch.zeros_like(y[:, 0])
            for back in range(min(taps.shape[-1], t + 1)):
                seen = torch.ones(len(y)) if begins is None else (t - back >= begins[:, t]).to(y.dtype)
                row = row + taps[..., -1 - back] * y[:, t - back] * seen[:, None, None]
            rows.append(row / (1 + torch.exp(-row)))
        return torch.stack(rows, 1)

    q, k, v, gate, strength, decay = map(project_input, ("query", "key", "value", "gate", "strength", "decay"))
    q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    q, k = (y.repeat_interleave(v.shape[2] // k.shape[2], 2) for y in (q / math.sqrt(q.shape[-1]), k))
    state, rows = torch.zeros(*v[:, 0].shape[:2], k.shape[-1], v.shape[-1], dtype=x.dtype), []
    for t in range(x.shape[1]):
        if begins is not None:
            state = state * (begins[:, t] < t)[:, None, None, None]
        lost = torch.exp(w[f"{name}.rate"]) * F.softplus(decay[:, t] + w[f"{name}.shift"])
        state = state * torch.exp(-lost)[..., None, None]
        new = torch.sigmoid(strength[:, t])[..., None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
        state = state + k[:, t, ..., None] * new[:, :, None]
        rows.append((q[:, t, :, None] @ state)[:, :, 0])
    y = torch.stack(rows, 1)
    y = y / (y.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[f"{name}.head_norm.gain"]
    y = y * gate / (1 + torch.exp(-gate))
    return y.flatten(2) @ w[f"{name}.output"].flatten(1).t()


def feed_forward(c: Model, w: Weights, name: str, x: Tensor) -> Tensor:
    if f"{name}.router" in w:  # which drops no token that is not trained with
        every, real = replace(c, capacity_factor=0.0), torch.ones(x.shape[1], dtype=torch.bool)
        return torch.stack([reference_experts.experts(every, w, name, row, real)[0] for row in x])

    def inner(kind: str) -> Tensor:
        return x @ w[f"{name}.{kind}"].t() + (w[f"{name}.{kind}_bias"] if c.bias else 0)

    if c.activation in GATES:
        h = ACTIVATIONS[GATES[c.activation]](inner("gate")) * inner("up")
    else:
        h = ACTIVATIONS[c.activation](inner("up"))
    y = h @ w[f"{name}.down"].t()
    return y + w[f"{name}.down_bias"] if c.bias else y


def embed(
    c: Model, w: Weights, prefix: str, tokens: Tensor, segments: Tensor | None = None, begins: Tensor | None = None
) -> Tensor:
    x = F.embedding(tokens.clamp(min=0), w["embedding"]) * c.embedding_scale
    if c.positions == "learned":
        place = torch.arange(tokens.shape[1])
        x = x + w[f"{prefix}position"][place - begins if c.within_documents and begins is not None else place]
    if c.positions == "sinusoidal":
        table = torch.empty(tokens.shape[1], c.d_model, dtype=x.dtype)
        for position in range(tokens.shape[1]):
            for i in range(0, c.d_model, 2):
                angle = position / 10000 ** (i / c.d_model)
                table[position, i], table[position, i + 1] = math.sin(angle), math.cos(angle)
        x = x * math.sqrt(c.d_model) + table
    if c.segments:
        x = x + w[f"{prefix}segment"][segments]
    return norm(c, w, f"{prefix}embedding.norm", x) if c.embedding_norm else x


def behind(c: Model, n: int, layer: int, begins: Tensor | None) -> Tensor:
    """What causal attention does not see, pair by pair: [batch or 1, 1, n, n]."""
    windowed = c.window and (not c.window_layers or layer in c.window_layers)
    rows = [[j > i or bool(windowed and j <= i - c.window) for j in range(n)] for i in range(n)]
    hidden = torch.tensor(rows)[None, None]
    if begins is not None and c.within_documents:
        hidden = hidden | (torch.arange(n) < begins[:, None, :, None])
    return hidden


def stack(
    c: Model, w: Weights, prefix: str, x: Tensor, padding: Tensor | None, memory=None, memory_padding=None, begins=None
):
    """`padding` [batch, length] is hidden; None: causal."""
    n = x.shape[1]
    more = torch.zeros(n, n, dtype=x.dtype)
    if padding is not None:
        more = HIDDEN * padding[:, None, None].to(x.dtype)
    if c.positions == "relative":
        rows = [[bucket(j - i, c.buckets, c.distance, padding is not None) for j in range(n)] for i in range(n)]
        more = more + w[f"{prefix}relative_bias"][torch.tensor(rows)].permute(2, 0, 1)

    def layer(name, x, f, read=None):
        if c.post_norm:
            return norm(c, w, f"{name}.norm", x + c.residual_scale * f(x))
        read = x if read is None else read
        y = f(norm(c, w, f"{name}.norm", read) if c.input_norm else read)
        return x + c.residual_scale * (norm(c, w, f"{name}.output_norm", y) if c.output_norm else y)

    for i in range(c.layers):
        name = f"{prefix}layers.{i}"
        added = more if padding is not None else more + HIDDEN * behind(c, n, i, begins).to(x.dtype)
        mine, read = c, x
        windowed = c.window and (not c.window_layers or i in c.window_layers)
        if c.window_rope_theta and windowed:
            share = 1.0 if c.rope_scaling == "proportional" else c.rope_share
            mine = replace(c, rope_theta=c.window_rope_theta, rope_scaling="none", rope_share=share)
        mine = replace(mine, values_are_keys=c.values_are_keys and not windowed)
        if i in c.no_rope_layers:
            mine = replace(c, positions="none")
        if i in c.linear_layers:
            afresh = begins if c.within_documents else None
            x = layer(f"{name}.delta", x, lambda y: delta(c, w, f"{name}.delta", y, afresh))  # noqa: B023
        else:
            x = layer(f"{name}.attention", x, lambda y: attention(mine, w, f"{name}.attention", y, y, added))  # noqa: B023
        if memory is not None:
            unseen = HIDDEN * memory_padding[:, None, None].to(x.dtype)
            x = layer(f"{name}.cross", x, lambda y: attention(c, w, f"{name}.cross", y, memory, unseen))  # noqa: B023
        read = read if c.parallel_residual else x
        x = layer(f"{name}.mlp", x, lambda y: feed_forward(c, w, f"{name}.mlp", y), read)  # noqa: B023
        x = x * w[f"{name}.scale"] if c.stored_scale else x
    return x if c.post_norm else norm(c, w, f"{prefix}norm", x)


def logits(c: Model, w: Weights, data: Mapping[str, Tensor]) -> Tensor:
    """[batch, length, vocab] of data tensors [batch, length]."""
    tokens = data["tokens"]
    if c.kind == "decoder":
        begins = data.get("begins")
        x = stack(c, w, "", embed(c, w, "", tokens, begins=begins), None, begins=begins)
    elif c.kind == "encoder":
        x = stack(c, w, "", embed(c, w, "", tokens, data.get("segments")), tokens < 0)
    else:
        source = data["source"]
        memory = stack(c, w, "encoder.", embed(c, w, "encoder.", source), source < 0)
        x = stack(c, w, "decoder.", embed(c, w, "decoder.", tokens), None, memory, source < 0)
    if c.head_transform:
        h = ACTIVATIONS[c.activation](x @ w["head_transform"].t() + w["head_transform_bias"])
        x = norm(c, w, "head_transform.norm", h)
    y = c.logit_scale * x @ w["embedding" if c.tied else "head"].t()
    return capped(c.logit_cap, y + w["head_bias"] if c.head_bias else y)


def loss(c: Model, w: Weights, data: Mapping[str, Tensor]) -> Tensor:
    """Mean loss over the labels that count; data tensors [batch, length]."""
    labels = data["labels"]
    log_p = torch.log_softmax(logits(c, w, data), -1)[labels >= 0]
    picked = log_p.gather(1, labels[labels >= 0].unsqueeze(1)).squeeze(1)
    return -((1 - c.label_smoothing) * picked + c.label_smoothing * log_p.mean(-1)).mean()
