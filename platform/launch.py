"""Command line of the platform: `python -m platform.launch +experiment=NAME [key=value ...]`.

Composes the configuration of every job with Hydra, checks and plans all jobs, and only then trains them one after the
other, so that all mistakes are reported at once. `platform._startup` recognises our package by this file's name, and
imports of this module must stay cheap.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from platform.boundary.redaction import known_secrets, own_secrets, redact, register_url_secrets
from platform.boundary.refusals import (
    DONE,
    FAILED,
    REFUSED,
    STOPPED,
    ConfigError,
    closest,
    given_arguments,
    passes,
    refusal_status,
    refuse_all,
    violation,
)
from platform.boundary.terminal import QuickExit, phase, print_line, print_while_read
from platform.cluster.crew.signals import Stopped, StopSignals
from platform.cluster.shown_commands import Phases, command_start
from platform.config.arguments import experiment_of, jobs_of, rewrite, translate_error, typed_values
from platform.config.composition import CONF, Composer, open_composer
from platform.config.extensions import complete_settings, load_extensions, refusing_exits
from platform.config.fields import Config, flat_values, impossible_values, set_value, violations_of_values
from platform.config.groups import ON_RAY, RESUME
from platform.config.identity import default_directory
from platform.config.layout_rules import axes_of, leave_open, parse_layout, slices_heads, too_many_workers
from platform.config.run_rules import absent_profiles, absent_ranks, expanded, violations_of_surroundings
from platform.config.validation import violations_of_configuration
from platform.plan.generators import ONE_CHUNK

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from platform.cluster.shown_commands import Command
    from platform.weights import FROM_HF
from platform.predict.make_plan import Plan
from platform.weights import FROM_HF

SEVERITY = (DONE, STOPPED, REFUSED, FAILED)  # least to most severe: a sweep exits with the worst status of its jobs
# Keys that planning reads. If one has an illegal value, planning could run for ever, so no plan is made to look for
# further mistakes.
PLANNED = tuple("model. tensor. branch. pipeline. parallel. train.global_batch train.microbatch recompute".split())

# Keys that nothing reads in such configurations: unless they are typed, they are at their defaults there.
UNREAD: dict[str, Callable[[Config], bool]] = {
    "tensor.layout": lambda c: c.tensor.scheme != "layout" or not c.tensor.layout,
    "branch.slice_via": lambda c: not slices_heads(c.branch),
    "parallel.zero": lambda c: c.branch.kind == "dsp_csub",  # not built beside it
    "pipeline.stages": lambda c: c.pipeline.kind == "none",
    "pipeline.chunks": lambda c: c.pipeline.kind in ("none", *ONE_CHUNK),
    "pipeline.file": lambda c: c.pipeline.kind != "file",
    **dict.fromkeys((f"cluster.{name}" for name in ON_RAY), lambda c: c.cluster.kind != "ray"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line that trains (default: this process's); return its exit status (docs/run-directory.md)."""
    from hydra._internal.utils import get_args_parser  # accepts all of Hydra's own flags

    parser = get_args_parser()
    parser.error = _misread  # type: ignore[method-assign]
    with given_arguments(argv) as given:
        if argv is None:
            sys.argv[1:] = redact(given)  # libraries such as W&B record sys.argv
        phases = Phases(command_start() if argv is None else None)
        try:
            return _answer(given, parser, phases)
        except ConfigError as error:
            return refusal_status(error, "config")


def _answer(argv: Sequence[str], parser: ArgumentParser, phases: Phases) -> int:
    """Parse a launcher's command line, plan, train or print as it asks, and return the exit status; raises
    ConfigError."""
    args = parser.parse_intermixed_args(argv)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--{flag.replace('_', '-')}: not supported; own files go by --config-dir DIRECTORY")
    if args.cfg == "job":
        return print_while_read(lambda: _show(args))
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion:
        return print_while_read(lambda: _inform(argv, args))
    return _run(args, phases)


def _misread(message: str) -> NoReturn:
    """Raise ConfigError for a launch command line that the parser of flags refuses, with its message."""
    raise ConfigError(f"command line: {message}; nearest legal: +experiment=NAME KEY=VALUE, --help")


