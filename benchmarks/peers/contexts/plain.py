"""The block as a careful user writes it in PyTorch, its attention over two ranks in one of these ways:

- `gathered`: keys and values gathered in one collective, and one call of torch's fused attention with a mask;
- `pieces`: gathered so, and one call for each of the rank's two pieces, with the keys that it can see;
- `torch_allgather`, `torch_alltoall`: torch's own ring attention, with either rotation.

torch's `context_parallel` itself refuses on a CPU: DTensor has no strategy for the CPU's attention kernel. Its ring,
which is what its handlers call for each of the GPU's kernels, takes any kernel, and is called here with the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from benchmarks.peers.contexts.block import RANKS, Block, Given, Size, in_zigzag
from benchmarks.peers.gpt import rotated
from platform.runtime.communicator import Communicator

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, heads, length here, width]
aten = torch.ops.aten


class _Gathered(torch.autograd.Function):
    """Keys and values [2, batch, heads, length, width] of all ranks, one rank's after another's; their gradient is
    summed where they came from."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(RANKS, *x.shape)
        dist.all_gather_single(out.flatten(0, 1), x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(gradient[0])
        dist.reduce_scatter_single(out, gradient.contiguous().flatten(0, 1))
        return out


def _in_order(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values of all positions, in their order: pieces 0, 3 are one rank's, 1, 2 the other's."""
    gathered = _Gathered.apply(torch.stack([k, v]))
    (a, d), (b, c) = (of_rank.chunk(2, -2) for of_rank in gathered)
    whole = torch.cat([a, b, c, d], -2)
    return whole[0], whole[1]


def gathered(size: Size, rank: int) -> Attention:
    """Return attention to all gathered keys, with a mask made once."""
    hidden = torch.arange(size.length) > in_zigzag(size, rank)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _in_order(k, v)
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), enable_gqa=size.heads != size.kv_heads)

    return attend


def pieces(size: Size, rank: int) -> Attention:
    """Return attention of each of the rank's pieces to the gathered keys up to its last one."""
    each = size.length // (2 * RANKS)
    ends = [(rank + 1) * each, size.length - rank * each]
    hidden = [torch.arange(end) > torch.arange(end - each, end)[:, None] for end in ends]
    masks = [torch.zeros(h.shape).masked_fill_(h, -torch.inf) for h in hidden]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = _in_order(k, v)
        parts = [
            F.scaled_dot_product_attention(
                part, k[..., :end, :], v[..., :end, :], mask.to(q.dtype), enable_gqa=size.heads != size.kv_heads
            )
            for part, end, mask in zip(q.chunk(2, -2), ends, masks, strict=True)
        ]
        return torch.cat(parts, -2)

    return attend


class _Ring(torch.autograd.Function):
    """torch's ring attention, forward and backward, with the attention kernel of the CPU."""

    @staticmethod
    def forward(ctx, q, k, v):
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = torch_ring._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, gradient):
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        more = {"is_causal": True, "dropout_p": 0.0}
        return torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, gradient, "grad_out", *ctx.saved_tensors, **more
        )


def ring(rotation: str, size: Size, rank: int) -> Attention:
    """Return torch's ring attention with the `rotation` allgather or alltoall, with its defaults."""
    torch_ring.set_rotate_method(rotation)
    torch_ring._cp_options.convert_to_f32 = size.precision == "fp32"
    return _Ring.apply


class Model(nn.Module):
    """A block of a decoder, with one product for Q, K and V, and one for gate and up."""

    def __init__(self, size: Size, w: Mapping[str, Tensor], positions: Tensor, attention: Attention):
        super().__init__()
        self.size, self.attention = size, attention
        self.norm1, self.norm2 = (nn.Parameter(w[f"{layer}.norm.gain"].clone()) for layer in ("attention", "mlp"))
        self.qkv = nn.Parameter(torch.cat([w[f"attention.{name}"] for name in ("query", "key", "value")]))
        self.out, self.down = nn.Parameter(w["attention.output"].clone()), nn.Parameter(w["mlp.down"].clone())
        self.inner = nn.Parameter(torch.cat([w["mlp.gate"], w["mlp.up"]]))
        width = size.width
        angle = positions.double()[:, None] / 10_000 ** (torch.arange(0, width, 2).double() / width)
        self.cos, self.sin = torch.cos(angle).to(self.qkv.dtype), torch.sin(angle).to(self.qkv.dtype)

    def forward(self, x: Tensor) -> Tensor:
        size, (b, n, d) = self.size, x.shape
        h = F.linear(F.rms_norm(x, (d,), self.norm1, 1e-5), self.qkv).view(b, n, -1, size.width).transpose(1, 2)
        q, k, v = h.split([size.heads, size.kv_heads, size.kv_heads], 1)
        a = self.attention(rotated(q, self.cos, self.sin), rotated(k, self.cos, self.sin), v)
        x = x + F.linear(a.transpose(1, 2).reshape(b, n, -1), self.out)
        gate, up = F.linear(F.rms_norm(x, (d,), self.norm2, 1e-5), self.inner).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients by our names."""
        kv = self.size.kv_heads * self.size.width
        q, k, v = self.qkv.grad.split([self.size.heads * self.size.width, kv, kv])
        gate, up = self.inner.grad.chunk(2)
        return {
            "attention.query": q, "attention.key": k, "attention.value": v, "attention.output": self.out.grad,
            "mlp.gate": gate, "mlp.up": up, "mlp.down": self.down.grad, "attention.norm.gain": self.norm1.grad,
            "mlp.norm.gain": self.norm2.grad,
        }  # fmt: skip


WAYS: Mapping[str, Callable[[Size, int], Attention]] = {
    "gathered": gathered,
    "pieces": pieces,
    "torch_allgather": partial(ring, "allgather"),
    "torch_alltoall": partial(ring, "alltoall"),
}


def peer(way: str, size: Size, communicator: Communicator, g: Given) -> Block:
    """Build the block whose attention goes one of WAYS, on a rank."""
    positions = in_zigzag(size, communicator.rank)
    model = Model(size, g.weights, positions, WAYS[way](size, communicator.rank))
    x = g.x[positions].transpose(0, 1).contiguous().requires_grad_()
    gradient = g.gradient[positions].transpose(0, 1)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        out = model(x)
        out.backward(gradient)
        return out.detach().transpose(0, 1)

    return Block(step, lambda: {"x": x.grad.transpose(0, 1), **model.gradients()}, positions)
