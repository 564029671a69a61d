"""`python -m platform.plan +experiment=NAME [key=value ...]` explains the plan of a run without starting it: on one
screen, or with `--all` in full. With `--diff A B` it shows what differs between two plans, with `-m` a row for each job
of a sweep.

With `--shrink` it shows what the run becomes as it loses workers, one line per plan; with `--check` it follows every
tensor through the plan, and ends with status 1 if ranks would compute another number than one process.
`python -m platform.plan compare TABLE.csv` sets predicted beside measured steps; `python -m platform.plan calibrate`
measures the hardware.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from platform.boundary.documents import VALUES, parse_json, read_bytes
from platform.boundary.local_files import ReplacedFile
from platform.boundary.refusals import (
    DONE,
    FAILED,
    ConfigError,
    build_command_line,
    format_violation,
    refuse_all,
    refuse_failures,
    run_command,
    typed_command,
)
from platform.boundary.schema import Malformed
from platform.boundary.terminal import Say, escape_terminal_text, print_line, print_refusals
from platform.cluster.shown_commands import Command, replace_overrides
from platform.config.arguments import quote_value
from platform.config.fields import Config
from platform.config.key import WORKERS
from platform.launch import compose_config, compose_sweep
from platform.plan.layout import format_count
from platform.plan.plan import Plan, base_precision
from platform.plan.plan_builder import pause_garbage_collection
from platform.plan.plan_summary import format_number
from platform.plan.step_collectives import communication
from platform.predict.hardware import Hardware, format_fitted_file
from platform.predict.make_plan import list_refusals, make_plan
from platform.predict.plan_report import render_explanation
from platform.predict.plan_screen import closing_blocks, explain_config, find_fitting_change, format_screen
from platform.predict.step_price import choose_pricing_hardware, draw_step, read_hardware, set_hardware_device
from platform.predict.tier_traffic import NetworkTiers

MOST_TOKENS = 10**18  # of a run: a million times any run's
LEAST_MEMORY = 0.0001  # GB
MOST = 64 << 20  # bytes of a file for --diff: of thousands of ranks, groups are long lists

COMPARE = """`python -m platform.plan compare TABLE.csv [calibrate=SHARE|COLUMN]` sets predicted beside measured steps.

A row of the table is a run, see docs/measured.md. With `calibrate` the hardware's constants are fitted on a share of
the rows, evenly spaced, or on rows that a column marks, and the others are scored."""

CALIBRATE = """`python -m platform.plan calibrate --output FILE.yaml [--workers N] [key=value ...]` measures a cluster.

It starts workers as a run would and writes what they measure in about a minute as a description of the hardware, for
`python -m platform.plan --hardware FILE.yaml`: products by shape, memory, the host's time for a kernel, and each kind
of collective inside a node and between nodes. Ranks on a CPU share its cores: give as many workers as the run will
have. What is not measured comes from `--like`."""
CALIBRATION = "calibrate"  # folder in the run directory, with the workers' logs; they stay if a worker fails


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.plan`; return its exit status."""
    typed = list(sys.argv[1:] if argv is None else argv)
    if typed[:1] == ["compare"]:
        return _run_compare_command(typed[1:])
    if typed[:1] == ["calibrate"]:
        return _run_calibrate_command(typed[1:])
    parser = build_command_line("plan", __doc__)
    parser.add_argument("overrides", nargs="*", help="as for platform.launch: +experiment=NAME key=value ...")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="a row per job of a sweep: its seconds, TFLOP/s and memory"
    )
    parser.add_argument("--system", help="with -m: as another system runs the plans, a name in conf/system/")
    parser.add_argument("--workers", type=int, help="how many there are, where parallel.data=-1")
    parser.add_argument(
        "--tiers", type=_parse_tiers, metavar="node=8,rack=32,...",
        help="workers in one of each tier, for counting what crosses it (default: nodes of the hardware, or of 8)",
    )  # fmt: skip
    parser.add_argument(
        "--hardware", help="predict the seconds of a step on it: a name in conf/hardware/, or FILE.yaml"
    )
    parser.add_argument("--tokens", type=float, help="with --hardware: tokens to train on (default: train.steps)")
    parser.add_argument("--svg", metavar="FILE.svg", help="draw what each pipeline stage does when, in such a file")
    parser.add_argument("--shrink", action="store_true", help="what the run becomes with fewer and fewer workers")
    parser.add_argument("--memory", type=float, default=inf, help="with --shrink: GB per worker (default: any)")
    parser.add_argument("--check", action="store_true", help="whether each gradient is summed once, each tensor whole")
    parser.add_argument("--all", action="store_true", help="every group, collective and layout, not one screen")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="what differs between two plans: each more overrides in quotes,"
        " beside those before, or a FILE.json that --json wrote"
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return run_command(parser, _run_plan_command, argv, subject="config")


