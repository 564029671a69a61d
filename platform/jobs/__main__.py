"""`python -m platform.jobs kubernetes|slurm +experiment=NAME [key=value] [job.KEY=VALUE]` writes a job that runs it.

`status` and `logs` report on a job from its run directory. `supervise`, `node`, `pod` and `keep` are what a job
runs: the supervisor of a run's driver, Ray on one node, torchrun in one pod, and what keeps a pod's logs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from math import nan
from pathlib import Path
from typing import Any

from platform.boundary.refusals import (
    DONE,
    ConfigError,
    as_refusal,
    command_line,
    refusal_status,
    run_command,
    violation,
)
from platform.boundary.terminal import print_line
from platform.config.key import SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.jobs`; return its exit status."""
    parser = command_line("jobs", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (run, purpose, names) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose)
        for argument in names.split():
            command.add_argument(argument, **_ARGUMENTS[argument])
        command.set_defaults(run=run)
    return run_command(parser, lambda given: given.run(given), arguments, subject="config")


def _seconds(text: str) -> float:
    """Parse a duration. Raises ArgumentTypeError unless it is from 0 to SECONDS seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = nan
    if not 0 <= seconds <= SECONDS:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to {SECONDS}, not {text!a}")
    return seconds


def _count(text: str) -> int:
    """Parse a number in the job command line. Raises ArgumentTypeError unless it is an integer from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be an integer from 0 on, not {text!a}")
    return int(text)


def _options(kind: Any, given: argparse.Namespace, **more: Any) -> Any:
    """Construct a command's options, a dataclass `kind`, from the parsed arguments of its fields' names."""
    return kind(**{**{f.name: vars(given)[f.name] for f in fields(kind) if f.name in given}, **more})


