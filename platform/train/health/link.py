"""Speed of the connection between two workers."""

from __future__ import annotations

import time

import torch

from platform.parallel.communicator.base import Communicator
from platform.train.health.measure import REPEATS, Sizes
from platform.train.protocol.replies import Findings

PAIR = "data"  # axis along which the two lie


def measure_link(communicator: Communicator, sizes: Sizes) -> Findings:
    """Measure the bytes per second that this worker receives in an all-gather with one other, at best; both call it.
    Received bytes are compared with those sent."""
    device, rank = communicator.device, communicator.rank
    block = torch.arange(sizes.passed[device.type], device=device).add(rank).to(torch.uint8)
    seconds, wrong = [], 0.0
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        there = communicator.launch("all_gather", block, (PAIR,)).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(max(1e-9, time.perf_counter() - begin))
        wrong += (there.view(2, -1)[1 - rank] != block + 1 - 2 * rank).sum().item()
    return Findings({"link": block.nbytes / min(seconds[1:]), "wrong": wrong})
