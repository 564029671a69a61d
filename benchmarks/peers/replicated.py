"""Peers that train one replica per rank: plain PyTorch, DDP and what shards optimizer or parameters over replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.gpt import Batches, Gpt, Language, adamw, compile_blocks, groups_of, settings_of
from platform.config.fields import Config
from platform.runtime.communicator import Communicator

Step = Callable[[int], float]


def loop(
    c: Config, communicator: Communicator, model: nn.Module, optimizer: Any, clip: Callable[[float], object]
) -> Step:
    """Return one training step of a loop as one writes it: forward, backward, clip, update."""
    batches = Batches(c, communicator.coordinates.get("data", 0))

    def step(k: int) -> float:
        loss = model(*batches(k))
        loss.backward()
        clip(c.optimizer.clip)
        optimizer.step()
        model.zero_grad(set_to_none=True)  # of the model: fairscale's keeps its buckets
        return loss.item()

    return step


def clipped(model: nn.Module) -> Callable[[float], object]:
    return lambda most: torch.nn.utils.clip_grad_norm_(model.parameters(), most)


def plain(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    """Train in one process; `compiled` as one graph."""
    model = Language(Gpt(c.model, weights))
    if compiled:
        model.compile()
    return loop(c, communicator, model, adamw(model, c), clipped(model))


def replica(c: Config, weights: Mapping[str, Tensor], compiled: bool) -> Language:
    """Return the whole model; `compiled` block by block, so that gradients leave while others are computed."""
    model = Language(Gpt(c.model, weights))
    if compiled:
        compile_blocks(model)
    return model


def under_ddp(c: Config, weights: Mapping[str, Tensor], compiled: bool) -> DistributedDataParallel:
    return DistributedDataParallel(replica(c, weights, compiled), gradient_as_bucket_view=True)


def ddp(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    model = under_ddp(c, weights, compiled)
    return loop(c, communicator, model, adamw(model, c), clipped(model))


def sharded_optimizer(
    kind: Any, c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool
) -> Step:
    """Train under DDP with an optimizer of the class `kind`, which shards its state over the replicas."""
    model = under_ddp(c, weights, compiled)
    optimizer = kind(groups_of(model, c), torch.optim.AdamW, **settings_of(c))
    return loop(c, communicator, model, optimizer, clipped(model))


def zero_redundancy(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports torch.jit, seconds

    return sharded_optimizer(ZeroRedundancyOptimizer, c, weights, communicator, compiled)


def fsdp2(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    """Shard every block and the rest over the replicas, with the defaults of prefetching and resharding."""
    model = replica(c, weights, compiled)
    for block in model.gpt.blocks:
        fully_shard(block)
    fully_shard(model)
    return loop(c, communicator, model, adamw(model, c), clipped(model))


def oss(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    """fairscale's optimizer state sharding under torch's DDP."""
    from fairscale.optim import OSS

    return sharded_optimizer(OSS, c, weights, communicator, compiled)


def sharded_ddp(c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool) -> Step:
    """fairscale's OSS and ShardedDataParallel: each gradient goes to the rank that updates it."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim import OSS

    inner = replica(c, weights, compiled)
    optimizer = OSS(groups_of(inner, c), torch.optim.AdamW, **settings_of(c))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ShardedDataParallel(inner, optimizer)
    return loop(c, communicator, model, optimizer, optimizer.clip_grad_norm)
