"""Seconds of planning and of the static check of the plan, on one core.

    OMP_NUM_THREADS=1 python benchmarks/plan_check.py [--rounds 3]

The least CPU time of several rounds. A check of less than 2 % of planning could run before every launch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from platform.launch import compose_config
from platform.plan.plan import Plan
from platform.plan.plan_check import find_unsoundness
from platform.predict.make_plan import make_plan

LARGE = ["train.global_batch=1024", "precision=bf16"]
EXPERTS = [  # 674B parameters, most of them of 256 experts in each of 58 layers
    *("model.layers=58", "model.d_model=7168", "model.heads=128", "model.kv_heads=16", "model.d_kv=128"),
    *("model.vocab=129280", "model.length=4096", "model.norm=rmsnorm", "model.activation=swiglu"),
    *("model.positions=rope", "model.bias=false", "model.tied=false", "model.router=sigmoid"),
    *("model.experts=256", "model.experts_per_token=8", "model.expert_d_ff=2048", "model.shared_experts=1"),
    *("train.global_batch=2048", "precision=bf16", "recompute=full"),
]
PLANS = {
    "GPT 1T, 64 stages x data 4 x t 8, ZeRO 1": [
        "model=gpt_1t", "tensor=1d_sp", "tensor.axes.t=8", "pipeline=interleaved", "pipeline.stages=64",
        "pipeline.chunks=2", "parallel.data=4", "parallel.zero=1", "train.microbatch=1", *LARGE],
    "GPT 530B, data 16 x 3-D 8 x 4 x 4, ZeRO 3": [
        "model=gpt_529_6b", "tensor=3d", "tensor.axes={x: 8, y: 4, z: 4}", "parallel.data=16", "parallel.zero=3",
        "train.microbatch=8", *LARGE],
    "GPT 530B, 16 stages x data 2 x 2-D 8 x 8": [
        "model=gpt_529_6b", "tensor=2d", "tensor.axes={r: 8, c: 8}", "pipeline=1f1b", "pipeline.stages=16",
        "parallel.data=2", "train.microbatch=8", *LARGE],
    "674B of 256 experts, 4 stages x expert 64 x t 8": [
        "tensor=1d_sp", "tensor.axes.t=8", "pipeline=1f1b", "pipeline.stages=4", "parallel.data=64",
        "parallel.experts=64", "train.microbatch=1", *EXPERTS],
    "674B of 256 experts, data 2 x expert 64 x 3-D 2 x 2 x 4, ZeRO 3": [
        "tensor=3d", "tensor.axes={x: 2, y: 2, z: 4}", "parallel.data=128", "parallel.experts=64", "parallel.zero=3",
        "train.microbatch=2", *EXPERTS],
    "674B of 256 experts, 8 stages x expert 16 x 2-D 4 x 4": [
        "tensor=2d", "tensor.axes={r: 4, c: 4}", "pipeline=zb_h1", "pipeline.stages=8", "parallel.data=16",
        "parallel.experts=16", "train.microbatch=4", *EXPERTS],
    "DeepSeek-V3, 16 stages x data 2 x expert 64, ZeRO 1": ["+experiment=deepseek_v3"],
    "DeepSeek-V3, 8 stages x data 2 x expert 16 x 3-D 2 x 2 x 2, ZeRO 1": [
        "+experiment=deepseek_v3", "tensor=3d", "tensor.axes={x: 2, y: 2, z: 2}", "pipeline.stages=8",
        "parallel.data=32", "parallel.experts=16", "train.microbatch=2"],
}  # fmt: skip


def timed(overrides: Sequence[str]) -> tuple[float, float, Plan]:
    """Return the CPU seconds of planning and of checking a new plan, and the plan."""
    config, start = compose_config(overrides), time.process_time()
    plan = make_plan(config)
    planned = time.process_time()
    assert find_unsoundness(plan) == []
    return planned - start, time.process_time() - planned, plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| plan | ranks | operations | planning (s) | check (s) | of planning |\n|---|---|---|---|---|---|")
    for name, overrides in PLANS.items():
        rounds = [timed(overrides) for _ in range(args.rounds)]
        planning, check = (min(times) for times in list(zip(*rounds, strict=True))[:2])
        plan = rounds[0][2]
        share = f"{check / planning:.0%}"
        print(
            f"| {name} | {plan.mesh.world_size:,} | {len(plan.operations):,} | {planning:.2f} | {check:.2f} | {share} |"
        )


if __name__ == "__main__":
    main()
