"""The driver of a run: forms a crew of workers, runs the training loop, and writes everything down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

from platform import data
from platform.cluster import resources, torchrun
from platform.cluster.crew import ByRank, Crew, open_crew, seating
from platform.cluster.failures import WorkerFailed
from platform.cluster.job import WORKER, Job
from platform.cluster.metrics import metrics_row
from platform.cluster.run_directory import RunDirectory
from platform.cluster.signals import Stopped, StopSignals
from platform.config import Config, ConfigError
from platform.monitor import Journal, Monitor, Timeline, open_monitor
from platform.plan.hardware import dense_bf16_peak
from platform.plan.plan import Plan
from platform.plan.rows import rows
from platform.plan.schedule import Schedule, table
from platform.plan.simulate import simulate
from platform.train.pipeline import schedule_of

if TYPE_CHECKING:
    from platform.cluster.checkpoints import Checkpoints, Origin

DONE, FAILED, STOPPED = 0, 1, 75


def run(config: Config, plan: Plan, *, experiment: str, worker: str = WORKER) -> int:
    """Trains `config` under `plan` to its last step; returns the exit status (design.md, section 7).

    Raises ConfigError for what the user has to mend, before any process is started. Under torchrun every process
    calls this, and only that of rank 0 drives.
    """
    if torchrun.is_follower():
        torchrun.serve_rank()
        return DONE
    try:
        return _run(config, plan, experiment, worker)
    finally:
        if torchrun.present():
            torchrun.dismiss()


def _run(config: Config, plan: Plan, experiment: str, worker: str) -> int:
    directory = RunDirectory(config.run.dir)
    steps = config.train.stop_at or config.train.steps
    directory.check(config)
    if directory.finished(steps):
        print(f"already done: {steps} steps, in {directory.path}")
        return DONE
    if mistakes := data.check(config.data, vocab=config.model.vocab):
        raise ConfigError(mistakes)
    from platform.cluster.changes import changes  # torch takes seconds: cheap refusals come first
    from platform.cluster.checkpoints import check_writable, origin
    from platform.train import places

    found = origin(config)
    meta = found.manifest.meta if found and found.manifest else None
    try:
        with StopSignals() as signals:
            device = resources.secure(config.cluster, plan.mesh.size, print)
            with directory.claim(config, plan.to_dict()) as there:
                if places.saves(config):
                    check_writable(config)
                changed = changes(there, meta, config, plan.mesh.axes)
                status = _drive(config, plan, directory, device, steps, worker, signals, found, changed)
    except Stopped as stopped:  # outside of training, or for the second time
        print(f"stopped by {stopped}: nothing was done; the same command does it")
        return FAILED
    if status == DONE:
        print(f"run directory: {directory.path}")
        if steps < config.train.steps:
            print(f"ended after step {steps}, as train.stop_at says; without it the same command continues")
        print(f"next: {_next_command(config, experiment)}")
    return status


def _drive(
    config: Config,
    plan: Plan,
    directory: RunDirectory,
    device: str,
    steps: int,
    worker: str,
    signals: StopSignals,
    found: Origin | None,
    changed: Mapping[str, tuple[Any, Any]],
) -> int:
    from platform.cluster.changes import report
    from platform.cluster.checkpoints import Checkpoints

    job = Job(
        config=config.to_dict(),
        coordinates=[plan.mesh.coordinates(rank) for rank in range(plan.mesh.size)],
        device=device,
        run_dir=directory.path,
        worker=worker,
    )
    with closing(Journal(directory.journal)) as journal:
        monitor = open_monitor(config, directory.path, total_steps=steps)
        status = FAILED
        try:
            report(changed, journal, monitor.say)
            checkpoints = Checkpoints(config, plan, found, journal, monitor.say)
            status = _Driver(config, plan, job, steps, journal, monitor, signals, checkpoints).run()
        finally:
            monitor.close(status)
    return status


class _Driver:
    """One run in one process."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        job: Job,
        steps: int,
        journal: Journal,
        monitor: Monitor,
        signals: StopSignals,
        checkpoints: Checkpoints,
    ):
        self.config, self.plan, self.job, self.steps = config, plan, job, steps
        self.journal, self.monitor, self.signals = journal, monitor, signals
        self.checkpoints = checkpoints
        self.done = 0  # updates so far
        self.stall = 0.0  # seconds that saving took since the last row
        self.timeline: Timeline | None = None

    def run(self) -> int:
        """One generation, from the data to the last step."""
        try:
            self._prepare_data()
            self.monitor.say(self.plan.describe())
            self.journal.next_generation()
            with self._crew() as crew:
                peak = self._form(crew)
                try:
                    with self.signals.deferred():
                        self._train(crew, peak)
                finally:
                    if self.timeline:
                        self.timeline.write(self.job.run_dir)
                self._finish(crew)
            self.journal.event("released")
            if self.checkpoints.lacks(self.steps):
                self.journal.event("unsaved", step=self.steps, saved=self.checkpoints.step)
                self.monitor.say(f"step {self.steps} could not be saved: {self.checkpoints.kept}")
                return FAILED
            self.journal.event("done", step=self.steps)
            return DONE
        except ConfigError as error:
            self.journal.event("refused", reasons=error.violations)
            raise
        except WorkerFailed as failure:
            self._report(failure)
        except Stopped as stopped:
            self.journal.event("stopped", signal=str(stopped), step=self.done)
            self.monitor.say(f"stopped by {stopped} after step {self.done}: {self.checkpoints.kept}")
            if self.config.checkpoint.every and self.checkpoints.step:
                self.journal.event("released")
                return STOPPED
        self.journal.event("released")
        return FAILED

    def _train(self, crew: Crew, peak_flops: float | None) -> None:
        every = self.config.eval.every
        first = self.done + 1
        for step in range(first, self.steps + 1):
            start = perf_counter()
            reports = crew.call("step", step)
            row = self._row(reports, perf_counter() - start, peak_flops)
            if self.timeline:
                row |= self.timeline.step(step, start, [report["timeline"] for report in reports])
            if every and step % every == 0:
                row["val_loss"] = crew.call("evaluate")[0]["val_loss"]
            self.monitor.step(row)
            self.done = step
            if step == first:
                self.journal.event("first_step", step=step)
            start = perf_counter()
            self.checkpoints.advance(crew)
            if self.checkpoints.due(step, last=step == self.steps, stopping=self.signals.requested):
                self.checkpoints.save(crew, step)
                self.stall = perf_counter() - start
            if self.signals.requested:
                self.checkpoints.finish(crew)
            self.signals.check()
        self.checkpoints.finish(crew)

    def _row(self, reports: list[dict[str, Any]], seconds: float, peak_flops: float | None) -> dict[str, Any]:
        row = metrics_row(
            reports,
            seconds,
            length=self.config.model.length,
            flops_per_token=self.plan.flops_per_token,
            peak_flops=peak_flops,
            generation=self.journal.generation,
        )
        if self.stall:  # after the step before this one, whose row was written before
            row["seconds"]["checkpoint"], self.stall = self.stall, 0.0
        return row

    def _prepare_data(self) -> None:
        """Here and first, so that the workers find the tokens in the cache and mistakes come before any process."""
        with _messages("platform.data", self.monitor.say):
            self.checkpoints.check(data.of(self.config).digest)

    def _crew(self) -> Crew:
        kind = resources.crew_kind(self.config.cluster)
        self.journal.event("forming", world_size=self.job.world_size, cluster=kind, device=self.job.device)
        self.monitor.say(f"starting {self.job.world_size} workers ({kind}, {self.job.device})")
        return open_crew(kind, self.job)

    def _form(self, crew: Crew) -> float | None:
        """Makes the crew a mesh with a model; the peak FLOP/s of each worker, None where unknown."""
        from platform.cluster import preflight

        size = self.job.world_size
        crew.seat(self.job, seating(crew.members)[:size])
        schedule = schedule_of(self.config, self.plan.mesh.axes["data"])
        if schedule.stages > 1:
            self.monitor.say(_described(schedule))
        preflight.check(crew, self.config, self.job.run_dir)
        config, stage_of = self.job.config, list(schedule.placement)
        workers = crew.call("form", ByRank(range(size)), size, config, crew.store, self.journal.generation, stage_of)
        self.journal.event("formed", workers=workers)
        of_stage = rows(schedule)
        if self.config.monitor.timeline:
            names = [self.job.name(rank) for rank in range(size)]
            stages = [c["stage"] for c in self.job.coordinates]
            self.timeline = Timeline(schedule, [stage.step for stage in of_stage], names, stages)
        plain = [stage.plain() for stage in of_stage]
        of_rank = ByRank(plain[c["stage"]] for c in self.job.coordinates)
        built = crew.call("build", of_rank)[0]
        while not self.checkpoints.restore(crew):
            built = crew.call("build", of_rank)[0]
        self.done = self.checkpoints.step
        self.journal.event("running", step=self.done + 1, parameters_per_worker=built["parameters"])
        return dense_bf16_peak(built["device"])

    def _finish(self, crew: Crew) -> None:
        if tokens := self.config.monitor.sample:
            self.monitor.say(f"a sample of {tokens} tokens:\n{crew.call('sample', tokens)[0]}")

    def _report(self, error: WorkerFailed) -> None:
        failure = error.culprit
        log = str(failure.log) if failure.log else None
        self.journal.event(
            "failure",
            rank=failure.rank,
            coordinates=failure.coordinates,
            method=failure.method,
            cause=failure.cause,
            log=log,
        )
        self.monitor.say(f"{failure}")
        if log:
            self.monitor.say(f"its log: {log}")
        self.monitor.say(f"stopped after step {self.done}: {self.checkpoints.kept}")


@contextmanager
def _messages(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """What a library logs under `name` is said to the user."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say(record.getMessage())

    logger, handler = logging.getLogger(name), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _described(schedule: Schedule) -> str:
    """The table of a pipeline, and what it should cost."""
    bubble = simulate(schedule).bubble
    title = f"schedule  {schedule.name}: {schedule.stages} stages x {schedule.chunks} chunks, {schedule.microbatches}"
    return f"{title} microbatches; bubble {bubble:.1%} of the work\n{table(schedule.rows)}"


def _next_command(config: Config, experiment: str) -> str:
    """The same numbers from another layout: what this platform is for."""
    other = "1d_sp" if config.tensor.scheme == "1d" else "1d"
    return f"python -m platform.launch +experiment={experiment} tensor={other}"
