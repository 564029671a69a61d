"""`python -m platform.plan +experiment=NAME [key=value ...]` explains the plan of a run without starting it: on one
screen, or with `--all` in full. With `--diff A B` it shows what differs between two plans.

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
from math import inf
from pathlib import Path
from typing import Any

from platform.boundary.documents import VALUES, from_json, read_bytes
from platform.boundary.refusals import (
    DONE,
    FAILED,
    ConfigError,
    as_refusal,
    command_line,
    refuse_all,
    run_command,
    typed_command,
    violation,
)
from platform.boundary.schema import Malformed
from platform.boundary.terminal import print_line, print_refusals, visible
from platform.cluster.shown_commands import with_values
from platform.config.fields import Config
from platform.launch import compose
from platform.plan.layout import count_of
from platform.plan.plan import Plan
from platform.plan.plan_builder import without_collecting
from platform.plan.plan_summary import human
from platform.plan.step_collectives import communication
from platform.predict.hardware import Hardware
from platform.predict.make_plan import make_plan
from platform.predict.plan_report import render
from platform.predict.plan_screen import closing, explained, screen
from platform.predict.step_price import picture, read_hardware, usual_hardware
from platform.predict.tier_traffic import Tiers

MOST = 64 << 20  # bytes of a file for --diff: of thousands of ranks, groups are long lists

COMPARE = """`python -m platform.plan compare TABLE.csv [calibrate=SHARE|COLUMN]` sets predicted beside measured steps.

A row of the table is a run, see docs/planning.md. With `calibrate` the hardware's constants are fitted on a share of
the rows, evenly spaced, or on rows that a column marks, and the others are scored."""

CALIBRATE = """`python -m platform.plan calibrate --output FILE.yaml [--workers N] [key=value ...]` measures a cluster.

