"""Command line of the platform: `python -m platform.launch +experiment=NAME [key=value ...]`.

Composes the configuration of every job with Hydra, checks and plans all jobs, and only then trains them one after the
other, so that all mistakes are reported at once. `platform._startup` recognises our package by this file's name, and
imports of this module must stay cheap.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from platform.boundary import refusals
from platform.boundary.redaction import isolate_secrets, known_secrets, redact_secrets, register_url_secrets
from platform.boundary.refusals import DONE, FAILED, REFUSED, STOPPED, ConfigError, format_violation, refuse_all
from platform.boundary.schema import Malformed
from platform.boundary.terminal import QuickExit, Say, print_line, run_printing_command, show_phase
from platform.boundary.world_faults import UNAVAILABLE
from platform.cluster.crew.failures import NoPlaces
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.cluster.shown_commands import Command, PhaseTimes, monotonic_command_start
from platform.config import run_rules
from platform.config.arguments import (
    HOW_MANY,
    expand_sweep_jobs,
    find_experiment_name,
    format_hydra_error,
    parse_typed_values,
)
from platform.config.composition import CONF, Composer, open_composer
from platform.config.extensions import CHOSEN, complete_user_settings, import_user_modules, refuse_exits
from platform.config.fields import (
    KEYS,
    Config,
    Tensor,
    distill_settings,
    flatten_config,
    list_value_violations,
    set_value,
    violations_of_values,
)
from platform.config.groups import AUTO, RESUME
from platform.config.identity import find_default_directory
from platform.config.layout_rules import list_tensor_axes, mark_open_keys, parse_layout, violations_of_worker_count
from platform.config.validation import violations_of_configuration

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

from platform.predict.make_plan import Plan
from platform.weights import FROM_HF

SEVERITY = (DONE, STOPPED, UNAVAILABLE, REFUSED, FAILED)  # a sweep exits with its jobs' most severe status, the last


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line that trains (default: this process's); return its exit status (docs/run-directory.md)."""
    from hydra._internal.utils import get_args_parser  # accepts all of Hydra's own flags

    parser = get_args_parser()
    parser.error = _refuse_command_line  # type: ignore[method-assign]
    with refusals.shield_arguments(argv) as command_arguments:
        if argv is None:
            sys.argv[1:] = redact_secrets(command_arguments)  # libraries such as W&B record sys.argv
        phases = PhaseTimes(monotonic_command_start() if argv is None else None)
        try:
            return _run_launch_command(command_arguments, parser, phases)
        except ConfigError as error:
            return refusals.report_refusal(error, "config")


def _run_launch_command(argv: Sequence[str], parser: ArgumentParser, phases: PhaseTimes) -> int:
    """Parse a launcher's command line, plan, train or print as it asks, and return the exit status; raises
    ConfigError."""
    args = parser.parse_intermixed_args(argv)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}: not supported; own files go by --config-dir DIRECTORY")
    if args.cfg == "job":
        return run_printing_command(lambda: _print_configuration(args))
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return run_printing_command(lambda: _print_hydra_help(argv, args))
    return _run_jobs(args, phases)


def _refuse_command_line(message: str) -> NoReturn:
    """Raise ConfigError for a command line of `platform.launch` that its parser of flags refuses, with its message."""
    reason, separator, words = message.partition("unrecognized arguments: ")
    flags = " ".join(word for word in words.split() if word.startswith("-")) or words  # KEY=VALUE behind one is legal
    remark = f"; {HOW_MANY}" if "--workers" in flags else ""
    refused = f"{reason}{separator}{flags}{remark}"
    raise ConfigError(f"command line: {refused}; nearest legal: +experiment=NAME KEY=VALUE, --help")


