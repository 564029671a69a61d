"""A world of one worker against a plain PyTorch loop: the same model, batch, threads and optimizer, side by side.

    python benchmarks/step_time.py [--device cuda] [--models llama_1b] [--pairs 15] [--compile] [--dropout 0.1]

Prints paired step times and the median ratio, and what the named-einsum layer costs per step at world 1: its calls on
tensors too small to matter, beside torch.matmul on the same ones. `--compile`: ours with train.compile=on, the plain
model block by block, as torchtitan does. `--dropout`: ours with train.compile=on beside ours without, as the plain
model has none. The plain model (`peers/gpt.py`) has fused products, grouped heads, and on a GPU a stream in bf16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks.peers.gpt import Gpt, Recurring, compile_blocks, groups_of, settings_of  # noqa: E402
from platform.config.fields import Config, Model  # noqa: E402
from platform.model.feed_forward import FeedForward  # noqa: E402
from platform.model.layers import StackSpecs  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.oracle import trainer_of  # noqa: E402

Step = Callable[[int], Any]  # number of the training step, from 1 -> its loss

SIZES = {
    "gpt_tiny": (Model(layers=4, d_model=128, heads=4, length=128, vocab=2048), 8),
    "gpt_small": (Model(layers=4, d_model=384, heads=6, length=256, vocab=4096), 4),
    "llama_small": (
        Model(layers=4, d_model=384, heads=6, kv_heads=2, length=256, vocab=4096, d_ff=1024, norm="rmsnorm",
              activation="swiglu", positions="rope", bias=False, tied=False),
        4,
    ),
}  # fmt: skip
GPT: dict[str, Any] = {"vocab": 50257}
LLAMA: dict[str, Any] = {"kv_heads": 8, "vocab": 128256, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope",
                         "rope_theta": 5e5, "bias": False}  # fmt: skip
GPU_SIZES = {
    "gpt2_124m": (Model(layers=12, d_model=768, heads=12, length=1024, **GPT), 8),
    "gpt2_124m_64": (Model(layers=12, d_model=768, heads=12, length=1024, **GPT), 64),
    "gpt2_350m": (Model(layers=24, d_model=1024, heads=16, length=1024, **GPT), 16),
    "gpt3_1_3b": (Model(layers=24, d_model=2048, heads=16, length=2048, **GPT), 4),
    "llama_1b": (Model(layers=16, d_model=2048, heads=32, d_ff=8192, length=4096, **LLAMA), 2),  # Llama 3.2 1B
    # 8 of the 32 layers of Llama 3.1 8B: too large for a GPU to hold twice
    "llama_8b_8": (Model(layers=8, d_model=4096, heads=32, d_ff=14336, length=8192, tied=False, **LLAMA), 1),
}
STRETCH = {"cpu": 1, "cuda": 4}  # steps that are timed at once, as a loop that prints every few steps runs them


class PlainLoop:
    """A step as torchtitan and nanochat write it: stream and products in the precision of `c`, the vocabulary
    padded as ours is, masters in fp32 beside weights in bf16, every block and the head compiled by itself, one fused
    AdamW. No step asks the device for a number: `step` returns the loss as a tensor."""

    def __init__(self, c: Config, device: str, weights: Mapping[str, Tensor], compiled: bool = False):
        self.config, self.device, self.corpus = c, device, Recurring(c)
        with torch.device(device):  # the tables of rotary angles too
            self.model = Gpt(replace(c.model, vocab=len(weights["embedding"])), weights)
        self.copies = list(self.model.parameters())
        self.masters = self.copies
        groups = groups_of(self.model, c)
        if c.precision == "bf16":
            self.masters = [nn.Parameter(p.detach().clone()) for p in self.copies]
            masters = dict(zip(self.copies, self.masters, strict=True))
            groups = [group | {"params": [masters[p] for p in group["params"]]} for group in groups]
            for p in self.copies:  # not the tables, whose turns are in fp32
                p.data = p.data.bfloat16()
        self.optimizer = torch.optim.AdamW(groups, **settings_of(c))
        self.loss = torch.compile(self.compute_loss, dynamic=False) if compiled else self.compute_loss
        if compiled:
            compile_blocks(self.model)

    def compute_loss(self, stream: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy in fp32 of the last block's output, without the vocabulary's padding."""
        logits = self.model.head(self.model.norm(stream)).flatten(0, 1)
        return F.cross_entropy(logits[:, : self.config.model.vocab].float(), labels.flatten())

    def read_batch(self, k: int) -> list[Tensor]:
        """Return tokens and labels of training step `k`, whose copies to the device nothing waits for."""
        size = self.config.train.global_batch
        rows = self.corpus.batch("train", (k - 1) * size, k * size)
        tensors = [torch.from_numpy(rows[name]).contiguous() for name in ("tokens", "labels")]
        on_host = [x.pin_memory() for x in tensors] if self.device == "cuda" else tensors
        return [x.to(self.device, non_blocking=True) for x in on_host]

    def step(self, k: int) -> Tensor:
        model, (tokens, labels) = self.model, self.read_batch(k)
        stream = model.embedding(tokens)
        stream = stream if model.position is None else stream + model.position
        for block in model.blocks:
            stream = block(stream)
        loss = self.loss(stream, labels)
        loss.backward()
        if self.masters is not self.copies:
            for master in self.masters:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([p.grad for p in self.masters], [p.grad for p in self.copies])
        torch.nn.utils.clip_grad_norm_(self.masters, self.config.optimizer.clip)
        self.optimizer.step()
        if self.masters is not self.copies:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)
        for p in (*self.copies, *self.masters):
            p.grad = None
        return loss.detach()


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


