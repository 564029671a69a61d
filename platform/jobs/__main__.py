"""`python -m platform.jobs kubernetes|slurm +experiment=NAME [key=value] [job.KEY=VALUE]` writes a job that runs it.

`status` and `logs` report on a job from its run directory. `supervise`, `node`, `pod` and `keep` are what a job
runs: the supervisor of a run's driver, Ray on one node, torchrun in one pod, and what keeps a pod's logs.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any

from platform.boundary import refusals
from platform.boundary.local_files import ReplacedFile, refuse_unwritable
from platform.boundary.refusals import DONE, ConfigError, report_refusal, run_command
from platform.boundary.terminal import print_line
from platform.config.key import SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.jobs`; return its exit status."""
    parser = refusals.build_command_line("jobs", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, purpose, names) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        for argument in names.split():
            command.add_argument(argument, **_ARGUMENTS[argument])
        command.set_defaults(run=run)
    return run_command(parser, lambda options: options.run(options), arguments, subject="config")


def _parse_seconds(text: str) -> float:
    """Parse a duration. Raises ArgumentTypeError unless it is from 0 to SECONDS seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = nan
    if not 0 <= seconds <= SECONDS:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to {SECONDS}, not {text!a}")
    return seconds


def _parse_count(text: str) -> int:
    """Parse a number in the job command line. Raises ArgumentTypeError unless it is an integer from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be an integer from 0 on, not {text!a}")
    return int(text)


def _build_options(kind: Any, arguments: argparse.Namespace, **more: Any) -> Any:
    """Construct a command's options, a dataclass `kind`, from the parsed arguments of its fields' names."""
    return kind(**{**{f.name: vars(arguments)[f.name] for f in fields(kind) if f.name in arguments}, **more})


def _write_job(arguments: argparse.Namespace) -> int:
    """Print the job that the command line asks for, or write it to a file."""
    from platform.jobs.job_options import JobOptions, KubernetesOptions, SlurmOptions, list_option_rows
    from platform.jobs.kubernetes import render_kubernetes_claim, render_kubernetes_job
    from platform.jobs.slurm import render_slurm_job

    kubernetes = arguments.command == "kubernetes"
    if arguments.options:
        job_options = KubernetesOptions if kubernetes else SlurmOptions
        return _print_lines([*list_option_rows(JobOptions), *list_option_rows(job_options)])
    text = (render_kubernetes_job if kubernetes else render_slurm_job)(arguments.overrides, arguments.config_dir)
    claim = render_kubernetes_claim(arguments.overrides, arguments.config_dir) if kubernetes else None
    if claim and not arguments.output:
        constraint = "the claim is written to a file of its own, beside --output"
        raise ConfigError("job.storage", claim[2], constraint, ["--output job.yaml"])
    if not arguments.output:
        print(text, end="")
        return DONE
    files = {arguments.output: text, **({arguments.output.parent / claim[0]: claim[1]} if claim else {})}
    with refuse_unwritable("--output", arguments.output):
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for job_file, content in [(ReplacedFile(path, "--output"), content) for path, content in files.items()]:
        job_file.write(content)
    if claim:
        print_line(f"{arguments.output.parent / claim[0]}: the claim; kubectl apply -f it once, before the job")
    nodes = re.search(r"(: [^:]*)\. Written by$", text, re.MULTILINE)
    submit = f"{'kubectl apply -f' if kubernetes else 'sbatch'} {shlex.quote(str(arguments.output))}"
    print_line(f"wrote {arguments.output}{nodes[1] if nodes else ''}; submit it: {submit}")
    return DONE


def _print_lines(lines: Iterable[str]) -> int:
    """Print the lines of a job command; return its exit status, 0."""
    for line in lines:
        print_line(line)
    return DONE


def _print_status(arguments: argparse.Namespace) -> int:
    """Print the status of a job, from its run directory, by its drivers; return the exit status."""
    from platform.jobs.job_state import describe_status

    return _print_lines(describe_status(arguments.run_dir))


def _print_logs(arguments: argparse.Namespace) -> int:
    """Print the ends of the logs of a job, from its run directory; return the exit status."""
    from platform.jobs.job_state import read_log_lines

    return _print_lines(read_log_lines(arguments.run_dir, arguments.name, max(1, arguments.lines)))


def _keep_ray_logs(arguments: argparse.Namespace) -> int:
    """Save the end of Ray's logs in the run directory when this process is stopped; return the exit status."""
    from platform.jobs.job_state import keep_logs_at_end

    keep_logs_at_end(arguments.run_dir)
    return DONE