def compose(overrides: Sequence[str], config_dir: str | None = None, stored: Mapping[str, Any] | None = None) -> Config:
    """Compose the configuration that a command with the arguments `overrides` runs; `config_dir` adds the user's files.
    `stored`: a configuration (`Config.to_dict`) on top of which the arguments come.

    Raises ConfigError with one line for each argument that Hydra refuses and each illegal value.
    """
    with open_composer(config_dir, stored) as composer:
        config, lines = _compose(composer, overrides)
    refuse_all(lines)
    return config


@refusing_exits()
def _compose(composer: Composer, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Compose and complete the configuration of one launched job's arguments; return it, and one line per mistake in
    it."""
    modules = typed_values(arguments).get("extend")  # first: other arguments may name what they register
    load_extensions([name for name in modules if isinstance(name, str)] if isinstance(modules, list) else [])
    config, accepted, refused = composer.load(arguments)
    lines = [translate_error(argument, error) for argument, error in refused]
    lines += _complete(config, accepted)
    if any(type(error).__name__ == "MissingConfigException" for _, error in refused):
        lines += impossible_values(config)  # relations between keys depend on the missing file: not checked
    else:
        lines += violations_of_configuration(config)
    return config, list(dict.fromkeys(lines))


def _complete(config: Config, arguments: Sequence[str]) -> list[str]:
    """Complete a composed configuration in place: import the user's modules, drop settings that an experiment made for
    another scheme, parse `tensor.layout`, and make the paths absolute.

    Settings that the user typed are kept, so that `violations_of_configuration` can refuse them. Returns one line per
    mistake found on the way; some of them can only be seen by comparing with `arguments`, the job's.
    """
    typed = typed_values(arguments)
    lines = load_extensions(config.extend)
    lines += _complete_paths(config)
    complete_settings(config, typed)
    leave_open(config, typed)
    if config.model.source or config.model.kind == FROM_HF:
        with phase("reading the model's description"):  # takes seconds, as it imports torch
            from platform.weights.importing import complete_model

            lines += complete_model(config, typed)
    if config.data.document_mask and "model.within_documents" not in typed:
        config.model.within_documents = True
    if config.train.length_ramp and config.model.positions == "learned" and "model.position_rows" not in typed:
        config.model.position_rows = config.model.length
    tensor, branch = config.tensor, config.branch
    if tensor.scheme == "layout" and tensor.layout:
        try:
            tensor.regions, tensor.parameters = parse_layout(tensor.layout, tensor.axes)
        except ConfigError as error:  # its lines quote words of the layout; if that holds a secret, quote none
            shown = redact(tensor.layout)
            lines += error.violations if shown == tensor.layout else [violation("tensor.layout", shown, "is no layout")]
    declared = axes_of(tensor)
    tensor.axes = _own_axes("tensor", tensor.axes, declared, typed)
    tensor.order = list(dict.fromkeys([*tensor.order, *tensor.axes])) if tensor.scheme == "layout" else declared
    branch.axes = _own_axes("branch", branch.axes, [] if branch.kind == "none" else list(branch.axes), typed)
    for key, unread in UNREAD.items():
        if unread(config) and not any(f"{name}.".startswith(f"{key}.") for name in typed):
            set_value(config, key, flat_values(Config())[key])
    warmup, steps = config.optimizer.warmup_steps, config.train.steps
    if "optimizer.warmup_steps" in typed and warmup > steps >= 1:  # untyped it is legal: the run was shortened
        lines.append(violation("optimizer.warmup_steps", warmup, f"must be <= train.steps={steps}", [steps]))
    name = experiment_of(arguments) or "config"
    if config.resume.allow and not config.run.dir and not config.checkpoint.url and config.checkpoint.resume in RESUME:
        constraint = "needs the run to go on from; its default directory has other values in its name"
        lines.append(violation("resume.allow", ",".join(config.resume.allow), constraint, ["run.dir=DIRECTORY"]))
    config.run.dir = config.run.dir or os.path.abspath(default_directory(config, name))
    return lines


def _own_axes(group: str, axes: Mapping[str, int], declared: Sequence[str], typed: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in `axes` of the mesh axes that a job keeps for its scheme in `group` (tensor or branch), by
    name; of the axes that the scheme has (`declared`), and of the axes in `typed`, the keys that the user typed, unless
    undeclared and of size 1 (without effect).

    Undeclared axes that only an experiment sets are dropped; undeclared typed ones stay, to be refused later.
    """
    given = [key.removeprefix(f"{group}.axes.") for key in typed if key.startswith(f"{group}.axes.")]
    if f"{group}.axes" in typed:  # `tensor.axes={...}` replaces all axes that files set
        axes = {name: axes[name] for name in given}
    return {name: n for name, n in axes.items() if name in declared or (name in given and n != 1)}


# Keys that hold a path or URL, and the words that may stand there instead.
PATHS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("run.dir", "data.cache", "pipeline.file", "checkpoint.url", "model.source"), ()),
    "eval.task_folder": (),
    "checkpoint.resume": RESUME,
    "train.init": ("random",),
    "data.tokenizer": ("train",),
    "data.chat_template": ("chatml",),
}