def _run_compare_command(argv: Sequence[str]) -> int:
    """Run the command line `python -m platform.plan compare`; return its exit status."""
    from platform.predict.measured_runs import (  # with numpy  # fmt: skip
        CONSTANTS,
        FITTED,
        compare_runs,
        dump_comparison,
        format_prediction_errors,
        is_share,
        leave_one_out,
        mark_fitted_runs,
        read_measured_runs,
        select_moved,
    )

    parser = build_command_line("plan compare", COMPARE)
    parser.add_argument("table", metavar="TABLE.csv", help="a row per measured run")
    parser.add_argument("calibrate", nargs="?", type=_parse_calibration, help="calibrate=SHARE, calibrate=COLUMN")
    parser.add_argument("--constants", default=",".join(FITTED), help=f"which are fitted, of {', '.join(CONSTANTS)}")
    parser.add_argument("--hardware", default="", help="of rows that name none: a name in conf/hardware/, or FILE.yaml")
    parser.add_argument("--leave-one-out", action="store_true", help="score each row by constants fitted on all others")
    parser.add_argument("--output", metavar="FILE.yaml", help="write the fitted constants, for --hardware FILE.yaml")
    parser.add_argument("--overwrite", action="store_true", help="the file of --output, although it exists")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")

    def print_prediction_errors(arguments: argparse.Namespace) -> int:
        """Print the comparison of the command `plan compare`, as text or JSON; return the exit status."""
        names = tuple(arguments.constants.split(","))
        refuse_all(f"--constants {n}: unknown; legal: {', '.join(CONSTANTS)}" for n in names if n not in CONSTANTS)
        calibrate, alone = arguments.calibrate or "", arguments.leave_one_out
        if calibrate and alone:
            raise ConfigError(f"--leave-one-out: fits on all other rows, not on calibrate={calibrate}")
        if output := arguments.output and Path(arguments.output):
            if not (calibrate or alone):
                raise ConfigError("--output", output, "nothing is fitted without calibrate= or --leave-one-out")
            _require_writable_output(output, arguments.overwrite)
        mark = "" if is_share(calibrate) else calibrate
        report = partial(print, file=sys.stderr, flush=True)
        runs = read_measured_runs(arguments.table, compose_config, arguments.hardware, mark, report)
        groups = dict.fromkeys(run.group for run in runs)
        if output and len(groups) > 1:
            raise ConfigError("--output", output, f"describes one hardware; rows name {', '.join(groups)}")
        if alone:
            comparison = leave_one_out(runs, names)
        else:
            comparison = compare_runs(runs, mark_fitted_runs(runs, calibrate), names)
        text = (
            json.dumps(dump_comparison(comparison))
            if arguments.json
            else "\n".join(format_prediction_errors(comparison))
        )
        print(escape_terminal_text(text) if not arguments.json else text)
        if output:
            like, [constants] = runs[0].cells["hardware"], comparison.constants.values()
            how = f"By python -m platform.plan compare: fitted on {sum(comparison.fitted) or len(runs)} measured runs."
            ReplacedFile(output, "--output").write(format_fitted_file(like, select_moved(constants), how))
            print_line(f"written: {output}", sys.stderr)
        return DONE

    return run_command(parser, print_prediction_errors, argv, subject="table")


