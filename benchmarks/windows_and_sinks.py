"""Attention whose windows and sinks are computed pair by pair, beside a mask of all scores and an unfused softmax.

    OMP_NUM_THREADS=1 python -m benchmarks.windows_and_sinks [--steps 4]

Steps of one rank with one sequence; 2 layers, d_model 256, 4 heads, d_ff 512, fp32. Both systems step in turn; times
are of the processor, the least of `--steps`, and memory is what a plan's worker needs, as counted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from platform.plan.operations import fused_attention  # noqa: E402
from platform.plan.operations.recorder import Recorder  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.predict.memory_budget import predict_peak_bytes  # noqa: E402
from platform.runtime.communicator import SingleRank  # noqa: E402
from tests.harness.oracle import configure, trainer_of  # noqa: E402

MODEL: dict[str, Any] = {"layers": 2, "d_model": 256, "heads": 4, "d_ff": 512, "vocab": 512, "precision": "fp32",
                         "microbatch": 1, "global_batch": 1}  # fmt: skip
CASES: list[dict[str, Any]] = [
    {"length": 2048, "window": 128},
    {"length": 4096, "window": 256},
    {"length": 4096, "window": 512},
    {"length": 1024, "attention_sinks": True},
    {"length": 2048, "attention_sinks": True},
    {"length": 2048, "attention_sinks": True, "window": 128},
]


@contextmanager
def whole() -> Iterator[None]:
    """Compute all scores: hidden by a mask, or with a sink by a softmax between two products."""
    with (
        patch.object(Recorder, "uses_ring_attention", lambda *_: False),
        patch.object(fused_attention, "_computes_pair_by_pair", lambda *_: False),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| length | window | sinks | in pairs (s, MB) | all scores (s, MB) | time | memory |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        config = configure(**{**MODEL, **case})
        seconds, needed, trainers = [9e9, 9e9], [0.0, 0.0], []
        for system in (0, 1):
            with whole() if system else ExitStack():
                plan = make_plan(config)
                needed[system] = predict_peak_bytes(config, plan) / 1e6
                trainers.append(trainer_of(config, plan, SingleRank(plan.mesh)))
        losses: list[list[float]] = [[], []]
        for step in range(1, options.steps + 1):
            for system in (0, 1):
                with whole() if system else ExitStack():
                    begun = time.process_time()
                    losses[system].append(trainers[system].step(step).loss)
                    seconds[system] = min(seconds[system], time.process_time() - begun)
        assert torch.allclose(*map(torch.tensor, losses), rtol=1e-5), losses
        sizes = f"{case['length']:,} | {case.get('window', '')} | {'yes' if 'attention_sinks' in case else ''}"
        both = " | ".join(f"{s:.3f}, {n:.0f}" for s, n in zip(seconds, needed, strict=True))
        print(f"| {sizes} | {both} | **{seconds[0] / seconds[1]:.2f}** | {needed[0] / needed[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
