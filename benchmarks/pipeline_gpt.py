"""Pipeline schedules on a GPT that computes, beside torch.distributed.pipelining's 1F1B: wall time and CPU seconds.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_gpt.py [--schedules 1f1b zb_h1] [--rounds 30]

Two gloo processes, one per stage, hold a trainer per schedule and torch's stages of the same model (the same units on
the same stage, the same initial weights; fused Q, K and V, fused AdamW, clipping over both stages). They take steps in
turn, in an order drawn anew each round. Prints the median of the paired ratios ours / torch's of a step's wall time
(slowest stage, from a barrier on) and of its CPU seconds (`time.process_time`, summed over both), each with a 95 %
bootstrap interval. The losses of all engines agree in every step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402

from platform.config.fields import Config  # noqa: E402
from platform.config.fields import Model as ModelConfig  # noqa: E402
from platform.plan.plan import Plan  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import Communicator  # noqa: E402
from tests.harness.oracle import Tokens, configure, trainer_of  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

MICROBATCHES = 8
GPT = {"layers": 4, "d_model": 256, "heads": 8, "length": 128, "vocab": 8192, "tied": False}
TORCHS = "torch 1f1b"


def configured(schedule: str) -> Config:
    c = configure(precision="fp32", pipeline=schedule, stages=2, microbatch=1, global_batch=MICROBATCHES, **GPT)
    c.train.steps, c.optimizer.schedule, c.optimizer.lr, c.optimizer.clip = 10_000, "constant", 1e-3, 1.0
    return c


class Block(nn.Module):
    """A GPT-2 block with one product for Q, K and V."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        d, self.heads = c.d_model, c.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(a.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    @torch.no_grad()
    def load(self, w: Callable[[str], Tensor]) -> None:
        """Copy the platform's parameters of one layer, by their names within it."""
        parts = ["attention.query", "attention.key", "attention.value"]
        self.qkv.weight.copy_(torch.cat([w(p).flatten(0, 1) for p in parts]))
        self.qkv.bias.copy_(torch.cat([w(f"{p}_bias").flatten() for p in parts]))
        self.output.weight.copy_(w("attention.output").flatten(1))
        self.up.weight.copy_(w("mlp.up"))
        self.down.weight.copy_(w("mlp.down"))
        rest = {"output": "attention.output_bias", "up": "mlp.up_bias", "down": "mlp.down_bias"}
        for linear, name in rest.items():
            getattr(self, linear).bias.copy_(w(name))
        for norm, name in ((self.norm1, "attention.norm"), (self.norm2, "mlp.norm")):
            norm.weight.copy_(w(f"{name}.gain"))
            norm.bias.copy_(w(f"{name}.bias"))


class Stage(nn.Module):
    """The `units` of a GPT that one stage of the plan holds."""

    def __init__(self, c: ModelConfig, units: Sequence[str], weights: dict[str, Tensor]):
        super().__init__()
        first, last = "embedding" in units, "head" in units
        self.tokens = nn.Embedding(c.vocab, c.d_model) if first else None
        self.positions = nn.Parameter(torch.empty(c.length, c.d_model)) if first else None
        layers = [unit for unit in units if unit.startswith("layers.")]
        self.blocks = nn.ModuleList(Block(c) for _ in layers)
        self.norm = nn.LayerNorm(c.d_model) if last else None
        self.head = nn.Linear(c.d_model, c.vocab, bias=False) if last else None
        for layer, block in zip(layers, self.blocks, strict=True):
            block.load(lambda name, layer=layer: weights[f"{layer}.{name}"])
        with torch.no_grad():
            if first:
                self.tokens.weight.copy_(weights["embedding"])
                self.positions.copy_(weights["position"])
            if last:
                self.norm.weight.copy_(weights["norm.gain"])
                self.norm.bias.copy_(weights["norm.bias"])
                self.head.weight.copy_(weights["head"])

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x) + self.positions
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


