"""Whether the real runtime, run on torch's fake tensors, could forecast memory in place of `platform.predict`.

    python benchmarks/fake_memory.py

Prints, per plan, the bytes that the meter forecasts, that a fake run holds and that a real run holds, and how long each
forecast takes; then the same two forecasts of an experiment that this machine could not run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from platform.config.fields import Config  # noqa: E402
from platform.launch import compose_config  # noqa: E402
from platform.model import build_model, register_model  # noqa: E402
from platform.model.layers import dim_sizes  # noqa: E402
from platform.plan.model_types import Parameter, Spec  # noqa: E402
from platform.plan.plan import Plan  # noqa: E402
from platform.predict.footprint import measure_passes  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.predict.memory_budget import predict_peak_bytes  # noqa: E402
from platform.predict.meter import MemoryMeter  # noqa: E402
from platform.runtime.communicator import Communicator, SingleRank  # noqa: E402
from platform.train.trainer import Trainer  # noqa: E402
from tests.harness.card import AsOnNccl, Cached  # noqa: E402
from tests.harness.live import Live, count  # noqa: E402
from tests.harness.oracle import configure, trainer_of  # noqa: E402

STREAM = Spec.of("stream", "length batch d_model")
HEADS = Spec.of("attention", "length batch heads d_kv")


class OneOperation:
    """Model of one operation between a table's rows and a loss without a product."""

    inputs = ("tokens",)

    def __init__(self, c):
        self.sizes, self.operation = dim_sizes(c), c.activation
        self.table = Parameter("table", ("vocab", "d_model"), "in", std=0.1)

    def parameters(self):
        return [self.table]

    def forward(self, ops, inputs):
        x = ops.lookup("input", self.table, inputs["tokens"], STREAM)
        if self.operation == "gelu":
            q = ops.reshape("heads", x, STREAM, HEADS)
            y = ops.attention("attention", q, q, q, HEADS, HEADS, scale=0.1, causal=True)
            y = ops.reshape("joined", y, HEADS, STREAM)
        else:
            y = ops.recurrence("recurrence", ops.pointwise("sigmoid", x), x, STREAM)
        return ops.squared_error("loss", y, x, STREAM, inputs["tokens"])


register_model("one_operation", OneOperation)

SIZES = {"layers": 1, "d_model": 64, "heads": 4, "length": 128, "vocab": 256, "precision": "fp32", "global_batch": 4}
ALONE = {**SIZES, "kind": "one_operation"}
PASSES = {
    "fused attention": {**ALONE, "activation": "gelu"},
    "fused attention, bf16": {**ALONE, "activation": "gelu", "precision": "bf16"},
    "gated recurrence": {**ALONE, "activation": "silu"},
    "gated recurrence, bf16": {**ALONE, "activation": "silu", "precision": "bf16"},
    "layer": SIZES,
    "layer, bf16": {**SIZES, "precision": "bf16"},
    "layer, dropout": {**SIZES, "dropout": 0.1},
    "layer, recompute full": {**SIZES, "recompute": "full"},
}
TRAINED = {**SIZES, "layers": 3, "global_batch": 8}
STEPS = {
    "serial": TRAINED,
    "serial, bf16": {**TRAINED, "precision": "bf16"},
    "dropout": {**TRAINED, "dropout": 0.1},
    "1d": {**TRAINED, "tensor": "1d", "axes": {"t": 2}},
    "3d": {**TRAINED, "tensor": "3d", "axes": {"x": 2, "y": 2, "z": 1}},
    "zero 3": {**TRAINED, "data": 2, "zero": 3, "microbatch": 2},
}
LARGE = ["+experiment=gpt175b"]


class Pretended(AsOnNccl):
    """Communicator of a rank in a world of torch's `fake` transport, whose tensors lie on `device`."""

    def __init__(self, plan: Plan, rank: int, device: str):
        super().__init__(plan, rank)
        self.device = torch.device(device)


