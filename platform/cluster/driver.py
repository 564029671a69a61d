"""Driver of a run: checks the configuration, opens a crew of workers, runs the training loop, and records the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any

from platform.boundary.local_files import list_missing_directories, remove_empty_directories
from platform.boundary.redaction import known_secrets, strip_url_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures
from platform.boundary.schema import Malformed
from platform.boundary.terminal import Say, show_phase
from platform.boundary.world_faults import growing_pauses, is_external_fault
from platform.cluster import resources, run_directory
from platform.cluster.answer_scores import RunTasks, open_tasks, violations_of_tasks
from platform.cluster.callbacks import CallbackGuard, Callbacks, demonstration_warning, seconds_left
from platform.cluster.control.pulse import Pulse
from platform.cluster.control.run_context import RunContext
from platform.cluster.crew import torchrun
from platform.cluster.crew.job import WORKER, Job, gpu_count
from platform.cluster.crew.launchers import open_crew
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.cluster.endings import DONE, FAILED, DriverState, Unsaved, report_end
from platform.cluster.run_directory import RunDirectory
from platform.cluster.shown_commands import Command, PhaseTimes, list_next_commands
from platform.config.extensions import flatten_own_settings
from platform.config.fields import Config, training_objective_name
from platform.config.ramps import count_earlier_samples
from platform.data import cache
from platform.data.corpus import Corpus, open_run_corpus
from platform.data.data_checks import check_sample, violations_of_sources
from platform.data.text_sources import count_stdlib_bytes
from platform.data.tokenizer import Vocabulary, load_named_vocabulary
from platform.monitor import Journal, RunMonitor, events, open_monitor
from platform.monitor.journal import LiveState
from platform.monitor.sinks.sink_process import violations_of_sinks
from platform.optimizer.learning_rate import warning_of_warmup
from platform.plan.layout import format_count
from platform.plan.model_types import AHEAD
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_summary
from platform.plan.plan_summary import format_number, head_lines
from platform.predict.async_choice import describe_async_products
from platform.predict.choose_schedule import violations_of_kernel, violations_of_text_requests
from platform.predict.memory_budget import predict_peak_bytes
from platform.predict.pair_choice import describe_pairs

if TYPE_CHECKING:
    from platform.checkpoint.catalogue import Selection
    from platform.checkpoint.manifest import Manifest
    from platform.cluster.control.checkpoints import Checkpoints


def drive_run(
    config: Config,
    plan: Plan,
    *,
    experiment: str = "",
    command: Command | None = None,
    worker: str = "",
    guard: CallbackGuard | None = None,
    phases: PhaseTimes | None = None,
) -> int:
    """Train the model of `config` under `plan` to the run's last step, as its driver, and return the exit status
    (docs/contract.md). `command`: the command line of the run, by default with the experiment alone. `worker`:
    "module:Class" of the workers, "" for the platform's own. `guard`: calls the user's callbacks. `phases`: phases that
    the run has reached before.

    Raises ConfigError for what the user has to correct, before any process starts unless only the workers can see it (a
    checkpoint that they refuse); all other ends are handled by `platform.cluster.endings`. Under torchrun every process
    calls this; rank 0 drives, and the others only serve workers.
    """
    if torchrun.is_follower():
        torchrun.follow_driver(Path(config.run.dir))
        return DONE
    steps = config.train.stop_at or config.train.steps
    command = command or Command([f"+experiment={experiment}"])
    guard, phases = guard or CallbackGuard(Callbacks()), phases or PhaseTimes()
    state = DriverState(config, RunDirectory(config.run.dir), command, steps, guard, phases)
    try:
        with StopSignals() as signals, _stop_before_time_limit(config, signals):
            state.guard.stop = signals.note_request
            return _drive_with_start_retries(config, plan, worker, signals, state)
    finally:
        if torchrun.is_under_torchrun():
            torchrun.release_waiting_workers()


def _drive_with_start_retries(config: Config, plan: Plan, worker: str, signals: StopSignals, state: DriverState) -> int:
    """Drive a run as `_drive_or_report` does, again after growing pauses while the world keeps it from starting
    (`is_external_fault`): for elastic.wait seconds if it has done steps before, and for cluster.wait at least."""
    has_steps = False
    with suppress(OSError, Malformed):
        has_steps = run_directory.find_last_step(state.directory.path) > 0
    pauses = growing_pauses(max(config.cluster.wait, config.elastic.wait if has_steps else 0.0))
    while True:
        try:
            return _drive_or_report(config, plan, worker, signals, state)
        except ConfigError as error:
            if state.journal or not is_external_fault(error) or (pause := next(pauses, None)) is None:
                raise
            state.say(f"{error}: tries again in {pause:.0f} s")
        try:
            sleep(pause)
        except Stopped as error:
            return report_end(error, state)


def _drive_or_report(config: Config, plan: Plan, worker: str, signals: StopSignals, state: DriverState) -> int:
    """Check and drive a run, report its end, and return the exit status. Raises ConfigError if it is refused, by its
    user's mistake or, before it starts, by a fault of the world."""
    with ExitStack() as opened:
        try:
            return _check_and_drive(config, plan, worker, signals, state, opened)
        except (Stopped, Exception) as error:
            if isinstance(error, ConfigError) and not (state.journal and is_external_fault(error)):
                if state.journal:
                    state.journal.write(events.Refused(reasons=error.violations))
                raise
            signals.exit_on_second_signal(FAILED)
            status = report_end(error, state)
            signals.exit_on_second_signal(status)
            return status


