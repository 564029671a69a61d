"""Packed documents whose hidden scores are left out, and the same masked, in turn: steps of one rank and of two.

    OMP_NUM_THREADS=1 python -m benchmarks.packed_rows [--lengths 4096 8192] [--documents 8] [--pairs 7]

Rows of `--lengths` tokens have so many documents of drawn lengths, or one. A model of 2 layers, of d_model 256 with 8
heads that share 2 of keys, d_ff 512, fp32, steps with one row in the batch; two processes on gloo share it in each kind
of contexts. `masked` computes every pair of blocks of 1,024 queries and keys that causality leaves, with a mask; alone,
torch's fused kernel with a mask of the whole row. Steps alternate A, B, B, A; the ratio, left out / masked, is the
median of the paired ratios of the slowest rank's time, with a bootstrap interval of 95 %.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.peers.pairs import OURS, PEER, Seen, Step, compare, take_turns  # noqa: E402
from platform.config.fields import Config  # noqa: E402
from platform.plan.layout import BLOCK, pair_queries_with_keys  # noqa: E402
from platform.plan.operations import fused_attention  # noqa: E402
from platform.plan.plan import Plan  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime import panels  # noqa: E402
from platform.runtime.communicator import Communicator, SingleRank  # noqa: E402
from tests.harness.oracle import Tokens, configure, trainer_of  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

MODEL: dict[str, Any] = {"layers": 2, "d_model": 256, "heads": 8, "kv_heads": 2, "d_ff": 512, "vocab": 512,
                         "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
                         "precision": "fp32", "microbatch": 1, "global_batch": 1, "within_documents": True}  # fmt: skip
KINDS = ("gather", "ring", "heads")
PLANS: dict[str, dict[str, Any]] = {"one rank": {}, **{k: {"context": 2, "context_kind": k} for k in KINDS}}
PATIENCE = 3600.0  # seconds for one launch
NEVER = 1 << 40


@dataclass(frozen=True)
class Job:
    """What a launch does."""

    config: Config
    documents: int
    warmup: int
    pairs: int


class Packed(Tokens):
    """Rows of so many documents of drawn lengths."""

    def __init__(self, job: Job):
        super().__init__(job.config)
        self.documents = job.documents

    def sample(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        row, place = super().sample(draw), np.arange(self.model.length)
        first = np.isin(place, draw.choice(np.arange(1, len(place)), self.documents - 1, replace=False))
        begins = np.maximum.accumulate(np.where(first, place, 0))
        return row | {"begins": begins, "positions": place - begins}


@contextmanager
def masked() -> Iterator[None]:
    """Hide documents by masks within the context."""
    originals = panels.document_pairs, fused_attention.LEAST

    def every(begins, queries, short, key, make):
        """Every pair of blocks that causality leaves, each with a mask."""
        keys, how, _ = key
        return pair_queries_with_keys(queries, keys, *how, BLOCK, (0, NEVER))

    panels.document_pairs, fused_attention.LEAST = every, NEVER
    try:
        yield
    finally:
        panels.document_pairs, fused_attention.LEAST = originals


def in_turn(job: Job, plan: Plan, communicator: Communicator) -> dict[str, Seen]:
    """Step both systems in turn on this rank."""
    torch.set_num_threads(1)
    alone = SingleRank(plan.mesh) if plan.mesh.world_size == 1 else communicator
    trainers = {name: trainer_of(job.config, plan, alone, Packed(job)) for name in (OURS, PEER)}

    def as_masked(step: int) -> float:
        with masked():
            return trainers[PEER].step(step).loss

    steps: dict[str, Step] = {OURS: lambda step: trainers[OURS].step(step).loss, PEER: as_masked}
    seen = take_turns(steps, communicator.barrier, job.warmup, job.pairs)
    ours, peer = (seen[name].losses for name in (OURS, PEER))
    assert np.allclose(ours, peer, rtol=1e-4, equal_nan=True), (ours, peer)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--documents", type=int, nargs="+", default=[8])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="steps of each before the first pair")
    options = parser.parse_args()
    print(f"{options.pairs} pairs, load {os.getloadavg()[0]:.1f}\n")
    print("| length | documents | plan | left out (s) | masked (s) | ratio | 95 % |\n|---|---|---|---|---|---|---|")
    for length in options.lengths:
        for documents in options.documents:
            for name in options.plans:
                c = configure(**{**MODEL, **PLANS[name], "length": length})
                plan = make_plan(c)
                with closing(Pool(plan.mesh.world_size, PATIENCE)) as pool:
                    comparison = compare(pool.run(in_turn, Job(c, documents, options.warmup, options.pairs), plan))
                cells = [f"{length:,}", str(documents), name, *(f"{s:.2f}" for s in comparison.seconds),
                         f"**{comparison.ratio:.3f}**", "{:.3f} to {:.3f}".format(*comparison.interval)]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
