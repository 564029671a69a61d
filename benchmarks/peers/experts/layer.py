"""The layer that all sides compute: x + experts(x), backwards from one gradient, with a loss of uneven load.

A rank has its own tokens and half of the experts. Gradients are those of the rank, not yet summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from platform.config.fields import Config
from platform.model.feed_forward import Experts
from platform.model.layers import StackSpecs
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator
from platform.runtime.parallel_ops import ParallelOps
from platform.train.rank_parameters import RankWeights
from tests.harness.oracle import configure

RANKS = 2
NAME = "layers.0.mlp"
SEED = 7
BALANCE = 0.01  # factor of the loss of uneven load


@dataclass(frozen=True)
class Size:
    """Sizes of a layer. `tokens`: of each of a rank's `sequences`; `capacity`: slots of an expert in a sequence over
    its even share, 0 for a slot for every token."""

    d_model: int
    experts: int
    chosen: int
    d_ff: int
    shared: int = 0
    tokens: int = 512
    sequences: int = 1
    capacity: float = 0.0
    precision: str = "fp32"


class Layer(NamedTuple):
    """A layer on a rank. `step`: one step, forward and backward, which returns the output [length, batch, d_model];
    `gradients`: those of the last step, of the input `x` and of the weights here, by our names."""

    step: Callable[[], Tensor]
    gradients: Callable[[], Mapping[str, Tensor]]


def configured(size: Size) -> Config:
    """Return our configuration: one layer of experts, over two ranks that each read sequences of their own."""
    return configure(
        data=RANKS, experts_of=RANKS, microbatch=size.sequences, global_batch=RANKS * size.sequences, layers=1,
        d_model=size.d_model, heads=1, length=size.tokens, vocab=8, norm="rmsnorm", bias=False, activation="swiglu",
        experts=size.experts, experts_per_token=size.chosen, expert_d_ff=size.d_ff, shared_experts=size.shared,
        capacity_factor=size.capacity, balance_loss=BALANCE, z_loss=0.0, precision=size.precision,
    )  # fmt: skip


class Given(NamedTuple):
    """What all sides are given on a rank: input x and the gradient of the output [length, batch, d_model]; the whole
    weights, by what follows the layer's name in ours."""

    x: Tensor
    gradient: Tensor
    weights: Mapping[str, Tensor]


def build_inputs(size: Size, rank: int) -> Given:
    """Draw what all sides are given on a rank: weights of which each score has a standard deviation of about 1/2."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[size.precision]
    draw = torch.Generator().manual_seed(SEED)

    def normal(std: float, *shape: int) -> Tensor:
        return (std * torch.randn(*shape, generator=draw)).to(dtype)

    d, wide = size.d_model, size.d_ff * size.shared
    shapes = {name: (size.experts, size.d_ff, d) for name in ("experts.up", "experts.gate")}
    shapes |= {"experts.down": (size.experts, d, size.d_ff)}
    if size.shared:
        shapes |= {"shared.up": (wide, d), "shared.gate": (wide, d), "shared.down": (d, wide)}
    weights = {"router": normal(0.5 * d**-0.5, size.experts, d)}
    weights |= {name: normal(shape[-1] ** -0.5, *shape) for name, shape in shapes.items()}
    draw.manual_seed(SEED + 1 + rank)
    rows = (size.tokens, size.sequences, d)
    return Given(normal(1.0, *rows), normal(1.0, *rows), weights)


def ours(size: Size, communicator: Communicator, g: Given) -> Layer:
    """Build our layer on a rank, with our weights in flat buffers as in training."""
    c = configured(size)
    plan = make_plan(c).stage_part(0)
    x, gradient, whole = g.x.clone().requires_grad_(), g.gradient, g.weights
    weights = RankWeights(plan, communicator, None, overlap=False)
    parameters = {p.name: p for p in plan.parameters if p.name.removeprefix(f"{NAME}.") in whole}
    for name, p in parameters.items():
        where = tuple(slice(at, at + n) for at, n in plan.locate_block(p, communicator.coordinates))
        with torch.no_grad():
            weights.compute[name].copy_(whole[name.removeprefix(f"{NAME}.")][where])
    ops, layer = ParallelOps(plan, communicator, weights.compute), Experts(NAME, c.model, StackSpecs())
    tokens: Any = {("route", NAME): torch.zeros(x.shape[:2], dtype=torch.long)}

    def step() -> Tensor:
        x.grad, ops.routed = None, {}
        for flat in weights.buckets:
            _forget(flat)
        ops.begin_pass()
        out, auxiliary = layer(ops, x, entered=x, tokens=tokens)
        torch.autograd.backward([out, auxiliary.mean()], [gradient, None])
        return out.detach()

    def gradients() -> Mapping[str, Tensor]:
        return {"x": x.grad, **{name.removeprefix(f"{NAME}."): g for name, g in weights.local_gradients.items()}}

    return Layer(step, gradients)


def _forget(flat: Any) -> None:
    """Let the next gradients of a flat bucket be the first ones, as after a step."""
    flat.sums = None
    flat._summed.clear()
    flat.end_backward_pass()


@contextmanager
def leaving(rank: int) -> Iterator[list[int]]:
    """Collect, in the context, the bytes of each of this process's all-to-alls that go to the other rank."""
    sent: list[int] = []
    started = dist.all_to_all_single

    def counted(out: Tensor, x: Tensor, *more: Any, **how: Any) -> Any:
        splits = more[1] if len(more) > 1 else how.get("input_split_sizes")
        away = len(x) * (RANKS - 1) // RANKS if splits is None else sum(splits) - splits[rank]
        sent.append(int(away) * x[0].numel() * x.element_size() if len(x) else 0)
        return started(out, x, *more, **how)

    dist.all_to_all_single = counted
    try:
        yield sent
    finally:
        dist.all_to_all_single = started


def floor(size: Size, rank: int, g: Given) -> int:
    """Return the bytes of this rank's rows that must be sent in one step: of each token once for each of its experts
    that lies elsewhere and has a slot for it, there and back, in both passes."""
    x, plan = g.x, make_plan(configured(size))
    best = (x @ g.weights["router"].t()).topk(size.chosen, -1).indices
    chosen = torch.zeros(*x.shape[:2], size.experts, dtype=torch.bool).scatter_(-1, best, True)
    kept = chosen & (chosen.cumsum(0) <= (plan.sizes["slots"] if size.capacity else size.tokens))
    share = size.experts // RANKS
    away = int(kept.sum()) - int(kept[..., rank * share : (rank + 1) * share].sum())
    return 4 * away * size.d_model * x.element_size()
