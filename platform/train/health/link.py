"""Speed of a worker's connections: with one other worker, and with all of its node at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from platform.parallel.communicator.base import Communicator
from platform.train.health.measure import REPEATS, Sizes
from platform.train.protocol.replies import Findings

TOGETHER = "data"  # axis along which those lie who measure together
_VALUES = 1 << 10  # whose sums over all GPUs of a node are exact in fp32


def measure_link(communicator: Communicator, sizes: Sizes) -> Findings:
    """Measure the bytes/s that a worker receives in an all-gather with one partner, and count wrong bytes."""
    device, rank = communicator.device, communicator.rank
    block = torch.arange(sizes.passed[device.type], device=device).add(rank).to(torch.uint8)
    right = torch.cat([block - rank + i for i in range(communicator.mesh.size)])
    seconds, wrong = _best_of(communicator, "all_gather", lambda: block, right)
    return Findings({"link": block.nbytes / seconds, "wrong": wrong})


def measure_node(communicator: Communicator, sizes: Sizes) -> Findings:
    """Measure the bytes/s that a worker sends in a ring all-reduce with all GPUs of its node, and count wrong sums."""
    device, n = communicator.device, communicator.mesh.size
    block = torch.arange(sizes.passed[device.type] // 4, device=device).remainder(_VALUES).float()
    right = block * n + n * (n - 1) / 2
    seconds, wrong = _best_of(communicator, "all_reduce", lambda: block + communicator.rank, right)
    return Findings({"node": 2 * (n - 1) / n * block.nbytes / seconds, "wrong": wrong})


def _best_of(
    communicator: Communicator, op: str, given: Callable[[], torch.Tensor], right: torch.Tensor
) -> tuple[float, float]:
    """Time a collective several times, to measure a worker's connections. Return the fewest seconds, and the number of
    wrong elements in all results. `op`: the collective; `given`: makes its input block; `right`: the correct result."""
    seconds, wrong = [], 0.0
    for _ in range(REPEATS + 1):  # the first is not timed
        block = given()
        settle_device(communicator.device)
        begin = time.perf_counter()
        there = communicator.launch(op, block, (TOGETHER,)).wait()
        settle_device(communicator.device)
        seconds.append(max(1e-9, time.perf_counter() - begin))
        wrong += (there.view(-1) != right).sum().item()
    return min(seconds[1:]), wrong


def settle_device(device: torch.device) -> None:
    """Wait until the worker's GPU has finished all launched work, so that it can be timed; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


CONNECTIONS: Mapping[str, Callable[[Communicator, Sizes], Findings]] = {"link": measure_link, "node": measure_node}