def _parse_calibration(text: str) -> str:
    """Parse the argument calibrate=SHARE|COLUMN of `plan compare`. Raises ArgumentTypeError for another one."""
    key, _, value = text.partition("=")
    if key != "calibrate" or not value:
        raise argparse.ArgumentTypeError("must be calibrate=SHARE, such as 0.5, or calibrate=COLUMN")
    return value


def _run_calibrate_command(argv: Sequence[str]) -> int:
    """Run the command line `python -m platform.plan calibrate`; return its exit status."""
    from platform.cluster.crew.failures import NoPlaces

    parser = build_command_line("plan calibrate", CALIBRATE)
    parser.add_argument("overrides", nargs="*", help="where and in what to measure: cluster=..., precision=...")
    parser.add_argument("--output", required=True, metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="although it exists")
    parser.add_argument("--workers", type=int, help="how many measure at once (default: as many as there is room for)")
    parser.add_argument("--like", help="hardware that says what is not measured (default: this device's, or cpu)")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # sizes that say nothing, for tests
    return run_command(parser, _write_hardware, argv, subject="calibrate", failures=(NoPlaces,))


def _write_hardware(arguments: argparse.Namespace) -> int:
    """Measure workers for `python -m platform.plan calibrate`, and write its file; return the exit status."""
    from platform.cluster import calibration_run
    from platform.cluster.crew import torchrun
    from platform.cluster.crew.failures import WorkerFailed
    from platform.cluster.crew.signals import Stopped, StopSignals
    from platform.cluster.resources import count_available_workers
    from platform.doctor import open_worker_folder

    output = Path(arguments.output)
    _require_writable_output(output, arguments.overwrite)
    like = read_hardware(arguments.like) if arguments.like else None
    config = compose_config([*calibration_run.TINY, *arguments.overrides], arguments.config_dir)
    workers = max(1, count_available_workers(config.cluster)) if arguments.workers is None else arguments.workers
    if not 1 <= workers <= WORKERS:
        raise ConfigError("--workers", workers, f"must be at least 1 and at most {WORKERS:,}")
    config.parallel.data, config.train.global_batch = workers, workers
    if torchrun.is_follower():
        torchrun.follow_driver(Path(config.run.dir) / CALIBRATION)
        return DONE
    try:
        with StopSignals(), open_worker_folder(config, CALIBRATION) as folder:
            text = calibration_run.run_calibration(config, workers, folder, like, arguments.tiny)
    except WorkerFailed as error:
        print_refusals("calibrate", [f"{error}; its log: {error.culprit.log}"])
        return FAILED
    except Stopped as error:
        print_refusals("calibrate", [f"{error}: nothing is written"])
        return FAILED
    finally:
        if torchrun.is_under_torchrun():
            torchrun.release_waiting_workers()
    ReplacedFile(output, "--output").write(text)
    print_line(f"{text}written: {output}; `{typed_command('plan')} ... --hardware {output}` predicts steps here")
    return DONE


def _require_writable_output(output: Path, overwrite: bool) -> None:
    """Raise ConfigError for an --output that `plan calibrate` cannot or is not to write, before it measures."""
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError("--output", output, f"must end in .yaml, as {output.stem}.yaml")
    if output.exists() and not overwrite:
        raise ConfigError("--output", output, "exists; --overwrite replaces it")
    target = output if output.exists() else output.parent
    if not os.access(target, os.W_OK):
        why = "is not writable" if target.exists() else f"the folder {target} does not exist"
        raise ConfigError("--output", output, why)


def _hardware_unless_guessed(hardware: Hardware, arguments: argparse.Namespace, config: Config) -> Hardware | None:
    """Return the `hardware` of a plan command if its arguments or the configuration name it, so that it is no guess."""
    return hardware if arguments.hardware or config.cluster.gpu else None


def _default_tiers(hardware: Hardware | None) -> dict[str, int]:
    """Return --tiers of the plan command where none are given: nodes as the `hardware` has them, or of 8 workers."""
    return {"node": hardware.ranks if hardware else 8}


