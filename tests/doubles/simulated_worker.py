"""Workers that say what real ones say, and compute nothing; many of them are threads of one process, their node."""

import json
import math
import os
import socket
import threading
import time
import zlib

from platform.boundary import schema
from platform.cluster.crew.worker_host import serve_worker
from platform.config.fields import SentConfig
from platform.plan.layout import Mesh
from platform.runtime.progress import PROGRESS
from platform.train.environment_proof import describe_environment
from platform.train.faults import Fault, inject_failure
from platform.train.replies import Built, Findings, Joined, StepReport, Taken
from platform.train.state_recovery import MemorySource

LATE_STEP = 1  # in which everybody takes long, and so is asked for beats; a first step may last
MOVED = ("all_gather/data", "all_reduce/data", "all_reduce/t", "reduce_scatter/data", "send/stage")
SECTIONS = ("data", "forward", "backward", "gradients", "optimizer", "checkpoint", "waiting")


def node(places, address, tokens):
    """The process of a node: the platform's own host for each of its members, in a thread."""
    alone = {"own_process": False}
    told = [(place, address, token) for place, token in zip(places, tokens, strict=True)]
    threads = [threading.Thread(target=serve_worker, args=args, kwargs=alone) for args in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Orders:
    """What rank 0 tells the others of its generation, and waits for, as a communicator does: through a Unix socket, one
    connection to each process, whose threads share it."""

    def __init__(self, path, rank, size):
        self.size, self.closed, self.told, self.lines, self.done = size, False, [], [], 0
        self.condition = threading.Condition()
        if rank == 0:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(path)
            self.listener.listen(64)
            threading.Thread(target=self.accept, daemon=True).start()
        self.ear = Ear.of(path)
        self.at = 0

    def accept(self):
        while True:
            line = self.listener.accept()[0]
            with self.condition:
                line.sendall("".join(self.told).encode())
                self.lines.append(line)
            threading.Thread(target=self.count, args=[line], daemon=True).start()

    def count(self, line):
        for done in line.makefile():
            with self.condition:
                self.done += int(done)
                self.condition.notify_all()

    def pass_on(self, order, function=None):
        """Tell all others, and return what `function` does when they have done as told."""
        with self.condition:
            self.told.append(f"{order}\n")
            for line in self.lines:
                line.sendall(self.told[-1].encode())
        if function:
            value, told = function(), len(self.told)
            with PROGRESS.mark_waiting("collect"), self.condition:
                self.condition.wait_for(lambda: self.closed or self.done == told * (self.size - 1))
            assert not self.closed, "aborted"
            return value

    def heard(self):
        while True:
            with PROGRESS.mark_waiting("announce"), self.ear.condition:
                self.ear.condition.wait_for(lambda: self.closed or len(self.ear.orders) > self.at)
            if self.closed:
                return
            self.at += 1
            order = self.ear.orders[self.at - 1]
            if order:
                yield order
            self.ear.tell()
            if not order:
                return

    def close(self):
        self.closed = True
        for condition in (self.condition, self.ear.condition):
            with condition:
                condition.notify_all()


class Ear:
    """One process's end of the socket: what it has heard, and how many of its threads have done it."""

    ALL, LOCK = {}, threading.Lock()

    @classmethod
    def of(cls, path):
        with cls.LOCK:
            if path not in cls.ALL:
                cls.ALL[path] = cls(path)
            return cls.ALL[path]

    def __init__(self, path):
        self.path, self.orders, self.condition, self.line, self.done = path, [], threading.Condition(), None, 0

    def connect(self):
        with self.condition:
            if self.line is None:
                self.line = socket.socket(socket.AF_UNIX)
                self.line.connect(self.path)
                threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        for order in self.line.makefile():
            with self.condition:
                self.orders.append(order.strip())
                self.condition.notify_all()

    def tell(self):
        with self.condition:
            self.line.sendall(b"1\n")


PROOFS, PROVING = {}, threading.Lock()  # the members of a node see the same


class SimulatedWorker:
    """Answers as platform.train.worker.Worker does: rank 0 with the report of all, the others with the step alone."""

    orders = None

    def __init__(self, config, number, *, device, run_dir, threads):
        self.number, self.run_dir, self.config = number, run_dir, config

    def prove_environment(self, probe):
        with PROVING:
            if probe not in PROOFS:
                PROOFS[probe] = describe_environment(self.config, self.run_dir, probe)
            return PROOFS[probe]

    def read_clock(self):
        return time.time()

    def examine_device(self, thorough):
        return Findings({"gemm": 1e12, "wrong": 0.0, "memory": 1e11, "write": 1e9, "read": 1e9})

    def join_mesh(self, rank, world_size, config: SentConfig, store, generation, stage_of, plan=""):
        self.rank, self.world_size, self.config = rank, world_size, config
        self.orders = Orders(f"\0{zlib.crc32(self.run_dir.encode())}-{os.getppid()}-{generation}", rank, world_size)
        axes = {"stage": config.pipeline.stages, "data": config.parallel.data, **config.tensor.axes}
        where = Mesh.arrange_axes(axes).rank_coordinates(rank)
        return Joined(rank, where, os.getpid(), "simulated")

    def build_trainer(
        self,
        rows: list[list[list[int]]],
        domains: list[str] = (),
        corpus: str = "",
        reach: dict[str, str] | None = None,
        fresh: bool = True,
    ):
        assert len(domains) == self.world_size and rows
        return Built(1_367_000_000, "cpu", None, ["exp_avg", "exp_avg_sq"])

    def recover_state(self, source: MemorySource):
        assert len(source.new_rank_by_old) <= self.world_size

    def step(self, step, limit=math.inf, faults: list[Fault] = ()):
        if step == LATE_STEP:
            for piece in range(8):
                PROGRESS.enter_section(f"piece {piece}")
                time.sleep(self.config.elastic.hang_seconds / 8)
        for fault in faults:
            if fault.rank == self.rank:
                with open(f"{self.run_dir}/struck", "w") as file:
                    file.write(str(time.monotonic()))
                inject_failure(fault.kind)
        return report(step, self.world_size) if self.rank == 0 else Taken(step)

    def lead(self, step: int, limit: float = math.inf, faults: list[Fault] = ()):
        order = json.dumps([step, list(map(vars, faults))])
        return self.orders.pass_on(order, lambda: self.step(step, limit, faults))

    def follow(self):
        self.orders.ear.connect()
        for order in self.orders.heard():
            step, faults = schema.parse_value(tuple[int, list[Fault]], json.loads(order))
            PROGRESS.begin_call(f"step({step})")
            self.step(step, math.inf, faults)

    def let_go(self):
        self.orders.pass_on("")

    def confirm_idle(self):
        pass

    def abort(self):
        if self.orders:
            self.orders.close()

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
