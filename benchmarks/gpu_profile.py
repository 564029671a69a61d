"""Where a step on one GPU goes, ours beside plain PyTorch, both compiled: kernels by time.

    python -m benchmarks.gpu_profile [--model gpt2_124m] [--rows 14] [--batch 8] [--eager]

Prints for each side milliseconds of a step, of the GPU's kernels in it, the number of kernels, and the longest kinds.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import torch
from torch.autograd import DeviceType

from benchmarks.step_time import GPU_SIZES, PlainLoop, Step, build_ours, configured

WARM_UP, TIMED = 4, 10


def kernels_of(step: Step, k: int, device: str = "cuda") -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of every kernel and copy of step `k`, by name; on a CPU of every operator."""
    with torch.profiler.profile() as profile:
        step(k)
        if device == "cuda":
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    kernels: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in profile.events():
        if event.device_type == kind:
            total, calls = kernels[event.name]
            kernels[event.name] = total + event.time_range.elapsed_us() / 1e3, calls + 1
    return kernels


def show(name: str, step: Step, rows: int) -> None:
    for k in range(1, 1 + WARM_UP):
        step(k)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for k in range(1 + WARM_UP, 1 + WARM_UP + TIMED):
        step(k)
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / TIMED * 1e3
    kernels = kernels_of(step, 1 + WARM_UP + TIMED)
    busy, calls = (sum(x[i] for x in kernels.values()) for i in (0, 1))
    print(f"\n{name}: {wall:.2f} ms a step, kernels {busy:.2f} ms, {calls} kernels")
    for kernel, (total, count) in sorted(kernels.items(), key=lambda x: -x[1][0])[:rows]:
        print(f"  {total:8.3f} ms {count:5d}  {kernel[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--model", default="gpt2_124m", choices=GPU_SIZES)
    parser.add_argument("--batch", type=int, default=0, help="sequences; default: the model's own number")
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    model, batch = GPU_SIZES[arguments.model]
    c = configured(model, arguments.batch or batch, "cuda", not arguments.eager)
    ours = build_ours(c, "cuda")
    plain = PlainLoop(c, "cuda", ours.weights.master, not arguments.eager)
    show("ours", lambda k: ours.step(k).loss, arguments.rows)
    show("plain", plain.step, arguments.rows)


if __name__ == "__main__":
    main()