def _check_and_drive(
    config: Config, plan: Plan, worker: str, signals: StopSignals, state: DriverState, opened: ExitStack
) -> int:
    """Refuse a run that cannot work, cheapest checks first, claim its directory and places for its workers, then drive
    it; return the exit status. `opened`: closes what this opens, when the run ends."""
    directory, steps = state.directory, state.steps
    directory.check_identity(config)
    if done := directory.find_final_step(steps, config.eval):
        early = "" if done >= steps else ", after which it learned no more"
        state.say(f"already done: {format_count(done, 'step')}{early}, in {directory.path}")
        return DONE
    refuse_all([*violations_of_sources(config.data, vocab=config.model.vocab), *_violations_of_run(config, plan)])
    _check_memory(config, plan, config.cluster.device, state, stated=True)
    if config.data.kind == "stdlib" and (line := demonstration_warning(config, plan, count_stdlib_bytes(config.data))):
        state.say(f"warning: {line}")
    from platform.cluster.resources import reserve_or_suggest

    directory.refuse_if_locked()
    size, spares, least = plan.mesh.world_size, config.elastic.spares, config.elastic.min_workers
    reserve = partial(reserve_or_suggest, config, state.command, size, spares=spares, least=least)
    waits = config.cluster.kind == "ray" or config.cluster.wait
    reserve_lines: list[str] = []  # said once nothing refuses the run any more
    places = None if waits else reserve(reserve_lines.append)  # refuse early: importing torch takes seconds
    with show_phase("importing torch, looking for checkpoints and weights"):
        from platform.cluster import origin
        from platform.cluster.control.checkpoints import Checkpoints

        selection = origin.find_resume_checkpoint(config, plan)
        resumes = bool(selection and selection.manifest)
        base = _check_initial_weights(config, selection.manifest if selection else None)
    tasks, places = open_tasks(config), places or reserve(state.say)
    for line in reserve_lines:
        state.say(line)
    placed_config = replace(config, cluster=replace(config.cluster, device=places.device))
    refuse_all(violations_of_kernel(placed_config, plan))
    _check_memory(placed_config, plan, places.device, state)
    previous_config = opened.enter_context(directory.claim(config, plan_summary(plan)))
    origin.check_storage_writable(config)
    corpus = _open_corpus(config, plan, directory.path, state.say, tasks, fresh=not resumes)
    orphan = directory.find_dead_driver_step()
    meta = selection.manifest.meta if selection and selection.manifest else None
    changed = origin.find_changed_keys(previous_config, meta, config, plan.mesh.axes)
    effects = origin.describe_changed_schedule(previous_config, meta, config)
    journal, monitor = _open_records(config, state, opened)
    origin.report_changed_keys(changed, journal, monitor.say, effects)
    carried = _files_to_carry(config, selection, corpus, monitor.say)
    state.checkpoints = checkpoints = Checkpoints(config, plan, selection, journal, monitor.say, carried, base)
    job = _describe_job(config, plan, directory.path, places.device, worker)
    run = RunContext(config, plan, job, steps, journal, monitor, signals, checkpoints, directory, places, corpus, tasks)
    _drive_crew(run, state, orphan)
    status = report_end(None, state)
    if config.cluster.check:
        status = state.status = _print_cluster_check(checkpoints, journal, monitor) or status
    _print_closing_hints(state, config, corpus.vocabulary)
    return status


