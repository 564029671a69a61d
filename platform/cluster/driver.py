"""Driver of a run: checks the configuration, opens a crew of workers, runs the training loop, and records the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platform import data
from platform.boundary.redaction import learned
from platform.boundary.undo import missing, remove_empty
from platform.cluster.control.forming.context import Run
from platform.cluster.crew.base.job import WORKER, Job
from platform.cluster.crew.base.signals import Stopped, StopSignals
from platform.cluster.crew.launchers import torchrun
from platform.cluster.crew.open import open_crew
from platform.cluster.endings import DONE, FAILED, Known, Unsaved, end
from platform.cluster.run import resources
from platform.cluster.run.commands import Command
from platform.cluster.run.demonstration import demonstration
from platform.cluster.run.directory import RunDirectory
from platform.cluster.run.time_limit import seconds_left
from platform.config.fields import Config, ConfigError, violation
from platform.data import cache
from platform.monitor import Journal, open_monitor
from platform.plan.core.plan import Plan
from platform.plan.core.plan_data import summary
from platform.plan.reports.describe import describe

if TYPE_CHECKING:
    from platform.cluster.run.origin import Origin


def run(
    config: Config, plan: Plan, *, experiment: str = "", command: Command | None = None, worker: str = WORKER
) -> int:
    """Train `config` under `plan` to its last step and return the exit status (docs/design.md, section 7). `command`:
    the command line of the run, by default that of the experiment alone. `worker`: "module:Class" of the workers.

    Raises ConfigError for what the user has to correct, before any process starts unless only the workers can see it
    (a checkpoint that they refuse); all other ends are handled by `platform.cluster.endings`. Under torchrun every
    process calls this; rank 0 drives, and the others only serve workers.
    """
    if torchrun.is_follower():
        torchrun.follow(Path(config.run.dir))
        return DONE
    steps = config.train.stop_at or config.train.steps
    command = command or Command([f"+experiment={experiment}"])
    known = Known(config, RunDirectory(config.run.dir), command, steps)
    try:
        with ExitStack() as opened:
            signals = opened.enter_context(StopSignals())
            try:
                opened.enter_context(_time_limit(config, signals))
                return _run(config, plan, worker, signals, known, opened)
            except ConfigError as error:
                if known.journal:
                    known.journal.event("refused", reasons=error.violations)
                raise
            except (Stopped, Exception) as error:
                signals.finish(FAILED)
                status = end(error, known)
                signals.finish(status)
                return status
    finally:
        if torchrun.present():
            torchrun.dismiss()


def _run(config: Config, plan: Plan, worker: str, signals: StopSignals, known: Known, opened: ExitStack) -> int:
    directory, steps = known.directory, known.steps
    directory.check(config)
    if directory.finished(steps):
        known.say(f"already done: {steps} steps, in {directory.path}")
        return DONE
    if mistakes := [*data.check(config.data, vocab=config.model.vocab), *_impossible(config, plan)]:
        raise ConfigError(mistakes)
    _check_memory(config, plan, config.cluster.device, known.say, stated=True)
    if config.data.kind == "stdlib" and (line := demonstration(config, plan, data.stdlib_bytes(config.data))):
        known.say(f"warning: {line}")
    size, spares, least = plan.mesh.size, config.elastic.spares, config.elastic.min_workers
    if config.cluster.kind != "ray" and not config.cluster.wait:  # refuse early: importing torch takes seconds
        resources.secure(config.cluster, size, lambda line: None, spares, least)
    from platform.cluster.run.changes import changes
    from platform.cluster.run.origin import check_writable, origin
    from platform.train.recovery import urls

    found = origin(config)
    meta = found.manifest.meta if found and found.manifest else None
    secured = resources.secure(config.cluster, size, known.say, spares, least)
    _check_memory(config, plan, secured.device, known.say)
    there = opened.enter_context(directory.claim(config, summary(plan)))
    if urls.saves(config):
        check_writable(config)
    corpus = _corpus(config, known.say)
    changed = changes(there, meta, config, plan.mesh.axes)
    _open(config, known, opened)
    status = _drive(config, plan, secured, worker, signals, found, changed, corpus, known)
    if status == DONE:
        known.say(f"run directory: {directory.path}")
        if steps < config.train.steps:
            known.say(f"ended after step {steps}, as train.stop_at says; without it the same command continues")
        if line := known.command.other_layout(config, plan.mesh.size):
            known.say(f"next: {line}")
    return status


def _corpus(config: Config, say: Callable[[str], None]) -> str:
    """Open the corpus, before any lease, W&B run or worker exists, and return its digest; workers then find its tokens
    in the cache. Raises ConfigError for an error inside a file, and then leaves no empty directories behind."""
    made = missing(cache.root(config.data.cache))
    with _messages("platform.data", say):
        try:
            return data.of(config).digest
        except ConfigError:
            remove_empty(made)
            raise


def _open(config: Config, known: Known, opened: ExitStack) -> None:
    """Open the journal and the monitor. Raises ConfigError if the run directory cannot be written."""
    path = known.directory.path
    try:
        known.journal = opened.enter_context(closing(Journal(known.directory.journal, known.say)))
        known.monitor = monitor = open_monitor(config, path, total_steps=known.steps)
    except OSError as error:
        raise known.directory.unusable(error) from None
    opened.callback(lambda: monitor.close(known.status))


def _drive(
    config: Config,
    plan: Plan,
    secured: resources.Places,
    worker: str,
    signals: StopSignals,
    found: Origin | None,
    changed: Mapping[str, tuple[Any, Any]],
    corpus: str,
    known: Known,
) -> int:
    """Train to the last step, through as many generations as it takes; return the exit status."""
    from platform.cluster.control.controller import Controller
    from platform.cluster.control.forming.former import Former
    from platform.cluster.control.saving.checkpoints import Checkpoints
    from platform.cluster.run.changes import report

    journal, monitor = known.journal, known.monitor
    assert journal and monitor
    job = Job(
        config=config,
        coordinates=[plan.mesh.coordinates(rank) for rank in range(plan.mesh.size)],
        device=secured.device,
        run_dir=known.directory.path,
        secrets=learned(),
        worker=worker,
    )
    report(changed, journal, monitor.say)
    known.checkpoints = checkpoints = Checkpoints(config, plan, found, journal, monitor.say)
    records = journal, monitor, signals, checkpoints, known.directory
    run = Run(config, plan, job, known.steps, *records, secured)
    known.controller = controller = Controller(run, Former(run))
    checkpoints.check(corpus)
    monitor.say(describe(plan))
    kind = resources.crew_kind(config.cluster)
    beside = secured.members - job.world_size  # spares; negative if the run starts with fewer workers
    spares = f" and {beside} spares" if beside > 0 else ""
    monitor.say(f"starting {job.world_size + min(0, beside)} workers{spares} ({kind}, {job.device})")
    journal.event("starting", world_size=job.world_size, cluster=kind, device=job.device)
    try:
        with _messages("platform.cluster", monitor.say), open_crew(kind, job, beside) as crew:
            controller.run(crew)
    finally:
        journal.event("released")
    if checkpoints.lacks(run.steps):
        raise Unsaved
    signals.finish(DONE)
    return end(None, known)


@contextmanager
def _time_limit(config: Config, signals: StopSignals) -> Iterator[None]:
    """Request a stop when the time limit of the run is reached."""
    left = seconds_left(config.run)
    if left is None:
        yield
        return
    timer = threading.Timer(left, signals.request, ["run.time_limit"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _impossible(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a violation if elastic.max_workers or elastic.min_workers contradicts the size of the plan."""
    e, size = config.elastic, plan.mesh.size
    if 0 < e.max_workers < size:
        constraint = f"must be 0 or >= the {size} workers of the plan"
        yield violation("elastic.max_workers", e.max_workers, constraint, [0, size])
    elif e.min_workers > (most := e.max_workers or size):
        constraint = f"must be <= the {most} workers that the run may have"
        yield violation("elastic.min_workers", e.min_workers, constraint, [most])


def _check_memory(config: Config, plan: Plan, kind: str, say: Callable[[str], None], *, stated: bool = False) -> None:
    """Raise ConfigError for a plan that needs more memory than its devices of `kind` have, or warn of it, as
    cluster.memory says. `stated`: the call before any device is looked for, which checks only if the configuration
    alone determines the memory; the later call checks otherwise."""
    from platform.cluster.run.devices import device_of
    from platform.planning.remedies import lack_of_memory

    c = config.cluster
    decides = bool(c.device_memory) or (
        kind == "cuda" and resources.crew_kind(c) != "ray" and not resources.gpu_count()
    )
    if stated != decides:
        return
    device = device_of(config, kind, plan.mesh.size)
    if device and (line := lack_of_memory(config, plan, device)):
        if c.memory == "refuse":
            raise ConfigError(line)
        say(f"warning: {line}")


@contextmanager
def _messages(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Pass to `say` what is logged under `name` during the block, at INFO or above."""

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
