"""The same Transformers in plain PyTorch, written from the papers and sharing no code with the platform."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from platform.config.fields import Model


class Block(nn.Module):
    def __init__(self, c: Model):
        super().__init__()
        self.config = c
        self.head_dim = c.d_model // c.heads
        kv = (c.kv_heads or c.heads) * self.head_dim
        norm = nn.LayerNorm if c.norm == "layernorm" else nn.RMSNorm
        self.norm1, self.norm2 = norm(c.d_model, eps=1e-5), norm(c.d_model, eps=1e-5)
        d_ff = c.d_ff or 4 * c.d_model
        self.q = nn.Linear(c.d_model, c.heads * self.head_dim, bias=c.bias)
        self.k = nn.Linear(c.d_model, kv, bias=c.bias)
        self.v = nn.Linear(c.d_model, kv, bias=c.bias)
        self.o = nn.Linear(c.heads * self.head_dim, c.d_model, bias=c.bias)
        self.up = nn.Linear(c.d_model, d_ff, bias=c.bias)
        self.gate = nn.Linear(c.d_model, d_ff, bias=c.bias) if c.activation == "swiglu" else None
        self.down = nn.Linear(d_ff, c.d_model, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        c, (b, n, _) = self.config, x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, n, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        if c.positions == "rope":
            q, k = rotary(q, c.rope_theta), rotary(k, c.rope_theta)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, n, -1))
        h = self.norm2(x)
        hidden = F.silu(self.gate(h)) * self.up(h) if self.gate is not None else F.gelu(self.up(h))
        return x + self.down(hidden)


def rotary(x: Tensor, theta: float) -> Tensor:
    """Half-split rotary embedding of [batch, heads, length, head_dim]."""
    d = x.shape[-1]
    places, pairs = (torch.arange(*ends, device=x.device).double() for ends in ((x.shape[2],), (0, d, 2)))
    angle = places[:, None] / theta ** (pairs / d)
    cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class ReferenceModel(nn.Module):
    """`forward(tokens, labels)` [batch, length] -> mean cross-entropy."""

    def __init__(self, c: Model):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab, c.d_model)
        self.position = nn.Parameter(torch.empty(c.length, c.d_model)) if c.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = (nn.LayerNorm if c.norm == "layernorm" else nn.RMSNorm)(c.d_model, eps=1e-5)
        self.head = None if c.tied else nn.Linear(c.d_model, c.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x if self.position is None else x + self.position
        for block in self.blocks:
            x = block(x)
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = F.linear(self.norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def names(self) -> dict[str, nn.Parameter]:
        """The platform's parameter name -> the parameter here."""
        out = {"embedding": self.embedding.weight}
        if self.position is not None:
            out["position"] = self.position
        if self.head is not None:
            out["head"] = self.head.weight
        layers = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "o": "attention.output",
                  "up": "mlp.up", "gate": "mlp.gate", "down": "mlp.down"}  # fmt: skip
        norms = {"norm": self.norm}
        for i, block in enumerate(self.blocks):
            norms |= {f"layers.{i}.attention.norm": block.norm1, f"layers.{i}.mlp.norm": block.norm2}
            for short, name in layers.items():
                if (linear := getattr(block, short)) is not None:
                    out[f"layers.{i}.{name}"] = linear.weight
                    if linear.bias is not None:
                        out[f"layers.{i}.{name}_bias"] = linear.bias
        for name, norm in norms.items():
            out[f"{name}.gain"] = norm.weight
            if getattr(norm, "bias", None) is not None:
                out[f"{name}.bias"] = norm.bias
        return out

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes whole tensors under the platform's names."""
        parameters = self.names()
        assert set(parameters) == set(weights), set(parameters) ^ set(weights)
        for name, parameter in parameters.items():
            w = weights[name][: self.config.vocab] if name in ("embedding", "head") else weights[name]  # unpadded
            parameter.copy_(w.reshape(parameter.shape))

    def gradients(self) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.names().items()}


def parameter_groups(model: ReferenceModel, weight_decay: float) -> list[dict]:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
