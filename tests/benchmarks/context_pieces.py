"""Steps of contexts whose ranks have few pieces of each sequence, and many, in turn: for windows and for documents.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.context_pieces [--ranks 2] [--length 8192] [--many 16] [--pairs 7]

Rows of documents are packed as a run packs them, of lengths that are lognormal (a median of 665 tokens, one of 40 longer
than 7,000), in the order that contexts have equal work by; with a window no document hides anything. A model of 2
layers, of d_model 256 with 8 heads that share 2 of keys, d_ff 512, fp32, steps with one row in the batch; processes on
gloo share it. Steps alternate A, B, B, A; the ratio, many / few, is the median of the paired ratios of the slowest
rank's time, with a bootstrap interval of 95 %; `busiest` is what plan and documents say of attention alone: the work of
the busiest rank in terms of the mean, with few pieces and with many.
"""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from platform.config.fields import Config  # noqa: E402
from platform.data.show.documents_work import busiest, work_of_documents  # noqa: E402
from platform.data.tokens.even_rows import evened  # noqa: E402
from platform.data.tokens.packing import best_fit  # noqa: E402
from platform.parallel.communicator.base import Communicator  # noqa: E402
from platform.plan.core.plan import Plan  # noqa: E402
from platform.planning.make_plan import make_plan  # noqa: E402
from tests.benchmarks.packed_rows import MODEL, PATIENCE  # noqa: E402
from tests.benchmarks.peers.pairs import OURS, PEER, Seen, Step, compare, take_turns  # noqa: E402
from tests.harness.oracle import Tokens, configure, trainer_of  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

FEW = 2


@dataclass(frozen=True)
class Job:
    """What a launch does: by name, the configuration with few pieces, and with many."""

    configs: dict[str, Config]
    plans: dict[str, Plan]
    warmup: int
    pairs: int


class Rows(Tokens):
    """Rows of packed documents."""

    def __init__(self, c: Config):
        super().__init__(c)
        length = c.model.length
        sizes = np.random.default_rng(0).lognormal(6.5, 1.2, 3000).astype(np.int64) + 8
        pieces, rows = best_fit(np.append(0, np.cumsum(sizes)), length)
        pieces = evened(pieces, rows, length)
        self.rows = [pieces[a:b, 1] for a, b in zip(rows[:-1], rows[1:], strict=True)]

    def sample(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        found, place = super().sample(draw), np.arange(self.model.length)
        starts = np.append(0, np.cumsum(self.rows[draw.integers(len(self.rows))]))
        begins = starts[np.searchsorted(starts, place, "right") - 1]
        return found | {"begins": begins, "positions": place - begins}


def stepped(trainer: Any, step: int) -> float:
    """Take a training step; return this rank's loss."""
    return trainer.step(step).loss


def in_turn(job: Job, plan: Plan, communicator: Communicator) -> dict[str, Seen]:
    """Step with few and with many pieces in turn on this rank."""
    torch.set_num_threads(1)
    trainers = {name: trainer_of(c, job.plans[name], communicator, Rows(c)) for name, c in job.configs.items()}
    steps: dict[str, Step] = {name: partial(stepped, trainer) for name, trainer in trainers.items()}
    seen = take_turns(steps, communicator.barrier, job.warmup, job.pairs)
    many, few = (seen[name].losses for name in (OURS, PEER))
    assert np.allclose(many, few, rtol=1e-4, equal_nan=True), (many, few)
    return seen


def evenness(c: Config, plan: Plan, steps: int) -> float:
    """Return the work of the busiest rank in terms of the mean, in the steps of a benchmark."""
    rows = Rows(c).batch("train", 0, steps)["begins"]
    return busiest(work_of_documents(plan, rows), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--many", type=int, nargs="+", default=[16], help="pieces of a rank")
    parser.add_argument("--hides", nargs="+", default=["documents", "window"], choices=("documents", "window"))
    parser.add_argument("--kinds", nargs="+", default=["gather", "ring"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="steps of each before the first pair")
    given = parser.parse_args()
    print(f"{given.ranks} ranks, rows of {given.length:,} tokens, {given.pairs} pairs, load {os.getloadavg()[0]:.1f}\n")
    head = ("hides", "kind", "pieces", "busiest", "few (s)", "many (s)", "ratio", "95 %")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for hides in given.hides:
        of_model: dict[str, Any] = {} if hides == "documents" else {"window": given.length // 4}
        shared = {**MODEL, **of_model, "within_documents": hides == "documents", "length": given.length}
        for kind in given.kinds:
            for many in given.many:
                context: dict[str, Any] = {"context": given.ranks, "context_kind": kind}
                configs = {name: configure(**shared, **context, context_pieces=pieces)
                           for name, pieces in ((OURS, many), (PEER, FEW))}  # fmt: skip
                plans = {name: make_plan(c) for name, c in configs.items()}
                with closing(Pool(given.ranks, PATIENCE)) as pool:
                    job = Job(configs, plans, given.warmup, given.pairs)
                    found = compare(pool.run(in_turn, job, plans[OURS]))
                even = [f"{evenness(configs[name], plans[name], 2 * given.pairs):.2f}" for name in (PEER, OURS)]
                cells = [hides, kind, str(many), ", ".join(even), *(f"{s:.2f}" for s in reversed(found.seconds)),
                         f"**{found.ratio:.3f}**", "{:.3f} to {:.3f}".format(*found.interval)]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
