"""What one worker does, whoever started it: Ray, a plain process, torchrun or the launching process itself."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Sequence
from concurrent import futures
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from platform import data
from platform.boundary.terminal import say, tolerated
from platform.checkpoint import Corrupt, Memory, Refused, connect, load
from platform.config.extensions import load_extensions
from platform.config.fields import Config, ConfigError
from platform.optimizer.optimizers import warm
from platform.parallel.communicator.base import Alone, Communicator, Launch
from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.communicator.sockets import open_sockets
from platform.parallel.communicator.torch_distributed import CONNECT, ProcessGroups
from platform.plan.core.plan_data import digest
from platform.plan.core.step_collectives import groups as needed_groups
from platform.plan.language.mesh import Mesh
from platform.plan.schedule.rows import Rows
from platform.planning.make_plan import make_plan
from platform.train.recovery import places
from platform.train.recovery.proof import proof
from platform.train.recovery.source import gathering, who_has
from platform.train.recovery.verify import differing
from platform.train.step.faults import Fault
from platform.train.step.step_report import Report
from platform.train.step.trainer import Trainer
from platform.train.step.training_state import State

JOIN_SECONDS = 600.0  # for all ranks to be there; the driver ends it earlier, by taking the store away


class Worker:
    """Member `number` of a crew, and in each generation one of its ranks, or a spare. Everything that goes in and comes
    out is plain data.

    The order of calls is, in each generation, `prove`, `form`, `build`, perhaps `restore` or `recover`, then `step`,
    `snapshot`, `write`, `written`, `evaluate` and `sample` on all ranks alike, `leave`; at the end `close`.
    """

    trainer: Any  # a Trainer from `build` to `leave`
    state: Any  # a State, likewise
    report: Any  # a Report, likewise

    def __init__(self, config: dict[str, Any], number: int, *, device: str, run_dir: str, threads: int):
        self._configure(config)
        self.number, self.run_dir, self.device = number, Path(run_dir), device
        self.communicator: Communicator | None = None
        self.memories: dict[int, Memory] = {}  # by generation; older ones until the newest has a whole snapshot
        torch.set_num_threads(threads)
        warm(self.config.optimizer)

    def _configure(self, config: dict[str, Any]) -> None:
        self.config = Config.from_dict(config)
        if mistakes := load_extensions(self.config.extend):
            raise ConfigError(mistakes)

    def prove(self, probe: str) -> dict[str, Any]:
        """Where this worker is, what it sees of the run's places and what it runs; see `train.recovery.proof`."""
        return proof(self.config, self.run_dir, probe)

    def form(
        self,
        rank: int,
        world_size: int,
        config: dict[str, Any],
        store: tuple[str, int],
        generation: int,
        stage_of: Sequence[int],
        plan: str = "",
    ) -> dict[str, Any]:
        """Joins generation `generation` as `rank` through the driver's TCPStore at (host, port) and builds the groups.

        `config`: of the same run, perhaps with another plan. `stage_of`: the pipeline stage of every model chunk, which
        the driver has from the schedule. `plan`: the digest that its plan must have, "" for any. Raises
        RuntimeError where a generation has not been left, ValueError for another plan.
        """
        if self.communicator:
            raise RuntimeError("this worker is still in the generation before; it has to leave that first")
        self._configure(config)
        self.rank, self.world_size, self.generation = rank, world_size, generation
        self.plan = make_plan(self.config, stage_of=stage_of)
        if plan and (own := digest(self.plan)) != plan:
            raise ValueError(f"this worker plans {own}, and the driver {plan}: they run different code")
        if self.plan.mesh.size != world_size:
            raise ValueError(f"the plan is for {self.plan.mesh.size} workers, the world has {world_size}")
        mesh = self.plan.mesh
        device = self._local_device()
        if world_size == 1:
            self.communicator = Alone(mesh, device)
        else:
            with PROGRESS.waiting("form"):
                before = open_sockets()
                self._join(rank, world_size, store, generation)
                groups = ProcessGroups(mesh, rank, needed_groups(self.plan), device)
                groups.meet(self.plan.neighbours)
                if self.device == "cpu":
                    groups.connections = dict(open_sockets().items() - before.items())
                self.communicator = groups
        if self.config.monitor.log_launches:
            self.communicator.log = []
        return {
            "rank": self.rank,
            "coordinates": mesh.coordinates(self.rank),
            "pid": os.getpid(),
            "node": socket.gethostname(),
        }

    def _local_device(self) -> str:
        if self.device != "cuda":
            return self.device
        torch.cuda.set_device(0)  # each worker's process sees one
        return "cuda:0"

    def _join(self, rank: int, size: int, address: tuple[str, int], generation: int | str) -> None:
        store = dist.PrefixStore(f"generation/{generation}", dist.TCPStore(*address, is_master=False))
        if store.add("there", 1) == size:
            store.set("all", "")
        store.wait(["all"], timedelta(seconds=JOIN_SECONDS))
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=CONNECT)

    def build(self, rows: list[Any], domains: Sequence[str] = ()) -> dict[str, Any]:
        """Parameters, optimizer and data. `rows`: what this stage runs, see `platform.plan.schedule.rows.Rows.plain`;
        `domains`: the node of every rank, () where all run on one."""
        assert self.communicator
        c = self.config
        self.trainer = Trainer(c, self.plan, self.communicator, data.of(c), Rows.from_plain(rows))
        self.state = State(self.trainer)
        self.report = Report(self.plan, self.communicator, c.elastic.slow)
        if c.elastic.snapshot_every:
            homes, pinned = domains or [""] * self.world_size, self.device == "cuda"
            self.memories[self.generation] = Memory(self.state.held, homes, self.rank, pinned)
        device = torch.cuda.get_device_properties() if self.device == "cuda" else None
        return {
            "parameters": self.plan.parameters_at(self.communicator.coordinates),
            "device": device.name if device else "cpu",
            "memory": device.total_memory if device else None,  # bytes; host memory is everybody's
        }

    def step(self, step: int, limit: float = inf, faults: Sequence[str] = ()) -> dict[str, Any]:
        """Update `step` (from 1), see `Trainer.step`; every `elastic.snapshot_every` steps its result is held in memory
        too. Returns `Report.together`. `faults`: those that strike in this step, on any rank."""
        assert self.communicator
        self._forget_generations()
        mine = [fault for fault in map(Fault.parse, faults) if fault.rank == self.rank]
        verified = self.config.train.verify_every
        verify = partial(self._verify, step) if verified and step % verified == 0 else None
        report = self.trainer.step(step, limit, next(iter(mine), None), verify)
        differ = "damaged" in report or "undecided" in report
        done = not report["skipped"] or (self.config.train.on_spike == "skip" and not differ)
        if (every := self.config.elastic.snapshot_every) and step % every == 0 and done:
            report["seconds"]["checkpoint"] += (seconds := self._hold(step))
            report["step_seconds"] += seconds
        if self.communicator.log is not None:
            self._write_launches(self.communicator.log)
        return self.report.together(report)

    def _verify(self, step: int) -> dict[str, Any]:
        """Compare this rank's state with its replicas', see `differing`."""
        memory = self.memories.get(self.generation)
        before = memory.at(step - 1) if memory and step - 1 in memory.steps else None
        return differing(self.trainer, self.state, before)

    def _forget_generations(self) -> None:
        """Once this one takes a step, all of its ranks have the state that it starts from."""
        self.memories = {g: memory for g, memory in self.memories.items() if g == self.generation}

    def _hold(self, step: int) -> float:
        """Copies the state to memory, see `Memory.hold`; returns the seconds that it took."""
        assert self.communicator
        begin = time.perf_counter()
        with self.trainer.clock.section("checkpoint"):
            transfer = self.communicator.transfer
            self.memories[self.generation].hold(step, self.state.blocks(), self.state.values(), transfer)
        return time.perf_counter() - begin

    def gather(self, source: dict[str, Any], rank: int, store: tuple[str, int], generation: str) -> None:
        """Before a generation in which some survivors have no seat, so that the others get what only these have. All
        `gathered` of the source call it, each with its place among them as `rank`; the group, whose store has the
        prefix `generation`, ends with the call."""
        mesh = Mesh.of({"data": len(source["gathered"])})
        with PROGRESS.waiting("gather"):
            self._join(rank, mesh.size, store, generation)
        self.communicator = communicator = ProcessGroups(mesh, rank, (), self._local_device())
        snapshot = self.memories[source["generation"]].at(source["step"])
        snapshot.take_over(gathering(source)[1], rank, communicator.transfer)

    def recover(self, source: dict[str, Any]) -> None:
        """Takes over the state that survivors of a generation hold in memory, and holds it under this one's plan, so
        that nothing is lost if this one fails at once. All ranks call it, those that hold nothing too.

        `source`: see `platform.train.recovery.source.who_has`.
        """
        memory = self.memories[source["generation"]] if self.rank in dict(source["ranks"]).values() else None
        if memory:
            memory.keep_only(source["step"])
        self.state.recover(who_has(source), memory.at(source["step"]) if memory else None)
        self._hold(source["step"])

    def _write_launches(self, log: list[Launch]) -> None:
        path = self.run_dir / "logs" / f"launches-{self.rank}.jsonl"
        with tolerated(say, str(path)):
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(vars(launch)) + "\n" for launch in log)
        log.clear()

    def snapshot(self) -> dict[str, Any]:
        """Copies this rank's share of the state to host memory; {"values": the optimizer's numbers, "tensors": on rank
        0, name -> global shape}."""
        self.state.image.fill(self.state.blocks())
        tensors = {h.name: list(h.shape) for h in self.state.held} if self.rank == 0 else {}
        return {"tensors": tensors, "values": self.state.values()}

    def write(self, directory: str) -> None:
        """Begins to write what the last `snapshot` copied into a checkpoint. `written` tells how it ends."""
        storage = connect(places.home(self.config))
        writer = futures.ThreadPoolExecutor(1, "checkpoint")
        self._written = writer.submit(self.state.image.write, storage, directory)
        writer.shutdown(wait=False)  # ends when it is done

    def written(self, seconds: float) -> dict[str, Any] | None:
        """Return the report of `Image.write`, or {"error": why} where the storage fails, which is no failure of this
        worker; None where it goes on for longer than `seconds`."""
        if futures.wait([self._written], seconds).not_done:
            return None
        try:
            return self._written.result()
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def restore(self, directory: str, own: bool = False) -> dict[str, str]:
        """Takes over the state of a checkpoint of any plan, from where the run resumes, or one of its `own`. {}, or,
        alike on all ranks and with an undefined state, {"corrupt" | "refused" | "failed": why}."""
        storage = connect(places.home(self.config) if own else places.source(self.config)[0])
        manifest = load(storage, directory)  # what goes wrong here does on this rank alone, and is its failure
        try:
            self.state.restore(storage, directory, manifest)
        except Corrupt as error:
            return {"corrupt": str(error)}
        except Refused as error:
            return {"refused": str(error)}
        except OSError as error:
            return {"failed": str(error)}
        if self.config.elastic.snapshot_every:
            self._hold(manifest.meta.step)
        return {}

    def evaluate(self) -> dict[str, float]:
        """{"val_loss": mean loss per token of the held-out batches}, equal on all ranks."""
        return self.trainer.evaluate()

    def sample(self, tokens: int) -> str:
        """Generated text, equal on all ranks."""
        return self.trainer.sample(tokens)

    def abort(self) -> None:
        """From another thread: frees a call that waits in a collective, where the backend can. It then raises."""
        if communicator := self.communicator:
            communicator.abort()

    def leave(self) -> None:
        """Leaves the generation: its groups, and the memory of its model. In any state, also again; then `form` may
        follow. Raises RuntimeError where the device does not work any more: this process is of no use then."""
        communicator, self.communicator = self.communicator, None
        self.trainer = self.state = self.report = None
        if communicator:
            communicator.abort()  # after a failure, closing would wait for what is under way
            communicator.close()
        elif dist.is_initialized():  # it failed while it joined
            dist.destroy_process_group()
        gc.collect()  # autograd's graphs have cycles
        if self.device == "cuda":
            torch.cuda.synchronize()  # an error of the device is for good
            torch.cuda.empty_cache()

    def close(self) -> None:
        """The end; may be called after a failure."""
        self.leave()
