"""`python -m platform.jobs kubernetes|slurm +experiment=NAME [key=value] [job.KEY=VALUE]` writes a job that runs it.

`status` and `logs` tell of a job from its run directory. `supervise`, `node`, `pod` and `keep` are what a job
runs: the supervisor of a run's driver, Ray on one node, torchrun in one pod, and what keeps a pod's logs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

from platform.boundary.command_line import DONE, CommandLine, command_line, refusing, run_command
from platform.boundary.refusals import ConfigError, violation
from platform.boundary.terminal import print_line
from platform.config.key import SECONDS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.jobs`; return its exit status."""
    parser = command_line("jobs", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("kubernetes", "a manifest, for `kubectl apply`"), ("slurm", "a script, for `sbatch`")):
        command = commands.add_parser(name, help=f"print {what}")
        command.add_argument(
            "overrides", nargs="*", metavar="KEY=VALUE", help="as for platform.launch; and job.KEY=VALUE"
        )
        command.add_argument("--config-dir", help="the user's own configuration files")
        command.add_argument("--output", type=Path, help="write this file instead")
        command.add_argument("--options", action="store_true", help="print the keys job.*")
        command.set_defaults(run=_write)
    command = commands.add_parser("supervise", help="run platform.launch, again where it goes on")
    _supervision(command)
    command.add_argument("--time-limit", type=_seconds, help="seconds after which the job's time is over")
    command.add_argument("--notice", type=_seconds, default=0.0, help="seconds that a node is given to leave")
    command.add_argument("launch", nargs=argparse.REMAINDER, help="arguments of platform.launch, with run.dir")
    command.set_defaults(run=_supervise)
    command = commands.add_parser("node", help="Ray on a node of a Slurm job")
    command.add_argument("shared", type=Path, help="directory that the nodes of the job share")
    command.add_argument("--interface", default="", help="network interface")
    command.add_argument("--peer", default="", help="host name of another node")
    command.add_argument("--ip", type=int, choices=(4, 6), default=4, help="version of IP")
    command.add_argument("--drain", type=_count, default=60, help="seconds that leaving takes at most")
    _supervision(command)
    command.add_argument("--run", nargs=argparse.REMAINDER, dest="launch", help="be the head, and supervise this run")
    command.set_defaults(run=_node)
    command = commands.add_parser("pod", help="torchrun in a pod of an Indexed Job of Kubernetes")
    command.add_argument("shared", type=Path, help="directory that the pods of the job share")
    for name, what in (("index", "of this pod"), ("pods", "of the job"), ("workers", "of a pod")):
        command.add_argument(f"--{name}", type=_count, required=True, help=what)
    command.add_argument("--first", required=True, help="host name of the first pod")
    command.add_argument("--address", required=True, help="IP address of this pod")
    command.add_argument("--drain", type=_count, default=60, help="seconds that workers are given to end")
    command.add_argument("--time-limit", type=_seconds, help="seconds after which the job's time is over")
    _supervision(command)
    command.add_argument("--run", nargs=argparse.REMAINDER, dest="launch", required=True, help="supervise this run")
    command.set_defaults(run=_pod)
    command = commands.add_parser("keep", help="keep the end of Ray's logs when this pod ends")
    command.add_argument("run_dir", type=Path, help="the run directory of the job")
    command.set_defaults(run=_keep)
    command = commands.add_parser("status", help="tell what a run directory says of its job")
    command.add_argument("run_dir", type=Path, help="the run directory of the job")
    command.set_defaults(run=_status)
    command = commands.add_parser("logs", help="print the ends of the logs in a run directory")
    command.add_argument("run_dir", type=Path, help="the run directory of the job")
    command.add_argument("name", nargs="?", default="", help="part of a log's name: worker-3, driver, node")
    command.add_argument("--lines", type=int, default=20, help="of each log (default: 20)")
    command.set_defaults(run=_logs)
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
    """Parse a number of times. Raises ArgumentTypeError unless it is an integer from 0 on."""
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"must be an integer from 0 on, not {text!a}")
    return int(text)


