"""One Transformer block on a 2 x 2 mesh, without a driver: four processes, forward and backward, beside one process.

    python examples/one_block.py

A plan says which block of each tensor lies on which rank and what they communicate; `platform.runtime` executes it.
Nothing else of the platform is needed: here torch.multiprocessing starts the ranks. Each one compares its blocks of the
gradients with those that a single process computes of whole tensors, in fp64. Try another scheme: SCHEME below.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from platform.api import (
    Communicator,
    Plan,
    ProcessGroups,
    SingleRank,
    StackSpecs,
    TransformerBlock,
    build_rank,
    compose,
    counts_at,
    describe,
    dim_sizes,
    place,
    plan,
    process_groups,
    register_model,
    stretches,
)

SCHEME = ["tensor=2d", "tensor.axes.r=2", "tensor.axes.c=2"]  # or tensor=3d, tensor=1d_sp tensor.axes.t=4, ...
SIZES = ["model.d_model=32", "model.heads=4", "model.length=8", "train.global_batch=4", "train.microbatch=4"]
COMMON = ["model.kind=one_block", "data=synthetic", "precision=fp64", *SIZES]
IDS = torch.arange(4 * 8).view(4, 8)  # what every rank reads: [batch, length]


class OneBlock:
    """Maps random features of ids through one block; the loss is the squared distance between its input and output."""

    inputs = ("ids",)

    def __init__(self, config):
        self.sizes, self.stream = dim_sizes(config), StackSpecs().stream
        self.block = TransformerBlock("block", config, StackSpecs(), causal=True, memory=None)

    def parameters(self):
        return self.block.parameters()

    def forward(self, ops, inputs):
        x = ops.features("x", inputs["ids"], self.stream)
        y, _ = self.block(ops, x, None)
        return ops.squared_error("loss", y, x, self.stream, inputs["ids"])


register_model("one_block", OneBlock)  # also in the four processes, which import this file


def forward_backward(planned: Plan, communicator: Communicator, config) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and this rank's blocks of the gradients."""
    rank = build_rank(config, planned, communicator)
    rows = {(start, end): {"ids": IDS[start:end]} for start, end in stretches(planned, communicator)}  # that it reads
    rank.weights.begin_step()
    loss = rank.model.forward(rank.ops, place(planned, communicator, rows))
    loss.backward()
    rank.weights.set_gradients(rank.weights.finish_reductions())
    total = loss.detach() if counts_at(communicator.coordinates, planned.loss_layout.axes) else torch.zeros_like(loss)
    if everywhere := planned.mesh.order_axes(planned.mesh.axes):
        total = communicator.launch("all_reduce", total, everywhere).wait()
    return total.item(), rank.weights.gradients


def run_rank(number: int, store: str) -> None:
    torch.set_num_threads(1)
    config, alone = compose(*COMMON, *SCHEME), compose(*COMMON)
    parallel, serial = plan(config), plan(alone)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=parallel.mesh.world_size)
    communicator = ProcessGroups(parallel.mesh, number, process_groups(parallel))
    loss, gradients = forward_backward(parallel, communicator, config)
    expected, whole = forward_backward(serial, SingleRank(serial.mesh), alone)
    worst = 0.0
    for p in parallel.parameters:
        mine = tuple(slice(first, first + n) for first, n in parallel.locate_block(p, communicator.coordinates))
        worst = max(worst, (gradients[p.name] - whole[p.name][mine]).abs().max().item())
    scale = max(g.abs().max().item() for g in whole.values())
    seat = ", ".join(f"{axis}={i}" for axis, i in communicator.coordinates.items() if parallel.mesh.axes[axis] > 1)
    print(f"rank {number} ({seat}): loss {loss:.6f}, alone {expected:.6f}; gradients differ by {worst / scale:.0e}")
    assert abs(loss - expected) < 1e-9 * abs(expected) and worst < 1e-10 * scale
    communicator.close()


if __name__ == "__main__":
    import tempfile

    planned = plan(compose(*COMMON, *SCHEME))
    print(describe(planned), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store",), nprocs=planned.mesh.world_size)
