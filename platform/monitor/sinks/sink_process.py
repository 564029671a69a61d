"""The process beside the driver that sends a run's numbers to one service; and the table of services: the ones that are
asked for, and what each needs (`SinkKind`)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple

from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import typed_command
from platform.config.fields import Config
from platform.config.groups import Monitor
from platform.monitor.sinks.alerts import MonitorSink, SinkRun
from platform.monitor.sinks.other_sinks import AlertCommandSink, MlflowSink, TensorboardSink, TrackioSink
from platform.monitor.sinks.wandb_sink import WandbSink


class SinkKind(NamedTuple):
    """Kind of service: its `title` for people, the Python `package` that it needs ("" for none), whether a
    configuration's keys ask for it, and how it is opened. Opening imports the package. `secrets`: the environment
    variables with its address and its token, each with its key among the secrets of a job."""

    title: str
    package: str
    asked: Callable[[Monitor], bool]
    open: Callable[[SinkRun], MonitorSink]
    secrets: Mapping[str, str] = MappingProxyType({})


SINKS = {
    "wandb": SinkKind("W&B", "wandb", lambda m: m.kind == "wandb", WandbSink, {"WANDB_API_KEY": "api-key"}),
    "tensorboard": SinkKind("TensorBoard", "tensorboard", lambda m: m.tensorboard, TensorboardSink),
    "mlflow": SinkKind(
        *("MLflow", "mlflow", lambda m: m.mlflow, MlflowSink),
        {"MLFLOW_TRACKING_URI": "tracking-uri", "MLFLOW_TRACKING_TOKEN": "token"},
    ),
    "trackio": SinkKind(
        *("trackio", "trackio", lambda m: m.trackio, TrackioSink),
        {"TRACKIO_SPACE_ID": "space-id", "HF_TOKEN": "token"},
    ),
    "alert_command": SinkKind("alerts", "", lambda m: bool(m.alert_command), AlertCommandSink),
}


def select_sinks(monitor: Monitor) -> list[str]:
    """Return the names of the services that a run's numbers are to be sent to."""
    return [name for name, kind in SINKS.items() if kind.asked(monitor)]


def secrets_of_sinks(monitor: Monitor) -> Iterator[tuple[str, str, str]]:
    """Yield (environment variable, service, key) of each secret of the services that a run's numbers are sent to."""
    for service in select_sinks(monitor):
        yield from ((variable, service, name) for variable, name in SINKS[service].secrets.items())


def violations_of_sinks(config: Config) -> Iterator[str]:
    """Yield a refusal line for each service of a run whose Python package is not installed here."""
    for name in select_sinks(config.monitor):
        if line := lack_of_package(name):
            yield f"monitor={name}: {line}"


def lack_of_package(name: str) -> str:
    """Return what the service `name` needs that is not installed here, with the command that installs it; "" if it
    lacks nothing."""
    package = SINKS[name].package
    if package and find_spec(package) is None:
        return f"needs the package {package}: pip install {package}, or 'elastic-platform[sinks]' for all services"
    server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http")
    if name == "mlflow" and not server and find_spec("sqlalchemy") is None:
        return "mlflow-skinny needs the URL of a server in MLFLOW_TRACKING_URI; or: pip install mlflow"
    return ""


ROOT = Path(__file__).parents[3]
END_SECONDS, STOP_SECONDS = 60.0, 10.0  # that the end of a run, and a stop of it, wait for its services
AGAIN_SECONDS = 60.0  # until a service that failed is tried again
_TAIL = 2000  # bytes of a log that are read to find its last line


class SinkProcess:
    """Process that sends a run's numbers to the service `name`, as `python -m platform.monitor.sinks --follow`. It
    hears of the run's end by its input; should the driver die, it ends by itself once all is sent. If it fails, it is
    started again every minute."""

    def __init__(self, name: str, config: Config, run_dir: Path):
        """Start the process for a service of the run in `run_dir`; what its package prints is in
        logs/sink-NAME.log there."""
        self._name, self._directory, self._title = name, run_dir, SINKS[name].title
        self._log = run_dir / "logs" / f"sink-{name}.log"
        told = {"config": redact_secrets(config.to_dict()), "monitor": asdict(config.monitor), "driver": os.getpid()}
        self._first_line = json.dumps(told)
        self._said: deque[str] = deque()
        self._failed: float | None = None  # when it was seen that the process has failed
        self._complained = False
        self._process: subprocess.Popen[str] | None = None
        self._start_process()

    def _start_process(self) -> None:
        """Start the service's process, and a thread that listens to it."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._failed = None
        try:
            self._log.parent.mkdir(0o700, exist_ok=True)
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "platform.monitor.sinks", "--follow", str(self._directory), self._name],
                    env=os.environ | {"PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for the driver
                )
        except OSError as error:
            self._failed = monotonic()
            self._said.append(f"cannot be started ({error})")
            return
        self._send_line(self._first_line)
        self._reader = threading.Thread(target=self._collect_lines, args=(self._process,), daemon=True)
        self._reader.start()

    def _send_line(self, line: str) -> None:
        """Send a line to the service's process; nothing if it has died."""
        with suppress(OSError, AttributeError):
            self._process.stdin.write(line + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _collect_lines(self, process: subprocess.Popen[str]) -> None:
        """Take note of the lines that the service's process has for the run's user, in a thread, until it ends."""
        assert process.stdout
        for line in process.stdout:
            self._said.append(line.rstrip("\n"))

    def take_new_lines(self) -> list[str]:
        """Return the new lines that the service has for the run's user; start its process again if it failed long
        ago."""
        if self._failed is None and self._process and self._has_failed():
            self._failed = monotonic()
            self._said.append("" if self._complained else self._describe_failure())
            self._complained = True
        elif self._failed is not None and monotonic() - self._failed > AGAIN_SECONDS:
            self._start_process()
        lines = [self._said.popleft() for _ in range(len(self._said))]
        return [f"{self._title}: {line}" for line in lines if line]

    def _has_failed(self) -> bool:
        """Return True if the service's process has ended by a failure."""
        # each step of the run asks: the thread that listens is looked at first, which costs no call of the kernel
        return not self._reader.is_alive() and self._process is not None and self._process.poll() not in (None, 0)

    def _describe_failure(self) -> str:
        """Describe for the run's user, in a line, that the service's process failed, and why by its log."""
        why = f"see {self._log}"
        with suppress(OSError, IndexError):
            why = f"{self._log.read_bytes()[-_TAIL:].decode(errors='replace').split(chr(10))[-2].strip()}; {why}"
        later = f"{typed_command('monitor.sinks')} {shlex.quote(str(self._directory))} {self._name}"
        return f"stopped ({why}). It is tried again every minute; after the run: {later}"

    def close(self, status: int) -> None:
        """Say to the service's process with which exit status the run ends, without waiting for it."""
        self._send_line(json.dumps({"status": status}))
        with suppress(OSError, AttributeError):
            self._process.stdin.close()  # type: ignore[union-attr]

    def wait(self, seconds: float) -> None:
        """Wait up to so long until the service has all of the run; after that its process goes on alone."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, seconds))
            self._reader.join(1.0)
        except subprocess.TimeoutExpired:
            self._said.append(f"is still being sent; process {self._process.pid} goes on with it")