def _supervise_run(arguments: argparse.Namespace) -> int:
    """Supervise the drivers of a run, and stop its Ray job, if it is in one; return the exit status."""
    from platform.jobs.supervisor import DriverSupervisor, SupervisorOptions, end_ray_job

    try:
        status = DriverSupervisor(_build_options(SupervisorOptions, arguments)).run()
    except ConfigError as error:
        status = report_refusal(error, "config")
    end_ray_job(status)
    return status


def _run_node(arguments: argparse.Namespace) -> int:
    """Run Ray on this node, as the head and with the run if its launch is given; return the exit status."""
    from platform.jobs.ray_node import NodeOptions, run_head, run_worker_node
    from platform.jobs.supervisor import SupervisorOptions

    if arguments.launch is None:
        return run_worker_node(_build_options(NodeOptions, arguments))
    supervision = _build_options(SupervisorOptions, arguments, elsewhere=True)
    return run_head(_build_options(NodeOptions, arguments, run_dir=supervision.run_dir), supervision)


def _run_pod(arguments: argparse.Namespace) -> int:
    """Run torchrun in this pod of a job, and in the first pod the supervisor; return the exit status."""
    from platform.jobs.pods import PodOptions, run_pod
    from platform.jobs.supervisor import SupervisorOptions

    supervision = _build_options(SupervisorOptions, arguments, launch=arguments.launch or [])
    return run_pod(_build_options(PodOptions, arguments), supervision)


_WRITTEN = "overrides --config-dir --output --options"
_SUPERVISED = "--retries --time-limit --notice launch"
_OF_POD = "shared --index --pods --workers --first --address --drain --time-limit --retries --run"
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str]] = {  # name -> function, purpose, arguments
    "kubernetes": (_write_job, "print a manifest, for `kubectl apply`", _WRITTEN),
    "slurm": (_write_job, "print a script, for `sbatch`", _WRITTEN),
    "supervise": (_supervise_run, "run platform.launch, again where it goes on", _SUPERVISED),
    "node": (_run_node, "Ray on a node of a Slurm job", "shared --interface --peer --ip --drain --retries --run"),
    "pod": (_run_pod, "torchrun in a pod of an Indexed Job of Kubernetes", _OF_POD),
    "keep": (_keep_ray_logs, "keep the end of Ray's logs when this pod ends", "run_dir"),
    "status": (_print_status, "tell what a run directory says of its job", "run_dir"),
    "logs": (_print_logs, "print the ends of the logs in a run directory", "run_dir name --lines"),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "overrides": {"nargs": "*", "metavar": "KEY=VALUE", "help": "as for platform.launch; and job.KEY=VALUE"},
    "--config-dir": {"help": "the user's own configuration files"},
    "--output": {"type": Path, "help": "write this file instead"},
    "--options": {"action": "store_true", "help": "print the keys job.*"},
    "--retries": {"type": _parse_count, "default": 10, "help": "drivers that may be lost (default: 10)"},
    "--time-limit": {"type": _parse_seconds, "help": "seconds after which the job's time is over"},
    "--notice": {"type": _parse_seconds, "default": 0.0, "help": "seconds that a node is given to leave"},
    "launch": {"nargs": argparse.REMAINDER, "help": "arguments of platform.launch, with run.dir"},
    "--run": {"nargs": argparse.REMAINDER, "dest": "launch", "help": "supervise this run; on a node, beside the head"},
    "shared": {"type": Path, "help": "directory that the nodes or pods of the job share"},
    "--interface": {"default": "", "help": "network interface"},
    "--peer": {"default": "", "help": "host name of another node"},
    "--ip": {"type": int, "choices": (4, 6), "default": 4, "help": "version of IP"},
    "--drain": {"type": _parse_count, "default": 60, "help": "seconds that leaving takes at most"},
    "--index": {"type": _parse_count, "required": True, "help": "of this pod"},
    "--pods": {"type": _parse_count, "required": True, "help": "of the job"},
    "--workers": {"type": _parse_count, "required": True, "help": "of a pod"},
    "--first": {"required": True, "help": "host name of the first pod"},
    "--address": {"required": True, "help": "IP address of this pod"},
    "run_dir": {"type": Path, "help": "the run directory of the job"},
    "name": {"nargs": "?", "default": "", "help": "part of a log's name: worker-3, driver, node"},
    "--lines": {"type": int, "default": 20, "help": "of each log (default: 20)"},
}

if __name__ == "__main__":
    sys.exit(main())
