"""The benchmark of contexts compares like with like, and counts what is sent to the byte."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.peers.contexts.block import Size, build_inputs, configured
from benchmarks.peers.contexts.plain import WAYS
from benchmarks.peers.contexts.turns import Job, build, difference, floor, sent
from benchmarks.peers.pairs import OURS, PEER
from platform.predict.make_plan import make_plan
from tests.harness.suite import suite

# Times of what must be sent: keys go around again in the backward pass, and torch's gradients one rank further.
AROUND = {"ring": 3 / 2, "torch_allgather": 2, "torch_alltoall": 2}
SMALL = Size(32, 4, 2, 24, length=16, precision="fp64")
KINDS = ("gather", "heads", "ring")
CASES = [{"kind": kind, "peer": peer} for kind in KINDS for peer in WAYS]
CHOSEN = [{"kind": "gather", "peer": "torch_allgather"}, {"kind": "heads", "peer": "pieces"}]


def both(job: Job, plan, communicator) -> tuple[float, float, int, int]:
    """How far the blocks part, and where one weight of the peer's is another; what each counts on this rank."""
    torch.set_num_threads(1)
    g = build_inputs(job.size)
    blocks = [build(job, name, communicator, g) for name in (OURS, PEER)]
    apart = difference(*blocks, job.size)
    other = g._replace(weights={**g.weights, "attention.key": 1.001 * g.weights["attention.key"]})
    control = difference(blocks[0], build(job, PEER, communicator, other), job.size)
    return apart, control, sent(blocks[0]), sent(blocks[1])


@suite("contexts beside plain PyTorch and torch's ring, on two ranks", CASES, chosen=CHOSEN)
def test_all_compute_alike(pool, case):
    job = Job(replace(SMALL, kind=case["kind"]), case["peer"], 0, 0)
    apart, control, our_bytes, their_bytes = zip(*pool.run(both, job, make_plan(configured(job.size))), strict=True)
    assert max(apart) < 1e-12 and min(control) > 1e-6
    assert sum(our_bytes) == AROUND.get(case["kind"], 1) * floor(job.size)
    assert sum(their_bytes) == AROUND.get(case["peer"], 1) * floor(replace(job.size, kind="gather"))
