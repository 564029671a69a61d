"""What a launch does on each rank: two layers are compared and stepped in turn, or one is measured for memory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.peers.experts.layer import Given, Layer, Size, build_inputs, floor, leaving
from benchmarks.peers.pairs import OURS, PEER, Seen, grown, take_turns
from platform.cluster.crew.worker_host import _keep_freed_memory
from platform.plan.plan import Plan
from platform.runtime.communicator import Communicator

PEERS = {
    "plain": "plain:plain",
    "megatron": "megatron_layer:dropping",
    "megatron padded": "megatron_layer:padding",  # computes empty slots too, with a capacity
}


@dataclass(frozen=True)
class Job:
    """What a launch does; `alone`: the system that is measured for memory, "" for both in turn."""

    size: Size
    peer: str
    warmup: int
    pairs: int
    alone: str = ""


@dataclass(frozen=True)
class Found:
    """What a rank saw: times of both layers; bytes that each sent, and the floor of these; how far they part."""

    seen: dict[str, Seen]
    sent: tuple[int, int, int]
    apart: float


def build(job: Job, name: str, communicator: Communicator, g: Given) -> Layer:
    module, function = ("layer", "ours") if name == OURS else PEERS[job.peer].split(":")
    layer: Layer = getattr(importlib.import_module(f"{__package__}.{module}"), function)(job.size, communicator, g)
    return layer


def difference(a: Layer, b: Layer) -> float:
    """Return the largest difference of outputs and gradients of two layers, relative to the largest element of each."""
    one, other = ({"out": layer.step(), **layer.gradients()} for layer in (a, b))
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name] - x).abs().max() / x.abs().max()) for name, x in other.items())


def alternate(job: Job, plan: Plan, communicator: Communicator) -> Found:
    """Build both layers on this rank, compare what they compute, and step them in turn."""
    torch.set_num_threads(1)
    _keep_freed_memory()
    g = build_inputs(job.size, communicator.rank)
    layers = {name: build(job, name, communicator, g) for name in (OURS, PEER)}
    apart, before = difference(layers[OURS], layers[PEER]), communicator.moved.total()
    layers[OURS].step()
    ours = communicator.moved.total() - before
    with leaving(communicator.rank) as counted:
        layers[PEER].step()
    sent = ours, sum(counted)
    steps = {name: lambda _, step=layer.step: float(step()[0, 0, 0]) for name, layer in layers.items()}
    seen = take_turns(steps, communicator.barrier, job.warmup, job.pairs)
    return Found(seen, (*sent, floor(job.size, communicator.rank, g)), apart)  # type: ignore[arg-type]


def peak_bytes(job: Job, plan: Plan, communicator: Communicator) -> int:
    """Return how much this process grows while the layer `job.alone` is built and stepped."""
    torch.set_num_threads(1)
    few = replace(job, size=Size(8, 4, 2, 8, tokens=4, capacity=job.size.capacity))
    inputs = build_inputs(few.size, communicator.rank)
    build(few, job.alone, communicator, inputs).step()  # its modules and the connections
    g = build_inputs(job.size, communicator.rank)

    def built() -> Callable[[int], object]:
        layer = build(job, job.alone, communicator, g)
        return lambda _: layer.step()

    return grown(built, job.warmup)