class LiveFakes(Live):
    """Counts fake tensors; a number that is read from one is 1."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        return super().__torch_dispatch__(function, types, args, kwargs)


@contextmanager
def pretended(c: Config, plan: Plan, rank: int = 0, device: str = "cpu") -> Iterator[tuple[Trainer, Live]]:
    """The trainer of one rank on fake tensors, and the count of the bytes that these would take."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Communicator, "read_numbers", lambda self, x: [1.0] * x.numel()))
        stack.enter_context(mock.patch.object(dist.distributed_c10d, "_set_pg_timeout", lambda *_: None))
        if plan.mesh.world_size > 1:
            dist.init_process_group("fake", rank=rank, world_size=plan.mesh.world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = stack.enter_context(LiveFakes())
        world = (
            Pretended(plan, rank, device) if plan.mesh.world_size > 1 else SingleRank(plan.mesh, torch.device(device))
        )
        trainer = trainer_of(c, plan, world, Cached(c), fresh=False)
        for bucket in trainer.weights.buckets if plan.zero == 3 else ():
            live.follow(bucket)
        yield trainer, live


def passes(trainer: Trainer, live: Live) -> tuple[int, int, int]:
    """Bytes that one microbatch's forward pass takes at its peak, that it keeps, and the peak of its backward pass."""
    (chunk,) = trainer.stage.chunks
    trainer.weights.begin_step()
    trainer.passes.run_chunk(chunk, {}, "train", 0, trainer.config.train.global_batch)  # what all passes share is made
    before = live.peak = live.now
    loss = trainer.passes.run_chunk(chunk, {}, "train", 0, trainer.config.train.global_batch)["loss"]
    peak, kept, start = live.peak - before, live.now - before, live.now
    live.peak = start
    loss.backward()
    return peak, kept, live.peak - start


def real_passes(c: Config, plan: Plan) -> tuple[int, int, int]:
    with Live() as live:
        return passes(trainer_of(c, plan, SingleRank(plan.mesh)), live)


def fake_passes(c: Config, plan: Plan) -> tuple[int, int, int]:
    with pretended(c, plan) as (trainer, live):
        return passes(trainer, live)


def metered_passes(c: Config, plan: Plan) -> tuple[int, int, int]:
    (chunk,), at = plan.stage_part(0).chunks, plan.mesh.rank_coordinates(0)
    measured = measure_passes(
        MemoryMeter(plan, c.model.dropout, at), build_model(c.model), chunk, splits_weight_gradients=False
    )
    return measured.forward, measured.kept, measured.backward


def fake_step(c: Config, plan: Plan, device: str = "cpu") -> tuple[int]:
    """The most bytes that the ranks of a plan hold in a step but the first."""
    most = 0
    for rank in range(plan.mesh.world_size):
        with pretended(c, plan, rank, device) as (trainer, live):
            trainer.step(1)
            live.peak = live.now
            trainer.step(2)
            most = max(most, live.peak)
    return (most,)


def timed(function: Callable[..., tuple[int, ...]], *arguments) -> tuple[tuple[int, ...], float]:
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def compare(names: str, cases, meter, fake, real) -> None:
    print(f"| {names} | meter, off | fake run, off | real run (bytes) | meter (s) | fake run (s) |")
    print("|---|---|---|---|---|---|")
    for name, options in cases.items():
        c = configure(**options)
        plan = make_plan(c)
        truth = real(c, plan)
        timed(fake, c, plan)  # torch's first use of a kernel is not the forecast's
        (metered, quick), (faked, slow) = timed(meter, c, plan), timed(fake, c, plan)
        off = [", ".join(f"{a / b - 1:+.2%}" for a, b in zip(sizes, truth, strict=True)) for sizes in (metered, faked)]
        print(f"| {name} | {off[0]} | {off[1]} | {', '.join(map(str, truth))} | {quick:.4f} | {slow:.3f} |", flush=True)
    print()


def seconds_of(code: str) -> float:
    """The quickest of three new processes."""

    def once() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    return min(once() for _ in range(3))


def large() -> None:
    """The forecast of an experiment of many ranks, beside fake passes of one microbatch through one of its chunks."""
    c = compose_config(LARGE)
    plan = make_plan(c)
    _, quick = timed(lambda: (predict_peak_bytes(c, plan),))
    print(
        f"{' '.join(LARGE)}, {plan.mesh.world_size} ranks, {plan.num_stages} stages: meter, all stages: {quick:.2f} s"
    )

    def both_ways() -> tuple[int, ...]:
        out = list(trainer.passes.run_chunk(chunk, {}, "train", 0, c.train.microbatch).values())
        torch.autograd.backward(out, [torch.ones_like(y) for y in out])
        return ()

    with pretended(c, plan) as (trainer, _):
        chunk = trainer.stage.chunks[0]
        trainer.weights.begin_step()
        both_ways()
        _, slow = timed(both_ways)
        print(f"fake forward and backward pass, one rank, one of {len(plan.chunks)} chunks: {slow:.2f} s")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    compare("pass of one microbatch: forward peak, kept, backward peak", PASSES, metered_passes, fake_passes,
            real_passes)  # fmt: skip
    compare("step: peak of the largest rank", STEPS, lambda c, plan: (predict_peak_bytes(c, plan),), fake_step,
            lambda c, plan: (max(rank.peak for rank in count(c, plan)),))  # fmt: skip
    empty = seconds_of("pass")
    print(f"importing torch and its fake tensors: {seconds_of('import torch._subclasses.fake_tensor') - empty:.2f} s")
    try:
        c = configure(**PASSES["layer"])
        print("fake run for GPUs on a machine without any:", fake_step(c, make_plan(c), "cuda"))
    except (RuntimeError, AssertionError) as error:
        print(f"fake run for GPUs on a machine without any: {str(error).splitlines()[0]}")
    large()


if __name__ == "__main__":
    main()
