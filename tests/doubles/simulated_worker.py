"""Workers that say what real ones say, and compute nothing; many of them are threads of one process, their node."""

import math
import os
import threading
import time

from platform.cluster.crew.launchers.host import serve
from platform.config.fields import SentConfig
from platform.parallel.communicator.progress import PROGRESS
from platform.plan.language.mesh import Mesh
from platform.train.protocol.answers import Built, Findings, Joined, StepReport, Taken
from platform.train.recovery.proof import proof
from platform.train.recovery.source import Source
from platform.train.step.faults import Fault, strike

LATE_STEP = 1  # in which everybody takes long, and so is asked for beats; a first step may last
MOVED = ("all_gather/data", "all_reduce/data", "all_reduce/t", "reduce_scatter/data", "send/stage")
SECTIONS = ("data", "forward", "backward", "gradients", "optimizer", "checkpoint", "waiting")


def node(places, address, tokens):
    """The process of a node: the platform's own host for each of its members, in a thread."""
    alone = {"own_process": False}
    told = [(place, address, token) for place, token in zip(places, tokens, strict=True)]
    threads = [threading.Thread(target=serve, args=args, kwargs=alone) for args in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


PROOFS, PROVING = {}, threading.Lock()  # the members of a node see the same


class SimulatedWorker:
    """Answers as platform.train.worker.Worker does: rank 0 with the report of all, the others with the step alone."""

    def __init__(self, config, number, *, device, run_dir, threads):
        self.number, self.run_dir, self.config = number, run_dir, config

    def prove(self, probe):
        with PROVING:
            if probe not in PROOFS:
                PROOFS[probe] = proof(self.config, self.run_dir, probe)
            return PROOFS[probe]

    def tell_time(self):
        return time.time()

    def examine(self, thorough):
        return Findings({"gemm": 1e12, "wrong": 0.0, "memory": 1e11, "write": 1e9, "read": 1e9})

    def form(self, rank, world_size, config: SentConfig, store, generation, stage_of, plan=""):
        self.rank, self.world_size, self.config = rank, world_size, config
        axes = {"stage": config.pipeline.stages, "data": config.parallel.data, **config.tensor.axes}
        where = Mesh.of(axes).coordinates(rank)
        return Joined(rank, where, os.getpid(), "simulated")

    def build(self, rows: list[list[list[int]]], domains: list[str] = (), corpus: str = "", fresh: bool = True):
        assert len(domains) == self.world_size and rows
        return Built(1_367_000_000, "cpu", None, ["exp_avg", "exp_avg_sq"])

    def recover(self, source: Source):
        assert len(source.ranks) <= self.world_size

    def step(self, step, limit=math.inf, faults: list[Fault] = ()):
        if step == LATE_STEP:
            for piece in range(8):
                PROGRESS.enter(f"piece {piece}")
                time.sleep(self.config.elastic.hang_seconds / 8)
        for fault in faults:
            if fault.rank == self.rank:
                with open(f"{self.run_dir}/struck", "w") as file:
                    file.write(str(time.monotonic()))
                strike(fault.kind)
        return report(step, self.world_size) if self.rank == 0 else Taken(step)

    def abort(self):
        pass

    def leave(self):
        pass

    def close(self):
        pass


def report(step, world_size):
    """Of all ranks together, as long as a real one."""
    return StepReport(
        step=step,
        loss=10.824631691,
        grad_norm=1.7320508075,
        lr=6e-05,
        skipped=False,
        tokens=step * 1536 * 2048,
        samples=((step - 1) * 1536, step * 1536),
        step_seconds=0.1234567891,
        seconds=dict.fromkeys(SECTIONS, 0.0123456789),
        comm_bytes=dict.fromkeys(MOVED, 1234567890),
        peak_memory_bytes=12345678901,
        world_size=world_size,
        slow=[],
        held=step,
    )
