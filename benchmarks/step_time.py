"""A world of one worker against a plain PyTorch loop: the same model, batch, threads and optimizer, side by side.

    python benchmarks/step_time.py [--device cuda] [--pairs 15] [--compile] [--dropout 0.1]

Prints paired step times and the median ratio, and what the named-einsum layer costs per step at world 1: its calls on
tensors too small to matter, beside torch.matmul on the same ones. `--compile`: ours with train.compile=on, the plain
model through torch.compile as a whole. `--dropout`: ours with train.compile=on beside ours without, as the plain model
has none.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from platform.config.fields import Config, Model  # noqa: E402
from platform.model.feed_forward import FeedForward  # noqa: E402
from platform.model.layers import StackSpecs  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.oracle import Tokens, trainer_of  # noqa: E402
from tests.harness.reference_model import ReferenceModel, parameter_groups  # noqa: E402

SIZES = {
    "gpt_tiny": (Model(layers=4, d_model=128, heads=4, length=128, vocab=2048), 8),
    "gpt_small": (Model(layers=4, d_model=384, heads=6, length=256, vocab=4096), 4),
    "llama_small": (
        Model(layers=4, d_model=384, heads=6, kv_heads=2, length=256, vocab=4096, d_ff=1024, norm="rmsnorm",
              activation="swiglu", positions="rope", bias=False, tied=False),
        4,
    ),
}  # fmt: skip
GPU_SIZES = {"gpt2_124m": (Model(layers=12, d_model=768, heads=12, length=1024, vocab=50257), 8)}


class PlainLoop:
    """Forward, backward, clipping and AdamW as one would write them without the platform."""

    def __init__(self, c: Config, device: str, weights, compiled: bool = False):
        self.config, self.device, self.tokens = c, device, Tokens(c)
        self.model = ReferenceModel(c.model).to(device)
        self.model.load(weights)
        self.loss = torch.compile(self.model, dynamic=False) if compiled else self.model
        o = c.optimizer
        groups = parameter_groups(self.model, o.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, o.lr, tuple(o.betas), o.eps, fused=True)

    def step(self, k: int) -> float:
        b = self.config.train.global_batch
        rows = self.tokens.batch("train", (k - 1) * b, k * b)
        tokens, labels = (torch.from_numpy(rows[name]).to(self.device) for name in ("tokens", "labels"))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision == "bf16"):
            loss = self.loss(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def einsum_layer(trainer: Trainer, calls: int = 300) -> tuple[float, float, int]:
    """Seconds of one product through `ops.project` and through torch.matmul, and how many a forward pass makes."""
    ops, shapes = trainer.ops, StackSpecs()
    weight = FeedForward("layers.0.mlp", trainer.config.model, shapes).products.down
    tensor = trainer.weights.compute[weight.name]
    small = torch.randn(1, 1, tensor.shape[1], device=tensor.device, dtype=tensor.dtype)

    def best(work) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            times.append((time.perf_counter() - begin) / calls)
        return min(times)

    named = best(lambda: ops.project(small, shapes.hidden, (weight,), (shapes.stream,)))
    plain = best(lambda: torch.matmul(small, tensor.t()))
    products = sum(len(g.einsums) for o in trainer.plan.operations.values() for g in o.groups)
    return named, plain, products


def timed(work, k: int, device: str) -> float:
    begin = time.perf_counter()
    work(k)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def other_side(args: argparse.Namespace, c: Config, weights) -> Callable[[int], float]:
    """What ours alternates with: a step of the plain loop, or of ours uncompiled where there is dropout."""
    if not args.dropout:
        return PlainLoop(c, args.device, weights, args.compile).step
    eager = replace(c, train=replace(c.train, compile="off"))
    plan = make_plan(eager)
    trainer = trainer_of(eager, plan, SingleRank(plan.mesh, args.device))
    return lambda k: trainer.step(k).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = SIZES if args.device == "cpu" else GPU_SIZES
    print(f"{'model':<12} {'ours (ms)':>10} {'plain (ms)':>11} {'median ratio':>13} {'min':>6} {'max':>6}  loss")
    for name, (model, batch) in sizes.items():
        c = Config(model=replace(model, dropout=args.dropout), precision="fp32" if args.device == "cpu" else "bf16")
        c.train.compile = "on" if args.compile or args.dropout else "off"
        c.train.global_batch = c.train.microbatch = batch
        c.optimizer.schedule = "constant"
        plan = make_plan(c)
        ours = trainer_of(c, plan, SingleRank(plan.mesh, args.device))
        plain = other_side(args, c, ours.weights.master)
        for k in (1, 2):  # warm-up; the losses agree
            a, b = ours.step(k).loss, plain(k)
            assert abs(a - b) < (1e-4 if c.precision == "fp32" else 2e-2) * abs(b), (a, b)
        pairs = []
        for k in range(3, 3 + args.pairs):
            order = [("ours", ours.step), ("plain", plain)]
            times = {n: timed(f, k, args.device) for n, f in (order if k % 2 else reversed(order))}
            pairs.append((times["ours"], times["plain"]))
        ratios = [a / b for a, b in pairs]
        medians = [1000 * statistics.median(x) for x in zip(*pairs, strict=True)]
        spread = f"{statistics.median(ratios):>13.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}"
        print(f"{name:<12} {medians[0]:>10.2f} {medians[1]:>11.2f} {spread}  {a:.4f} {b:.4f}")
        named, direct, products = einsum_layer(ours)
        cost = products * (named - direct)
        print(
            f"{'':<12} named einsum {1e6 * named:.1f} us a product, torch.matmul {1e6 * direct:.1f} us:"
            f" {products} products cost {1e3 * cost:.3f} ms, {cost / medians[0] * 1e5:.2f} % of the step"
        )


if __name__ == "__main__":
    main()