def _describe_job(config: Config, plan: Plan, run_dir: Path, device: str, worker: str) -> Job:
    """Return the job of a run: configuration, coordinates, device, directory and secrets for each of its workers."""
    return Job(
        config=config,
        coordinates=[plan.mesh.rank_coordinates(rank) for rank in range(plan.mesh.world_size)],
        device=device,
        run_dir=run_dir,
        secrets=known_secrets(),
        worker=worker or WORKER,
    )


def _check_initial_weights(config: Config, resumed: Manifest | None) -> dict[str, Any]:
    """Raise ConfigError if a run that does not resume cannot use the weights of train.init with its tokenizer, or if
    adapters have no base, or another than in the checkpoint `resumed`. Return what checkpoints of adapters say of it,
    {} without adapters."""
    tunes = config.tune.kind != "none"
    if config.train.init in ("", "random"):
        if tunes:
            reason = "adapters are of weights that exist"
            raise ConfigError("train.init", config.train.init, reason, ["train.init=FOLDER", "train.init=CHECKPOINT"])
        return {}
    if resumed and not tunes:
        return {}
    from platform.weights.importing import check_base, open_initial_weights
    from platform.weights.stored_adapters import BASE, read_base

    weights = open_initial_weights(config)
    if not resumed and config.data.kind != "synthetic":
        _check_vocabulary(config, load_named_vocabulary(config.data))
    if resumed and (base := read_base(resumed)):
        check_base(weights, base, "the checkpoint that it resumes from")
    return {BASE: asdict(weights.describe_base())} if tunes else {}


def _check_vocabulary(config: Config, vocabulary: Vocabulary | None) -> None:
    """Raise ConfigError for a run if `vocabulary`, its data's (None if it has none or it is not known yet), differs
    from the vocabulary of the weights of train.init."""
    if vocabulary and config.train.init not in ("", "random"):
        from platform.checkpoint.manifest import Refused
        from platform.weights.model_folder import check_tokenizer, find_companion_files

        with refuse_failures("train.init", strip_url_secrets(config.train.init), Refused, OSError):
            model_folder, files = find_companion_files(config.train.init)
        check_tokenizer(config.data, vocabulary, model_folder, files)


def _files_to_carry(config: Config, selection: Selection | None, corpus: Corpus, say: Say) -> dict[str, bytes]:
    """Return the files that the checkpoints of a run carry: its tokenizer's, and the settings of text generation of the
    checkpoint that it resumes from, else of the weights of train.init, if it reads their tokens."""
    files = dict(corpus.tokenizer_files)
    if config.train.init in ("", "random") or config.data.foreign_tokenizer:
        return files
    from platform.checkpoint.manifest import Refused
    from platform.weights.model_folder import GENERATION, find_companion_files

    weights_url = selection.url if selection and selection.manifest else config.train.init
    try:
        _, beside = find_companion_files(weights_url)
    except (Refused, OSError) as error:  # the run goes on: none of it is trained on
        say(f"WARNING: {error}: the checkpoints of this run carry no {GENERATION}")
        return files
    return files | {name: raw for name, raw in beside.items() if name == GENERATION}


def _print_closing_hints(state: DriverState, config: Config, vocabulary: Vocabulary | None) -> None:
    """Print the directory of a finished run, the newest checkpoint, and commands that may come next.
    `vocabulary`: the tokenizer of its text, None if it has none."""
    state.say(f"run directory: {state.directory.path}")
    if state.steps_done == state.steps < config.train.steps:
        state.say(f"ended after step {state.steps}, as train.stop_at says; without it the same command continues")
    if not (checkpoints := state.checkpoints):
        return
    lines = [checkpoints.describe_newest(state.steps_done), checkpoints.describe_best()]
    commands = list_next_commands(config, state.command, vocabulary, checkpoints.resume_override)
    lines += ["next:", *(f"  {line}" for line in commands)] if state.command.alone else []
    for line in filter(None, lines):
        state.say(line)


def _print_cluster_check(checkpoints: Checkpoints, journal: Journal, monitor: RunMonitor) -> int:
    """Print the findings of a cluster check, a finished run; return FAILED if any proof is missing, else DONE."""
    from platform.cluster.cluster_check import format_findings, judge_cluster_checks

    findings = judge_cluster_checks(journal.read_events(), monitor.read_rows(), checkpoints.find_newest_fault())
    monitor.say(format_findings(findings))
    return DONE if all(finding.proven for finding in findings) else FAILED


