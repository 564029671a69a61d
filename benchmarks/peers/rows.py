"""The rows of the table: a plan of ours, the peer beside it, and the ratio that is the goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.step_time import SIZES
from platform.config.fields import Config, Model
from tests.harness.oracle import configure

GPT = (Model(layers=4, d_model=256, heads=8, length=128, vocab=8192), 4)  # and sequences per replica
MODELS = {"gpt": GPT, **SIZES}
STAGES = {"stages": 2, "microbatch": 1, "global_batch": 8}  # 8 microbatches of one sequence


@dataclass(frozen=True)
class Row:
    """One line. `peer`: "module:function" of this package; `plan`: arguments of `configure`; `goal`: highest ratio of
    step times, `cpu_goal`: of CPU seconds; None = none was set. `package`: of `environment.PACKAGES`, "" if torch has
    the peer. `compiles`: whether the peer has a compiled form."""

    peer: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    goal: float | None = None
    cpu_goal: float | None = None
    model: str = "gpt"
    package: str = ""
    compiles: bool = True


DATA, ZERO_1, ZERO_3 = {"data": 2}, {"data": 2, "zero": 1}, {"data": 2, "zero": 3}
T_2 = {"tensor": "1d", "axes": {"t": 2}}
ONE_F, ZERO_BUBBLE = {"pipeline": "1f1b", **STAGES}, {"pipeline": "zb_h1", **STAGES}

ROWS = {
    "gpt_tiny": Row("replicated:plain", goal=0.97, model="gpt_tiny"),
    "gpt_small": Row("replicated:plain", goal=0.97, model="gpt_small"),
    "llama_small": Row("replicated:plain", goal=0.97, model="llama_small"),
    "ddp": Row("replicated:ddp", DATA, 0.95),
    "zero1_ddp": Row("replicated:ddp", ZERO_1, 0.97),
    "zero1_redundancy": Row("replicated:zero_redundancy", ZERO_1, 0.97),
    "zero1_oss": Row("replicated:oss", ZERO_1, 0.97, package="fairscale"),
    "zero1_sharded_ddp": Row("replicated:sharded_ddp", ZERO_1, 0.97, package="fairscale"),
    "zero3_ddp": Row("replicated:ddp", ZERO_3, 1.08),
    "zero3_fsdp2": Row("replicated:fsdp2", ZERO_3, 0.90),
    "tp_megatron": Row("megatron:tensor_parallel", T_2, 0.93, package="megatron-core"),
    "tp_dtensor": Row("dtensor:tensor_parallel", T_2),
    "1f1b_torch": Row("pipelined:one_f_one_b", ONE_F, 0.93),
    "1f1b_megatron": Row("megatron:one_f_one_b", ONE_F, 0.78, package="megatron-core"),
    "zb_h1_torch": Row("pipelined:one_f_one_b", ZERO_BUBBLE, 0.90, cpu_goal=1.05),
    "ray_train": Row("ray_train:prepared", DATA, package="ray-train"),
}


def configured(row: Row, steps: int) -> Config:
    """Return our configuration of a row: fp32, AdamW at a constant rate, gradients clipped to 1."""
    model, sequences = MODELS[row.model]
    batch = {"microbatch": sequences, "global_batch": sequences * row.plan.get("data", 1)}
    c = configure(**{"precision": "fp32", **batch, **row.plan})
    c.model = model
    c.train.steps = steps
    c.optimizer.lr, c.optimizer.clip, c.optimizer.schedule = 1e-3, 1.0, "constant"
    return c


def compiling(c: Config) -> str:
    """Let our configuration compile; return "", or why it cannot."""
    if not hasattr(c.train, "compile"):
        return "compiling is not built"
    c.train.compile = "on"
    return ""
