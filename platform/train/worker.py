"""What one worker does, whoever started it: Ray, a plain process, torchrun or the launching process itself."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from platform import data
from platform.checkpoint import Corrupt, Memory, Refused, connect, load
from platform.config import Config, ConfigError
from platform.extensions import load_extensions
from platform.parallel.groups import Alone, Communicator, ProcessGroups
from platform.plan.mesh import Mesh
from platform.plan.rows import Rows
from platform.train import places
from platform.train.plan import make_plan
from platform.train.state import State
from platform.train.survivors import gathering, who_has
from platform.train.trainer import Trainer

TIMEOUT = timedelta(minutes=10)  # of one collective


class Worker:
    """One rank. Everything that goes in and comes out is plain data.

    The order of calls is `form`, `build`, perhaps `restore`, then `step`, `snapshot`, `write`, `written`, `evaluate`
    and `sample` on all ranks alike, `close`.
    """

    def __init__(self, config: dict[str, Any], rank: int, world_size: int, *, device: str, run_dir: str, threads: int):
        self.config = Config.from_dict(config)
        if mistakes := load_extensions(self.config.extend):
            raise ConfigError(mistakes)
        self.rank, self.world_size, self.run_dir = rank, world_size, Path(run_dir)
        self.device = device
        self.memories: dict[int, Memory] = {}  # by generation; older ones until the newest has a whole snapshot
        torch.set_num_threads(threads)

    def form(self, store: tuple[str, int], generation: int, stage_of: Sequence[int]) -> dict[str, Any]:
        """Joins generation `generation` through the driver's TCPStore at (host, port) and builds the groups.

        `stage_of`: the pipeline stage of every model chunk, which the driver has from the schedule.
        """
        self.generation = generation
        self.plan = make_plan(self.config, stage_of=stage_of)
        if self.plan.mesh.size != self.world_size:
            raise ValueError(f"the plan is for {self.plan.mesh.size} workers, the world has {self.world_size}")
        mesh = self.plan.mesh
        device = self._local_device()
        self.communicator: Communicator
        if self.world_size == 1:
            self.communicator = Alone(mesh, device)
        else:
            self._join(store, generation, self.rank, self.world_size)
            self.communicator = ProcessGroups(mesh, self.rank, self.plan.groups, device)
            self.communicator.meet(self.plan.neighbours)
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
        local = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        torch.cuda.set_device(local)
        return f"cuda:{local}"

    def _join(self, store: tuple[str, int], generation: int, rank: int, world_size: int) -> None:
        rendezvous = dist.PrefixStore(f"generation/{generation}", dist.TCPStore(*store, is_master=False))
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=rendezvous, rank=rank, world_size=world_size, timeout=TIMEOUT)

    def build(self, rows: list[Any], domains: Sequence[str] = ()) -> dict[str, Any]:
        """Parameters, optimizer and data. `rows`: what this stage runs, see `platform.plan.rows.Rows.plain`; `domains`:
        the node of every rank, () where all run on one."""
        c = self.config
        self.trainer = Trainer(c, self.plan, self.communicator, data.of(c), Rows.from_plain(rows))
        self.state = State(self.trainer)
        if c.elastic.snapshot_every:
            homes, pinned = domains or [""] * self.world_size, self.device == "cuda"
            self.memories[self.generation] = Memory(self.state.held, homes, self.rank, pinned)
        name = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return {"parameters": self.plan.parameters_at(self.communicator.coordinates), "device": name}

    def step(self, step: int) -> dict[str, Any]:
        """Update `step` (from 1), see `Trainer.step`; every `elastic.snapshot_every` steps its result is held in memory
        too."""
        self._forget_generations()
        report = self.trainer.step(step)
        if (every := self.config.elastic.snapshot_every) and step % every == 0:
            report["seconds"]["checkpoint"] += (seconds := self._hold(step))
            report["step_seconds"] += seconds
        if self.communicator.log is not None:
            self._write_launches()
        return report

    def _forget_generations(self) -> None:
        """Once this one takes a step, all of its ranks have the state that it starts from."""
        self.memories = {g: memory for g, memory in self.memories.items() if g == self.generation}

    def _hold(self, step: int) -> float:
        """Copies the state to memory, see `Memory.hold`; returns the seconds that it took."""
        begin = time.perf_counter()
        transfer = self.communicator.transfer
        self.memories[self.generation].hold(step, self.state.blocks(), self.state.values(), transfer)
        return time.perf_counter() - begin

    def held(self) -> list[tuple[int, list[int]]]:
        """(generation, the steps whose state is whole in this worker's memory) each; may be called after a failure."""
        return [(generation, memory.steps) for generation, memory in self.memories.items() if memory.steps]

    def gather(self, source: dict[str, Any], rank: int, store: tuple[str, int], generation: int) -> None:
        """Before a generation in which some survivors have no seat, so that the others get what only these have. All
        `gathered` of the source call it, each with its place among them as `rank`; the group, whose store has the
        prefix `generation`, ends with the call."""
        mesh = Mesh.of({"data": len(source["gathered"])})
        self._join(store, generation, rank, mesh.size)
        communicator = ProcessGroups(mesh, rank, (), self._local_device())
        try:
            snapshot = self.memories[source["generation"]].at(source["step"])
            snapshot.take_over(gathering(source)[1], rank, communicator.transfer)
        finally:
            communicator.close()

    def recover(self, source: dict[str, Any]) -> None:
        """Takes over the state that survivors of a generation hold in memory, and holds it under this one's plan, so
        that nothing is lost if this one fails at once. All ranks call it, those that hold nothing too.

        `source`: see `platform.train.survivors.who_has`.
        """
        memory = self.memories[source["generation"]] if self.rank in dict(source["ranks"]).values() else None
        if memory:
            memory.keep_only(source["step"])
        self.state.recover(who_has(source), memory.at(source["step"]) if memory else None)
        self._hold(source["step"])

    def _write_launches(self) -> None:
        assert self.communicator.log is not None
        path = self.run_dir / "logs" / f"launches-{self.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.writelines(json.dumps(vars(launch)) + "\n" for launch in self.communicator.log)
        self.communicator.log.clear()

    def snapshot(self) -> dict[str, Any]:
        """Copies this rank's share of the state to host memory; {"values": the optimizer's numbers, "tensors": on rank
        0, name -> global shape}."""
        self.state.image.fill(self.state.blocks())
        tensors = {h.name: list(h.shape) for h in self.state.held} if self.rank == 0 else {}
        return {"tensors": tensors, "values": self.state.values()}

    def write(self, directory: str) -> None:
        """Begins to write what the last `snapshot` copied into a checkpoint. `written` tells how it ends."""
        storage = connect(places.home(self.config))
        writer = ThreadPoolExecutor(1, "checkpoint")
        self._written = writer.submit(self.state.image.write, storage, directory)
        writer.shutdown(wait=False)  # ends when it is done

    def written(self, wait: bool) -> dict[str, Any] | None:
        """The report of `Image.write`, or {"error": why} where the storage fails, which is no failure of this worker;
        None while it goes on, unless told to `wait`."""
        if not (wait or self._written.done()):
            return None
        try:
            return self._written.result()
        except OSError as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def restore(self, directory: str) -> dict[str, str]:
        """Takes over the state of a checkpoint of any plan. {}, or, alike on all ranks and with an undefined state,
        {"corrupt" | "refused" | "failed": why}."""
        storage = connect(places.source(self.config)[0])
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

    def close(self) -> None:
        """Leaves the groups; may be called after a failure."""
        if communicator := getattr(self, "communicator", None):
            communicator.close()