def timed(step: Step, steps: range, device: str) -> float:
    """Return the seconds of one of these training steps, after which alone the device is waited for."""
    begin = time.perf_counter()
    for k in steps:
        step(k)
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(steps)


def configured(model: Model, batch: int, device: str, compiles: bool) -> Config:
    """Return the configuration of steps of one microbatch of `batch` sequences at a constant learning rate."""
    c = Config(model=model, precision="fp32" if device == "cpu" else "bf16")
    c.train.compile, c.cluster.device = "on" if compiles else "off", device
    c.train.global_batch = c.train.microbatch = batch
    c.optimizer.schedule = "constant"
    return c


def build_ours(c: Config, device: str) -> Trainer:
    """Return the trainer of one worker, on the batches of the plain loop."""
    plan = make_plan(c)
    return trainer_of(c, plan, SingleRank(plan.mesh, device), Recurring(c))


def other_side(args: argparse.Namespace, c: Config, weights: Mapping[str, Tensor]) -> Step:
    """What ours alternates with: a step of the plain loop, or of ours uncompiled where there is dropout."""
    if not args.dropout:
        return PlainLoop(c, args.device, weights, args.compile).step
    trainer = build_ours(replace(c, train=replace(c.train, compile="off")), args.device)
    return lambda k: trainer.step(k).loss


def check_losses(ours: Sequence[float], other: Sequence[float], device: str) -> None:
    """Raise AssertionError unless the losses of both sides in the same training steps agree, as their precision has
    it."""
    most = 1e-4 if device == "cpu" else 2e-2
    assert all(abs(a - b) < most * abs(b) for a, b in zip(ours, other, strict=True)), f"losses {ours} and {other}"


def alternate(ours: Step, other: Step, pairs: int, device: str) -> list[tuple[float, float]]:
    """Return pairs of seconds of a step, alternated: on a GPU of some steps that only the sides themselves wait
    between."""
    at_once, seconds = STRETCH[device], []
    for pair in range(pairs):
        steps = range(3 + pair * at_once, 3 + (pair + 1) * at_once)
        first, second = (ours, other) if pair % 2 else (other, ours)
        times = timed(first, steps, device), timed(second, steps, device)
        seconds.append(times if pair % 2 else times[::-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", default="", help="names, with commas; default: of a GPU gpt2_124m,llama_1b")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = SIZES if args.device == "cpu" else GPU_SIZES
    names = args.models.split(",") if args.models else [*SIZES] if args.device == "cpu" else ["gpt2_124m", "llama_1b"]
    if unknown := set(names) - set(sizes):
        parser.error(f"--models={','.join(sorted(unknown))}: on {args.device} there are {', '.join(sizes)}")
    print(f"{'model':<12} {'ours (ms)':>10} {'plain (ms)':>11} {'median ratio':>13} {'min':>6} {'max':>6}")
    for name in names:
        model, batch = sizes[name]
        model = replace(model, dropout=args.dropout)
        c = configured(model, batch, args.device, args.compile or args.dropout > 0)
        ours = build_ours(c, args.device)
        other = other_side(args, c, ours.weights.master)
        losses = [(ours.step(k).loss, float(other(k))) for k in (1, 2)]  # which warms both up
        check_losses(*zip(*losses, strict=True), args.device)
        pairs = alternate(lambda k: ours.step(k).loss, other, args.pairs, args.device)  # noqa: B023
        ratios = [a / b for a, b in pairs]
        medians = [1000 * statistics.median(x) for x in zip(*pairs, strict=True)]
        spread = f"{statistics.median(ratios):>13.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}"
        print(f"{name:<12} {medians[0]:>10.2f} {medians[1]:>11.2f} {spread}")
        named, direct, products = einsum_layer(ours)
        cost = products * (named - direct)
        print(
            f"{'':<12} named einsum {1e6 * named:.1f} us a product, torch.matmul {1e6 * direct:.1f} us:"
            f" {products} products cost {1e3 * cost:.3f} ms, {cost / medians[0] * 1e5:.2f} % of the step"
        )


if __name__ == "__main__":
    main()
