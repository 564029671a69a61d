"""What a launch does on each rank: two blocks are compared and stepped in turn, or one is measured for memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.contexts.block import RANKS, Block, Given, Size, build_inputs, floor, ours
from benchmarks.peers.contexts.plain import peer
from benchmarks.peers.pairs import OURS, PEER, Seen, grown, take_turns
from platform.cluster.crew.worker_host import _keep_freed_memory
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator


@dataclass(frozen=True)
class Job:
    """What a launch does. `peer`: one of `plain.WAYS`; `alone`: the system that is measured for memory, "" for both."""

    size: Size
    peer: str
    warmup: int
    pairs: int
    alone: str = ""


@dataclass(frozen=True)
class Found:
    """What a rank saw: times of both blocks; the bytes that each counted here, and all ranks' floor; how far the
    blocks part."""

    seen: dict[str, Seen]
    sent: tuple[int, int]
    floor: int
    apart: float


def build(job: Job, name: str, communicator: Communicator, g: Given) -> Block:
    return ours(job.size, communicator, g) if name == OURS else peer(job.peer, job.size, communicator, g)


def whole(block: Block, size: Size) -> Mapping[str, Tensor]:
    """Step a block; return its output and its gradients, of all ranks together and in the order of the positions."""
    tensors = {"out": block.step(), **block.gradients()}
    for name in ("out", "x"):
        every = tensors[name].new_zeros(size.length, *tensors[name].shape[1:])
        tensors[name] = every.index_copy_(0, block.positions, tensors[name])
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    for t in tensors.values():
        dist.all_reduce(t)
    return tensors


def difference(a: Block, b: Block, size: Size) -> float:
    """Return the largest difference of outputs and gradients of two blocks, relative to the largest element of each."""
    one, other = whole(a, size), whole(b, size)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name] - x).abs().max() / x.abs().max()) for name, x in other.items())


class Leaving(TorchDispatchMode):
    """Counts, in its context, the bytes that torch's collectives take from this process to the other one."""

    BLOCKS: Mapping[str, Callable[..., int]] = {  # op -> bytes of what each rank sends to each other one
        "_c10d_functional.all_gather_into_tensor": lambda x, *_: x.nbytes,
        "_c10d_functional.all_to_all_single": lambda x, *_: x.nbytes,  # of a rotation: all to the next rank
        "c10d._allgather_base_": lambda out, x, *_: x.nbytes,
        "c10d._reduce_scatter_base_": lambda out, x, *_: out.nbytes,
    }

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.replace("::", ".")
        if name in self.BLOCKS:
            self.bytes += self.BLOCKS[name](*args) * (RANKS - 1)
        elif "c10d" in name and not name.endswith(("wait_tensor", "_wrap_tensor_autograd")):
            raise NotImplementedError(f"{name}: not counted")
        return func(*args, **(kwargs or {}))


def sent(block: Block) -> int:
    """Step a block; return the bytes that it counts on this rank."""
    if block.moved is not None:
        before = block.moved()
        block.step()
        return block.moved() - before
    with Leaving() as counted:
        block.step()
    return counted.bytes


def alternate(job: Job, plan: Plan, communicator: Communicator) -> Found:
    """Build both blocks on this rank, compare what they compute, and step them in turn."""
    torch.set_num_threads(1)
    _keep_freed_memory()
    g = build_inputs(job.size)
    blocks = {name: build(job, name, communicator, g) for name in (OURS, PEER)}
    apart = difference(blocks[OURS], blocks[PEER], job.size)
    each = sent(blocks[OURS]), sent(blocks[PEER])
    steps = {name: lambda _, step=block.step: float(step()[0, 0, 0]) for name, block in blocks.items()}
    return Found(take_turns(steps, communicator.barrier, job.warmup, job.pairs), each, floor(job.size), apart)


def peak_bytes(job: Job, plan: Plan, communicator: Communicator) -> int:
    """Return how much this process grows while the block `job.alone` is built and stepped."""
    torch.set_num_threads(1)
    few = replace(job, size=replace(job.size, d_model=16 * job.size.heads, d_ff=8, length=16))
    build(few, job.alone, communicator, build_inputs(few.size)).step()  # its modules and the connections
    g = build_inputs(job.size)

    def built() -> Callable[[int], object]:
        block = build(job, job.alone, communicator, g)
        return lambda _: block.step()

    return grown(built, job.warmup)
