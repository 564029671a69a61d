"""Bytes that a rank hands to torch.distributed in the largest world of each paper, 512 to 3,072 ranks of torch's `fake`
transport, against the plan's: the step that runs on a cluster, on a card that is not there."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from platform.config.fields import Config
from platform.launch import compose_config
from platform.plan.operation_plan import TRAFFIC
from platform.plan.plan import Plan
from platform.plan.step_collectives import collectives_by_stage
from platform.predict.make_plan import make_plan
from tests.harness.card import alone
from tests.harness.one_attention import OneAttention

GPUS = ["cluster.device=cuda", "train.steps=1", "precision=bf16"]
WORLDS = {
    # Narayanan et al. 2021: 1T; 64 microbatches of its 512, as all are alike
    "megatron 1T on 3072": ["+experiment=gpt175b", "model=gpt_1t", "pipeline.stages=64", "pipeline.chunks=2",
                            "parallel.data=6", "train.microbatch=1", "train.global_batch=384"],
    # Bian et al. 2021: a cube of 8 x 8 x 8
    "cube of 512": ["+experiment=cube_bert", "tensor.axes.x=8", "tensor.axes.y=8", "tensor.axes.z=8", "model.heads=64",
                    "model.d_model=8192", "model.d_ff=32768", "train.global_batch=64", "train.microbatch=64",
                    "model.layers=3"],
    # Shazeer et al. 2018: 4.9B on 16 x 32 cores
    "mesh of 512": ["+experiment=mesh_lm", "tensor.axes.rows=16", "tensor.axes.cols=32", "train.global_batch=64",
                    "train.microbatch=64", "model.layers=3"],
    # Jain et al.: four sub-grids of 128 workers
    "sub-graphs on 512": ["+experiment=t5_large_mod", "parallel.data=128", "train.global_batch=512",
                          "train.microbatch=4"],
}  # fmt: skip
OPS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all", "send": "send",
}  # fmt: skip


class Handed(TorchDispatchMode):
    """Collects the bytes of what a rank hands to torch.distributed, by operation: its share of what its group moves."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and name != "recv_":
            op = OPS[name]
            # a gather's input is its second argument, as is that of a reduce-scatter and of an all-to-all
            source = args[0][0] if isinstance(args[0], list) else args[1]
            group = next(dist.ProcessGroup.unbox(x) for x in args[1:] if type(x).__name__ == "ScriptObject")
            n = 1 if op == "send" else group.size()
            self.nbytes[op] += Fraction(TRAFFIC[op](n, source.numel()) * source.element_size(), n)
        return function(*args, **(kwargs or {}))


def planned(plan: Plan, stage: int) -> Counter[str]:
    """Return the bytes that a rank of a stage moves in a step, by operation."""
    nbytes: Counter[str] = Counter()
    for _, c, launches, stages in collectives_by_stage(plan):
        if stage == stages[0] or c.op != "send" and stage in stages:
            ranks = plan.mesh.world_size // (1 if "stage" in c.axes and c.op != "send" else plan.num_stages)
            nbytes[c.op] += Fraction(launches * plan.traffic_bytes(c), ranks)
    return nbytes


def handed(c: Config, rank: int) -> Counter[str]:
    with alone(c, rank, []) as trainer, Handed() as counter, OneAttention():
        trainer.step(1)
    return counter.nbytes


@pytest.mark.parametrize(
    "name", [name if name == "cube of 512" else pytest.param(name, marks=pytest.mark.full) for name in WORLDS]
)
def test_bytes_are_the_plans(name):
    """Of a rank of the first, a middle and the last stage: a stage's ranks are alike."""
    c = compose_config([*WORLDS[name], *GPUS])
    plan = make_plan(c)
    for stage in sorted({0, plan.num_stages // 2, plan.num_stages - 1}):
        rank = next(r for r in range(plan.mesh.world_size) if plan.mesh.rank_coordinates(r)["stage"] == stage)
        assert handed(c, rank) == planned(plan, stage)


def test_negative_control_a_collective_more(monkeypatch):
    c = compose_config([*WORLDS["cube of 512"], *GPUS])
    plan = make_plan(c)
    right = planned(plan, 0)
    launched = dist.all_reduce
    monkeypatch.setattr(
        dist,
        "all_reduce",
        lambda *arguments, **named: (launched(*arguments, **named), launched(*arguments, **named))[1],
    )
    assert handed(c, 0) != right
