"""The loss of a small GPT on 20 million tokens of the standard library's source, in bf16 and with products in 8 bits.

    OMP_NUM_THREADS=1 python -m benchmarks.eight_bits [--tokens 20e6]

Both train from the same weights on the same tokens, step by step in turn. Prints a row of the table at each twentieth:
the mean loss of its steps, and the validation loss behind it, of both, and fp8's over bf16's. A CPU without kernels for
bf16 multiplies in fp32 and rounds the result, as a GPU does (`WideProducts`): several times as fast as torch's own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
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
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.oracle import trainer_of, validation_loss  # noqa: E402

PRECISIONS = ("bf16", "fp8")
PARTS = 40  # rows of the table
STEP = 8192  # tokens
SIZES = ("model=gpt_tiny", "model.layers=2", "model.d_model=64", "model.vocab=320", "model.length=64")
RUN = ("data=stdlib", "tensor=serial", "train.microbatch=128", "train.global_batch=128", "optimizer.lr=3e-3",
       "optimizer.warmup_steps=100", "eval.batches=4")  # fmt: skip


aten = torch.ops.aten
WIDE = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default}


class WideProducts(TorchDispatchMode):
    """Products of matrices, and attention, that are in bf16 computed in fp32, and rounded."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the results of an operation f."""
        into = args[0] if f is aten.addmm_.default else None
        f = aten.addmm.default if into is not None else f
        if f not in WIDE or args[0].dtype != torch.bfloat16:
            return f(*args, **(kwargs or {})) if into is None else into.addmm_(*args[1:], **(kwargs or {}))
        result = f(*(x.float() if isinstance(x, Tensor) else x for x in args), **(kwargs or {}))
        if isinstance(result, tuple):
            return result[0].bfloat16(), *result[1:]
        return result.bfloat16() if into is None else into.copy_(result)


def start_trainer(precision: str, steps: int) -> Trainer:
    """Start training in a precision on one core."""
    c = compose_config([*SIZES, *RUN, f"precision={precision}", f"train.steps={steps}"])
    plan = make_plan(c)
    return trainer_of(c, plan, SingleRank(plan.mesh), open_run_corpus(c))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=20e6)
    torch.set_num_threads(1)
    steps = round(parser.parse_args().tokens / STEP)
    trainers = [start_trainer(precision, steps) for precision in PRECISIONS]
    losses: list[list[float]] = [[], []]
    seconds, ends = [0.0, 0.0], {-(-steps * part // PARTS) for part in range(1, PARTS + 1)}
    print("| tokens | bf16 | fp8 | fp8 / bf16 | validation: bf16 | fp8 | fp8 / bf16 | CPU s a step: bf16 | fp8 |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for step in range(1, steps + 1):
        for n, trainer in enumerate(trainers):
            begun = time.process_time()
            with WideProducts():
                losses[n].append(trainer.step(step).loss)
            seconds[n] += time.process_time() - begun
        if step in ends:
            print(f"| {step * STEP:,} | {show_row(map(fmean, losses))} | {show_row(map(validation_loss, trainers))} "
                  f"| {seconds[0] / step:.2f} | {seconds[1] / step:.2f} |", flush=True)  # fmt: skip
            losses = [[], []]


def show_row(losses: Iterable[float]) -> str:
    """Return two losses and their ratio as cells of a table."""
    bf16, fp8 = losses
    return f"{bf16:.4f} | {fp8:.4f} | {fp8 / bf16:.5f}"


if __name__ == "__main__":
    main()