def _open_corpus(
    config: Config, plan: Plan, run_dir: Path, say: Say, tasks: RunTasks | None = None, *, fresh: bool = False
) -> Corpus:
    """Open the run's training corpus, before any lease, W&B run or worker exists; workers then find its tokens in the
    cache or, as other machines may have another one, in the run directory. Raises ConfigError for an error inside a
    file of data, and then leaves no empty directories behind."""
    missing_folders = list_missing_directories(cache.cache_root(config.data.cache))
    shared = run_dir / "corpus" if resources.spans_machines(config.cluster) else None
    with relay_log("platform.data", say):
        try:
            corpus = open_run_corpus(config, shared=shared)
            lengths = {name: config.model.length for name in plan.reader_layouts if AHEAD not in name}
            if "source" in lengths:
                lengths["source"] = config.model.source_length or config.model.length
            if fresh:
                _check_vocabulary(config, corpus.vocabulary)
            if config.train.teacher:
                from platform.cluster.control.teacher import check_teacher_vocabulary, find_teacher

                check_teacher_vocabulary(config, find_teacher(config), corpus.vocabulary)
            if tasks:
                tasks.check_vocabulary(corpus.vocabulary)
            check_sample(training_objective_name(config), lambda: corpus.batch("train", 0, 1), lengths)
            for name, times in corpus.count_epochs(count_earlier_samples(config.train, config.train.steps + 1)).items():
                if round(times, 2) > 1:
                    say(f"{name or 'data'}: {format_count(config.train.steps, 'step')} read it {times:.3g} times")
            return corpus
        except ConfigError:
            remove_empty_directories(missing_folders)
            raise


def _open_records(config: Config, state: DriverState, opened: ExitStack) -> tuple[Journal, RunMonitor]:
    """Open the run's journal and its monitor (console, metrics, W&B), to be closed by `opened`. Raises ConfigError if
    the run directory cannot be written."""
    path = state.directory.path
    with state.directory.refuse_os_errors():
        journal = Journal(state.directory.journal, state.say, state.note_event)
        state.journal = opened.enter_context(closing(journal))
        state.monitor = monitor = open_monitor(config, path, total_steps=state.steps, on_step=state.note_step)
    opened.callback(lambda: monitor.close(state.status))
    return journal, monitor


def _driver_part_of_live(state: DriverState) -> LiveState:
    """Return the part of live.json that the driver of a run knows itself, in the thread that writes it."""
    controller, saving = state.controller, state.checkpoints.save_under_way if state.checkpoints else None
    return LiveState(
        time=0.0,
        generation=state.journal.generation if state.journal else 0,
        step=state.steps_done,
        usual=controller.pace.median_seconds(0) if controller else None,
        held=controller.held if controller else None,
        saving=saving[0] if saving else None,
        saving_since=time() - (monotonic() - saving[1]) if saving else None,
    )


