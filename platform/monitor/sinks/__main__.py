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

import yaml

from platform.boundary.redaction import register_environment
from platform.boundary.refusals import DONE, ConfigError, closest, command_line, refuse_all, run_command, violation
from platform.monitor.json_records import METRICS
from platform.monitor.sinks.alerts import SinkRun
from platform.monitor.sinks.follower import Follower, alone
from platform.monitor.sinks.sink_process import SINKS, lack_of_package
from platform.plan.layout import count_of

EVERY_SECONDS = 3.0  # a run's files are read: as late as people bear, since services take many steps at once for less
_TRIES = 20  # of a write that Linux takes ten times a second
_NICE = 19  # 1.5 % of the weight of a process of the run, so that a service goes on where no processor is idle
BY_HAND = [name for name, kind in SINKS.items() if kind.package]


class ServiceFailed(Exception):
    """Signals, for the user, that a service did not take a run's numbers, and why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `python -m platform.monitor.sinks` (default: this process's own); return its exit status."""
    parser = command_line("monitor.sinks", __doc__)
    parser.add_argument("run", help="run directory")
    parser.add_argument("sinks", nargs="+", metavar="SERVICE", help=", ".join(BY_HAND))
    parser.add_argument("--all", action="store_true", help="also the steps after the newest checkpoint")
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)  # started by a driver
    return run_command(parser, _answer, argv, subject="sinks", failures=(ServiceFailed,))


def _answer(given: argparse.Namespace) -> int:
    """Send the numbers of the run that the command line names to its services; return the exit status."""
    directory = Path(given.run).absolute()
    register_environment(os.environ)  # of which a service's package may print its address and its token
    if given.follow:
        [name] = given.sinks
        return _follow_run(directory, name)
    lines = [
        violation("SERVICE", name, "unknown", closest(name, BY_HAND)) for name in given.sinks if name not in BY_HAND
    ]
    known = [name for name in given.sinks if name in BY_HAND]
    lines += [f"{name}: {line}" for name in known if (line := lack_of_package(name))]
    if not (directory / METRICS).exists():
        lines.append(violation("RUN_DIR", given.run, "holds no run", ["the directory of a run"]))
    refuse_all(lines)
    config = _configuration(directory)
    for name in given.sinks:
        try:
            _send_rest(SinkRun(directory, config, _resolved_keys(config["monitor"])), name, given.all)
        except Exception as error:  # of any package
            raise ServiceFailed(f"{SINKS[name].title}: {type(error).__name__}: {error}") from error
    return DONE


def _send_rest(run: SinkRun, name: str, every: bool) -> None:
    """Send a service the rest of a run, without alerts, and print where it is; `every`: also the steps that would be
    kept back."""
    say = partial(print, f"{SINKS[name].title}:", flush=True)
    with alone(run.directory, name, say):
        follower = Follower(name, run, SINKS[name].open, alerts=False)
        say(follower.sink.where)
        if every:
            follower.keep_all()
        follower.catch_up()
        if follower.held:
            say(f"the newest {count_of(follower.held, 'step')} may be trained again: --all sends them now")
        follower.close(follower.status)


def _resolved_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the run's keys of the group monitor with references such as ${oc.env:NAME} resolved, if all can be."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with suppress(OmegaConfBaseException):
        return OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[return-value]
    return values


def _configuration(directory: Path) -> dict[str, Any]:
    """Read the configuration of the run whose numbers are sent, with the defaults of what an older version lacks.
    Raises ConfigError."""
    from platform.config.fields import Config

    try:
        there = yaml.safe_load((directory / "config.yaml").read_text())
        known: dict[str, Any] = Config().to_dict()
        return {k: known[k] | there.get(k, {}) if isinstance(known[k], dict) else there.get(k) for k in known}
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(violation("RUN_DIR", str(directory), f"its config.yaml cannot be read ({error})")) from None


def _follow_run(directory: Path, name: str) -> int:
    """Send a run's numbers to a service while its driver, which has started this process, lives; return the exit
    status. The driver's first line is JSON with the configuration, its last the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = _message_channel()
    driver = open(0, "rb", buffering=0, closefd=False)  # what comes after the first line is left to `select`
    start = json.loads(driver.readline())
    run = SinkRun(directory, start["config"], start["monitor"], start["driver"])
    with alone(directory, name):
        follower = Follower(name, run, SINKS[name].open)
        _tell_driver(said, follower.sink.where)
        if follower.sink.takes_steps:  # an alert's command has a minute, also where all processors are busy
            _give_way()
        rest, ended = "", False
        while not ended:
            ready, _, _ = select.select([driver], [], [], EVERY_SECONDS)
            if ready:
                text = os.read(0, 1 << 16).decode()
                rest, ended = rest + text, not text
            else:
                follower.catch_up()
        status = json.loads(rest)["status"] if rest.endswith("\n") else None
        follower.close(status)
    return DONE


def _give_way() -> None:
    """Let the run go before this process and all that it has started, such as W&B's own process."""
    if not hasattr(os, "SCHED_IDLE"):  # not Linux
        os.nice(_NICE)
        return
    for process, threads in _family(os.getpid()):
        _lower_session(process)
        for thread in threads:
            with suppress(OSError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def _lower_session(process: int) -> None:
    """Lower a process's session, as Linux shares processors between sessions first, and W&B's process has its own."""
    for _ in range(_TRIES):
        try:
            Path(f"/proc/{process}/autogroup").write_text(str(_NICE))
        except BlockingIOError:  # Linux takes one from all users in a tenth of a second
            sleep(0.11)
        except OSError:  # it has ended, or there are no groups of sessions
            return
        else:
            return


def _family(process: int) -> Iterator[tuple[int, list[int]]]:
    """Yield a process and all that it has started, which still run, each with its threads."""
    tasks = [*Path(f"/proc/{process}/task").glob("*")]
    yield process, [int(task.name) for task in tasks]
    for task in tasks:
        with suppress(OSError):
            for child in (task / "children").read_text().split():
                yield from _family(int(child))


def _message_channel() -> int:
    """Return a descriptor by which this process speaks to the driver; what packages print on stdout is in the log."""
    said = os.dup(1)
    os.dup2(2, 1)
    return said


def _tell_driver(channel: int, line: str) -> None:
    """Send the driver a line on this service for the run's user; nothing if the driver has died."""
    with suppress(OSError):
        os.write(channel, (line + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