def _parse_tiers(text: str) -> dict[str, int]:
    """Read the plan command's option --tiers, such as node=8,rack=32. Raises ArgumentTypeError for an illegal text."""
    try:
        sizes = {name: int(count) for name, count in (pair.split("=") for pair in text.split(","))}
        NetworkTiers.build_tiers(sizes, 0)
    except ValueError as error:
        reason = str(error) if str(error).startswith("tiers:") else "must be NAME=WORKERS,... such as node=8,rack=32"
        raise argparse.ArgumentTypeError(reason) from None
    return sizes


def _run_plan_command(arguments: argparse.Namespace) -> int:
    """Print the explanation that the command line asks for; return the exit status of `python -m platform.plan`."""
    refuse_all([*_violations_of_numbers(arguments), *_violations_of_views(arguments)])
    with pause_garbage_collection():
        return _print_requested_view(arguments)


def _violations_of_numbers(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a refusal line for each number of the plan command's arguments with which there is no plan."""
    bounds = {"workers": (1, WORKERS), "tokens": (1, MOST_TOKENS), "memory": (LEAST_MEMORY, inf)}
    for name, (least, most) in bounds.items():
        number = getattr(arguments, name)
        if number is not None and not least <= number <= most:
            constraint = f"must be >= {least:,}" + (f" and <= {most:,}" if most < inf else "")
            yield format_violation(f"--{name}", number, constraint)


def _violations_of_views(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a refusal line for each option that is read only beside -m, or only without it."""
    if arguments.system and not arguments.multirun:
        yield format_violation("--system", arguments.system, "is read with -m alone")
    for name in ("tiers", "tokens", "svg", "shrink", "check", "all", "diff") if arguments.multirun else ():
        if value := getattr(arguments, name):
            yield format_violation(f"--{name}", value, "is of one plan; -m prints a row for each")


def _print_requested_view(arguments: argparse.Namespace) -> int:
    """Print the explanation of a plan as text or JSON, or with `--shrink` the plans for fewer and fewer workers, with
    `--check` mistakes, with `--diff` what differs between two plans; return the exit status."""
    if arguments.multirun:
        return _print_sweep(arguments)
    if arguments.diff:
        return _print_differing_predictions(arguments)
    config, plan = _compose_plan(arguments, arguments.overrides)
    if arguments.check:
        return _print_unsound_parts(plan, arguments.json)
    if arguments.shrink:
        for line in _format_shrinking_plans(config, arguments.memory * 1e9, arguments.json):
            print(escape_terminal_text(line), flush=True)
        return 0
    hardware = _choose_hardware(arguments.hardware, config)
    known_hardware = _hardware_unless_guessed(hardware, arguments, config)
    if arguments.svg:
        ReplacedFile(arguments.svg, "--svg").write(draw_step(config, plan, known_hardware))
    explanation = explain_config(
        config,
        plan,
        arguments.tiers or _default_tiers(known_hardware),
        hardware,
        named=bool(arguments.hardware),
        tokens=arguments.tokens,
        seeks_changes=True,
    )
    if config.train.teacher:
        from platform.cluster.control.teacher import describe_teacher, explain_teacher  # with torch

        explanation["teacher"] = explain_teacher(config, hardware)
    if arguments.json:
        print(json.dumps(explanation))
        return 0
    blocks = [render_explanation(plan, explanation), *closing_blocks(plan, explanation)] if arguments.all else []
    print(escape_terminal_text("\n\n".join(blocks) or format_screen(plan, explanation)))
    if facts := explanation.get("teacher"):
        print(escape_terminal_text(describe_teacher(facts)))
    if fitting := find_fitting_change(explanation):
        print_line(Command(arguments.overrides, arguments.config_dir).format_with_overrides(fitting))
    return 0


def _compose_plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[Config, Plan]:
    """Return the configuration that the plan command's overrides give, with its open keys chosen, and its plan."""
    config = _compose_config(arguments, overrides, lambda line: print_line(line, sys.stderr))
    return config, _plan_config(arguments, config)


def _plan_config(arguments: argparse.Namespace, config: Config) -> Plan:
    """Return the plan of a configuration, of which the open keys are chosen in place."""
    sizes_are_set = config.parallel.data != -1 and not config.plan.search
    if config.plan.search:
        _choose_open_keys(config, arguments)
    plan = make_plan(config, arguments.workers)
    if sizes_are_set and arguments.workers and arguments.workers != plan.mesh.world_size:
        _refuse_workers(config, plan, arguments.workers)
    config.parallel.data = plan.num_replicas
    return plan


def _print_sweep(arguments: argparse.Namespace) -> int:
    """Print a row for each job of the sweep that the command line asks for, as text or JSON; return the exit status."""
    from platform.predict.measured_runs import list_swept_arguments, read_system
    from platform.predict.sweep_prices import dump_prices, format_prices, price_job

    system = read_system(arguments.system or "ours")
    jobs, prices, names = compose_sweep(_add_hardware(arguments, arguments.overrides), arguments.config_dir), [], []
    for words, (_, config) in zip(list_swept_arguments([words for words, _ in jobs]), jobs, strict=True):
        _set_device(arguments, config)
        hardware = _choose_hardware(arguments.hardware, config)
        names.append(hardware.name)
        prices.append(price_job(words, config, _plan_config(arguments, config), hardware, system))
    shown = "\n".join(format_prices(prices, " and ".join(dict.fromkeys(names))))
    print(json.dumps(dump_prices(prices)) if arguments.json else escape_terminal_text(shown))
    return DONE


def _refuse_workers(config: Config, plan: Plan, workers: int) -> NoReturn:
    """Raise ConfigError for --workers of the plan command that are not the plan's, all sizes of which are set."""
    filled = replace(config, parallel=replace(config.parallel, data=-1))
    legal = [plan.mesh.world_size, *([] if list_refusals(filled, workers) else ["parallel.data=-1"])]
    constraint = f"all sizes of the plan are set, for {plan.mesh}; plan.search=[all] seeks one for {workers}"
    raise ConfigError("--workers", workers, constraint, legal)


def _compose_config(arguments: argparse.Namespace, overrides: Sequence[str], say: Say = lambda _: None) -> Config:
    """Return the configuration of the plan command's overrides, on its --hardware, if any, which plans for its kind of
    device; `say`: gets notes."""
    config = compose_config(_add_hardware(arguments, overrides), arguments.config_dir, say=say)
    _set_device(arguments, config)
    return config


def _add_hardware(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Return overrides that say --hardware, if any: composition chooses for it what the configuration leaves open."""
    if arguments.hardware:
        read_hardware(arguments.hardware)  # refuses it by the name of the option
    return [*overrides, *([f"cluster.hardware={quote_value(arguments.hardware)}"] if arguments.hardware else [])]


def _set_device(arguments: argparse.Namespace, config: Config) -> None:
    """Set the kind of device of the hardware of the command line, if any, in a configuration, in place."""
    if arguments.hardware:
        _choose_hardware(arguments.hardware, config)  # refuses it by the name of the option
    set_hardware_device(config)


def _print_differing_predictions(arguments: argparse.Namespace) -> int:
    """Print what differs between the two plans that `--diff` names, as text or JSON; return the exit status."""
    from platform.predict.plan_screen import NoExplanation, differing_predictions_by_part, format_differences

    one, other = (_explain_diff_argument(arguments, argument) for argument in arguments.diff)
    try:
        differences = differing_predictions_by_part(one, other)
    except NoExplanation as error:
        raise ConfigError("--diff", " ".join(arguments.diff), f"{error}, which --json writes") from None
    titles = [f"{name}  {argument or 'as it is'}" for name, argument in zip("AB", arguments.diff, strict=True)]
    text = json.dumps(differences) if arguments.json else "\n".join([*titles, *format_differences(differences)])
    print(text if arguments.json else escape_terminal_text(text))
    return DONE


def _explain_diff_argument(arguments: argparse.Namespace, argument: str) -> Any:
    """Return the explanation of one plan of the plan command's `--diff`, from a file or from overrides beside the
    common ones."""
    if not argument.endswith(".json"):
        with refuse_failures("--diff", argument, ValueError):  # a quotation that does not end
            typed = shlex.split(argument)
        config, plan = _compose_plan(arguments, replace_overrides(arguments.overrides, typed))
        hardware = _choose_hardware(arguments.hardware, config)
        tiers = arguments.tiers or _default_tiers(_hardware_unless_guessed(hardware, arguments, config))
        return explain_config(config, plan, tiers, hardware, bool(arguments.hardware), arguments.tokens)
    try:
        return parse_json(read_bytes(argument, MOST), MOST, VALUES)
    except OSError as error:
        raise ConfigError("--diff", argument, f"cannot be read: {error.strerror}") from None
    except Malformed as error:
        raise ConfigError("--diff", argument, f"is no JSON: {error}") from None


def _choose_open_keys(config: Config, arguments: argparse.Namespace) -> None:
    """Choose the open keys of the plan command's configuration, in place, for --workers; print the choice or, as
    plan.top says, the best plans."""
    from platform.predict.search import choose_plan, format_choice, format_ranking

    if not arguments.workers:
        raise ConfigError("--workers", "", "must be given, for the planner to choose for", ["--workers=8"])
    hardware = read_hardware(arguments.hardware) if arguments.hardware else None
    standings = choose_plan(config, arguments.workers, hardware=hardware)
    if not standings:
        return
    for line in format_ranking(standings, config.plan.top) if config.plan.top else [format_choice(standings)]:
        print(escape_terminal_text(line), file=sys.stderr if arguments.json or arguments.multirun else sys.stdout)


def _print_unsound_parts(plan: Plan, as_json: bool) -> int:
    """Print what of a plan would compute another number than one process, or that nothing does; return the status."""
    from platform.plan.plan_check import find_unsoundness

    lines = find_unsoundness(plan)
    if as_json:
        print(json.dumps({"operations": len(plan.operations), "parameters": len(plan.parameters), "unsound": lines}))
    else:
        counts = (len(plan.operations), "operation"), (len(plan.parameters), "parameter")
        sound = f"sound: {' and '.join(format_count(*pair) for pair in counts)} on {plan.mesh}"
        print(escape_terminal_text("\n".join(lines or [sound])))
    return FAILED if lines else DONE


def _choose_hardware(name: str | None, config: Config) -> Hardware:
    """Return the --hardware `name` of the plan command, or the usual one of its configuration. Raises ConfigError for
    an unknown `name`, and for hardware without a speed in the run's precision."""
    if not name:
        return choose_pricing_hardware(config)
    hardware = read_hardware(name)
    if (precision := base_precision(config.precision)) not in hardware.peaks:
        constraint = f"its peaks lack {precision}, in which the run computes"
        raise ConfigError("--hardware", name, constraint)
    return hardware


def _format_shrinking_plans(config: Config, memory: float, as_json: bool) -> Iterator[str]:
    """Yield the plan command's lines for --shrink, text or JSON: one per plan that the run would have as it loses
    workers one by one. A plan holds from its own number of workers down to one more than the next line has; `memory`:
    bytes per worker."""
    from platform.predict.replan import iterate_shrinking

    if not as_json:
        yield f"{'workers':>7}  {'idle':>4}  {'bytes per step':>14}  mesh"
    for workers, replanned in iterate_shrinking(config, memory=memory):
        mesh = replanned.plan.mesh if replanned else None
        idle = workers - mesh.world_size if mesh else workers
        moved = sum(communication(replanned.plan).values()) if replanned else None
        if as_json:
            yield json.dumps({"workers": workers, "idle": idle, "bytes": moved, "mesh": mesh and dict(mesh.axes)})
        elif mesh:
            yield f"{workers:>7}  {idle:>4}  {format_number(moved or 0) + 'B':>14}  {mesh}"
        else:
            yield f"{workers:>7}  {idle:>4}  {'':>14}  none: it would wait for more"


if __name__ == "__main__":
    sys.exit(main())
