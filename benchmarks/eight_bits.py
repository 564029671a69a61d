"""The loss of a small GPT on 20 million tokens of the standard library's source, in bf16 and with products in 8 bits.

    OMP_NUM_THREADS=1 python -m benchmarks.eight_bits [--tokens 20e6] [--runs bf16 fp8 moved] [model.d_model=256 ...]

All train on the same tokens, each on a core of its own: both from the same weights and, to know how far two runs go
apart by chance, one in bf16 from weights that are moved by at most one rounding of bf16. Prints a row of the table at
each fortieth: the mean loss of its steps, and the validation loss behind it, and both over the first run's. A CPU
without kernels for bf16 multiplies in fp32 and rounds the result, as a GPU does (`WideProducts`): several times as fast
as torch's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from platform.data.corpus import open_run_corpus  # noqa: E402
from platform.launch import compose_config  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from platform.runtime.eight_bits import FORMS  # noqa: E402
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.oracle import trainer_of, validation_loss  # noqa: E402

MOVED = "moved"
RUNS = {"bf16": "bf16", "fp8": "fp8", MOVED: "bf16"}  # name -> precision
ROUNDING = 2**-9  # of a number in bf16, at most, as a part of it
PARTS = 40  # rows of the table
STEP = 8192  # tokens
SIZES = ("model=gpt_tiny", "model.layers=1", "model.d_model=64", "model.vocab=320", "model.length=128")
RUN = ("data=stdlib", "tensor=serial", "train.microbatch=64", "train.global_batch=64", "optimizer.lr=3e-3",
       "optimizer.warmup_steps=100", "eval.batches=4")  # fmt: skip


aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward)  # fmt: skip
WIDE = {f.default for f in PRODUCTS}
NUMBERS = {dtype: torch.arange(256, dtype=torch.uint8).view(dtype).float() for dtype in FORMS.values()}


def is_wide(x: Any) -> bool:
    """Return True for numbers in fp32 that make a product of bf16 one of fp32."""
    return isinstance(x, Tensor) and x.dtype == torch.float32 and x.dim() > 0


class WideProducts(TorchDispatchMode):
    """Products of matrices, and attention, that are in bf16 computed in fp32, and rounded; 8 bits looked up."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results of an operation f."""
        if f is aten._to_copy.default and args[0].dtype in NUMBERS:
            numbers = NUMBERS[args[0].dtype].to(kwargs["dtype"])
            return numbers.index_select(0, args[0].contiguous().view(torch.uint8).flatten().int()).view(args[0].shape)
        if f in (aten.mul.Tensor, aten.mul_.Tensor) and args[0].dtype == torch.bfloat16 and is_wide(args[1]):
            product = args[0].float() * args[1]  # as torch does, in a fifth of the time
            return product if f is aten.mul.Tensor else args[0].copy_(product)
        into = args[0] if f is aten.addmm_.default else None
        f = aten.addmm.default if into is not None else f
        if f not in WIDE or args[0].dtype != torch.bfloat16:
            return f(*args, **(kwargs or {})) if into is None else into.addmm_(*args[1:], **(kwargs or {}))
        result = f(*(x.float() if isinstance(x, Tensor) else x for x in args), **(kwargs or {}))
        if isinstance(result, tuple):  # of which attention keeps sums of its rows as they are
            return tuple(x.bfloat16() if x.dim() == args[0].dim() else x for x in result)
        return result.bfloat16() if into is None else into.copy_(result)


def start_trainer(name: str, steps: int, overrides: Sequence[str]) -> Trainer:
    """Start one of RUNS on one core."""
    c = compose_config([*SIZES, *RUN, *overrides, f"precision={RUNS[name]}", f"train.steps={steps}"])
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh), open_run_corpus(c))
    if name == MOVED:
        draw = torch.Generator().manual_seed(1)
        for weight in trainer.weights.master.values():
            weight.data.mul_(1 + ROUNDING * (2 * torch.rand(weight.shape, generator=draw) - 1))
        trainer.weights.refresh_copies()
    return trainer


def train(name: str, steps: int, overrides: Sequence[str], rows: Connection) -> None:
    """Train one of RUNS, in a process of its own, and send `rows` one for each of its PARTS: the number of its last
    step, its mean loss, the validation loss behind it, and the seconds of CPU of a step until then."""
    torch.set_num_threads(1)
    trainer, losses, seconds = start_trainer(name, steps, overrides), [], 0.0
    ends = {-(-steps * part // PARTS) for part in range(1, PARTS + 1)}
    for step in range(1, steps + 1):
        begun = time.process_time()
        with WideProducts():
            losses.append(trainer.step(step).loss)
        seconds += time.process_time() - begun
        if step in ends:
            with WideProducts():
                validation = validation_loss(trainer)
            rows.send((step, fmean(losses), validation, seconds / step))
            losses = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=20e6)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=[*RUNS])
    parser.add_argument("overrides", nargs="*", help="of the configuration: model.d_model=256")
    options = parser.parse_args()
    names, steps = options.runs, round(options.tokens / STEP)
    processes = multiprocessing.get_context("spawn")
    rows = {}
    for name in names:
        rows[name], sending = processes.Pipe(duplex=False)
        processes.Process(target=train, args=(name, steps, options.overrides, sending), daemon=True).start()
        sending.close()  # so that a run that fails ends its rows
    cells = [*names, *(f"{name} / {names[0]}" for name in names[1:])]
    print(f"| tokens | {' | '.join(cells)} | validation: {' | '.join(cells)} | CPU s a step: {' | '.join(names)} |")
    print("|---" * (1 + 2 * len(cells) + len(names)) + "|", flush=True)
    for _ in range(min(PARTS, steps)):
        (step, *_), means, validation, times = zip(*(rows[name].recv() for name in names), strict=True)
        of_steps = " | ".join(f"{x:.2f}" for x in times)
        print(f"| {step * STEP:,} | {show_cells(means)} | {show_cells(validation)} | {of_steps} |", flush=True)


def show_cells(losses: Sequence[float]) -> str:
    """Return losses, and all but the first over the first, as cells of a table."""
    return " | ".join([*(f"{loss:.4f}" for loss in losses), *(f"{loss / losses[0]:.5f}" for loss in losses[1:])])


if __name__ == "__main__":
    main()