def compose_config(
    overrides: Sequence[str],
    config_dir: str | None = None,
    stored: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> Config:
    """Compose, with Hydra, the configuration that `platform.launch` or another command with the arguments `overrides`
    runs; `config_dir` adds the user's files. `stored`: a configuration (`Config.to_dict`) on top of which the arguments
    come. `say`: gets lines on what arguments do not say.

    Raises ConfigError with one line for each argument that Hydra refuses and each illegal value.
    """
    with open_composer(config_dir, stored) as composer:
        config, lines = _compose_job(composer, overrides, with_plan=True, say=say)
    refuse_all(lines)
    return config


@refuse_exits()
def _compose_job(
    composer: Composer, arguments: Sequence[str], with_plan: bool = False, say: Say = lambda _: None
) -> tuple[Config, list[str]]:
    """Compose and complete the configuration of one launched job's arguments; return it, and one line per mistake in
    it; of one that has some, also the mistakes that its plan would show later, if `with_plan` is set. `say`: gets a
    line on a scheme that splits nothing."""
    modules = parse_typed_values(arguments).get("extend")  # first: other arguments may name what they register
    import_user_modules([name for name in modules if isinstance(name, str)] if isinstance(modules, list) else [])
    config, accepted, refused = composer.compose_arguments(arguments)
    lines = [format_hydra_error(argument, error) for argument, error in refused]
    lines += _complete_config(config, accepted, say)
    if any(type(error).__name__ == "MissingConfigException" for _, error in refused):
        lines += list_value_violations(config)  # relations between keys depend on the missing file: not checked
    else:
        lines += violations_of_configuration(config)
        if lines := list(dict.fromkeys(lines)):
            from platform.predict.make_plan import complete_violations  # which plans

            lines = complete_violations(config, lines, with_plan)
    if any(line.startswith("extend=") for line in lines):  # what a module would have registered is not known
        lines = [line for line in lines if refusals.find_refused_key(line) not in CHOSEN]
    return config, list(dict.fromkeys(lines))


def _complete_config(config: Config, arguments: Sequence[str], say: Say) -> list[str]:
    """Complete in place the configuration that `platform.launch` has composed of a job's arguments: import the user's
    modules, drop settings that an experiment made for another scheme, parse `tensor.layout`, and make the paths
    absolute.

    Settings that the user typed are kept, so that `violations_of_configuration` can refuse them. Returns one line per
    mistake found on the way; some of them can only be seen by comparing with `arguments`, the job's.
    """
    typed = parse_typed_values(arguments)
    lines = import_user_modules(config.extend)
    lines += _complete_paths(config)
    complete_user_settings(config, typed)
    mark_open_keys(config, typed)
    if config.model.source or config.model.kind == FROM_HF:
        with show_phase("reading the model's description"):  # takes seconds, as it imports torch
            from platform.weights.importing import complete_model

            lines += complete_model(config, typed)
    if config.data.document_mask and "model.within_documents" not in typed:
        config.model.within_documents = True
    if config.train.length_ramp and config.model.positions == "learned" and "model.position_rows" not in typed:
        config.model.position_rows = config.model.length
    tensor, branch = config.tensor, config.branch
    if tensor.scheme == "layout" and tensor.layout == AUTO:
        lines += _choose_layout(config, typed, say)
    if tensor.scheme == "layout" and tensor.layout:
        try:
            tensor.regions, tensor.parameters = parse_layout(tensor.layout, tensor.axes)
        except ConfigError as error:  # its lines quote words of the layout; if that holds a secret, quote none
            shown = redact_secrets(tensor.layout)
            is_plain = shown == tensor.layout
            lines += error.violations if is_plain else [format_violation("tensor.layout", shown, "is no layout")]
    declared = list_tensor_axes(tensor)
    before, tensor.axes = tensor.axes, _select_axes("tensor", tensor.axes, declared, typed)
    if "tensor" in typed and not config.plan.search and not any(key.startswith("tensor.axes") for key in typed):
        for line in _describe_untyped_axes(tensor, declared, before):
            say(line)
    tensor.order = list(dict.fromkeys([*tensor.order, *tensor.axes])) if tensor.scheme == "layout" else declared
    branch.axes = _select_axes("branch", branch.axes, [] if branch.kind == "none" else list(branch.axes), typed)
    defaults = flatten_config(Config())
    for key, legal in KEYS.items():  # what nothing reads is at its default, unless it is typed
        if legal.read_if and not legal.read_if(config) and not any(f"{name}.".startswith(f"{key}.") for name in typed):
            set_value(config, key, defaults[key])
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if "optimizer.warmup_steps" in typed and warmup > steps >= 1:  # untyped it is legal: the run was shortened
        lines.append(format_violation("optimizer.warmup_steps", warmup, f"must be <= train.steps={steps}", [steps]))
    name = find_experiment_name(arguments) or "config"
    if config.resume.allow and not config.run.dir and not config.checkpoint.url and config.checkpoint.resume in RESUME:
        constraint = "needs the run to go on from; its default directory has other values in its name"
        lines.append(format_violation("resume.allow", ",".join(config.resume.allow), constraint, ["run.dir=DIRECTORY"]))
    _keep_documents_unmasked(config, typed, name)
    config.run.dir = config.run.dir or os.path.abspath(find_default_directory(config, name))
    return lines


def _choose_layout(config: Config, typed: Mapping[str, Any], say: Say) -> list[str]:
    """Choose tensor.layout=auto of a configuration in place, and say it; return a line for each axis without a size."""
    tensor, prefix = config.tensor, "tensor.axes."
    sized = {key.removeprefix(prefix) for key in typed if key.startswith(prefix)}
    tensor.axes = {name: n for name, n in tensor.axes.items() if name in sized or not (sized or "tensor.axes" in typed)}
    unset = [key for key in config.plan.search if key.startswith(prefix)] or ([] if tensor.axes else [f"{prefix}NAME"])
    tensor.layout = None
    if unset:
        return [format_violation("tensor.layout", AUTO, "needs sizes of axes", [f"{key}=2" for key in unset])]
    with show_phase("choosing a layout"):
        from platform.predict.layout_search import choose_layout

        chosen = choose_layout(config)
    if chosen == "":
        return [format_violation("tensor.layout", AUTO, f"no dim can be split over axes of {tensor.axes}")]
    if chosen:
        tensor.layout = chosen
        say(f"tensor.layout={chosen}: the quickest, as predicted, of layouts on these axes")
    return []


def _keep_documents_unmasked(config: Config, typed: Mapping[str, Any], name: str) -> None:
    """Let a run over instructions that began with documents that see each other, as was the default, go on so, in
    place, and say so in a line, unless `typed` arguments decide. `name`: the experiment's."""
    if config.data.kind != "instructions" or not config.data.document_mask or "data.document_mask" in typed:
        return
    from platform.cluster.run_directory import read_configuration

    earlier = replace(config, data=replace(config.data, document_mask=False))
    earlier.model = replace(config.model, within_documents=False)
    if not (directory := config.run.dir):
        if os.path.isdir(find_default_directory(config, name)):
            return
        directory = os.path.abspath(find_default_directory(earlier, name))
    with suppress(Malformed, OSError):  # whoever reads the directory refuses it
        stored = read_configuration(Path(directory))
        if stored and stored.data.kind == "instructions" and not stored.data.document_mask:
            config.data, config.model, config.run.dir = earlier.data, earlier.model, directory
            reason = "as this run began; a new run keeps them apart (data.document_mask=true)"
            print_line(f"documents in a row see each other, {reason}", sys.stderr)


def _select_axes(group: str, axes: Mapping[str, int], declared: list[str], typed: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in `axes` of the mesh axes that a launched job keeps for its scheme in `group` (tensor or
    branch), by name; of the axes that the scheme has (`declared`), and of the axes in `typed`, the keys that the user
    typed, unless undeclared and of size 1 (without effect).

    Undeclared axes that only an experiment sets are dropped; undeclared typed ones stay, to be refused later.
    """
    typed_axes = [key.removeprefix(f"{group}.axes.") for key in typed if key.startswith(f"{group}.axes.")]
    if f"{group}.axes" in typed:  # `tensor.axes={...}` replaces all axes that files set
        axes = {name: axes[name] for name in typed_axes}
    return {name: n for name, n in axes.items() if name in declared or (name in typed_axes and n != 1)}


def _describe_untyped_axes(tensor: Tensor, declared: Sequence[str], before: Mapping[str, int]) -> Iterator[str]:
    """Yield what launch says of a typed tensor scheme, with axes `declared`, if it splits nothing; `before`: sizes."""
    if declared and all(tensor.axes.get(name, 1) == 1 for name in declared):
        sizes = " or ".join(f"tensor.axes.{name}=N" for name in declared)
        dropped = " ".join(f"tensor.axes.{name}={n}" for name, n in before.items() if n > 1)
        ending = f"; {dropped}, of another scheme, is dropped" if dropped else ""
        yield f"tensor={tensor.scheme}: all its axes are 1, nothing is split; {sizes} splits it{ending}"


def _complete_paths(config: Config) -> list[str]:
    """Make every path in a launched job's configuration absolute, in place, as workers have other working directories.
    Return one refusal line per path that begins with ~USER of a user that does not exist."""
    from platform.data.mixture import paths_by_key

    lines, values = [], flatten_config(config)
    path_values = {key: values[key] for key, k in KEYS.items() if k.path is not None and values[key] not in k.path}
    for key, typed_path in {**paths_by_key(config.data), **path_values}.items():
        path, path_violations = run_rules.expand_path(key, typed_path)
        set_value(config, key, path)
        lines += path_violations
    return lines


def _run_jobs(args: Namespace, phases: PhaseTimes) -> int:
    """Plan every job of a command line (one, or one per combination of a sweep, `-m`), then train one after the other;
    return the most severe exit status, as SEVERITY orders them."""
    try:
        with StopSignals():
            jobs = _plan_jobs(args, phases)
    except Stopped as stopped:
        print_line(f"stopped by {stopped}: nothing was done; the same command does it")
        return STOPPED
    except NoPlaces as error:
        print_line(f"{error}; the same command tries again")
        return STOPPED
    statuses = []
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print_line(f"job {number} of {len(jobs)}: {' '.join(job.arguments)}")
        with isolate_secrets(job.secrets):
            command = Command(job.arguments, args.config_dir, alone=len(jobs) == 1)
            statuses.append(_train_job(job.config, job.plan, command, phases if number == 1 else PhaseTimes()))
        if statuses[-1] == STOPPED:  # the stop is meant for the whole command, not for one job
            break
    if args.multirun:
        from platform.predict.measured_runs import TrainedRun, format_sweep, write_sweep_table

        runs = [TrainedRun(job.arguments, job.config, job.plan.mesh.world_size) for job in jobs]
        print_line(format_sweep(runs, statuses))
        again = partial(compose_config, config_dir=args.config_dir)
        print_line(write_sweep_table(find_experiment_name(jobs[0].arguments) or "config", runs, again))
    return max(statuses, key=SEVERITY.index)


class PlannedJob(NamedTuple):
    """Planned run of a command, which has one, or one per member of a sweep."""

    arguments: list[str]
    config: Config
    plan: Plan
    secrets: dict[str, str]  # its own, so that it is the same run as that of its arguments alone


def _plan_jobs(args: Namespace, phases: PhaseTimes) -> list[PlannedJob]:
    """Compose and plan every job of a command, before any starts; `phases` takes note of the first. Raises ConfigError
    with the mistakes of all jobs."""
    jobs: list[PlannedJob] = []
    lines: list[str] = []
    with open_composer(args.config_dir) as composer:
        for arguments in _expand_jobs(composer, args.overrides, args.multirun):
            with isolate_secrets():
                register_url_secrets(arguments)
                mistakes, job = _plan_job(composer, arguments, phases)
            lines += mistakes
            jobs += [job] if job else []
    directories = [job.config.run.dir for job in jobs]
    lines += [f"run.dir={d}: several jobs of the sweep share it" for d in directories if directories.count(d) > 1]
    refuse_all(lines)
    return jobs


def _expand_jobs(composer: Composer, overrides: Sequence[str], multirun: bool) -> list[list[str]]:
    """Return the arguments of each job of a command, with what files say to sweep over if `multirun` is set."""
    swept, jobs = composer.find_sweep_arguments(overrides) if multirun else ([], [[]])
    return expand_sweep_jobs([*overrides, *swept], multirun, jobs)


def compose_sweep(overrides: Sequence[str], config_dir: str | None = None) -> list[tuple[list[str], Config]]:
    """Compose a sweep, `-m`; return each job's arguments and configuration. Raises ConfigError with all mistakes."""
    with open_composer(config_dir) as composer:
        jobs = [(words, *_compose_job(composer, words, True)) for words in _expand_jobs(composer, overrides, True)]
    refuse_all(dict.fromkeys(line for _, _, lines in jobs for line in lines))
    return [(words, config) for words, config, _ in jobs]


def _plan_job(composer: Composer, arguments: list[str], phases: PhaseTimes) -> tuple[list[str], PlannedJob | None]:
    """Compose and plan the job with these arguments; return one line per mistake in it, and the job, None without a
    plan."""
    notes: list[str] = []
    config, mistakes = _compose_job(composer, arguments, say=notes.append)
    phases.reach_phase("composed")
    if find_experiment_name(arguments) is None:
        names = composer.list_options("experiment")
        mistakes.insert(0, f"experiment: none is chosen; write +experiment=NAME, NAME one of {', '.join(names)}")
    plan, lines = prepare_plan(config, mistakes)
    phases.reach_phase("planned")
    for note in notes if plan else []:
        print_line(note, sys.stderr)
    return lines, PlannedJob(arguments, config, plan, known_secrets()) if plan else None


def prepare_plan(config: Config, mistakes: Sequence[str]) -> tuple[Plan | None, list[str]]:
    """Plan a job that `platform.launch` or another command has composed, with the mistakes `mistakes` so far; return
    the plan, None if there is none, and all mistakes, one line each. Settles open keys, parallel.data=-1, buckets and
    rhythms that are auto in `config`, so that workers make the same plan and take the same snapshots."""
    from platform.cluster.resources import choose_auto_keys, expect_cluster, settle_auto_intervals
    from platform.data.data_checks import violations_of_sources
    from platform.predict.make_plan import make_plan, settle_for_workers
    from platform.predict.step_price import violations_of_hardware

    lines = [*mistakes]
    if not lines:
        lines += run_rules.violations_of_environment(config)
        lines += violations_of_sources(config.data, vocab=config.model.vocab)
        lines += violations_of_hardware(config)
    # if a key that planning reads is illegal, planning could run for ever: none looks for further mistakes
    is_plannable = not any(key in KEYS and KEYS[key].planned for key in violations_of_values(config))
    if not is_plannable or [*violations_of_worker_count(config)]:
        return None, lines
    if lines and config.plan.search:
        return None, lines
    try:
        with expect_cluster(config):
            choose_auto_keys(config, print_line)
            plan = make_plan(config, _count_workers(config))
    except ConfigError as error:
        return None, [*dict.fromkeys([*lines, *error.violations])]
    except Exception:
        if not mistakes:  # otherwise an illegal value, reported already, may have broken the planner
            raise
        return None, lines
    config.parallel.data = plan.num_replicas
    settle_for_workers(config, plan)
    lines += _violations_of_teacher(config) if distill_settings(config) else []
    if not lines:
        with expect_cluster(config):
            settle_auto_intervals(config, plan, print_line)
    lines += run_rules.violations_of_fault_ranks(config, plan.mesh.world_size)
    lines += run_rules.violations_of_profile_ranks(config, plan.mesh.world_size)
    return plan, lines


def _violations_of_teacher(config: Config) -> list[str]:
    """Return the refusal lines of a launched job's teacher: its model, its tokenizer, its weights and its plan."""
    if not config.train.teacher:
        legal = ["train.teacher=FOLDER", "train.teacher=CHECKPOINT"]
        return [format_violation("train.teacher", "", "train.loss=distill needs a trained model", legal)]
    with show_phase("reading the teacher's description"):  # takes seconds, as it imports torch
        from platform.cluster.control.teacher import find_teacher, plan_teacher
    try:
        plan_teacher(config, find_teacher(config))
    except ConfigError as error:
        return error.violations
    return []


def _count_workers(config: Config) -> int | None:
    """Return the number of workers available to a launched job if `parallel.data` is -1 (all of them), else None."""
    if config.parallel.data != -1:
        return None
    from platform.cluster.resources import count_available_workers

    return count_available_workers(config.cluster)


def _train_job(config: Config, plan: Plan, command: Command, phases: PhaseTimes) -> int:
    """Train a planned job of the command line; return its exit status, and print a refusal or a traceback."""
    from platform.cluster import driver

    try:
        return driver.drive_run(config, plan, command=command, phases=phases)
    except ConfigError as error:
        return refusals.report_refusal(error, "config")
    except BaseException as error:  # a bug of ours, or of the user's code; the next job of a sweep may still succeed
        if refusals.is_stop_signal(error):
            raise
        print_line(traceback.format_exc().rstrip(), sys.stderr)
        return FAILED


def _print_configuration(args: Namespace) -> int:
    """Print the resolved configuration (`--cfg job`), or one group of it (`--package GROUP`), without secrets."""
    from omegaconf import OmegaConf

    values = OmegaConf.create(compose_config(args.overrides, args.config_dir).to_dict())
    chosen_part = OmegaConf.select(values, args.package) if args.package else values
    if not OmegaConf.is_config(chosen_part):
        groups = [name for name in values if OmegaConf.is_config(values[name])]
        raise ConfigError("--package", args.package, "no such part", refusals.closest_values(args.package, groups))
    print(OmegaConf.to_yaml(OmegaConf.create(redact_secrets(OmegaConf.to_container(chosen_part)))), end="")
    return DONE


def _print_hydra_help(argv: Sequence[str], args: Namespace) -> int:
    """Let Hydra answer a command that asks for --help, --hydra-help, --info, --cfg hydra, --cfg all or shell
    completion; return the exit status."""
    import hydra

    from platform.config.arguments import rewrite_argument

    if not args.shell_completion:
        compose_config(args.overrides, args.config_dir)
    with open_composer(args.config_dir):
        overrides = [rewrite_argument(a) for a in args.overrides]
    command = sys.argv
    try:
        sys.argv = [command[0], *overrides, *(a for a in argv if a not in args.overrides)]
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda config: None)()
    except SystemExit as answered:
        if answered.code:
            return FAILED
    finally:
        sys.argv = command
    if args.help:
        from platform.config.reference import render_summary

        print(render_summary())
    return DONE


if __name__ == "__main__":
    sys.exit(QuickExit().run(main))
