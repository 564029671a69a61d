"""Attention of a rank, heads one by one or as one product: what D&SP saves where launches dominate (Jain et al., VI-C).

    OMP_NUM_THREADS=1 python benchmarks/heads_apart.py [--rounds 200]

Under data parallelism a rank has one sequence and all eight heads, under 4-way D&SP four sequences and two of them: the
same products, a quarter of the launches if heads are apart. Prints microseconds of a forward and backward pass, medians
of rounds in turn, and data parallelism's time over D&SP's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

HEADS, WIDTH, WAYS = 8, 64, 4


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return attention of a batch of heads, in the operations that LBANN's layers are."""
    return torch.softmax(query @ key.transpose(-1, -2) * WIDTH**-0.5, -1) @ value


def attend_apart(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the same by kernels for each head: slices, attention, and their concatenation."""
    heads = zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)
    return torch.stack([attend(q, k, v) for q, k, v in heads], 1)


def time_pass(attention: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> float:
    """Return the seconds of a forward and backward pass."""
    begin = time.perf_counter()
    torch.autograd.grad(attention(*tensors).sum(), tensors)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    print(f"{'length':>6} {'heads':<8} {'DP (us)':>8} {'D&SP (us)':>10} {'DP / D&SP':>10}")
    for length in (8, 16, 64):
        shares = [(1, HEADS), (WAYS, HEADS // WAYS)]
        sides = [[torch.randn(b, h, length, WIDTH, requires_grad=True) for _ in range(3)] for b, h in shares]
        torch.testing.assert_close(attend(*sides[0]), attend_apart(*sides[0]))
        cases = {(name, i): (attention, side) for name, attention in (("apart", attend_apart), ("batched", attend))
                 for i, side in enumerate(sides)}  # fmt: skip
        seconds = {case: [] for case in cases}
        for _ in range(rounds):
            for case, (attention, side) in cases.items():
                seconds[case].append(time_pass(attention, side))
        for name in ("apart", "batched"):
            data, dsp = (1e6 * median(seconds[name, i][rounds // 10 :]) for i in range(2))
            print(f"{length:>6} {name:<8} {data:>8.0f} {dsp:>10.0f} {data / dsp:>10.2f}")


if __name__ == "__main__":
    main()