def _supervision(parser: CommandLine) -> None:
    parser.add_argument("--retries", type=_count, default=10, help="drivers that may be lost (default: 10)")


def _write(given: argparse.Namespace) -> int:
    """Print the job that the command line asks for, or write it to a file."""
    from platform.jobs.kubernetes import kubernetes_claim, kubernetes_job
    from platform.jobs.options import JobOptions, KubernetesOptions, SlurmOptions, options_page
    from platform.jobs.slurm import slurm_job

    write: Callable[..., str] = kubernetes_job if given.command == "kubernetes" else slurm_job
    if given.options:
        own = KubernetesOptions if given.command == "kubernetes" else SlurmOptions
        print("\n".join([*options_page(JobOptions), *options_page(own)]))
        return DONE
    text = write(given.overrides, given.config_dir)
    claim = kubernetes_claim(given.overrides, given.config_dir) if write is kubernetes_job else None
    if claim and not given.output:
        constraint = "the claim is written to a file of its own, beside --output"
        raise ConfigError(violation("job.storage", claim[2], constraint, ["--output job.yaml"]))
    if not given.output:
        print(text, end="")
        return DONE
    files = {given.output: text, **({given.output.parent / claim[0]: claim[1]} if claim else {})}
    for path, content in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        except OSError as error:
            raise ConfigError(f"--output={path}: cannot be written ({error.strerror})") from None
    if claim:
        print_line(f"{given.output.parent / claim[0]}: the claim; kubectl apply -f it once, before the job")
    return DONE


def _status(given: argparse.Namespace) -> int:
    """Print what a run directory says of its job."""
    from platform.jobs.look.status import status_lines

    for line in status_lines(given.run_dir):
        print_line(line)
    return DONE


def _logs(given: argparse.Namespace) -> int:
    """Print the ends of the logs in a run directory."""
    from platform.jobs.look.logs import log_lines

    for line in log_lines(given.run_dir, given.name, max(1, given.lines)):
        print_line(line)
    return DONE


def _keep(given: argparse.Namespace) -> int:
    """Keep the end of Ray's logs when this process is stopped; return the exit status."""
    from platform.jobs.look.logs import keep_at_the_end

    keep_at_the_end(given.run_dir)
    return DONE


def _supervise(given: argparse.Namespace) -> int:
    """Supervise the drivers of a run, and stop its Ray job, if it is in one; return the exit status."""
    from platform.jobs.supervisor import Supervision, Supervisor, end_ray_job

    told = Supervision(given.launch, given.retries, given.time_limit, notice=given.notice)
    status = refusing(Supervisor(told).run, "config")
    end_ray_job(status)
    return status


def _node(given: argparse.Namespace) -> int:
    """Run Ray on this node, as the head and with the run if its launch is given; return the exit status."""
    from platform.jobs.ray_node import NodeOptions, run_follower, run_head
    from platform.jobs.supervisor import Supervision

    options = NodeOptions(given.shared, given.interface, given.peer, given.ip, given.drain)
    if given.launch is None:
        return run_follower(options)
    told = Supervision(given.launch, given.retries, elsewhere=True)
    return run_head(replace(options, run_dir=told.run_dir), told)


def _pod(given: argparse.Namespace) -> int:
    """Run torchrun in this pod of a job, and in the first pod the supervisor; return the exit status."""
    from platform.jobs.pods.pod import run_pod
    from platform.jobs.pods.torch_node import PodOptions
    from platform.jobs.supervisor import Supervision

    place = given.shared, given.index, given.pods, given.workers
    return run_pod(
        PodOptions(*place, first=given.first, address=given.address, drain=given.drain),
        Supervision(given.launch, given.retries, given.time_limit),
    )


if __name__ == "__main__":
    sys.exit(main())