def _write(given: argparse.Namespace) -> int:
    """Print the job that the command line asks for, or write it to a file."""
    from platform.jobs.job_options import JobOptions, KubernetesOptions, SlurmOptions, options_page
    from platform.jobs.kubernetes import kubernetes_claim, kubernetes_job
    from platform.jobs.slurm import slurm_job

    kubernetes = given.command == "kubernetes"
    if given.options:
        own = KubernetesOptions if kubernetes else SlurmOptions
        return _print([*options_page(JobOptions), *options_page(own)])
    text = (kubernetes_job if kubernetes else slurm_job)(given.overrides, given.config_dir)
    claim = kubernetes_claim(given.overrides, given.config_dir) if kubernetes else None
    if claim and not given.output:
        constraint = "the claim is written to a file of its own, beside --output"
        raise ConfigError(violation("job.storage", claim[2], constraint, ["--output job.yaml"]))
    if not given.output:
        print(text, end="")
        return DONE
    files = {given.output: text, **({given.output.parent / claim[0]: claim[1]} if claim else {})}
    for path, content in files.items():
        with as_refusal("--output", path, OSError, why="cannot be written ({.strerror})"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    if claim:
        print_line(f"{given.output.parent / claim[0]}: the claim; kubectl apply -f it once, before the job")
    return DONE


def _print(lines: Iterable[str]) -> int:
    """Print the lines of a job command; return its exit status, 0."""
    for line in lines:
        print_line(line)
    return DONE


def _status(given: argparse.Namespace) -> int:
    """Print the state of the run in a run directory, by its drivers; return the exit status."""
    from platform.jobs.job_state import status_lines

    return _print(status_lines(given.run_dir))


def _logs(given: argparse.Namespace) -> int:
    """Print the ends of the logs in a run directory; return the exit status."""
    from platform.jobs.job_state import log_lines

    return _print(log_lines(given.run_dir, given.name, max(1, given.lines)))


def _keep(given: argparse.Namespace) -> int:
    """Save the end of Ray's logs in the run directory when this process is stopped; return the exit status."""
    from platform.jobs.job_state import keep_at_the_end

    keep_at_the_end(given.run_dir)
    return DONE


def _supervise(given: argparse.Namespace) -> int:
    """Supervise the drivers of a run, and stop its Ray job, if it is in one; return the exit status."""
    from platform.jobs.supervisor import Supervision, Supervisor, end_ray_job

    try:
        status = Supervisor(_options(Supervision, given)).run()
    except ConfigError as error:
        status = refusal_status(error, "config")
    end_ray_job(status)
    return status


def _node(given: argparse.Namespace) -> int:
    """Run Ray on this node, as the head and with the run if its launch is given; return the exit status."""
    from platform.jobs.ray_node import NodeOptions, run_follower, run_head
    from platform.jobs.supervisor import Supervision

    if given.launch is None:
        return run_follower(_options(NodeOptions, given))
    supervision = _options(Supervision, given, elsewhere=True)
    return run_head(_options(NodeOptions, given, run_dir=supervision.run_dir), supervision)


def _pod(given: argparse.Namespace) -> int:
    """Run torchrun in this pod of a job, and in the first pod the supervisor; return the exit status."""
    from platform.jobs.pods import PodOptions, run_pod
    from platform.jobs.supervisor import Supervision

    return run_pod(_options(PodOptions, given), _options(Supervision, given, launch=given.launch or []))


_WRITTEN = "overrides --config-dir --output --options"
_COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str]] = {  # name -> function, purpose, arguments
    "kubernetes": (_write, "print a manifest, for `kubectl apply`", _WRITTEN),
    "slurm": (_write, "print a script, for `sbatch`", _WRITTEN),
    "supervise": (_supervise, "run platform.launch, again where it goes on", "--retries --time-limit --notice launch"),
    "node": (_node, "Ray on a node of a Slurm job", "shared --interface --peer --ip --drain --retries --run"),
    "pod": (
        _pod,
        "torchrun in a pod of an Indexed Job of Kubernetes",
        "shared --index --pods --workers --first --address --drain --time-limit --retries --run",
    ),
    "keep": (_keep, "keep the end of Ray's logs when this pod ends", "run_dir"),
    "status": (_status, "tell what a run directory says of its job", "run_dir"),
    "logs": (_logs, "print the ends of the logs in a run directory", "run_dir name --lines"),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "overrides": {"nargs": "*", "metavar": "KEY=VALUE", "help": "as for platform.launch; and job.KEY=VALUE"},
    "--config-dir": {"help": "the user's own configuration files"},
    "--output": {"type": Path, "help": "write this file instead"},
    "--options": {"action": "store_true", "help": "print the keys job.*"},
    "--retries": {"type": _count, "default": 10, "help": "drivers that may be lost (default: 10)"},
    "--time-limit": {"type": _seconds, "help": "seconds after which the job's time is over"},
    "--notice": {"type": _seconds, "default": 0.0, "help": "seconds that a node is given to leave"},
    "launch": {"nargs": argparse.REMAINDER, "help": "arguments of platform.launch, with run.dir"},
    "--run": {"nargs": argparse.REMAINDER, "dest": "launch", "help": "supervise this run; on a node, beside the head"},
    "shared": {"type": Path, "help": "directory that the nodes or pods of the job share"},
    "--interface": {"default": "", "help": "network interface"},
    "--peer": {"default": "", "help": "host name of another node"},
    "--ip": {"type": int, "choices": (4, 6), "default": 4, "help": "version of IP"},
    "--drain": {"type": _count, "default": 60, "help": "seconds that leaving takes at most"},
    "--index": {"type": _count, "required": True, "help": "of this pod"},
    "--pods": {"type": _count, "required": True, "help": "of the job"},
    "--workers": {"type": _count, "required": True, "help": "of a pod"},
    "--first": {"required": True, "help": "host name of the first pod"},
    "--address": {"required": True, "help": "IP address of this pod"},
    "run_dir": {"type": Path, "help": "the run directory of the job"},
    "name": {"nargs": "?", "default": "", "help": "part of a log's name: worker-3, driver, node"},
    "--lines": {"type": int, "default": 20, "help": "of each log (default: 20)"},
}

if __name__ == "__main__":
    sys.exit(main())
