"""torch.distributed.pipelining's 1F1B, with the layers on the stages where our plan has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.gpt import Batches, Gpt, adamw, compile_blocks, mean_loss
from benchmarks.peers.norms import clip
from platform.config.fields import Config
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import Communicator


def split_of(c: Config) -> int:
    """Return how many layers our plan has on the first of two stages."""
    first, second = ({u for u in chunk.units if u.split(".")[-1].isdigit()} for chunk in make_plan(c).chunks)
    assert len(first) + len(second) == c.model.layers, (first, second)
    return len(first)


def one_f_one_b(
    c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool
) -> Callable[[int], float]:
    rank, at = dist.get_rank(), split_of(c)
    model = Gpt(c.model, weights, first=(0, at)[rank], end=(at, c.model.layers)[rank])
    if compiled:
        compile_blocks(model)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    engine = Schedule1F1B(stage, c.train.global_batch, loss_fn=mean_loss)
    optimizer, batches = adamw(model, c), Batches(c)
    own = list(model.parameters())
    tied = model.embedding.weight if rank == 0 else model.head.weight

    def step(k: int) -> float:
        tokens, labels = batches(k)
        losses: list[Tensor] = []
        if rank == 0:
            engine.step(tokens)
        else:
            engine.step(target=labels, losses=losses)
        if c.model.tied:
            dist.all_reduce(tied.grad)
        alone = [p.grad for p in own if rank == 0 or not (c.model.tied and p is tied)]
        clip([p.grad for p in own], alone, c.optimizer.clip, None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item() if losses else nan

    return step
