"""A small Transformer on the papers' (3,3,3) cube against one process: 27 ranks as threads, fp64.

    OMP_NUM_THREADS=1 python benchmarks/cube_27.py

Prints, per scheme and policy for gathered operands, the largest error of any gradient relative to the model's largest
one, the loss's, and a step's bytes, counted and planned. It fails where the oracle does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from platform.plan.step_collectives import communication  # noqa: E402
from tests.harness.oracle import assemble, compare, configure, counted, run, serial  # noqa: E402

MODEL = {"layers": 2, "d_model": 36, "heads": 9, "d_ff": 144, "length": 9, "vocab": 61}
CUBE = {"x": 3, "y": 3, "z": 3}


def main() -> None:
    print(f"{'scheme':<12} {'gathered':<8} {'gradient error':>14} {'loss - serial':>14} {'bytes counted':>14} "
          f"{'planned':>14} {'seconds':>8}")  # fmt: skip
    for scheme in ("3d", "3d_literal"):
        for gathered in ("keep", "again"):
            c = configure(scheme, CUBE, microbatch=9, global_batch=9, **MODEL)
            c.tensor.gathered = gathered
            expected = serial(c)
            begin = time.perf_counter()
            plan, results = run(c)
            seconds = time.perf_counter() - begin
            compare(c, plan, results, expected)
            gradients = assemble(plan, results, lambda r: r.gradients)
            scale = max(g.abs().max() for g in expected.gradients.values())  # a key bias has a gradient of zero
            worst = max((g - expected.gradients[n]).abs().max() / scale for n, g in gradients.items())
            moved, planned = counted(results), communication(plan)
            assert moved == planned
            print(f"{scheme:<12} {gathered:<8} {worst:>14.1e} {results[0].loss - expected.loss:>14.1e} "
                  f"{sum(moved.values()):>14,} {sum(planned.values()):>14,} {seconds:>8.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
