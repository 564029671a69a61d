"""Sequences of 3,000 tokens on one rank and on eight, which share each of them: what a rank needs, planned and counted.

    python benchmarks/long_context.py [--length 3000] [--steps 3]

The ranks are processes on gloo. `planned`: the memory that the plan counts of the neediest rank; `counted`: the most
bytes of storages that lived on a rank in a step after the first; `host`: of these, in host memory, which on a CPU is
the same. A step takes the median of all, of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from platform.config.fields import Config  # noqa: E402
from platform.plan.plan import Plan  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.predict.memory_budget import predict_footprints  # noqa: E402
from platform.runtime.communicator import Communicator  # noqa: E402
from tests.harness.oracle import configure  # noqa: E402
from tests.harness.pool import SIZE, Pool  # noqa: E402

MODEL: dict[str, Any] = {"layers": 4, "d_model": 128, "heads": 8, "kv_heads": 8, "d_ff": 1024, "vocab": 512,
                         "norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "bias": False,
                         "precision": "fp32", "microbatch": 1, "global_batch": 1}  # fmt: skip
SAVING = {"recompute": "full", "offload": True, "mlp_chunks": 8}
VARIATIONS: dict[str, tuple[int, str, dict[str, Any]]] = {  # -> context, kind, settings
    "one rank": (1, "auto", {}),
    "one rank, recomputed": (1, "auto", {"recompute": "full"}),
    "one rank, chunks and offload": (1, "auto", SAVING),
    "heads": (SIZE, "heads", {}),
    "heads, recomputed": (SIZE, "heads", {"recompute": "full"}),
    "heads, chunks and offload": (SIZE, "heads", SAVING),
    "gather, chunks and offload": (SIZE, "gather", SAVING),
}


class Seen(NamedTuple):
    """What one rank saw."""

    peak: int
    seconds: float
    loss: float


def train(c: Config, plan: Plan, communicator: Communicator) -> Seen:
    """Train all steps on one rank."""
    from tests.harness.live import Live
    from tests.harness.oracle import trainer_of

    gc.disable()
    with Live() as live:
        trainer, seconds = trainer_of(c, plan, communicator), []
        for bucket in trainer.weights.buckets if plan.zero == 3 else ():
            live.follow(bucket)
        for step in range(1, c.train.steps + 1):
            live.peak = live.peak if step > 2 else live.now
            begin = perf_counter()
            loss = trainer.step(step).loss
            seconds.append(perf_counter() - begin)
    gc.enable()
    return Seen(live.peak, median(seconds), loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--length", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print("| plan | planned MB | counted MB | ratio | host MB | s per step | loss |\n|---|---|---|---|---|---|---|")
    with closing(Pool(SIZE, timeout=1200)) as pool:
        for name, (context, kind, settings) in VARIATIONS.items():
            plan_of = {"context": context, "context_kind": kind, "zero": 3 if context > 1 else 0}
            c = configure(**{**MODEL, **plan_of, "length": options.length, **settings})
            c.train.steps = options.steps
            plan = make_plan(c)
            most = max(predict_footprints(c, plan), key=lambda f: f.total_bytes)
            seen = pool.run(train, c, plan)
            peak, seconds = (max(one) for one in list(zip(*seen, strict=True))[:2])
            cells = [name, f"{most.total_bytes / 1e6:.1f}", f"{peak / 1e6:.1f}", f"{most.total_bytes / peak:.3f}"]
            cells += [f"{most.host / 1e6:.1f}", f"{seconds:.1f}", f"{seen[0].loss:.5f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