def _complete_paths(config: Config) -> list[str]:
    """Make every path in a configuration absolute, in place, as workers have other working directories. Return one
    refusal line per path that begins with ~USER of a user that does not exist."""
    from platform.data.mixture import paths_of

    lines, values = [], flat_values(config)
    own = {key: values[key] for key, words in PATHS.items() if values[key] not in words}
    for key, given in {**paths_of(config.data), **own}.items():
        path, wrong = expanded(key, given)
        set_value(config, key, path)
        lines += wrong
    return lines


def _run(args: Namespace, phases: Phases) -> int:
    """Plan every job of a command line (one, or one per combination of a sweep, `-m`), then train one after the other;
    return the most severe exit status, as SEVERITY orders them."""
    try:
        with StopSignals():
            jobs = _planned(args, phases)
    except Stopped as stopped:
        print_line(f"stopped by {stopped}: nothing was done; the same command does it")
        return STOPPED
    statuses = []
    for number, job in enumerate(jobs, 1):
        if len(jobs) > 1:
            print_line(f"job {number} of {len(jobs)}: {' '.join(job.arguments)}")
        with own_secrets(job.secrets):
            command = command_of(job.arguments, args.config_dir)
            statuses.append(_train(job.config, job.plan, command, phases if number == 1 else Phases()))
        if statuses[-1] == STOPPED:  # the stop is meant for the whole command, not for one job
            break
    if args.multirun:
        from platform.predict.measured_runs import TrainedRun, table_of_sweep

        runs = [TrainedRun(job.arguments, job.config, job.plan.mesh.size) for job in jobs]
        again = partial(compose, config_dir=args.config_dir)
        print_line(table_of_sweep(experiment_of(jobs[0].arguments) or "config", runs, again))
    return max(statuses, key=SEVERITY.index)


class PlannedJob(NamedTuple):
    """Planned run of a command, which has one, or one per member of a sweep."""

    arguments: list[str]
    config: Config
    plan: Plan
    secrets: dict[str, str]  # its own, so that it is the same run as that of its arguments alone


def _planned(args: Namespace, phases: Phases) -> list[PlannedJob]:
    """Compose and plan every job of a command, before any starts; `phases` takes note of the first. Raises ConfigError
    with the mistakes of all jobs."""
    jobs: list[PlannedJob] = []
    lines: list[str] = []
    with open_composer(args.config_dir) as composer:
        swept = composer.swept(args.overrides) if args.multirun else []
        for arguments in jobs_of([*args.overrides, *swept], args.multirun):
            with own_secrets():
                register_url_secrets(arguments)
                wrong, job = _plan_job(composer, arguments, phases)
            lines += wrong
            jobs += [job] if job else []
    directories = [job.config.run.dir for job in jobs]
    lines += [f"run.dir={d}: several jobs of the sweep share it" for d in directories if directories.count(d) > 1]
    refuse_all(lines)
    return jobs


def _plan_job(composer: Composer, arguments: list[str], phases: Phases) -> tuple[list[str], PlannedJob | None]:
    """Compose and plan the job with these arguments; return one line per mistake in it, and the job, None without a
    plan."""
    config, wrong = _compose(composer, arguments)
    phases.reach("composed")
    if experiment_of(arguments) is None:
        names = composer.options("experiment")
        wrong.insert(0, f"experiment: none is chosen; write +experiment=NAME, NAME one of {', '.join(names)}")
    plan, lines = prepare(config, wrong)
    phases.reach("planned")
    return lines, PlannedJob(arguments, config, plan, known_secrets()) if plan else None


