"""The benchmark of a layer of experts compares like with like, and counts what is sent to the byte."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.peers.experts.layer import RANKS, Given, Size, build_inputs, configured, floor, leaving
from benchmarks.peers.experts.turns import Job, build, difference
from benchmarks.peers.pairs import OURS, PEER
from platform.predict.make_plan import make_plan
from tests.harness.suite import suite

SMALL = Size(16, 4, 2, 8, shared=1, tokens=16, sequences=2, precision="fp64")
CASES = [{"capacity": capacity} for capacity in (0.0, 0.75)]


def both(job: Job, plan, communicator) -> tuple[float, float, int, int]:
    """How far the layers part, and where one weight of the peer's is another; what the peer sends, and the floor."""
    torch.set_num_threads(1)
    g = build_inputs(job.size, communicator.rank)
    layers = [build(job, name, communicator, g) for name in (OURS, PEER)]
    apart = difference(*layers)
    with leaving(communicator.rank) as sent:
        layers[1].step()
    other = Given(g.x, g.gradient, {**g.weights, "experts.down": 1.001 * g.weights["experts.down"]})
    control = difference(layers[0], build(job, PEER, communicator, other))
    counts = 8 * job.size.experts * (RANKS - 1) // RANKS
    return apart, control, sum(sent) - counts, floor(job.size, communicator.rank, g)


@suite("experts beside plain PyTorch, on two ranks", CASES, chosen=CASES)
def test_both_compute_alike(pool, case):
    job = Job(replace(SMALL, capacity=case["capacity"]), "plain", 0, 0)
    apart, control, sent, least = zip(*pool.run(both, job, make_plan(configured(job.size))), strict=True)
    assert max(apart) < 1e-12 and min(control) > 1e-5
    assert sum(sent) == sum(least) > 0
