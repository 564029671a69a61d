"""Tensor parallelism by torch's DTensor: heads, the feed-forward layer and the vocabulary over two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from benchmarks.peers.gpt import Batches, Gpt, compile_blocks, groups_of, mean_loss, settings_of
from benchmarks.peers.norms import clip
from platform.config.fields import Config
from platform.runtime.communicator import Communicator


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def tensor_parallel(
    c: Config, weights: Mapping[str, Tensor], communicator: Communicator, compiled: bool
) -> Callable[[int], float]:
    size = communicator.mesh.world_size
    mesh = init_device_mesh("cpu", (size,))
    model = Gpt(c.model, weights, shards=size)
    layer = {"qkv": ColwiseParallel(), "proj": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, layer)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    if c.model.tied:
        model.head.weight = model.embedding.weight
    if compiled:
        compile_blocks(model)
    groups = [  # plain tensors and DTensors apart: one fused update takes no mixture
        {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) == spread]}
        for group in groups_of(model, c)
        for spread in (False, True)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **settings_of(c))
    batches, own = Batches(c), list(model.parameters())
    mine = [p for p in own if communicator.rank == 0 or (isinstance(p, DTensor) and p.placements[0].is_shard())]

    def step(k: int) -> float:
        tokens, labels = batches(k)
        with loss_parallel():
            loss = mean_loss(model(tokens), labels)
            loss.backward()
        clip([local(p.grad) for p in own], [local(p.grad) for p in mine], c.optimizer.clip, None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor().item()

    return step