It starts workers as a run would and writes what they measure in about a minute as a description of the hardware, for
`python -m platform.plan --hardware FILE.yaml`: products by shape, memory, the host's time for a kernel, and each kind
of collective inside a node and between nodes. Ranks on a CPU share its cores: give as many workers as the run will
have. What is not measured comes from `--like`."""
CALIBRATION = "calibrate"  # folder in the run directory, with the workers' logs; they stay if a worker fails


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.plan`; return its exit status."""
    typed = list(sys.argv[1:] if given is None else given)
    if typed[:1] == ["compare"]:
        return _compare(typed[1:])
    if typed[:1] == ["calibrate"]:
        return _calibrate_hardware(typed[1:])
    parser = command_line("plan", __doc__)
    parser.add_argument("overrides", nargs="*", help="as for platform.launch: +experiment=NAME key=value ...")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--workers", type=int, help="how many there are, where parallel.data=-1")
    parser.add_argument(
        "--tiers", type=_tiers, metavar="node=8,rack=32,...",
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
    return run_command(parser, _answer, given, subject="config")


def _compare(given: Sequence[str]) -> int:
    """Run the command line `python -m platform.plan compare`; return its exit status."""
    from platform.predict.measured_runs import (  # with numpy  # fmt: skip
        CONSTANTS,
        FITTED,
        as_data,
        as_text,
        compare,
        is_share,
        leave_one_out,
        marked_runs,
        read_runs,
    )

    parser = command_line("plan compare", COMPARE)
    parser.add_argument("table", metavar="TABLE.csv", help="a row per measured run")
    parser.add_argument("calibrate", nargs="?", type=_calibrate, help="calibrate=SHARE, calibrate=COLUMN")
    parser.add_argument("--constants", default=",".join(FITTED), help=f"which are fitted, of {', '.join(CONSTANTS)}")
    parser.add_argument("--hardware", default="", help="of rows that name none: a name in conf/hardware/, or FILE.yaml")
    parser.add_argument("--leave-one-out", action="store_true", help="score each row by constants fitted on all others")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")

    def answer(arguments: argparse.Namespace) -> int:
        """Print the comparison that the command line asks for, as text or JSON; return the exit status."""
        names = tuple(arguments.constants.split(","))
        refuse_all(f"--constants {n}: unknown; legal: {', '.join(CONSTANTS)}" for n in names if n not in CONSTANTS)
        calibrate = arguments.calibrate or ""
        mark = "" if is_share(calibrate) else calibrate
        runs = read_runs(arguments.table, compose, arguments.hardware, mark)
        if arguments.leave_one_out:
            found = leave_one_out(runs, names)
        else:
            found = compare(runs, marked_runs(runs, calibrate), names)
        print(json.dumps(as_data(found)) if arguments.json else visible("\n".join(as_text(found))))
        return DONE

    return run_command(parser, answer, given, subject="table")


def _calibrate(text: str) -> str:
    """Return the share or column of an argument calibrate=SHARE|COLUMN. Raises ArgumentTypeError for another one."""
    key, _, value = text.partition("=")
    if key != "calibrate" or not value:
        raise argparse.ArgumentTypeError("must be calibrate=SHARE, such as 0.5, or calibrate=COLUMN")
    return value


def _calibrate_hardware(given: Sequence[str]) -> int:
    """Run the command line `python -m platform.plan calibrate`; return its exit status."""
    from platform.cluster.crew.failures import NoPlaces

    parser = command_line("plan calibrate", CALIBRATE)
    parser.add_argument("overrides", nargs="*", help="where and in what to measure: cluster=..., precision=...")
    parser.add_argument("--output", required=True, metavar="FILE.yaml", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="although it exists")
    parser.add_argument("--workers", type=int, help="how many measure at once (default: as many as there is room for)")
    parser.add_argument("--like", help="hardware that says what is not measured (default: this device's, or cpu)")
    parser.add_argument("--config-dir", help="the user's own configuration files")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # sizes that say nothing, for tests
    return run_command(parser, _write_hardware, given, subject="calibrate", failures=(NoPlaces,))


def _write_hardware(given: argparse.Namespace) -> int:
    """Measure, for the command line, and write the file; return the exit status."""
    from platform.cluster import calibration_run
    from platform.cluster.crew import torchrun
    from platform.cluster.crew.failures import WorkerFailed
    from platform.cluster.crew.signals import Stopped, StopSignals
    from platform.cluster.resources import available_workers
    from platform.doctor import folder_of_workers

    output = Path(given.output)
    _refuse_output(output, given.overwrite)
    like = read_hardware(given.like) if given.like else None
    config = compose([*calibration_run.TINY, *given.overrides], given.config_dir)
    workers = max(1, available_workers(config.cluster)) if given.workers is None else given.workers
    if workers < 1:
        raise ConfigError(violation("--workers", workers, "must be at least 1"))
    config.parallel.data, config.train.global_batch = workers, workers
    if torchrun.is_follower():
        torchrun.follow(Path(config.run.dir) / CALIBRATION)
        return DONE
    try:
        with StopSignals(), folder_of_workers(config, CALIBRATION) as folder:
            text = calibration_run.calibration(config, workers, folder, like, given.tiny)
    except WorkerFailed as error:
        print_refusals("calibrate", [f"{error}; its log: {error.culprit.log}"])
        return FAILED
    except Stopped as error:
        print_refusals("calibrate", [f"{error}: nothing is written"])
        return FAILED
    finally:
        if torchrun.present():
            torchrun.dismiss()
    with as_refusal("--output", output, OSError, why="cannot be written: {.strerror}"):
        output.write_text(text)
    print_line(f"{text}written: {output}; `{typed_command('plan')} ... --hardware {output}` predicts steps here")
    return DONE


def _refuse_output(output: Path, overwrite: bool) -> None:
    """Raise ConfigError for a file that cannot be written, or is not to be, before anything is measured."""
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(violation("--output", output, f"must end in .yaml, as {output.stem}.yaml"))
    if output.exists() and not overwrite:
        raise ConfigError(violation("--output", output, "exists; --overwrite replaces it"))
    place = output if output.exists() else output.parent
    if not os.access(place, os.W_OK):
        why = "is not writable" if place.exists() else f"the folder {place} does not exist"
        raise ConfigError(violation("--output", output, why))


def _named(hardware: Hardware, arguments: argparse.Namespace, config: Config) -> Hardware | None:
    """Return the hardware of a plan if the command line or the configuration names it, and it is no guess."""
    return hardware if arguments.hardware or config.cluster.gpu else None


def _usual_tiers(hardware: Hardware | None) -> dict[str, int]:
    """Return the tiers of a plan where none are given: nodes as the `hardware` has them, or of 8 workers."""
    return {"node": hardware.ranks if hardware else 8}


def _tiers(text: str) -> dict[str, int]:
    """Read the option --tiers, such as node=8,rack=32. Raises ArgumentTypeError for an illegal text."""
    try:
        sizes = {name: int(count) for name, count in (pair.split("=") for pair in text.split(","))}
        Tiers.of(sizes, 0)
    except ValueError as error:
        reason = str(error) if str(error).startswith("tiers:") else "must be NAME=WORKERS,... such as node=8,rack=32"
        raise argparse.ArgumentTypeError(reason) from None
    return sizes


def _answer(arguments: argparse.Namespace) -> int:
    """Print the explanation that the command line asks for; return the exit status of `python -m platform.plan`."""
    with without_collecting():
        return _explain_as_asked(arguments)


def _explain_as_asked(arguments: argparse.Namespace) -> int:
    """Print the explanation as text or JSON, or with `--shrink` the plans for fewer and fewer workers, with `--check`
    mistakes, with `--diff` what differs between two plans; return the exit status."""
    if arguments.diff:
        return _compared_plans(arguments)
    config, plan = _one_plan(arguments, arguments.overrides)
    if arguments.check:
        return _check(plan, arguments.json)
    if arguments.shrink:
        for line in _shrink(config, arguments.memory * 1e9, arguments.json):
            print(visible(line), flush=True)
        return 0
    hardware = _hardware(arguments.hardware, config)
    named = _named(hardware, arguments, config)
    if arguments.svg:
        _draw(Path(arguments.svg), picture(config, plan, named))
    found = explained(
        config,
        plan,
        arguments.tiers or _usual_tiers(named),
        hardware,
        named=bool(arguments.hardware),
        tokens=arguments.tokens,
        composed=lambda typed: _composed_for(arguments, with_values(arguments.overrides, typed)),
    )
    whole = "\n\n".join([render(plan, found), *closing(plan, found)]) if arguments.all else ""
    print(json.dumps(found) if arguments.json else visible(whole or screen(plan, found)))
    return 0


def _one_plan(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[Config, Plan]:
    """Return the configuration that overrides give, with its open keys chosen, and its plan."""
    config = _composed_for(arguments, overrides)
    if config.plan.search:
        _choose_for(config, arguments)
    plan = make_plan(config, arguments.workers)
    config.parallel.data = plan.replicas
    return config, plan


def _composed_for(arguments: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the configuration that overrides give, on the hardware that the command line names, if it does."""
    config = compose(overrides, arguments.config_dir)
    if arguments.hardware:
        _hardware(arguments.hardware, config)  # refuses it by the name of the option
        config.cluster.hardware = arguments.hardware
    return config


def _compared_plans(arguments: argparse.Namespace) -> int:
    """Print what differs between the two plans that `--diff` names, as text or JSON; return the exit status."""
    from platform.predict.plan_screen import NoExplanation, difference_lines, plan_differences

    one, other = (_plan_of_diff(arguments, given) for given in arguments.diff)
    try:
        found = plan_differences(one, other)
    except NoExplanation as error:
        raise ConfigError(violation("--diff", " ".join(arguments.diff), f"{error}, which --json writes")) from None
    titles = [f"{name}  {given or 'as it is'}" for name, given in zip("AB", arguments.diff, strict=True)]
    print(json.dumps(found) if arguments.json else visible("\n".join([*titles, *difference_lines(found)])))
    return DONE


def _plan_of_diff(arguments: argparse.Namespace, given: str) -> Any:
    """Return the explanation of one plan of `--diff`, from a file or from overrides beside the common ones."""
    if not given.endswith(".json"):
        with as_refusal("--diff", given, ValueError):  # a quotation that does not end
            typed = shlex.split(given)
        config, plan = _one_plan(arguments, with_values(arguments.overrides, typed))
        hardware = _hardware(arguments.hardware, config)
        tiers = arguments.tiers or _usual_tiers(_named(hardware, arguments, config))
        return explained(config, plan, tiers, hardware, bool(arguments.hardware), arguments.tokens)
    try:
        return from_json(read_bytes(given, MOST), MOST, VALUES)
    except OSError as error:
        raise ConfigError(violation("--diff", given, f"cannot be read: {error.strerror}")) from None
    except Malformed as error:
        raise ConfigError(violation("--diff", given, f"is no JSON: {error}")) from None


def _choose_for(config: Config, arguments: argparse.Namespace) -> None:
    """Choose the open keys of a configuration, in place, for --workers; print the choice or, as plan.top says, the best
    plans."""
    from platform.predict.search import choice_line, choose_plan, ranked_table

    if not arguments.workers:
        raise ConfigError(violation("--workers", "", "must be given, for the planner to choose for", ["--workers=8"]))
    hardware = read_hardware(arguments.hardware) if arguments.hardware else None
    found = choose_plan(config, arguments.workers, hardware=hardware)
    for line in (ranked_table(found, config.plan.top) if config.plan.top else [choice_line(found)]) if found else []:
        print(visible(line), file=sys.stderr if arguments.json else sys.stdout)


def _check(plan: Plan, as_json: bool) -> int:
    """Print what of a plan would compute another number than one process, or that nothing does; return the status."""
    from platform.plan.plan_check import unsound

    lines = unsound(plan)
    if as_json:
        print(json.dumps({"operations": len(plan.operations), "parameters": len(plan.parameters), "unsound": lines}))
    else:
        counts = (len(plan.operations), "operation"), (len(plan.parameters), "parameter")
        sound = f"sound: {' and '.join(count_of(*pair) for pair in counts)} on {plan.mesh}"
        print(visible("\n".join(lines or [sound])))
    return FAILED if lines else DONE


def _hardware(name: str | None, config: Config) -> Hardware:
    """Return the hardware `name`, or the usual one of the configuration. Raises ConfigError for an unknown `name`, and
    for hardware without a speed in the run's precision."""
    if not name:
        return usual_hardware(config)
    found = read_hardware(name)
    if config.precision not in found.peaks:
        constraint = f"its peaks lack {config.precision}, in which the run computes"
        raise ConfigError(violation("--hardware", name, constraint))
    return found


def _draw(path: Path, image: str) -> None:
    """Write the picture of a step. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(image)
    except OSError as error:
        raise ConfigError(violation("--svg", path, f"cannot be written: {error.strerror}")) from None


def _shrink(config: Config, memory: float, as_json: bool) -> Iterator[str]:
    """Yield one printable line, text or JSON, per plan that the run would have as it loses workers one by one. A plan
    holds from its own number of workers down to one more than the next line has; `memory`: bytes per worker."""
    from platform.predict.replan import shrinking

    if not as_json:
        yield f"{'workers':>7}  {'idle':>4}  {'bytes per step':>14}  mesh"
    for workers, found in shrinking(config, memory=memory):
        mesh = found.plan.mesh if found else None
        idle = workers - mesh.size if mesh else workers
        moved = sum(communication(found.plan).values()) if found else None
        if as_json:
            yield json.dumps({"workers": workers, "idle": idle, "bytes": moved, "mesh": mesh and dict(mesh.axes)})
        elif mesh:
            yield f"{workers:>7}  {idle:>4}  {human(moved or 0) + 'B':>14}  {mesh}"
        else:
            yield f"{workers:>7}  {idle:>4}  {'':>14}  none: it would wait for more"


if __name__ == "__main__":
    sys.exit(main())
