"""Experts in plain PyTorch, token by token and expert by expert, written from the papers: no code of the platform's
but the random bits of jitter.

Shazeer et al. 2017 and Jiang et al. 2024 (softmax over all scores, the chosen ones divided by their sum), DeepSeek-AI
2024 (sigmoid, shared experts, groups, balance sequence by sequence), Fedus et al. 2021 (capacity), Zoph et al. 2022
(z-loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.config.fields import Model
from platform.runtime import residual


def feed_forward(c: Model, w: Mapping[str, Tensor], name: str, x: Tensor, expert: int | None = None) -> Tensor:
    """One vector x through up, gate and down of the given name."""

    def product(part: str, x: Tensor) -> Tensor:
        weight, *bias = (w[key] for key in (f"{name}.{part}", f"{name}.{part}_bias") if key in w)
        y = (weight if expert is None else weight[expert]) @ x
        return y + (bias[0] if expert is None else bias[0][expert]) if bias else y

    if c.activation == "swiglu":
        return product("down", F.silu(product("gate", x)) * product("up", x))
    if c.activation == "swiglu_clamped":
        gate = product("gate", x).clamp(max=7)
        return product("down", gate * torch.sigmoid(1.702 * gate) * (product("up", x).clamp(-7, 7) + 1))
    return product("down", F.gelu(product("up", x)))


def best_of(c: Model, likely: list[float]) -> list[int]:
    """The experts that compute a token: the most likely ones, in the groups that are."""
    each = c.experts // c.router_groups
    groups = [range(each * g, each * (g + 1)) for g in range(c.router_groups)]
    groups.sort(key=lambda group: -sum(sorted((likely[e] for e in group), reverse=True)[: c.router_group_best]))
    return sorted((e for group in groups[: c.router_groups_kept] for e in group), key=lambda e: -likely[e])[
        : c.experts_per_token
    ]


def experts(
    c: Model, w: Mapping[str, Tensor], name: str, x: Tensor, real: Tensor, noise: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, Tensor, int]:
    """What experts make of one sequence x [length, d_model], the auxiliary loss of each of its tokens, how many chose
    each expert, and how often an expert dropped a token. `real`: tokens that are no padding; `noise`: factors of what
    the router reads."""
    k = c.experts_per_token
    slots = min(c.length, ceil(c.capacity_factor * c.length * k / c.experts)) if c.capacity_factor else c.length
    taken, choices, dropped = [0] * c.experts, [0] * c.experts, 0
    more = w.get(f"{name}.router_bias", 0)
    shares, out, scores = [], [], [w[f"{name}.router"] @ token + more for token in x * noise]
    for token, score, counts in zip(x, scores, real.tolist(), strict=True):
        y = torch.zeros_like(token)
        if c.shared_experts:
            y = y + feed_forward(c, w, f"{name}.shared", token)
        probability = torch.sigmoid(score) if c.router == "sigmoid" else torch.softmax(score, 0)
        shares.append(probability / probability.sum())
        bias = w[f"{name}.choice_bias"] if c.router_bias else torch.zeros(c.experts)
        best = best_of(c, (probability + bias).tolist())
        for e in best if counts else ():
            choices[e] += 1
            weight = probability[e] / sum(probability[i] for i in best) if c.router_normalised else probability[e]
            if taken[e] < slots:
                taken[e] += 1
                y = y + c.router_scale * weight * feed_forward(c, w, f"{name}.experts", token, e)
            else:
                dropped += 1
        out.append(y)
    n = max(1, int(real.sum()))
    mean = sum(share for share, counts in zip(shares, real.tolist(), strict=True) if counts) / n
    balance = c.experts / k * sum(choices[e] / n * mean[e] for e in range(c.experts)) if real.any() else 0.0
    balances = [balance] * len(scores)
    if c.balance_over == "batch":
        balances = [sum(w[f"{name}.load"][e] * share[e] for e in range(c.experts)) for share in shares]
    squares = [torch.logsumexp(score, 0) ** 2 for score in scores]
    losses = [c.balance_loss * even + c.z_loss * square for even, square in zip(balances, squares, strict=True)]
    return torch.stack(out), torch.stack(losses) * real, torch.tensor(choices), dropped


def settled(c: Model, w: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of layers after a step in which so many tokens chose each expert, by layer."""
    out = {}
    for name, load in loads.items():
        mean = load.sum().item() / c.experts
        if c.router_bias:
            rises = [float((n < mean) - (n > mean)) for n in load.tolist()]
            out[f"{name}.choice_bias"] = w[f"{name}.choice_bias"] + c.balance_rate * torch.tensor(
                rises, dtype=torch.float64
            )
        if c.balance_over == "batch":
            out[f"{name}.load"] = load.double() / mean
    return out


class Found(NamedTuple):
    """The mean loss of labels, the mean auxiliary loss in it, tokens dropped, and, by layer, how many tokens chose each
    expert."""

    loss: Tensor
    auxiliary: Tensor
    dropped: int
    loads: dict[str, Tensor]


def jitter(c: Model, name: str, shape: Sequence[int], step: int = 1) -> Tensor:
    """Factors [batch, length, d_model] of what the router of a layer reads in a step: by number of the element."""
    bits = residual.random_bits(
        residual.derive_key(0, "jitter", step, f"{name}.jitter"), torch.arange(prod(shape)).view(*shape)
    )
    return 1 + c.router_jitter * (2 * (bits & 0xFFFFFFFF).double() / 2**32 - 1)


def loss_of(c: Model, w: Mapping[str, Tensor], tokens: Tensor, labels: Tensor) -> Found:
    """The loss of labels (at least 0) in batches [batch, length]. Norms are RMSNorm, positions learned, nothing but
    experts has a bias, and the embedding is tied. `w`: weights and states."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.gain"], 1e-5)

    x = w["embedding"][tokens.clamp_min(0)] + w["position"]
    auxiliary, dropped, loads = torch.zeros(tokens.shape, dtype=x.dtype), 0, {}
    for i in range(c.layers):
        name = f"layers.{i}"
        h = norm(x, f"{name}.attention.norm")
        q, k, v = (
            torch.einsum("bld,hkd->bhlk", h, w[f"{name}.attention.{part}"]) for part in ("query", "key", "value")
        )
        hidden = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        scores = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).masked_fill(hidden, -torch.inf)
        if c.attention_sinks:
            sink = w[f"{name}.attention.sink"].view(-1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        a = scores.softmax(-1)[..., : q.shape[2]] @ v
        x = x + torch.einsum("bhlk,dhk->bld", a, w[f"{name}.attention.output"])
        h = norm(x, f"{name}.mlp.norm")
        if (i + 1) % c.experts_every or i in c.dense_layers:
            x = x + torch.stack([torch.stack([feed_forward(c, w, f"{name}.mlp", t) for t in row]) for row in h])
            continue
        factors = jitter(c, f"{name}.mlp", h.shape)
        outputs = [
            experts(c, w, f"{name}.mlp", row, ids >= 0, noise)
            for row, ids, noise in zip(h, tokens, factors, strict=True)
        ]
        x = x + torch.stack([y for y, *_ in outputs])
        auxiliary = auxiliary + torch.stack([losses for _, losses, *_ in outputs])
        loads[f"{name}.mlp"] = sum(choices for *_, choices, _ in outputs)
        dropped += sum(count for *_, count in outputs)
    logits = norm(x, "norm") @ w["embedding"][: c.vocab].t()
    counted = labels >= 0
    more = auxiliary[counted].mean()
    return Found(F.cross_entropy(logits[counted], labels[counted]) + more, more, dropped, loads)
