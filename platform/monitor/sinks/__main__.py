"""`python -m platform.monitor.sinks RUN_DIR SERVICE ...` sends a run's numbers to services, also after its end.

A run does so itself, as `monitor=` says. This command sends what a service has not got yet, or all to a service that
the run did not name: wandb, tensorboard, mlflow or trackio. It goes by RUN_DIR/config.yaml, and sends no alerts.
Steps that no checkpoint has are kept back, as the run may go on and train them again; --all sends them too.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

from platform.boundary import refusals
from platform.boundary.documents import parse_yaml, read_bytes
from platform.boundary.redaction import register_environment
from platform.boundary.refusals import DONE, ConfigError, closest_values, format_violation, refuse_all, run_command
from platform.boundary.schema import Malformed
from platform.monitor.json_records import METRICS
from platform.monitor.sinks.alerts import SinkRun
from platform.monitor.sinks.follower import RunFollower, lock_service
from platform.monitor.sinks.sink_process import SINKS, lack_of_package
from platform.plan.layout import format_count

EVERY_SECONDS = 3.0  # a run's files are read: as late as people bear, since services take many steps at once for less
_TRIES = 20  # of a write that Linux takes ten times a second
_NICE = 19  # 1.5 % of the weight of a process of the run, so that a service goes on where no processor is idle
BY_HAND = [name for name, kind in SINKS.items() if kind.package]


class ServiceFailed(Exception):
    """Signals, for the user, that a service did not take a run's numbers, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.monitor.sinks` (default: this process's own); return its exit status."""
    parser = refusals.build_command_line("monitor.sinks", __doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("sinks", nargs="+", metavar="SERVICE", help=", ".join(BY_HAND))
    parser.add_argument("--all", action="store_true", help="also the steps after the newest checkpoint")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)  # started by a driver
    return run_command(parser, _send_numbers, argv, subject="sinks", failures=(ServiceFailed,))


def _send_numbers(arguments: argparse.Namespace) -> int:
    """Send the numbers of the run that the command line names to its services; return the exit status."""
    directory = Path(arguments.run).absolute()
    register_environment(os.environ)  # of which a service's package may print its address and its token
    if arguments.follow:
        [name] = arguments.sinks
        return _follow_run(directory, name)
    unknown = [name for name in arguments.sinks if name not in BY_HAND]
    lines = [format_violation("SERVICE", name, "unknown", closest_values(name, BY_HAND)) for name in unknown]
    known = [name for name in arguments.sinks if name in BY_HAND]
    lines += [f"{name}: {line}" for name in known if (line := lack_of_package(name))]
    if not (directory / METRICS).exists():
        lines.append(format_violation("RUN_DIR", arguments.run, "holds no run", ["the directory of a run"]))
    refuse_all(lines)
    config = _read_run_configuration(directory)
    for name in arguments.sinks:
        try:
            _send_remaining(
                SinkRun(directory, config, _resolve_references_if_possible(config["monitor"])), name, arguments.all
            )
        except Exception as error:  # of any package
            raise ServiceFailed(f"{SINKS[name].title}: {type(error).__name__}: {error}") from error
    return DONE


def _send_remaining(run: SinkRun, name: str, includes_held_steps: bool) -> None:
    """Send a service the rest of a run, without alerts, and print where it is; `includes_held_steps`: also the steps
    that would be kept back."""
    say = partial(print, f"{SINKS[name].title}:", flush=True)
    with lock_service(run.directory, name, say):
        follower = RunFollower(name, run, SINKS[name].open, alerts=False)
        say(follower.sink.where)
        if includes_held_steps:
            follower.finalize_all_steps()
        follower.catch_up()
        if follower.num_held_steps:
            say(
                f"the newest {format_count(follower.num_held_steps, 'step')} may be trained again: --all sends them now"
            )
        follower.close(follower.status)


def _resolve_references_if_possible(values: dict[str, Any]) -> dict[str, Any]:
    """Return for a service the keys of group monitor, references such as ${oc.env:NAME} resolved, if all can be."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with suppress(OmegaConfBaseException):
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[return-value]
    return values


def _read_run_configuration(directory: Path) -> dict[str, Any]:
    """Read the configuration of the run whose numbers a service gets, with the defaults of what an older version lacks.
    Raises ConfigError."""
    from platform.config.fields import Config

    try:
        stored_config = parse_yaml(read_bytes(directory / "config.yaml"))
        defaults: dict[str, Any] = Config().to_dict()
        groups = {k: default for k, default in defaults.items() if isinstance(default, dict)}
        return {k: groups[k] | stored_config.get(k, {}) if k in groups else stored_config.get(k) for k in defaults}
    except (OSError, ValueError, AttributeError, TypeError, Malformed) as error:
        raise ConfigError("RUN_DIR", str(directory), f"its config.yaml cannot be read ({error})") from None


def _follow_run(directory: Path, name: str) -> int:
    """Send a run's numbers to a service while its driver, which has started this process, lives; return the exit
    status. The driver's first line is JSON with the configuration, its last the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = os.dup(1)  # to the driver; what packages print on stdout is in the log
    os.dup2(2, 1)
    driver = open(0, "rb", buffering=0, closefd=False)  # what comes after the first line is left to `select`
    start = json.loads(driver.readline())
    run = SinkRun(directory, start["config"], start["monitor"], start["driver"])
    with lock_service(directory, name):
        follower = RunFollower(name, run, SINKS[name].open)
        with suppress(OSError):  # the driver may have died
            os.write(channel, (follower.sink.where + "\n").encode())
        if follower.sink.takes_steps:  # an alert's command has a minute, also where all processors are busy
            _lower_priority()
        last_line, ended = "", False
        while not ended:
            ready, _, _ = select.select([driver], [], [], EVERY_SECONDS)
            if ready:
                text = os.read(0, 1 << 16).decode()
                last_line, ended = last_line + text, not text
            else:
                follower.catch_up()
        status = json.loads(last_line)["status"] if last_line.endswith("\n") else None
        follower.close(status)
    return DONE


def _lower_priority() -> None:
    """Let the run go before this process and all that it has started, such as W&B's own process."""
    if not hasattr(os, "SCHED_IDLE"):  # not Linux
        os.nice(_NICE)
        return
    for process, threads in _walk_process_tree(os.getpid()):
        _lower_session_priority(process)
        for thread in threads:
            with suppress(OSError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _lower_session_priority(process: int) -> None:
    """Lower a process's session, as Linux shares processors between sessions first, and W&B's process has its own."""
    for _ in range(_TRIES):
        try:
            Path(f"/proc/{process}/autogroup").write_text(str(_NICE))
            return
        except BlockingIOError:  # Linux takes one from all users in a tenth of a second
            sleep(0.11)
        except OSError:  # it has ended, or there are no groups of sessions
            return


def _walk_process_tree(process: int) -> Iterator[tuple[int, list[int]]]:
    """Yield a service's process and all that it has started, such as W&B's, which still run, each with its threads."""
    tasks = [*Path(f"/proc/{process}/task").glob("*")]
    yield process, [int(task.name) for task in tasks]
    for task in tasks:
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _walk_process_tree(int(child))


if __name__ == "__main__":
    sys.exit(main())
