"""The driver of a run: forms a crew of workers, runs the training loop, and writes everything down."""

from __future__ import annotations

import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from platform import data
from platform.cluster import resources, torchrun
from platform.cluster.context import Run
from platform.cluster.crew import open_crew
from platform.cluster.failures import GaveUp, WorkerFailed
from platform.cluster.job import WORKER, Job
from platform.cluster.run_directory import RunDirectory
from platform.cluster.signals import Stopped, StopSignals
from platform.cluster.time_limit import seconds_left
from platform.config import Config, ConfigError, violation
from platform.monitor import Journal, Monitor, goodput, open_monitor, story
from platform.plan.plan import Plan

if TYPE_CHECKING:
    from platform.cluster.origin import Origin

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
    if mistakes := [*data.check(config.data, vocab=config.model.vocab), *_impossible(config, plan)]:
        raise ConfigError(mistakes)
    from platform.cluster.changes import changes  # torch takes seconds: cheap refusals come first
    from platform.cluster.origin import check_writable, origin
    from platform.train import places

    found = origin(config)
    meta = found.manifest.meta if found and found.manifest else None
    try:
        with StopSignals() as signals:
            device = resources.secure(config.cluster, plan.mesh.size, print, config.elastic.spares)
            with directory.claim(config, plan.to_dict()) as there:
                if places.saves(config):
                    check_writable(config)
                with _messages("platform.data", partial(print, flush=True)):
                    # Before W&B, a lease or a worker is there: what is wrong deep in a file leaves nothing behind. The
                    # workers then find the tokens in the cache.
                    corpus = data.of(config).digest
                changed = changes(there, meta, config, plan.mesh.axes)
                status = _drive(config, plan, directory, device, steps, worker, signals, found, changed, corpus)
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
    corpus: str,
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
            run = Run(config, plan, job, steps, journal, monitor, signals, checkpoints, directory)
            status = _control(run, corpus)
            _account(journal, monitor)
        finally:
            monitor.close(status)
    return status


def _control(run: Run, corpus: str) -> int:
    """From the first step to the last, through as many generations as it takes; the exit status."""
    from platform.cluster.controller import Controller
    from platform.cluster.forming import Former

    config, journal, monitor, checkpoints = run.config, run.journal, run.monitor, run.checkpoints
    controller = Controller(run, Former(run))
    try:
        checkpoints.check(corpus)
        monitor.say(run.plan.describe())
        kind = resources.crew_kind(config.cluster)
        spares = f" and {config.elastic.spares} spares" if config.elastic.spares else ""
        monitor.say(f"starting {run.job.world_size} workers{spares} ({kind}, {run.job.device})")
        journal.event("starting", world_size=run.job.world_size, cluster=kind, device=run.job.device)
        try:
            with _time_limit(config, run.signals), open_crew(kind, run.job, config.elastic.spares) as crew:
                controller.run(crew)
        finally:
            journal.event("released")
        if checkpoints.lacks(run.steps):
            journal.event("unsaved", step=run.steps, saved=checkpoints.step, **controller.lost())
            monitor.say(f"step {run.steps} could not be saved: {checkpoints.kept}")
            return FAILED
        journal.event("done", step=run.steps, **controller.told())
        return DONE
    except ConfigError as error:
        journal.event("refused", reasons=error.violations)
        raise
    except (GaveUp, WorkerFailed) as failure:
        journal.event("gave_up", cause=str(failure), step=controller.done, saved=checkpoints.step, **controller.lost())
        command = _command(checkpoints.resume)
        monitor.say(f"{failure}\nstopped after step {controller.done}: {checkpoints.kept}:\n  {command}")
        return FAILED
    except Stopped as stopped:
        saved = bool(config.checkpoint.every and checkpoints.step)
        event = "drained" if saved else "stopped"
        journal.event(event, signal=str(stopped), step=controller.done, saved=checkpoints.step, **controller.lost())
        monitor.say(f"stopped by {stopped} after step {controller.done}: {checkpoints.kept}")
        return STOPPED if saved else FAILED


@contextmanager
def _time_limit(config: Config, signals: StopSignals) -> Iterator[None]:
    """Asks the run to stop when its time is up."""
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


def _account(journal: Journal, monitor: Monitor) -> None:
    """What failures cost, from the journal: said where there were any."""
    events = Journal.read(journal.path)
    cost = goodput(events)
    journal.event("goodput", **cost.to_dict())
    monitor.summary(cost.to_dict())
    if cost.failures or cost.transitions:
        monitor.say(f"{story(events)}\n{cost}")


def _impossible(config: Config, plan: Plan) -> Iterator[str]:
    """How far the run may shrink and grow, beside its size at the start."""
    e, size = config.elastic, plan.mesh.size
    if 0 < e.max_workers < size:
        constraint = f"must be 0 or >= the {size} workers of the plan"
        yield violation("elastic.max_workers", e.max_workers, constraint, [0, size])
    elif e.min_workers > (most := e.max_workers or size):
        constraint = f"must be <= the {most} workers that the run may have"
        yield violation("elastic.min_workers", e.min_workers, constraint, [most])


def _command(override: str) -> str:
    """That of this process, with an override in the place of its like: what continues the run."""
    given = [a for a in sys.argv[1:] if not override or a.partition("=")[0] != override.partition("=")[0]]
    return f"python -m platform.launch {shlex.join([*given, *filter(None, [override])])}"


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


def _next_command(config: Config, experiment: str) -> str:
    """The same numbers from another layout: what this platform is for."""
    other = "1d_sp" if config.tensor.scheme == "1d" else "1d"
    return f"python -m platform.launch +experiment={experiment} tensor={other}"
