"""Steps of contexts whose ranks have few pieces of each sequence, and many, in turn: for windows and for documents.

    OMP_NUM_THREADS=1 python -m benchmarks.context_pieces [--ranks 2] [--length 8192] [--many 16] [--pairs 7]

Rows of documents are packed as a run packs them, of lengths that are lognormal (a median of 665 tokens), in the order
by which contexts have equal work; with a window of a quarter of the row no document hides anything. A model of 2
layers, of d_model 256 with 8 heads that share 2 of keys, d_ff 512, fp32, steps with one row in the batch; processes on
gloo share it. Steps alternate A, B, B, A; the ratio, many / few, is the median of the paired ratios of the slowest
rank's time, with a bootstrap interval of 95 %. `busiest`: the counted work of the busiest rank in terms of the mean,
with few pieces and with many.

    --attention: the attention of one layer alone, of each rank in turn in one process that has all keys: the CPU
    seconds of the busiest rank, and of the mean, which show what more ranks than cores would wait for.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.packed_rows import MODEL, PATIENCE  # noqa: E402
from benchmarks.peers.pairs import OURS, PEER, Seen, Step, compare, take_turns  # noqa: E402
from platform.config.fields import Config  # noqa: E402
from platform.data.packing import (
    best_fit,  # noqa: E402
    even_rows,  # noqa: E402
)
from platform.data.step_view import busiest_rank_ratio, count_attention_scores  # noqa: E402
from platform.plan.layout import (
    Mesh,  # noqa: E402
    Stretch,  # noqa: E402
)
from platform.plan.plan import Plan  # noqa: E402
from platform.plan.plan_summary import coordinates_of_context  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime import panels  # noqa: E402
from platform.runtime.communicator import Communicator, SingleRank  # noqa: E402
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
        pieces = even_rows(pieces, rows, length)
        self.rows = [pieces[a:b, 1] for a, b in zip(rows[:-1], rows[1:], strict=True)]

    def sample(self, draw: np.random.Generator) -> dict[str, np.ndarray]:
        row, place = super().sample(draw), np.arange(self.model.length)
        starts = np.append(0, np.cumsum(self.rows[draw.integers(len(self.rows))]))
        begins = starts[np.searchsorted(starts, place, "right") - 1]
        return row | {"begins": begins, "positions": place - begins}


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


def attend(c: Config, plan: Plan, begins: np.ndarray) -> list[float]:
    """Return the CPU seconds, of the fastest of three times, that each rank's attention to a row takes, and back."""
    m, generator, fastest = c.model, torch.Generator().manual_seed(0), list[float]()
    width = m.d_model // m.heads
    q, k, v = (torch.randn(1, n, m.length, width, generator=generator) for n in (m.heads, m.kv_heads, m.kv_heads))
    out = plan.attention_operations[0].operation.outputs[0]
    alone = SingleRank(Mesh.arrange_axes({"stage": 1, "data": 1}))
    for at in coordinates_of_context(plan):
        queries = plan.stretches_of_rank(out, "length", at)
        place = torch.cat([torch.arange(s.first, s.end) for s in queries])
        of_rank = panels.PanelAttention(queries, [[Stretch(0, m.length)]], (), "flash", width**-0.5, True, m.window)
        hiding = panels.Hiding(torch.from_numpy(begins[place][:, None])) if m.within_documents else None
        mine, keys, values = (x.clone().requires_grad_() for x in (q[:, :, place], k, v))
        took = []
        for _ in range(3):
            start = time.thread_time()
            panels.attend_panels(alone, of_rank, (mine, keys, values), hiding).sum().backward()
            took.append(time.thread_time() - start)
        fastest.append(min(took))
    return fastest


def attentions(options: argparse.Namespace) -> None:
    """Print what each number of pieces costs and gains in attention alone."""
    torch.set_num_threads(1)
    print("| ranks | hides | pieces | counted | busiest (s) | mean (s) |\n|---|---|---|---|---|---|")
    for hides in options.hides:
        for pieces in (FEW, *options.many):
            c = configured(options, hides, "gather", pieces)
            plan, rows = make_plan(c), Rows(c).batch("train", 0, options.pairs if hides == "documents" else 1)["begins"]
            took = np.array([attend(c, plan, row) for row in rows])
            counted = busiest_rank_ratio(count_attention_scores(plan, rows), 1)
            cells = [str(options.ranks), hides, str(pieces), f"{counted:.2f}",
                     f"{took.max(1).sum():.3f}", f"{took.mean(1).sum():.3f}"]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


def configured(options: argparse.Namespace, hides: str, kind: str, pieces: int) -> Config:
    """Return the configuration of a context whose ranks have so many pieces each."""
    window, documents = (0 if hides == "documents" else options.length // 4), hides == "documents"
    model = {**MODEL, "window": window, "within_documents": documents, "length": options.length}
    return configure(**model, context=options.ranks, context_kind=kind, context_pieces=pieces)


def evenness(c: Config, plan: Plan, steps: int) -> float:
    """Return the work of the busiest rank in terms of the mean, in the steps of a benchmark."""
    rows = Rows(c).batch("train", 0, steps)["begins"]
    return busiest_rank_ratio(count_attention_scores(plan, rows), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--many", type=int, nargs="+", default=[16], help="pieces of a rank")
    parser.add_argument("--hides", nargs="+", default=["documents", "window"], choices=("documents", "window"))
    parser.add_argument("--kinds", nargs="+", default=["gather", "ring"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="steps of each before the first pair")
    parser.add_argument("--attention", action="store_true", help="of each rank in turn, without a step")
    options = parser.parse_args()
    if options.attention:
        attentions(options)
        return
    load = os.getloadavg()[0]
    print(f"{options.ranks} ranks, rows of {options.length:,} tokens, {options.pairs} pairs, load {load:.1f}\n")
    head = ("hides", "kind", "pieces", "busiest", "few (s)", "many (s)", "ratio", "95 %")
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for hides in options.hides:
        for kind in options.kinds:
            for many in options.many:
                configs = {name: configured(options, hides, kind, n) for name, n in ((OURS, many), (PEER, FEW))}
                plans = {name: make_plan(c) for name, c in configs.items()}
                with closing(Pool(options.ranks, PATIENCE)) as pool:
                    job = Job(configs, plans, options.warmup, options.pairs)
                    comparison = compare(pool.run(in_turn, job, plans[OURS]))
                even = [f"{evenness(configs[name], plans[name], 2 * options.pairs):.2f}" for name in (PEER, OURS)]
                cells = [hides, kind, str(many), ", ".join(even), *(f"{s:.2f}" for s in reversed(comparison.seconds)),
                         f"**{comparison.ratio:.3f}**", "{:.3f} to {:.3f}".format(*comparison.interval)]  # fmt: skip
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
