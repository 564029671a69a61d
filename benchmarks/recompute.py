"""A step whose blocks are recomputed but for their last product, beside one that computes whole blocks again.

    OMP_NUM_THREADS=1 python -m benchmarks.recompute [--pairs 24]

One process steps both in turn; prints the median of the paired ratios of CPU time, and the planned bytes and seconds of
GPT-3 175B on 128 A100.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest

from platform.launch import compose_config
from platform.plan.operations.recorder import Recorder
from platform.plan.step_collectives import communication
from platform.predict.make_plan import make_plan
from platform.predict.step_price import read_hardware, step_price
from platform.runtime.communicator import SingleRank
from platform.train.trainer import Trainer
from tests.harness.oracle import MODELS, Tokens, configure, trainer_of

SIZES = {"length": 256, "window": 256, "d_model": 512, "heads": 8, "d_ff": 2048, "layers": 4, "vocab": 512}


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Plan, within the context, as if each recomputed result were needed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "_mark_unneeded_product", lambda *_: None)
        yield


def stepped() -> Trainer:
    c = configure(recompute="full", precision="fp32", microbatch=2, global_batch=2, **{**MODELS["llama"], **SIZES})
    plan = make_plan(c)
    return trainer_of(c, plan, SingleRank(plan.mesh), Tokens(c))


def seconds(trainer: Trainer, step: int) -> float:
    begun = time.process_time()
    trainer.step(step)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=24)
    args = parser.parse_args()
    few = stepped()
    with whole_blocks():
        whole = stepped()
    ratios = []
    for step in range(1, args.pairs + 4):
        order = (few, whole) if step % 2 else (whole, few)
        took = {id(trainer): seconds(trainer, step) for trainer in order}
        ratios.append(took[id(few)] / took[id(whole)])
    print(f"CPU time of a step, of that with whole blocks: {median(ratios[3:]):.3f}")
    c = compose_config(["+experiment=gpt175b"])

    def of_gpt() -> tuple[float, float]:
        plan = make_plan(c)
        return sum(communication(plan).values()) / 1e12, step_price(c, plan, read_hardware("a100_80g")).seconds

    print("gpt175b: {:.0f} TB, {:.0f} s a step".format(*of_gpt()))
    with whole_blocks():
        print("  whole blocks: {:.0f} TB, {:.0f} s".format(*of_gpt()))


if __name__ == "__main__":
    main()
