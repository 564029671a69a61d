"""A crew of simulated workers, many per process, that notes what its calls cost the driver."""

import multiprocessing
import signal
import time
from dataclasses import dataclass, replace

from platform.cluster.crew import remote_crew
from platform.cluster.crew.crew import Launcher
from platform.cluster.crew.job import assign_worker
from platform.cluster.crew.remote_crew import RemoteCrew
from tests.doubles.simulated_worker import node

EXIT_SECONDS = 3.0


@dataclass(frozen=True)
class Meter:
    """Readings at one moment: seconds of the clock and of the driver's CPU (all threads), bytes to and from members."""

    clock: float
    cpu: float
    sent: int
    received: int

    def __sub__(self, before):
        return Meter(*(a - b for a, b in zip(vars(self).values(), vars(before).values(), strict=True)))


@dataclass(frozen=True)
class Call:
    """`number`: as messages have it; `failed`: it raised."""

    number: int
    method: str
    args: tuple
    begin: Meter
    end: Meter
    failed: bool


class SimulatedCrew(RemoteCrew):
    """Notes what its calls cost."""

    def __init__(self, job, spares=0, *, per_node):
        self.calls = []
        super().__init__(Nodes(per_node), job, spares)

    def meter(self):
        board = self._roster.board
        return Meter(time.monotonic(), time.process_time(), board.sent, board.received)

    def call_ranks(self, method, *args, **keywords):
        return self._noted(super().call_ranks, method, method, args, keywords)

    def lead_step(self, step, *args, **keywords):
        if self.job.world_size < remote_crew.FOLLOWED:
            return super().lead_step(step, *args, **keywords)  # which calls
        return self._noted(super().lead_step, "step", step, args, keywords)

    def _noted(self, function, method, first, args, keywords):
        begin, failed = self.meter(), True
        try:
            values = function(first, *args, **keywords)
            failed = False
            return values
        finally:
            arguments = args if first == method else (first, *args)
            self.calls.append(Call(self._call, method, arguments, begin, self.meter(), failed))


class Nodes(Launcher):
    """`per_node` members are threads of one process, which is a node: they die together."""

    def __init__(self, per_node):
        super().__init__()
        self.per_node, self._nodes = per_node, {}  # number -> its process

    def prepare_launch(self, job, size):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.doubles.simulated_worker"])  # torch is imported once
        return "127.0.0.1"

    def launch_workers(self, job, numbers, board):
        for at in range(0, len(numbers), self.per_node):
            of_node = numbers[at : at + self.per_node]
            name = f"node{of_node[0] // self.per_node}"
            places = [assign_worker(job, n, local_rank=0, local_world_size=1, group_rank=0) for n in of_node]
            # what is a process's own, its members have not
            places = [replace(place, log="", environment={}, node=name) for place in places]
            told = (places, board.address, [board.member_token(number) for number in of_node])
            process = self._context.Process(target=node, args=told, name=name, daemon=True)
            process.start()
            self._nodes |= dict.fromkeys(of_node, process)

    def describe_exit(self, number, seconds):
        self._nodes[number].join(seconds)
        code = self._nodes[number].exitcode
        if code is None:
            return None
        return f"its node was killed by {signal.Signals(-code).name}" if code < 0 else f"its node's status is {code}"

    def kill_worker(self, number):
        """It ends when its connection is closed."""

    def end_workers(self, polite):
        deadline = time.monotonic() + (EXIT_SECONDS if polite else 0.0)
        processes = set(self._nodes.values())
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