def _drive_crew(run: RunContext, state: DriverState, dead_driver_step: int | None) -> None:
    """Start the run's crew of workers and train to the last step, re-forming the mesh as often as it takes.
    `dead_driver_step`: the last step of a driver before that died without an end, None if none did. Raises Unsaved if
    the state after the last step was to be saved and is not."""
    job, say = run.job, run.monitor.say
    run.checkpoints.check_corpus(run.corpus.digest)
    for line in list_start_lines(run.config, run.plan, job.device):
        say(line)
    if settings := flatten_own_settings(run.config):
        say("settings  " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    if line := warning_of_warmup(run.config.optimizer, run.config.train.steps):
        say(line)
    kind = resources.launcher_kind(run.config.cluster)
    spare_count = run.places.members - job.world_size  # spares; negative if the run starts with fewer workers
    spares = f" and {format_count(spare_count, 'spare')}" if spare_count > 0 else ""
    learns = f"{format_count(run.steps, 'step')} of {run.plan.tokens_per_step:,} tokens of {run.config.data.kind}"
    count = format_count(job.world_size + min(0, spare_count), "worker")
    say(f"starting {count}{spares} ({kind}, {job.device}): {learns}, written to {run.config.run.dir}")
    from platform.cluster.origin import report_code_changes
    from platform.train.environment_proof import describe_git_state, identify_code

    code = identify_code(run.config)
    report_code_changes(code, run.journal, say)
    starting = events.Starting(world_size=job.world_size, cluster=kind, device=job.device, code=code)
    run.journal.write(replace(starting, command=state.command.resume_line(), git=describe_git_state() or None))
    if dead_driver_step is not None:
        lost = max(0, dead_driver_step - run.checkpoints.step)
        run.journal.write(events.TookOver(step=dead_driver_step, steps_lost=lost))
        say(
            f"the driver before died after step {dead_driver_step}:"
            f" this one goes on in its place after {run.checkpoints.step}"
        )
    try:
        pulse = Pulse(state.directory.path, partial(_driver_part_of_live, state))
        with relay_log("platform.cluster", say), pulse, open_crew(kind, job, spare_count) as crew:
            pulse.outlook = crew.outlook
            if crew.came is not None:
                state.phases.reach_phase("first_process", crew.came)
            from platform.cluster.control.controller import Controller
            from platform.cluster.control.former import GenerationFormer

            state.controller = controller = Controller(run, GenerationFormer(run))
            controller.train_to_last_step(crew)
    finally:
        run.journal.write(events.Released())
    if run.checkpoints.is_last_step_unsaved(controller.done):
        raise Unsaved
    run.signals.exit_on_second_signal(DONE)


def list_start_lines(config: Config, plan: Plan, device: str) -> list[str]:
    """List the lines with which the driver of a run on this kind of device begins: its plan in short, with parameters
    and memory, and the plan's warnings. `python -m platform.plan` prints the rest."""
    placed_config = replace(config, cluster=replace(config.cluster, device=device))
    title, memory = head_lines(plan, 0)[0], format_number(predict_peak_bytes(placed_config, plan))
    size = f"{plan.parameter_count:,} parameters, {memory}B of memory for a worker"
    lines = [describe_async_products(config, plan)] if device == "cuda" else []
    lines += [describe_pairs(config, plan)] if device == "cuda" or plan.pairs_passes else []
    return [f"{title}; {size}", *filter(None, lines), *(f"warning: {line}" for line in plan.warnings)]


@contextmanager
def _stop_before_time_limit(config: Config, signals: StopSignals) -> Iterator[None]:
    """Request a stop of the run, during the block, when run.time_limit or the end of the Slurm allocation is near."""
    left = seconds_left(config.run)
    if left is None:
        yield
        return
    timer = threading.Timer(left, signals.request_stop, ["run.time_limit"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _violations_of_run(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a refusal line for each key that makes a run impossible: elastic.max_workers or elastic.min_workers that
    contradict the plan's number of workers, what eval.tasks and services such as TensorBoard lack on this machine, and
    text that is asked of a model that gives none."""
    yield from violations_of_tasks(config)
    yield from violations_of_sinks(config)
    yield from violations_of_text_requests(config, plan)
    e, size = config.elastic, plan.mesh.world_size
    if 0 < e.max_workers < size:
        constraint = f"must be 0 or >= {format_count(size, 'worker')}, as the plan has"
        yield format_violation("elastic.max_workers", e.max_workers, constraint, [0, size])
    elif e.min_workers > (most := e.max_workers or size):
        constraint = f"must be <= {format_count(most, 'worker')}, which the run may have"
        yield format_violation("elastic.min_workers", e.min_workers, constraint, [most])


def _check_memory(config: Config, plan: Plan, kind: str, state: DriverState, *, stated: bool = False) -> None:
    """Raise ConfigError for a plan that needs more memory than its workers' devices of `kind` (cpu | cuda) have, or
    warn the user of it, as cluster.memory says. The driver calls it twice, and one of the calls checks: the first
    (`stated`), before it looks for devices, if the configuration states their memory; else the second."""
    from platform.cluster.resources import find_worker_device, machine_memory, refuse_lack_of_memory
    from platform.predict.remedies import Device, violation_of_host_memory, violation_of_memory

    c = config.cluster
    decides = bool(c.device_memory) or (kind == "cuda" and resources.launcher_kind(c) != "ray" and not gpu_count())
    if stated != decides:
        return
    device = find_worker_device(config, kind, plan.mesh.world_size)
    if device and c.memory == "refuse":
        refuse_lack_of_memory(config, plan, device, state.command)
    elif device and (line := violation_of_memory(config, plan, device)):
        state.say(f"warning: {line}")
    if kind == "cuda" and resources.launcher_kind(c) in ("inline", "local", "processes"):
        machine = Device(machine_memory(), "this machine")
        refuse_all(filter(None, [violation_of_host_memory(config, plan, machine, plan.mesh.world_size)]))


@contextmanager
def relay_log(name: str, say: Say) -> Iterator[None]:
    """Pass to `say`, by which a run's driver prints, the messages that are logged in it under the logger `name` during
    the block, at INFO or above."""

    class Handler(logging.Handler):
        """Passes each message to `say`."""

        def emit(self, record: logging.LogRecord) -> None:
            """Pass the text of a message logged in a run's driver to `say`, which prints it for the user."""
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
