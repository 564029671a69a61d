"""Worker: answers the driver's calls in any kind of crew, started by Ray, as a plain process, by torchrun or inline."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from concurrent import futures
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from platform.boundary.terminal import print_line, tolerated
from platform.checkpoint.in_memory.snapshots import RankSnapshots
from platform.checkpoint.storage.catalogue import load_manifest
from platform.checkpoint.storage.manifest import Corrupt, Refused
from platform.checkpoint.storage.report import FileReport
from platform.checkpoint.storage.storage import open_storage
from platform.config.extensions import load_extensions
from platform.config.fields import Config, ConfigError, SentConfig
from platform.data.corpus import corpus_of
from platform.optimizer.optimizers import preload_imports
from platform.parallel.communicator.base import Communicator, Launch, SingleRank
from platform.parallel.communicator.progress import PROGRESS
from platform.parallel.communicator.sockets import open_sockets
from platform.parallel.communicator.torch_distributed import CONNECT, ProcessGroups
from platform.plan.core.plan_data import digest
from platform.plan.core.step_collectives import process_groups
from platform.plan.language.mesh import Mesh
from platform.plan.schedule.rows import StageRows
from platform.planning.make_plan import make_plan
from platform.train.protocol.answers import (
    Built,
    Copied,
    Differences,
    Joined,
    Proof,
    StepReport,
    Taken,
    Unrestored,
    Unwritten,
)
from platform.train.recovery import urls
from platform.train.recovery.proof import proof
from platform.train.recovery.source import Source
from platform.train.recovery.verify import differing
from platform.train.step.faults import Fault
from platform.train.step.step_report import Combiner
from platform.train.step.trainer import Trainer
from platform.train.step.training_state import State

JOIN_SECONDS = 600.0  # for all ranks to join; the driver ends the wait earlier by closing the store


class Worker:
    """Member `number` of a crew; in each generation it is seated as one of the ranks or is a spare. Arguments of calls
    are read as the signatures here declare them, results as `platform.train.protocol.answers` does.

    The driver's calls in a generation are, in order: `prove`, `form`, `build`, perhaps `restore` or `recover`; then
    `step`, `snapshot`, `write`, `written`, `evaluate` and `sample`, each on all ranks; then `leave`. The last call of
    all is `close`.
    """

    trainer: Any  # a Trainer from `build` to `leave`
    state: Any  # a State, likewise
    combiner: Any  # a Combiner, likewise

    def __init__(self, config: Config, number: int, *, device: str, run_dir: str, threads: int):
        self._configure(config)
        self.number, self.run_dir, self.device = number, Path(run_dir), device
        self.communicator: Communicator | None = None
        self.memories: dict[int, RankSnapshots] = {}  # by generation; older ones until the newest takes a step
        torch.set_num_threads(threads)
        preload_imports(self.config.optimizer)

    def _configure(self, config: Config) -> None:
        self.config = config
        if mistakes := load_extensions(self.config.extend):
            raise ConfigError(mistakes)

    def prove(self, probe: str) -> Proof:
        """Return the proof of this worker's environment."""
        return proof(self.config, self.run_dir, probe)

    def form(
        self,
        rank: int,
        world_size: int,
        config: SentConfig,
        store: tuple[str, int],
        generation: int,
        stage_of: list[int],
        plan: str = "",
    ) -> Joined:
        """Join generation `generation` as `rank` through the driver's TCPStore at (host, port) and build the groups.

        `config`: of the same run, perhaps with another plan. `stage_of`: the pipeline stage of every model chunk, from
        the driver's schedule. `plan`: the digest that this worker's plan must have, "" for any. Raises RuntimeError if
        the previous generation has not been left, ValueError if the plan is another.
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
            self.communicator = SingleRank(mesh, device)
        else:
            with PROGRESS.waiting("form"):
                before = open_sockets()
                self._join(rank, world_size, store, generation)
                groups = ProcessGroups(mesh, rank, process_groups(self.plan), device)
                groups.meet(self.plan.neighbours)
                if self.device == "cpu":
                    groups.connections = dict(open_sockets().items() - before.items())
                self.communicator = groups
        if self.config.monitor.log_launches:
            self.communicator.log = []
        return Joined(rank, mesh.coordinates(rank), os.getpid(), socket.gethostname())

    def _local_device(self) -> str:
        if self.device != "cuda":
            return self.device
        torch.cuda.set_device(0)  # each worker process sees a single GPU
        return "cuda:0"

    def _join(self, rank: int, size: int, address: tuple[str, int], generation: int | str) -> None:
        store = dist.PrefixStore(f"generation/{generation}", dist.TCPStore(*address, is_master=False))
        if store.add("there", 1) == size:
            store.set("all", "")
        store.wait(["all"], timedelta(seconds=JOIN_SECONDS))
        backend = "nccl" if self.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=CONNECT)

    def build(self, rows: list[Any], domains: list[str] | None = None) -> Built:
        """Build parameters, optimizer and data. `rows`: the schedule rows of this stage, from
        `platform.plan.schedule.rows.StageRows.plain`; `domains`: the node of every rank, None if all run on one."""
        assert self.communicator
        c = self.config
        self.trainer = Trainer(c, self.plan, self.communicator, corpus_of(c), StageRows.from_plain(rows))
        self.state = State(self.trainer)
        self.combiner = Combiner(self.plan, self.communicator, c.elastic.slow)
        if c.elastic.snapshot_every:
            homes, pinned = domains or [""] * self.world_size, self.device == "cuda"
            self.memories[self.generation] = RankSnapshots(self.state.held, homes, self.rank, pinned)
        device = torch.cuda.get_device_properties() if self.device == "cuda" else None
        parameters = self.plan.parameters_at(self.communicator.coordinates)
        return Built(parameters, device.name, device.total_memory) if device else Built(parameters, "cpu", None)

    def step(self, step: int, limit: float = inf, faults: list[Fault] | None = None) -> StepReport | Taken:
        """Run training step `step` (from 1), see `Trainer.step`, and snapshot the state to memory every
        `elastic.snapshot_every` steps. Returns what `Combiner.together` does. `faults`: all that strike in this step,
        on any rank."""
        assert self.communicator
        self._forget_generations()
        mine = [fault for fault in faults or () if fault.rank == self.rank]
        verified = self.config.train.verify_every
        verify = partial(self._verify, step) if verified and step % verified == 0 else None
        report = self.trainer.step(step, limit, next(iter(mine), None), verify)
        done = not report.skipped or (self.config.train.on_spike == "skip" and not report.differences)
        if (every := self.config.elastic.snapshot_every) and step % every == 0 and done:
            report.seconds["checkpoint"] += (seconds := self._hold(step))
            report.step_seconds += seconds
        if self.communicator.log is not None:
            self._write_launches(self.communicator.log)
        return self.combiner.together(report)

    def _verify(self, step: int) -> Differences:
        """Compare this rank's state with that of its replicas, see `differing`."""
        memory = self.memories.get(self.generation)
        before = memory.at(step - 1) if memory and step - 1 in memory.steps else None
        return differing(self.trainer, self.state, before)

    def _forget_generations(self) -> None:
        """Drop snapshots of older generations: all ranks of this one have its state once it takes a step."""
        self.memories = {g: memory for g, memory in self.memories.items() if g == self.generation}

    def _hold(self, step: int) -> float:
        """Copy the state to a snapshot in memory, see `RankSnapshots.hold`. Returns the seconds taken."""
        assert self.communicator
        begin = time.perf_counter()
        with self.trainer.clock.section("checkpoint"):
            transfer = self.communicator.transfer
            self.memories[self.generation].hold(step, self.state.blocks(), self.state.values(), transfer)
        return time.perf_counter() - begin

    def gather(self, source: Source, rank: int, store: tuple[str, int], generation: str) -> None:
        """Transfer parts of a snapshot before a generation in which some survivors have no seat: the seated ones get
        what only the others hold. Called on all `gathered` members of the source, each with its index among them as
        `rank`. The group, whose store prefix is `generation`, serves this call only: `leave` follows."""
        mesh = Mesh.of({"data": len(source.gathered)})
        with PROGRESS.waiting("gather"):
            self._join(rank, mesh.size, store, generation)
        self.communicator = communicator = ProcessGroups(mesh, rank, (), self._local_device())
        snapshot = self.memories[source.generation].at(source.step)
        snapshot.take_over(source.gathering()[1], rank, communicator.transfer)

    def recover(self, source: Source) -> None:
        """Recover the state from snapshots that survivors of a generation hold in memory, and snapshot it again under
        this generation's plan, so that nothing is lost if this one fails at once. All ranks call it together, also
        those that hold nothing."""
        memory = self.memories[source.generation] if self.rank in source.ranks.values() else None
        if memory:
            memory.keep_only(source.step)
        self.state.recover(source.holders(), memory.at(source.step) if memory else None)
        self._hold(source.step)

    def _write_launches(self, log: list[Launch]) -> None:
        path = self.run_dir / "logs" / f"launches-{self.rank}.jsonl"
        with tolerated(print_line, str(path)):
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(vars(launch)) + "\n" for launch in log)
        log.clear()

    def snapshot(self) -> Copied:
        """Copy this rank's share of the state to host memory for a checkpoint."""
        self.state.image.fill(self.state.blocks())
        tensors = {h.name: list(h.shape) for h in self.state.held} if self.rank == 0 else {}
        return Copied(tensors, self.state.values())

    def write(self, directory: str) -> None:
        """Start writing the copy of the last `snapshot` to a checkpoint directory; `written` returns the outcome."""
        storage = open_storage(urls.home(self.config))
        writer = futures.ThreadPoolExecutor(1, "checkpoint")
        self._written = writer.submit(self.state.image.write, storage, directory)
        writer.shutdown(wait=False)  # its thread ends after the write

    def written(self, seconds: float) -> FileReport | Unwritten | None:
        """Return the outcome of `write`, None if it is still running after `seconds`."""
        if futures.wait([self._written], seconds).not_done:
            return None
        try:
            return self._written.result()
        except OSError as error:
            return Unwritten(f"{type(error).__name__}: {error}")

    def restore(self, directory: str, own: bool = False) -> Unrestored | None:
        """Restore the state from a checkpoint of any plan, in the storage that the run resumes from or, if `own`, saves
        to. Returns, alike on all ranks, None or why the state is undefined now."""
        storage = open_storage(urls.home(self.config) if own else urls.source(self.config)[0])
        manifest = load_manifest(storage, directory)  # an error here concerns this rank alone, and fails it
        try:
            self.state.restore(storage, directory, manifest)
        except Corrupt as error:
            return Unrestored("corrupt", str(error))
        except Refused as error:
            return Unrestored("refused", str(error))
        except OSError as error:
            return Unrestored("failed", str(error))
        if self.config.elastic.snapshot_every:
            self._hold(manifest.meta.step)
        return None

    def evaluate(self) -> float:
        """Return the mean loss per token of the held-out batches, equal on all ranks."""
        return self.trainer.evaluate()

    def sample(self, tokens: int) -> str:
        """Generate text of `tokens` tokens, equal on all ranks."""
        return self.trainer.sample(tokens)

    def abort(self) -> None:
        """Make a call that waits in a collective raise, if the backend can. Called from another thread."""
        if communicator := self.communicator:
            communicator.abort()

    def leave(self) -> None:
        """Leave the generation: close its groups and free its model. Works in any state, repeatedly too; `form` may
        follow. Raises RuntimeError if the device no longer works, which makes this process useless."""
        communicator, self.communicator = self.communicator, None
        self.trainer = self.state = self.combiner = None
        if communicator:
            communicator.abort()  # after a failure, closing would wait for collectives in progress
            communicator.close()
        elif dist.is_initialized():  # joining failed
            dist.destroy_process_group()
        gc.collect()  # autograd's graphs have cycles
        if self.device == "cuda":
            torch.cuda.synchronize()  # raises if the device is broken, which is permanent
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Close the worker for good; may be called after a failure."""
        self.leave()