def prepare(config: Config, wrong: Sequence[str]) -> tuple[Plan | None, list[str]]:
    """Plan a job whose configuration has the mistakes `wrong` already; return the plan, None if there is none, and all
    mistakes, one line each. Settles open keys, parallel.data=-1, buckets and rhythms that are auto in `config`, so that
    workers make the same plan and take the same snapshots."""
    from platform.cluster.resources import settle_here, settle_rhythms_here
    from platform.data.data_checks import violations_of_sources
    from platform.predict.make_plan import make_plan
    from platform.predict.step_price import violations_of_hardware

    lines = [*wrong] or [
        *violations_of_surroundings(config),
        *violations_of_sources(config.data, vocab=config.model.vocab),
        *violations_of_hardware(config),
    ]
    if any(key.startswith(PLANNED) for key in violations_of_values(config)) or [*too_many_workers(config)]:
        return None, lines
    if lines and config.plan.search:
        return None, lines
    try:
        settle_here(config, print_line)
        plan = make_plan(config, _workers(config))
    except ConfigError as error:
        return None, [*dict.fromkeys([*lines, *error.violations])]
    except Exception:
        if not wrong:  # otherwise an illegal value, reported already, may have broken the planner
            raise
        return None, lines
    config.parallel.data = plan.replicas
    if plan.zero < 3:
        config.parallel.bucket_mib = plan.bucket_mib  # workers may lack the file of cluster.hardware
    if not lines:
        settle_rhythms_here(config, plan, print_line)
    return plan, [*lines, *absent_ranks(config, size := plan.mesh.size), *absent_profiles(config, size)]


def _workers(config: Config) -> int | None:
    """Return the number of workers available to a launched job if `parallel.data` is -1 (all of them), else None."""
    if config.parallel.data != -1:
        return None
    from platform.cluster.resources import available_workers

    return available_workers(config.cluster)


def _train(config: Config, plan: Plan, command: Command, phases: Phases) -> int:
    """Train a planned job of the command line; return its exit status, and print a refusal or a traceback."""
    from platform.cluster import driver

    try:
        return driver.run(config, plan, command=command, phases=phases)
    except ConfigError as error:
        return refusal_status(error, "config")
    except BaseException as error:  # a bug of ours, or of the user's code; the next job of a sweep may still succeed
        if passes(error):
            raise
        print_line(traceback.format_exc().rstrip(), sys.stderr)
        return FAILED


def command_of(arguments: Sequence[str], config_dir: str | None = None) -> Command:
    """Make the Command of one run, by which it shows the user how to start it again: its typed arguments, and a
    function that counts the workers of a run with other arguments (0 if that is refused)."""
    from platform.cluster.shown_commands import Command
    from platform.predict.make_plan import make_plan

    def workers(others: Sequence[str]) -> int:
        """Count the workers that a run with the arguments `others` would have; return 0 if it is refused."""
        try:
            config = compose(others, config_dir)
            return 0 if config.plan.search else make_plan(config, _workers(config)).mesh.size
        except ConfigError:
            return 0

    return Command(arguments, config_dir, workers)


def _show(args: Namespace) -> int:
    """Print the resolved configuration (`--cfg job`), or one group of it (`--package GROUP`), without secrets."""
    from omegaconf import OmegaConf

    values = OmegaConf.create(compose(args.overrides, args.config_dir).to_dict())
    part = OmegaConf.select(values, args.package) if args.package else values
    if not OmegaConf.is_config(part):
        groups = [name for name in values if OmegaConf.is_config(values[name])]
        raise ConfigError(violation("--package", args.package, "no such part", closest(args.package, groups)))
    print(OmegaConf.to_yaml(OmegaConf.create(redact(OmegaConf.to_container(part)))), end="")
    return DONE


def _inform(argv: Sequence[str], args: Namespace) -> int:
    """Let Hydra answer a command that asks for --help, --hydra-help, --info, --cfg hydra, --cfg all or shell
    completion; return the exit status."""
    import hydra

    if not args.shell_completion:
        compose(args.overrides, args.config_dir)
    with open_composer(args.config_dir):
        overrides = [rewrite(a) for a in args.overrides]
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
        from platform.config.reference import summary

        print(summary())
    return DONE


if __name__ == "__main__":
    sys.exit(QuickExit().run(main))
