"""What plans are said to need, and the most that torch allocates for them: on one GPU, in one command, without Ray.

    python benchmarks/needed_memory.py [--device cuda] [--steps 3] [--experiment one_gpu]

Prints one line per plan; where a plan does not fit, what it needs alone. A peak is of the steps after the first.
`needed`: tensors, and what is reserved for CUDA, its libraries and rounding; `on the device`: what the driver says is
in use by all processes, so that no other may run.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from platform.config.fields import Config  # noqa: E402
from platform.launch import compose_config  # noqa: E402
from platform.plan.plan import Plan  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.predict.memory_budget import predict_footprints  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from platform.runtime.compilation import may_compile  # noqa: E402
from tests.harness.live import count  # noqa: E402
from tests.harness.oracle import trainer_of  # noqa: E402

VARIATIONS = (
    "",
    "train.microbatch=4",
    "recompute=full",
    "recompute=full recompute_every=3",
    "model.dropout=0.1",
    "model.dropout=0.1 recompute=selective",
    "precision=fp32 train.microbatch=4",
    "model=llama_8b model.layers=4 train.microbatch=1 model.length=2048",
)


def measure(config: Config, plan: Plan, device: str, steps: int) -> int:
    if device == "cpu":
        return count(config, plan, steps)[0].peak
    if may_compile(config.train.compile, device):  # as the plan expects
        config = replace(config, train=replace(config.train, compile="on"))
    trainer = trainer_of(config, plan, SingleRank(plan.mesh, device))
    trainer.step(1)
    torch.cuda.reset_peak_memory_stats()
    for step in range(2, steps + 1):
        trainer.step(step)
    return torch.cuda.max_memory_allocated()


def in_use(device: str) -> tuple[str, str]:
    """Return gigabytes that torch holds on the GPU, and that are in use on it."""
    if device == "cpu":
        return "-", "-"
    free, total = torch.cuda.mem_get_info()
    return f"{torch.cuda.memory_reserved() / 1e9:.3f}", f"{(total - free) / 1e9:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--experiment", default="one_gpu")
    parser.add_argument("overrides", nargs="*", help="for every plan")
    arguments = parser.parse_args()
    print("| plan | needed (GB) | allocated (GB) | tensors / allocated | torch's reserve (GB) | on the device (GB) |")
    print("|---|---|---|---|---|---|")
    for variation in VARIATIONS:
        config = compose_config([f"+experiment={arguments.experiment}", *arguments.overrides, *variation.split()])
        config.train = replace(config.train, global_batch=2 * config.train.microbatch)
        plan = make_plan(config)
        most = max(predict_footprints(config, plan), key=lambda footprint: footprint.total_bytes)
        tensors = most.total_bytes - most.reserved
        try:
            peak = measure(config, plan, arguments.device, arguments.steps)
            figures = f"{peak / 1e9:.3f} | {tensors / peak:.3f} | {' | '.join(in_use(arguments.device))}"
        except torch.OutOfMemoryError:
            figures = "out of memory | | |"
        needed = f"{tensors / 1e9:.3f} + {most.reserved / 1e9:.3f}"
        print(f"| {variation or 'as it is'} | {needed} | {figures} |", flush=True)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
