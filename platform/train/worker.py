"""Worker: answers the driver's calls in any kind of crew, started by Ray, as a plain process, by torchrun or inline."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch

from platform.boundary import schema
from platform.boundary.documents import error_line
from platform.boundary.schema import Real
from platform.boundary.storage import open_storage
from platform.checkpoint.catalogue import find_resume_source, load_manifest
from platform.checkpoint.manifest import FileReport
from platform.checkpoint.snapshots import RankSnapshots, find_copy_peers
from platform.config.fields import Config, SentConfig
from platform.config.identity import find_checkpoint_url
from platform.data.corpus import open_run_corpus
from platform.data.teacher_classes import FILE, encode_records
from platform.model.losses import loss_measures
from platform.optimizer.optimizers import preload_imports
from platform.plan.layout import Mesh
from platform.plan.plan_data import plan_digest
from platform.plan.simulate import StageRows
from platform.plan.step_collectives import may_compile
from platform.predict.choose_schedule import list_process_groups
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank, all_gather_values
from platform.runtime.compilation import reason_uncompiled, use_deterministic_kernels
from platform.runtime.host_memory import HostMemory
from platform.runtime.process_groups import connect_process_groups, leave_default_group, meet_ranks
from platform.runtime.progress import PROGRESS
from platform.train import replies
from platform.train.faults import Fault
from platform.train.gauges import GAUGES
from platform.train.generator import TextGenerator
from platform.train.rehearsal import rehearse_steps
from platform.train.state_recovery import MemorySource, compare_replicas, is_divided
from platform.train.step_report import ReportCombiner, add_unaccounted_seconds
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState, attempt_fill
from platform.train.worker_records import RecordingWorker


class Worker(RecordingWorker):
    """Member `number` of a crew: answers the driver's calls in a worker's process. In each generation it is seated as
    one of the ranks or is a spare. Arguments of calls are read as the signatures here declare them, results as
    `platform.train.replies` does. `run_dir`: the run directory; `threads`: number of torch's threads on the
    CPU.

    The driver's calls in a generation are, in order: `prove_environment`, `join_mesh`, `build_trainer`, perhaps
    `restore_checkpoint`, `recover_state` or `load_initial_weights`, `take_references`, `open_teacher` and
    `rehearse_steps`; then `step`, `take_snapshot`, `copy_state`, `write_checkpoint`, `await_checkpoint`,
    `evaluate_splits`, `measure_loss`, `continue_texts`, `score_texts` and `rank_classes`, each on all ranks; then
    `leave`. The last call of all is `close`. In a large world `lead` on rank 0 and `follow` on the others stand for
    many a `step`. A step may lie between `begin_profile` and `end_profile`.
    """

    trainer: Trainer | None = None  # from `build_trainer` to `leave`, as are these
    state: RankTrainingState | None = None
    combiner: ReportCombiner | None = None
    _generator: TextGenerator | None = None  # from the first question of a generation on

    def __init__(self, config: Config, number: int, *, device: str, run_dir: str, threads: int):
        """Initialise the worker process of crew member `number`, on `device` (cpu | cuda), without a rank yet."""
        super().__init__(config, device, run_dir)
        self.number = number
        self.memories: dict[int, RankSnapshots] = {}  # by generation; older ones until the newest takes a step
        self.late = device == "cuda"  # a snapshot is copied beside the next step, and whole before that updates
        self._unheld: int | None = None  # the step whose state the next one is to copy
        # the end of the last update, and what reads the state's numbers there, where later work is queued behind it
        self._updated: tuple[torch.cuda.Event, Callable[[], dict[str, Any]]] | None = None
        self._planned: tuple[Config, list[int]] | None = None  # what `plan` has been made of
        torch.set_num_threads(threads)
        for kind in ("bf16", "fp16"):  # products add in fp32, also where cuBLAS splits them: sums over many tokens
            setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", False)
        self._order = ExitStack()
        if config.train.deterministic:
            self._order.enter_context(use_deterministic_kernels(may_compile(config.train.compile, device)))
        preload_imports(self.config.optimizer)

    def join_mesh(
        self,
        rank: int,
        world_size: int,
        config: SentConfig,
        store: tuple[str, int],
        generation: int,
        stage_of: list[int],
        plan: str = "",
    ) -> replies.Joined:
        """Join the mesh that workers form in `generation`, as `rank` of `world_size`: make the plan, and open its
        process groups through the driver's TCPStore `store` (host, port).

        `config`: configuration of the same run, perhaps with another plan. `stage_of`: the pipeline stage of every
        model chunk, from the driver's schedule. `plan`: the digest that this worker's plan must have, "" for any.
        Raises RuntimeError if the previous generation has not been left, ValueError if the plan is another.
        """
        if self.communicator:
            raise RuntimeError("this worker is still in the generation before; it has to leave that first")
        if (config, stage_of) != self._planned:  # it is the same where a spare has taken a seat
            self._apply_config(config)
            self.plan = make_plan(self.config, stage_of=stage_of)
            self._planned = config, stage_of
        self.rank, self.world_size, self.generation = rank, world_size, generation
        if plan and (own_digest := plan_digest(self.plan)) != plan:
            raise ValueError(f"this worker plans {own_digest}, and the driver {plan}: they run different code")
        if self.plan.mesh.world_size != world_size:
            raise ValueError(f"the plan is for {self.plan.mesh.world_size} workers, the world has {world_size}")
        mesh, device = self.plan.mesh, self._select_device()
        if world_size == 1:
            self.communicator = SingleRank(mesh, device)
        else:
            groups, pairs = list_process_groups(self.config, self.plan), self.plan.neighbour_stages
            self.communicator = connect_process_groups(mesh, rank, store, generation, groups, device, pairs)
        if self.config.monitor.log_launches:
            self.communicator.log = []
        return replies.Joined(rank, mesh.rank_coordinates(rank), os.getpid(), socket.gethostname())

    def build_trainer(
        self,
        rows: list[list[list[int]]],
        domains: list[str] | None = None,
        corpus: str = "",
        reach: dict[str, str] | None = None,
        fresh: bool = True,
    ) -> replies.Built:
        """Build this rank's weights, optimizer and data in the mesh that it has joined; return their size and the
        device's. `rows`: the schedule rows of this stage, from `platform.plan.simulate.StageRows.encode_rows`;
        `domains`: the node of every rank, None if all run on one; `corpus`: the folder in which the driver has found
        the tokens, "" for none; `reach`: axes of collectives -> the widest tier of the cluster that their groups span;
        `fresh`: True gives the weights their initial values; False if another call restores them."""
        assert self.communicator
        c, lacking = self._settle_compilation()
        self._unheld = self._updated = None
        data = open_run_corpus(c, entry=corpus)
        for earlier in self.memories.values():
            earlier.move_base_to_host()
        self.trainer = Trainer(c, self.plan, self.communicator, data, StageRows.decode_rows(rows), fresh)
        self.state = RankTrainingState(self.trainer)
        self.combiner = ReportCombiner(self.plan, self.communicator, c.elastic.slow, c.monitor.layers, reach or {})
        GAUGES.start_reading(self.communicator.device)
        shared = False
        if c.elastic.snapshot_interval:
            nodes, all_gather = domains or [""] * self.world_size, partial(all_gather_values, self.communicator)
            options = {"divided": is_divided(c), "pinned": self.device == "cuda"}
            memory = RankSnapshots.open(self.state.held, nodes, self.rank, all_gather, base=self.state.base, **options)
            memory.base = self.state.base_blocks()
            self.communicator.connect_peers(find_copy_peers(memory.held.copies, self.rank))
            self.memories[self.generation], shared = memory, memory.held.shared
        device = torch.cuda.get_device_properties() if self.device == "cuda" else None
        parameters = self.plan.count_parameters_of_rank(self.communicator.coordinates)
        name, capacity = (device.name, device.total_memory) if device else ("cpu", None)
        return replies.Built(parameters, name, capacity, self.state.moments, lacking, shared)

    def _settle_compilation(self) -> tuple[Config, str]:
        """Settle whether this worker compiles: return the configuration with train.compile `on` or `off`, alike on all
        ranks, and, if `auto` would compile but a worker cannot, the reason, else "". Raises RuntimeError if
        train.compile is `on` and this worker cannot."""
        c, asked = self.config, self.config.train.compile
        why = reason_uncompiled(asked, self.device)
        if asked == "on" and why:
            raise RuntimeError(f"train.compile=on: {why}")
        tried = asked == "auto" and self.device == "cuda"
        if tried and self.communicator and self.communicator.is_true_anywhere(bool(why)):
            why = why or "another worker has no compiler"
        return replace(c, train=replace(c.train, compile="off" if why else "on")), why if tried else ""

    def rehearse_steps(self, step: int) -> str:
        """Prepare compiled code for steps from `step` on; return why this rank cannot, else "": see `Trainer`."""
        assert self.trainer
        return rehearse_steps(self.trainer, step)

    def step(
        self, step: int, limit: float = inf, faults: list[Fault] | None = None
    ) -> replies.StepReport | replies.Taken:
        """Run training step `step` (from 1) on this rank, see `Trainer.step`, and snapshot the state to host memory
        every `elastic.snapshot_every` steps: at once or, if `late`, beside the next step. Return the report on all
        ranks if this is rank 0, else an acknowledgement. `limit`: the most that the loss may be for an update;
        `faults`: all failures to be injected in this step, on any rank."""
        assert self.communicator and self.trainer and self.combiner
        begun = time.perf_counter() - PROGRESS.seconds_in_call()
        self._drop_old_snapshots()
        self._begin_snapshot()
        own_faults = [fault for fault in faults or () if fault.rank == self.rank]
        verify_interval = self.config.train.verify_every
        verify = partial(self._compare_replicas, step) if verify_interval and step % verify_interval == 0 else None
        if faults:
            self.trainer.drop_passes_ahead()  # which would not meet them
        report = self.trainer.step(
            step, limit, next(iter(own_faults), None), verify, self._find_step_ahead(step, faults)
        )
        self._move_timeline_into_profile(report)
        skips = report.overflowed or (self.config.train.on_spike == "skip" and not report.differences)
        done = skips or not report.skipped
        if (snapshot_interval := self.config.elastic.snapshot_interval) and step % snapshot_interval == 0 and done:
            if self.late:
                self._unheld = step
            else:
                report.seconds["checkpoint"] += (seconds := self.take_snapshot(step))
                report.step_seconds += seconds
        report.gauges = GAUGES.take_means()
        if (memory := self.memories.get(self.generation)) and memory.complete_steps:
            report.held = memory.complete_steps[-1]
        if self.communicator.log is not None:
            self._write_collective_log(self.communicator.log)
        self.communicator.confirm_uninterrupted()  # an update from interrupted collectives is not acknowledged
        add_unaccounted_seconds(report, time.perf_counter() - begun - self.trainer.aligning)
        combined = self.combiner.combine_reports(report)
        self.communicator.confirm_uninterrupted()
        return combined

    def _find_step_ahead(self, step: int, faults: list[Fault] | None) -> int:
        """Return the step whose passes are launched behind step `step`'s update; 0 if other work comes between."""
        assert self.trainer
        every, last = self.config.eval.every, min(self.config.train.steps, self.config.train.stop_at or inf)
        is_free = self.trainer.runs_ahead and not (self.trainer.aligned or faults or (every and step % every == 0))
        return step + 1 if is_free and step < last else 0

    def lead(
        self, step: int, limit: float = inf, faults: list[Fault] | None = None
    ) -> replies.StepReport | replies.Taken:
        """Pass the driver's order of training step `step` from rank 0 on to all other ranks, which are in `follow`, and
        take the step with them, as `Worker.step` does. Return the report of all ranks, each of which has done its
        update."""
        assert self.communicator
        self.communicator.broadcast_text(json.dumps([step, limit, list(map(vars, faults or ()))]))
        PROGRESS.restart_call_clock()  # others may have been late to take it
        return self.step(step, limit, faults)

    def follow(self) -> None:
        """Take the training steps that rank 0 passes on to this worker, until rank 0 calls `let_go`."""
        assert self.communicator
        while order := self.communicator.broadcast_text():
            step, limit, faults = schema.parse_value(tuple[int, Real, list[Fault]], json.loads(order))
            PROGRESS.begin_call(f"step({step})")
            self.step(step, limit, faults)

    def let_go(self) -> None:
        """Release all other workers from `follow`, so that the driver may call them again. Called on rank 0 alone."""
        assert self.communicator
        self.communicator.broadcast_text("")

    def confirm_idle(self) -> None:
        """Return at once: the reply shows the driver that this worker is not in an earlier call any more."""

    def _compare_replicas(self, step: int) -> replies.Differences:
        """Compare this worker's weights and optimizer state with its replicas' before the update of step `step`."""
        assert self.trainer and self.state
        memory = self.memories.get(self.generation)
        before = memory.find_snapshot(step - 1) if memory and step - 1 in memory.complete_steps else None
        return compare_replicas(self.trainer, self.state, before)

    def _drop_old_snapshots(self) -> None:
        """Drop the in-memory snapshots that this worker took under earlier meshes (generations), to free host memory.
        Called at the start of every training step: all ranks of this generation hold the run's state by then, so no
        rank recovers from older ones."""
        self.memories = {g: memory for g, memory in self.memories.items() if g == self.generation}

    def _begin_snapshot(self) -> None:
        """Begin this worker's in-memory snapshot of the state after the last training step, if one is due. It is copied
        and passed on to peers while the next step runs, whose update waits until `_finish_snapshot` has finished it. It
        overwrites the snapshot before the newest only now, when the driver knows that all ranks have the newest."""
        assert self.communicator and self.trainer and self.state
        self.trainer.settle, self.trainer.note_update = self._finish_snapshot, self._note_update
        updated, self._updated = self._updated, None
        if self._unheld is not None:
            step, self._unheld = self._unheld, None
            memory, transfer = self.memories[self.generation], self.communicator.transfer
            after, values = updated or (None, self.state.read_values)
            memory.begin_snapshot(step, self.state.live_blocks(), values, transfer, after)

    def _note_update(self) -> None:
        """Note the end of a training step's update, for a snapshot begun when passes are queued behind it."""
        assert self.communicator and self.state
        if self.late and self.config.elastic.snapshot_interval and self.communicator.device.type != "cpu":
            self._updated = torch.cuda.current_stream().record_event(), self.state.start_reading_values()

    def _finish_snapshot(self) -> None:
        """Finish the in-memory snapshot begun before this training step, if any, before weights are updated."""
        assert self.trainer
        if (memory := self.memories.get(self.generation)) and memory.has_begun:
            with self.trainer.clock.time_section("checkpoint"), self.trainer.clock.mark_waiting_for_device():
                memory.finish_snapshot()

    def take_snapshot(self, step: int) -> float:
        """Take a snapshot of this rank's training state after step `step` to host memory, and wait until peers have its
        copies; all ranks call it together, the driver before it re-forms the mesh. Return the seconds taken."""
        self._unheld, begin = step, time.perf_counter()
        self._begin_snapshot()
        self._finish_snapshot()
        return time.perf_counter() - begin

    def exchange_snapshots(self, source: MemorySource, rank: int, store: tuple[str, int], generation: str) -> None:
        """Exchange parts of in-memory snapshots between surviving workers, before a mesh forms in which some of them
        get no rank: the others receive the parts that only these hold. Called on all `gathered` members of the source,
        each with its index among them as `rank`. Their connections, made in `store` under the prefix `generation`,
        serve this call only: `leave` follows."""
        mesh = Mesh.arrange_axes({"data": len(source.gathered)})
        with PROGRESS.mark_waiting("gather"):
            self.communicator = communicator = HostMemory(mesh, rank, meet_ranks(mesh.world_size, store, generation))
        memory = self.memories[source.generation]
        passed = source.plan_handovers(memory.held)[1]
        communicator.connect_peers(find_copy_peers(passed, rank))
        memory.exchange_handovers(passed, source.step, rank, communicator.transfer, source.distrusted)

    def recover_state(self, source: MemorySource) -> None:
        """Recover this rank's training state from `source`, snapshots in survivors' memory, and snapshot it under this
        generation's plan, lest a failure at once lose it. All ranks call it together, also ranks that hold nothing."""
        assert self.state
        memory = self.memories[source.generation] if self.rank in source.new_rank_by_old.values() else None
        if memory:
            memory.keep_only_step(source.step)
        survived = source.list_surviving_chains(memory.held if memory else source.formed.build_memory_map())
        snapshot = memory.open_node_snapshot(source.step, source.distrusted) if memory else None
        self.state.recover_state(survived, snapshot)
        self.take_snapshot(source.step)

    def copy_state(self) -> replies.Copied:
        """Copy this rank's share of the training state to host memory, for `write_checkpoint` to write."""
        assert self.state
        self.state.checkpoint_image.fill_parts(self.state.live_blocks())
        tensors = {h.name: list(h.shape) for h in self.state.held} if self.rank == 0 else {}
        return replies.Copied(tensors, self.state.read_values())

    def write_checkpoint(self, directory: str) -> None:
        """Start a thread that writes this rank's last `copy_state` to `directory` of the checkpoint storage."""
        assert self.state
        storage = open_storage(find_checkpoint_url(self.config))
        writer = futures.ThreadPoolExecutor(1, "checkpoint")
        self._written = writer.submit(self.state.checkpoint_image.write_file, storage, directory)
        writer.shutdown(wait=False)  # its thread ends after the write

    def await_checkpoint(self, seconds: float) -> FileReport | replies.Unwritten | None:
        """Return the outcome of the last `write_checkpoint` of this rank's share: the file written, or why it was
        not; None if it is still running after waiting `seconds`."""
        if futures.wait([self._written], seconds).not_done:
            return None
        try:
            return self._written.result()
        except OSError as error:
            return replies.Unwritten(error_line(error))

    def restore_checkpoint(self, directory: str, own_storage: bool = False) -> replies.Unrestored | None:
        """Restore this rank's training state from the checkpoint `directory`, of any plan, in the storage that the run
        resumes from or, if `own_storage`, saves to. Return None on success, else why the state is undefined now, alike
        on all ranks."""
        assert self.state
        storage = open_storage(find_checkpoint_url(self.config) if own_storage else find_resume_source(self.config)[0])
        manifest = load_manifest(storage, directory)  # an error here concerns this rank alone, and fails it
        failed = attempt_fill(partial(self.state.restore_checkpoint, storage, directory, manifest))
        if self.config.elastic.snapshot_interval and not failed:
            self.take_snapshot(manifest.meta.step)
        return failed

    def load_initial_weights(self) -> replies.Unrestored | None:
        """Fill this worker's weights from train.init; return None, or why they are undefined, on all ranks alike."""
        assert self.state
        return attempt_fill(self.state.load_initial_weights)

    def take_references(self, references: dict[str, list[float]]) -> None:
        """Take the log-probability of each answer of this worker's data by the reference, by SPLIT/SOURCE."""
        assert self.trainer
        for part in self.trainer.corpus.parts:
            for split, stream in part.streams.items():
                stream.references[:] = references[f"{split}/{part.name}"]

    def rank_classes(self, texts: replies.AskedTexts, classes: int, temperature: float) -> str:
        """Return records of what texts' tokens are followed by, text by text, in base64; "" on other ranks than 0."""
        with self._use_generator() as generator:
            ranked = generator.rank_classes(texts, classes, temperature)
        rows = torch.cat([of_text[: len(ids)] for of_text, ids in zip(ranked, texts.ids, strict=True)]).numpy()
        return encode_records(rows) if self.rank == 0 else ""

    def open_teacher(self) -> None:
        """Open the classes of the run's teacher for the labels of this worker's data, in the run's directory."""
        assert self.trainer and self.trainer.corpus.teacher
        self.trainer.corpus.teacher.open_file(self.run_dir / FILE)

    def evaluate_splits(self, samples: dict[str, int]) -> dict[str, float]:
        """Return the mean loss per token of each data split over its first samples; `samples`: split -> count."""
        assert self.trainer
        with self.trainer.use_evaluation_weights():
            return {split: self.trainer.compute_mean_loss(split, count) for split, count in samples.items()}

    def measure_loss(self, samples: dict[str, int]) -> dict[str, dict[str, float]]:
        """Return the means of this worker's `loss_measures`, by split; `samples`: split -> count."""
        assert self.trainer
        measures, mean = loss_measures(self.config), self.trainer.compute_mean_loss
        with self.trainer.use_evaluation_weights():
            return {s: {word: mean(s, n, m) for word, m in measures.items()} for s, n in samples.items()}

    @contextmanager
    def _use_generator(self) -> Iterator[TextGenerator]:
        """Yield this worker's generator of texts, with the weights to be evaluated in place. The clock's records of
        this time are dropped: they belong to no training step, and an evaluation may have very many passes."""
        assert self.communicator and self.trainer
        if self._generator is None:
            self._generator = TextGenerator(self.config, self.plan, self.communicator, self.trainer.weights)
        with self.trainer.use_evaluation_weights():
            yield self._generator
        self.trainer.clock.take_section_times()

    def continue_texts(
        self, texts: replies.AskedTexts, tokens: int, rule: replies.Choice, ends: list[int]
    ) -> list[replies.Written]:
        """Continue each text by up to `tokens` tokens, on all ranks together; see `TextGenerator.continue_texts`."""
        with self._use_generator() as generator:
            return generator.continue_texts(texts, tokens, rule, ends)

    def score_texts(self, texts: replies.AskedTexts, starts: list[int]) -> list[replies.Scored]:
        """Score each text from its token number `starts[i]` on, on all ranks together; see
        `TextGenerator.score_texts`."""
        with self._use_generator() as generator:
            return generator.score_texts(texts, starts)

    def abort(self) -> None:
        """Interrupt this worker's call that waits in a collective, from another thread: it raises if possible."""
        if communicator := self.communicator:
            communicator.abort()

    def leave(self) -> None:
        """Leave the mesh of workers: close its process groups and free the model; in-memory snapshots stay, and what
        adapters are of. Works in any state, repeatedly too; `join_mesh` may follow. Raises RuntimeError if the device
        no longer works, which makes this process useless."""
        if self.trainer:
            self.trainer.drop_recorders()  # an abort waits for their end
        self.abort()  # after a failure, closing would wait for collectives and transfers in progress
        self._end_recording()
        communicator, self.communicator = self.communicator, None
        for memory in self.memories.values():
            memory.abandon_snapshot()
        self.trainer = self.state = self.combiner = self._generator = None
        if communicator:
            communicator.close()
        leave_default_group()  # joining may have failed
        gc.collect()  # autograd's graphs have cycles
        if self.device == "cuda":
            torch.cuda.synchronize()  # raises if the device is broken, which is permanent
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the mesh of workers for good, as the driver's last call to this worker; allowed after a failure."""
        self._order.close()
        self.leave()
