"""The block that all sides compute, forward and backward from one gradient, each rank on its part of the positions.

Weights' gradients are those of the rank, not yet summed over ranks: that sum is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.peers.experts.layer import _forget
from platform.config.fields import Config
from platform.model.attention import TransformerBlock
from platform.model.layers import StackSpecs
from platform.plan.layout import zigzag_order
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator
from platform.runtime.parallel_ops import ParallelOps
from platform.train.rank_parameters import RankWeights
from tests.harness.oracle import configure

RANKS = 2
NAME = "layers.0"
SEED = 7
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Size:
    """Sizes of a block; `kind`: how ours shares the length (`parallel.context_kind`)."""

    d_model: int
    heads: int
    kv_heads: int
    d_ff: int
    length: int
    kind: str = "gather"
    precision: str = "fp32"

    @property
    def width(self) -> int:
        """Return the width of a head."""
        return self.d_model // self.heads


class Block(NamedTuple):
    """A block on a rank. `step`: one step, forward and backward, which returns the output [length here, 1, d_model];
    `gradients`: those of the last step, of the input `x` and of the weights, by our names; `positions`: of the tokens
    here, in their order; `moved`: bytes that this rank counts itself, all steps together, None if it does not."""

    step: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]
    positions: Tensor
    moved: Callable[[], int] | None = None


def configured(size: Size) -> Config:
    """Return our configuration: one block of a decoder, over two ranks that share each sequence."""
    return configure(
        context=RANKS, context_kind=size.kind, microbatch=1, global_batch=1, layers=1, d_model=size.d_model,
        heads=size.heads, kv_heads=size.kv_heads, d_ff=size.d_ff, length=size.length, vocab=8, norm="rmsnorm",
        bias=False, activation="swiglu", positions="rope", precision=size.precision,
    )  # fmt: skip


class Given(NamedTuple):
    """What all sides are given: input x and the gradient of the output [length, 1, d_model], and the weights as
    matrices [out, in], by what follows the block's name in ours."""

    x: Tensor
    gradient: Tensor
    weights: Mapping[str, Tensor]


def build_inputs(size: Size) -> Given:
    """Draw what all sides are given, the same on all ranks."""
    draw = torch.Generator().manual_seed(SEED)
    d, q, kv = size.d_model, size.heads * size.width, size.kv_heads * size.width
    shapes = {"attention.query": (q, d), "attention.key": (kv, d), "attention.value": (kv, d)}
    shapes |= {"attention.output": (d, q), "mlp.up": (size.d_ff, d), "mlp.gate": (size.d_ff, d)}
    shapes |= {"mlp.down": (d, size.d_ff), "attention.norm.gain": (d,), "mlp.norm.gain": (d,)}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(DTYPES[size.precision])

    weights = {name: normal(*s) * s[-1] ** -0.5 if len(s) > 1 else 1 + 0.1 * normal(*s) for name, s in shapes.items()}
    return Given(normal(size.length, 1, d), normal(size.length, 1, d), weights)


def in_zigzag(size: Size, rank: int) -> Tensor:
    """Return the positions of a rank's two pieces, of the beginning and of the end."""
    pieces = torch.arange(size.length).chunk(2 * RANKS)
    return torch.cat([pieces[i] for i in zigzag_order(RANKS)[2 * rank : 2 * rank + 2]])


def ours(size: Size, communicator: Communicator, g: Given) -> Block:
    """Build our block on a rank, with our weights in flat buffers as in training."""
    c = configured(size)
    plan, specs = make_plan(c).stage_part(0), StackSpecs()
    weights = RankWeights(plan, communicator, None, overlap=False)
    with torch.no_grad():
        for name, w in g.weights.items():
            held = weights.compute[f"{NAME}.{name}"]
            held.copy_(w.view(held.shape))
    ops = ParallelOps(plan, communicator, weights.compute)
    block = TransformerBlock(NAME, c.model, specs, causal=True, memory=None)
    positions = ops.global_positions(specs.stream, "length", torch.device("cpu"))
    x, gradient = g.x[positions].requires_grad_(), g.gradient[positions]

    def step() -> Tensor:
        x.grad = None
        for flat in weights.buckets:
            _forget(flat)
        ops.begin_pass()
        out, _ = block(ops, x, None)
        out.backward(gradient)
        return out.detach()

    def gradients() -> Mapping[str, Tensor]:
        named = {name: weights.local_gradients[f"{NAME}.{name}"].view(w.shape) for name, w in g.weights.items()}
        return {"x": x.grad, **named}

    return Block(step, gradients, positions, lambda: sum(communicator.moved.values()))


def floor(size: Size) -> int:
    """Return the bytes that all ranks must send in one step, as our `kind` does it. Keys and values of each rank go to
    the other, and their gradients back; under `heads` half of queries, keys, values and results go, in both passes."""
    of_rank = size.length // RANKS * size.width * DTYPES[size.precision].itemsize
    if size.kind == "heads":
        return RANKS * 2 * of_rank * 2 * (size.heads + size.kv_heads) // RANKS
    return RANKS * 2 * of_rank * 2 * size.kv_heads * (RANKS - 1)
