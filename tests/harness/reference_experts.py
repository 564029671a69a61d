"""Experts in plain PyTorch, token by token and expert by expert, written from the papers: no code of the platform's.

Shazeer et al. 2017 and Jiang et al. 2024 (softmax over all scores, the chosen ones divided by their sum), DeepSeek-AI
2024 (sigmoid, shared experts, groups, balance sequence by sequence), Fedus et al. 2021 (capacity), Zoph et al. 2022
(z-loss).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.config.fields import Model


def feed_forward(c: Model, w: Mapping[str, Tensor], name: str, x: Tensor, expert: int | None = None) -> Tensor:
    """One vector x through up, gate and down of the given name."""
    up, down, gate = (
        w[f"{name}.{part}"] if expert is None else w[f"{name}.{part}"][expert]
        for part in ("up", "down", *(["gate"] if c.activation == "swiglu" else ["up"]))
    )
    return down @ (F.silu(gate @ x) * (up @ x) if c.activation == "swiglu" else F.gelu(up @ x))


def best_of(c: Model, likely: list[float]) -> list[int]:
    """The experts that compute a token: the most likely ones, in the groups that are."""
    each = c.experts // c.router_groups
    groups = [range(each * g, each * (g + 1)) for g in range(c.router_groups)]
    groups.sort(key=lambda group: -sum(sorted((likely[e] for e in group), reverse=True)[: c.router_group_best]))
    return sorted((e for group in groups[: c.router_groups_kept] for e in group), key=lambda e: -likely[e])[
        : c.experts_per_token
    ]


def experts(c: Model, w: Mapping[str, Tensor], name: str, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, int]:
    """What experts make of one sequence x [length, d_model], the auxiliary loss of each of its tokens, and how often an
    expert dropped a token. `real`: tokens that are no padding."""
    k = c.experts_per_token
    slots = min(c.length, ceil(c.capacity_factor * c.length * k / c.experts)) if c.capacity_factor else c.length
    taken, choices, dropped = [0] * c.experts, [0] * c.experts, 0
    shares, out, scores = [], [], [w[f"{name}.router"] @ token for token in x]
    for token, score, counts in zip(x, scores, real.tolist(), strict=True):
        y = torch.zeros_like(token)
        if c.shared_experts:
            y = y + feed_forward(c, w, f"{name}.shared", token)
        probability = torch.sigmoid(score) if c.router == "sigmoid" else torch.softmax(score, 0)
        shares.append(probability / probability.sum())
        best = best_of(c, probability.tolist())
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
    losses = [c.balance_loss * balance + c.z_loss * torch.logsumexp(score, 0) ** 2 for score in scores]
    return torch.stack(out), torch.stack(losses) * real, dropped


def loss_of(c: Model, w: Mapping[str, Tensor], tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """The mean loss of labels (at least 0) in batches [batch, length]; the mean auxiliary loss in it; tokens dropped.
    Norms are RMSNorm, positions learned, nothing has a bias, and the embedding is tied."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.gain"], 1e-5)

    x = w["embedding"][tokens.clamp_min(0)] + w["position"]
    auxiliary, dropped = torch.zeros(tokens.shape, dtype=x.dtype), 0
    for i in range(c.layers):
        name = f"layers.{i}"
        h = norm(x, f"{name}.attention.norm")
        q, k, v = (
            torch.einsum("bld,hkd->bhlk", h, w[f"{name}.attention.{part}"]) for part in ("query", "key", "value")
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bhlk,dhk->bld", a, w[f"{name}.attention.output"])
        h = norm(x, f"{name}.mlp.norm")
        if (i + 1) % c.experts_every or i in c.dense_layers:
            x = x + torch.stack([torch.stack([feed_forward(c, w, f"{name}.mlp", t) for t in row]) for row in h])
            continue
        found = [experts(c, w, f"{name}.mlp", row, ids >= 0) for row, ids in zip(h, tokens, strict=True)]
        x = x + torch.stack([y for y, _, _ in found])
        auxiliary = auxiliary + torch.stack([losses for _, losses, _ in found])
        dropped += sum(count for _, _, count in found)
    logits = norm(x, "norm") @ w["embedding"][: c.vocab].t()
    counted = labels >= 0
    more = auxiliary[counted].mean()
    return F.cross_entropy(logits[counted], labels[counted]) + more, more, dropped
