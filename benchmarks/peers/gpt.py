"""The decoder that all peers train, as a careful user writes it in PyTorch, and the batches that both sides read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from platform.config.fields import Config, Model
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from tests.harness.oracle import configure, trainer_of
from tests.harness.reference_model import Block, ReferenceModel

BATCHES = 4  # that recur, so that the model learns them by heart: a loss near log(vocab) would agree with anything


class Recurring:
    """A corpus whose batches recur, drawn once: reading one costs neither side anything."""

    teacher, counts_by_reading = None, False

    def __init__(self, c: Config):
        self.rows = np.random.default_rng(c.seed).integers(
            0, c.model.vocab, (BATCHES * c.train.global_batch, c.model.length + 1)
        )

    def batch(self, split: str, start: int, end: int) -> dict[str, np.ndarray]:
        rows = self.rows[np.arange(start, end) % len(self.rows)]
        return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}

    def predicted(self, split: str, start: int, end: int) -> int:
        return (end - start) * (self.rows.shape[1] - 1)


class Batches:
    """A rank's part of every global batch: replica `index` of `data`."""

    def __init__(self, c: Config, index: int = 0):
        self.corpus, self.size, self.each = Recurring(c), c.train.global_batch, c.train.global_batch // c.parallel.data
        self.first = index * self.each

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and labels of training step `step` (from 1): int64 [sequences of this rank, length]."""
        start = (step - 1) * self.size + self.first
        rows = self.corpus.batch("train", start, start + self.each)
        return torch.from_numpy(rows["tokens"]), torch.from_numpy(rows["labels"])


def initial_weights(c: Config) -> Mapping[str, Tensor]:
    """Return the whole initial weights that our trainer has under any plan, by our names."""
    alone = configure(precision=c.precision)
    alone.model, alone.optimizer, alone.seed = c.model, c.optimizer, c.seed
    plan = make_plan(alone)
    return {n: w.detach() for n, w in trainer_of(alone, plan, SingleRank(plan.mesh)).weights.master.items()}


class FusedBlock(nn.Module):
    """One layer with one product for Q, K and V, and one for gate and up. `shards`: of tensor parallelism; the rows of
    fused weights are in the order of the ranks, each with its own heads of Q, K and V."""

    def __init__(self, c: Model, plain: Block, shards: int = 1):
        super().__init__()
        self.config, self.width = c, plain.head_dim
        self.heads, self.kv_heads = c.heads // shards, (c.kv_heads or c.heads) // shards
        self.norm1, self.norm2, self.proj, self.down = plain.norm1, plain.norm2, plain.o, plain.down
        self.qkv = fused((plain.q, plain.k, plain.v), shards)
        self.gated = plain.gate is not None
        self.up = fused((plain.gate, plain.up), shards) if self.gated else plain.up
        angle = torch.arange(c.length).double()[:, None] / c.rope_theta ** (
            torch.arange(0, self.width, 2).double() / self.width
        )
        self.register_buffer("cos", torch.cos(angle).float(), persistent=False)
        self.register_buffer("sin", torch.sin(angle).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, n, _) = self.config, x.shape
        width = self.width
        parts = self.qkv(self.norm1(x)).split([self.heads * width, self.kv_heads * width, self.kv_heads * width], -1)
        q, k, v = (part.view(b, n, -1, width).transpose(1, 2) for part in parts)
        if c.positions == "rope":
            q, k = (rotated(x, self.cos, self.sin) for x in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, -1))
        h = self.up(self.norm2(x))
        if self.gated:
            gate, up = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of [batch, heads, length, width], by tables [length, width / 2] and in their type."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@torch.no_grad()
def fused(linears: Iterable[nn.Linear], shards: int) -> nn.Linear:
    """Return one linear layer that computes several of one input: rank by rank, of each its rows."""
    linears = list(linears)
    out = nn.Linear(linears[0].in_features, sum(x.out_features for x in linears), linears[0].bias is not None)
    for name in ("weight", "bias") if out.bias is not None else ("weight",):
        parts = [getattr(x, name).chunk(shards) for x in linears]
        getattr(out, name).copy_(torch.cat([part[r] for r in range(shards) for part in parts]))
    return out


class Gpt(nn.Module):
    """A decoder, or the layers `first` to `end` (0: the last one) of it: with the embedding if it has the first, with
    the norm and head if it has the last. `forward(tokens or stream)` -> logits, or the stream [batch, length,
    d_model]."""

    def __init__(self, c: Model, weights: Mapping[str, Tensor], shards: int = 1, first: int = 0, end: int = 0):
        super().__init__()
        plain = ReferenceModel(c)
        plain.load(weights)
        end = end or c.layers
        self.blocks = nn.ModuleList(FusedBlock(c, b, shards) for b in list(plain.blocks)[first:end])
        self.embedding = plain.embedding if first == 0 else None
        self.position = plain.position if first == 0 else None
        self.norm = self.head = None
        if end == c.layers:
            self.norm, self.head = plain.norm, plain.head or nn.Linear(c.d_model, c.vocab, bias=False)
            if c.tied:
                self.head.weight = plain.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
            x = x if self.position is None else x + self.position
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Language(nn.Module):
    """`forward(tokens, labels)` -> mean cross-entropy of a Gpt."""

    def __init__(self, gpt: nn.Module):
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.gpt(tokens), labels)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def groups_of(model: nn.Module, c: Config) -> list[dict[str, Any]]:
    """Return AdamW's parameter groups: vectors do not decay."""
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim == 1]
    return [{"params": decayed, "weight_decay": c.optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}]


def settings_of(c: Config) -> dict[str, Any]:
    """Return the arguments of AdamW that a configuration names."""
    o = c.optimizer
    return {"lr": o.lr, "betas": (o.betas[0], o.betas[1]), "eps": o.eps, "fused": True}


def adamw(model: nn.Module, c: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(model, c), **settings_of(c))


def compile_blocks(model: nn.Module) -> None:
    """Compile every block of a model in place; all of one kind share one graph."""
    for block in model.modules():
        if isinstance(block, FusedBlock):
            block.compile(dynamic=False)