class Torchs:
    """Steps of torch's 1F1B over the same stages as those of `plan`."""

    def __init__(self, c: Config, plan: Plan, communicator: Communicator, weights: dict[str, Tensor]):
        self.config, self.tokens, self.rank = c, Tokens(c), communicator.rank
        (chunk,) = plan.stage_part(communicator.coordinates["stage"]).chunks
        self.model = Stage(c.model, chunk.units, weights)
        stream = torch.zeros(1, c.model.length, c.model.d_model, requires_grad=True)
        tokens = torch.zeros(1, c.model.length, dtype=torch.int64)
        logits = torch.zeros(1, c.model.length, c.model.vocab)
        example, out = (stream, logits) if chunk.receives else (tokens, stream)
        stage = pipelining.PipelineStage(self.model, self.rank, 2, torch.device("cpu"), example, out)
        self.losses: list[Tensor] = []
        loss = lambda y, labels: F.cross_entropy(y.flatten(0, 1), labels.flatten())  # noqa: E731
        self.engine = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
        o = c.optimizer
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, o.lr, tuple(o.betas), o.eps, fused=True)

    def step(self, k: int) -> float:
        rows = self.tokens.batch("train", (k - 1) * MICROBATCHES, k * MICROBATCHES)
        tokens, labels = (torch.from_numpy(rows[name]) for name in ("tokens", "labels"))
        losses: list[Tensor] = []
        inputs = [] if self.rank else [tokens]
        self.engine.step(*inputs, **({"target": labels, "losses": losses} if self.rank else {}))
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        mine = torch.stack([g.square().sum() for g in gradients]).sum()
        both = torch.stack([mine, sum(losses, torch.zeros(())).detach() / MICROBATCHES])
        dist.all_reduce(both)
        if (norm := both[0].sqrt().item()) > self.config.optimizer.clip:
            torch._foreach_mul_(gradients, self.config.optimizer.clip / (norm + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return both[1].item()


Measured = dict[str, list[tuple[float, float]]]  # engine -> (wall, CPU) seconds of each round on this stage


def alternate(
    config: Config, plan: Plan, communicator: Communicator, schedules: Sequence[str], rounds: int
) -> Measured:
    """Step all engines in turn on this stage, `rounds` times."""
    trainers = {name: trainer_of(configured(name), plan, communicator) for name in schedules}
    weights = {n: w.detach() for n, w in trainers[schedules[0]].weights.master.items()}
    torchs = Torchs(config, plan, communicator, weights)
    communicator.open_stage_connections(plan.neighbour_stages)
    steps: dict[str, Callable[[int], float]] = {n: lambda k, t=t: t.step(k).loss for n, t in trainers.items()}
    steps[TORCHS] = torchs.step
    measured: Measured = {name: [] for name in steps}
    draw = random.Random(0)
    for k in range(1, rounds + 4):  # three to warm up
        losses = {}
        for name in draw.sample(list(steps), len(steps)):
            communicator.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[name] = steps[name](k)
            measured[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        assert max(losses.values()) - min(losses.values()) < 1e-3 * losses[TORCHS], losses
    return {name: times[3:] for name, times in measured.items()}


def interval(pairs: Sequence[float]) -> str:
    """Format the median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return f"{statistics.median(pairs):.3f} ({medians[50]:.3f} to {medians[-51]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    config = configured(args.schedules[0])
    pool = Pool()
    try:
        work = partial(alternate, schedules=args.schedules, rounds=args.rounds)
        ranks: list[Measured] = pool.run(work, config, make_plan(config))
    finally:
        pool.close()
    both: dict[str, list[Any]] = {
        name: [
            (max(w for w, _ in times), sum(c for _, c in times))
            for times in zip(*(r[name] for r in ranks), strict=True)
        ]
        for name in ranks[0]
    }
    print("| engine | step (ms) | ratio to torch's (95 %) | CPU seconds, both ranks (ms) | ratio to torch's (95 %) |")
    print("|---|---|---|---|---|")
    for name, times in both.items():
        cells = []
        for i in (0, 1):
            ratios = [a[i] / b[i] for a, b in zip(times, both[TORCHS], strict=True)]
            cells += [f"{1000 * statistics.median(t[i] for t in times):.1f}", interval(ratios)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
