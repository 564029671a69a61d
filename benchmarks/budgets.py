"""What a step of a GPT of 124 million parameters launches and moves beside its layers, on a machine without a GPU:
`python -m benchmarks.budgets`. The equalities are tests/runtime/test_step_budgets.py's."""

from __future__ import annotations

import torch

from platform.launch import compose_config
from platform.runtime.chunked_loss import LossClasses
from tests.harness.card import Counted, of_an_update, of_the_loss

GPT = ["+experiment=one_gpu"]
SHARED = ["parallel.data=8"]
RUNS = {
    "AdamW": [],
    "AdamW, clipped": ["optimizer.clip=0.5"],
    "SGD with momentum, clipped": ["optimizer=sgd", "optimizer.clip=0.5"],
    "Lion": ["optimizer=lion"],
    "AdamW, data 8": SHARED,
    **{f"AdamW, data 8, ZeRO {n}": [*SHARED, f"parallel.zero={n}"] for n in (1, 2, 3)},
    "AdamW, all in fp32": ["precision=fp32"],
}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOGITS = 8192, 50304


def cells(counted: Counted, elements: int) -> list[str]:
    """Return the cells of a row: kernels, and bytes for each of `elements`."""
    return [f"{counted.launched}", f"{counted.nbytes / elements:.2f}"]


def main() -> None:
    """Print both tables."""
    print("| loss of bf16 or fp32 logits [8192, 50304], eager | kernels | bytes per logit |\n|---|---|---|")
    for name, dtype in TYPES.items():
        for gradient in (False, True):
            loss = of_the_loss(compose_config(GPT), LOGITS, dtype, LossClasses((), 0, LOGITS[1]), gradient)
            what = "and its gradient" if gradient else "alone"
            print(f"| {name}, {what} | {' | '.join(cells(loss, LOGITS[0] * LOGITS[1]))} |")
    parts = [f"{part}: kernels | bytes" for part in ("norm", "update", "compute weights")]
    print(f"\n| run | elements updated | {' | '.join(parts)} |\n{'|---' * 8}|")
    for name, more in RUNS.items():
        trainer, sections = of_an_update(compose_config([*GPT, *more]))
        elements = sum(w.numel() for w in trainer.weights.trainable_masters.values())
        whole, copies = sections["optimizer"], Counted()
        copies.kernels["copy_"], copies.moved["copy_"] = whole.kernels["copy_"], whole.moved["copy_"]
        row = [cells(part, elements) for part in (sections["reduce"], whole - copies, copies)]
        print(f"| {name} | {elements:,} | {' | '.join(sum(row, []))} |", flush=True)


if __name__ == "__main__":
    main()
