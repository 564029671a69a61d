"""What the pipeline executor costs: every computation replaced by a sleep of fixed length, so cores do not matter.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--milliseconds 80] [--microbatches 16] [--realtime]

Eight gloo processes, one per stage. A stage's forward pass, input gradient and weight gradient of one microbatch take
the same time, of which each of its v chunks takes 1/v: all schedules train the same model. Prints makespan / ideal - 1
beside the schedule's closed form, for the executor and, where it has the schedule, for torch.distributed.pipelining.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed import pipelining  # noqa: E402

from platform.plan.simulate import (
    simulate,  # noqa: E402
    stage_rows,  # noqa: E402
)
from platform.predict.choose_schedule import build_schedule  # noqa: E402
from platform.predict.make_plan import make_plan  # noqa: E402
from platform.runtime.communicator import Communicator  # noqa: E402
from platform.runtime.pipeline import PipelineExecutor  # noqa: E402
from tests.harness.oracle import configure  # noqa: E402
from tests.harness.pool import Pool  # noqa: E402

STAGES = 8
REALTIME = "BENCHMARK_REALTIME"  # environment: set for the processes that are started
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb_h1": 1}
PEERS = {  # its zero bubble runs no gradient of an input through these stages
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}
SHAPE = (16, 1, 16)  # length, microbatch, d_model of what goes from stage to stage: its transfer takes no time


class Sleep(torch.autograd.Function):
    """The identity; each pass sleeps."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


def sleeping_stage(config, plan, communicator, seconds: float) -> Callable[[], object]:
    """One step of the executor on this stage, whose computations sleep."""
    row = stage_rows([build_schedule(config, 1)])[communicator.coordinates["stage"]].steps[0]
    stage = plan.stage_part(communicator.coordinates["stage"])
    shape = config.model.length, config.train.microbatch, config.model.d_model

    def forward(chunk, microbatch, flow, deferred):
        x = flow["stream"] if flow else torch.zeros(shape, requires_grad=True)
        if deferred is not None:
            deferred.append(lambda: time.sleep(seconds))
        y = Sleep.apply(x, seconds, seconds if deferred is not None else 2 * seconds)
        return {"stream": y} if chunk.sends else {"loss": y.sum()}

    communicator.open_stage_connections(plan.neighbour_stages)
    return partial(PipelineExecutor(stage, communicator, torch.float32, forward).run_row, row)


def ours(config, plan, communicator, seconds: float, repeats: int) -> list[float]:
    """Seconds that each step of the executor takes on this stage, from a barrier on."""
    return measure(sleeping_stage(config, plan, communicator, seconds), communicator, repeats)


class Chunk(torch.nn.Module):
    """The same for torch's engine: the gradients of the input and of the weight sleep, each when it is asked for."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds, self.weight = seconds, torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(self.weight, 0.0, self.seconds)


def torchs(config, plan, communicator, seconds: float, repeats: int) -> list[float]:
    """The same of torch.distributed.pipelining."""
    kind, v, m = config.pipeline.kind, config.pipeline.chunks, plan.microbatches
    rank, x = dist.get_rank(), torch.zeros(SHAPE, requires_grad=True)
    stages = [
        pipelining.PipelineStage(Chunk(seconds), rank + k * STAGES, v * STAGES, torch.device("cpu"), x, x)
        for k in range(v)
    ]
    several = issubclass(PEERS[kind], pipelining.schedules.PipelineScheduleMulti)
    loss = lambda y, target: y.sum()  # noqa: E731
    engine = PEERS[kind](stages if several else stages[0], m, loss_fn=loss)
    batch = torch.zeros(m * SHAPE[0], *SHAPE[1:], requires_grad=True)
    keywords = {"target": batch.detach()} if rank == STAGES - 1 else {}
    return measure(lambda: engine.step(*([batch] if rank == 0 else []), **keywords), communicator, repeats)


def measure(step: Callable[[], object], communicator: Communicator, repeats: int) -> list[float]:
    step()  # opens connections
    if os.environ.get(REALTIME):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))
    times = []
    for _ in range(repeats):
        communicator.barrier()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=80.0, help="of a stage's forward pass")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=list(CHUNKS), choices=CHUNKS)
    parser.add_argument("--alone", action="store_true", help="without torch.distributed.pipelining")
    parser.add_argument("--realtime", action="store_true", help="before all others; needs root, on a machine in use")
    args = parser.parse_args()
    os.environ |= {REALTIME: "1"} if args.realtime else {}
    m, whole = args.microbatches, args.milliseconds / 1000
    pool, makespan = Pool(), {}
    print("| schedule | v | closed form | executor | above (points) | torch | above (points) |")
    print("|---|---|---|---|---|---|---|")
    try:
        for kind in args.schedules:
            v = CHUNKS[kind]
            size = {"layers": STAGES * v, "d_model": SHAPE[2], "heads": 2, "length": SHAPE[0]}
            config = configure(
                microbatch=1, global_batch=m, precision="fp32", pipeline=kind, stages=STAGES, chunks=v, **size
            )
            plan, closed = make_plan(config), simulate(build_schedule(config, 1)).bubble
            cells = []
            for engine in (ours,) if args.alone or kind not in PEERS else (ours, torchs):
                work = partial(engine, seconds=whole / v, repeats=args.repeats)
                steps = pool.run(work, config, plan)
                makespan[kind, engine] = statistics.median(max(step) for step in zip(*steps, strict=True))
                bubble = makespan[kind, engine] / (m * 3 * whole) - 1
                cells += [f"{bubble:.2%}", f"{100 * (bubble - closed):.2f}"]
            cells += ["-"] * (4 - len(cells))
            print(f"| {' | '.join([kind, str(v), f'{closed:.2%}', *cells])} |", flush=True)
    finally:
        pool.close()
    if {("1f1b", ours), ("interleaved", ours)} <= makespan.keys():
        gain = makespan["1f1b", ours] / makespan["interleaved", ours]
        print(f"\n1F1B takes {gain:.3f} times as long as interleaved")


if __name__ == "__main__":
    main()
