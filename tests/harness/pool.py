"""A pool of processes on gloo, started once per test session: each job forms its groups anew, as a generation does."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from platform.cluster.crew.job import CUDA_ENVIRONMENT
from tests.harness import warm
from tests.harness.one_card import as_a_machine

SIZE = 8
TIMEOUT = 120.0


def _serve(rank: int, pipe: Connection, port: int, device: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if device == "cuda":
        os.environ.update(CUDA_ENVIRONMENT | as_a_machine(rank))
    import torch
    import torch.distributed as dist

    from platform.plan.step_collectives import process_groups
    from platform.runtime.process_groups import ProcessGroups, connect_process_groups

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while (job := pipe.recv()) is not None:
        generation, work, config, plan = job
        try:
            if device == "cuda":
                address = "127.0.0.1", port
                groups = process_groups(plan)
                communicator = connect_process_groups(
                    plan.mesh, rank, address, generation, groups, "cuda:0", plan.neighbour_stages
                )
                pipe.send(("done", work(config, plan, communicator)))
                communicator.abort()  # as Worker.leave does
                communicator.close()
                continue
            rendezvous = dist.PrefixStore(f"generation/{generation}", store)
            dist.init_process_group(
                "gloo", store=rendezvous, rank=rank, world_size=plan.mesh.world_size, timeout=timedelta(seconds=60)
            )
            communicator = ProcessGroups(plan.mesh, rank, process_groups(plan), neighbours=plan.neighbour_stages)
            result = work(config, plan, communicator)
            communicator.barrier()
            communicator.close()
            pipe.send(("done", result))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
            if dist.is_initialized():
                dist.destroy_process_group()


class Pool:
    """`run(work, config, plan)` calls work(config, plan, communicator) on plan.mesh.size of `size` processes, which
    may take `timeout` seconds. `device`: cpu, with gloo, or cuda, with NCCL and all of them on one GPU."""

    def __init__(self, size: int = SIZE, timeout: float = TIMEOUT, device: str = "cpu") -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        warm.start()
        self._timeout = timeout
        self._pipes, self._processes, self._generation = [], [], 0
        for rank in range(size):
            ours, theirs = warm.CONTEXT.Pipe()
            process = warm.CONTEXT.Process(target=_serve, args=(rank, theirs, self._store.port, device), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Any, config: Any, plan: Any) -> list[Any]:
        self._generation += 1
        pipes = self._pipes[: plan.mesh.world_size]
        for pipe in pipes:
            pipe.send((self._generation, work, config, plan))
        answers = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(self._timeout), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (status, value) in enumerate(answers):
            assert status == "done", f"rank {rank}: {value}"
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
