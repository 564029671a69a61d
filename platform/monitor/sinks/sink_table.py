"""The services that a run's numbers can be sent to: which are asked for, and what each needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

from platform.config.fields import Config
from platform.config.groups.execution_group import Monitor
from platform.monitor.sinks.services.command_sink import CommandSink
from platform.monitor.sinks.services.mlflow_sink import MlflowSink
from platform.monitor.sinks.services.sink import Sink, SinkRun
from platform.monitor.sinks.services.tensorboard_sink import TensorboardSink
from platform.monitor.sinks.services.trackio_sink import TrackioSink
from platform.monitor.sinks.services.wandb_sink import WandbSink


class SinkKind(NamedTuple):
    """Kind of service: its `title` for people, the Python `package` that it needs ("" for none), whether a
    configuration's keys ask for it, and how it is opened. Opening imports the package. `secrets`: the environment
    variables with its address and its token, each with its key among the secrets of a job."""

    title: str
    package: str
    asked: Callable[[Monitor], bool]
    open: Callable[[SinkRun], Sink]
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
    "alert_command": SinkKind("alerts", "", lambda m: bool(m.alert_command), CommandSink),
}


def asked_sinks(monitor: Monitor) -> list[str]:
    """Return the names of the services that a run's numbers are to be sent to."""
    return [name for name, kind in SINKS.items() if kind.asked(monitor)]


def secrets_of_sinks(monitor: Monitor) -> Iterator[tuple[str, str, str]]:
    """Yield (environment variable, service, key) of each secret of the services that a run's numbers are sent to."""
    for service in asked_sinks(monitor):
        yield from ((variable, service, name) for variable, name in SINKS[service].secrets.items())


def missing_for_sinks(config: Config) -> Iterator[str]:
    """Yield a refusal line for each service of a run whose Python package is not installed here."""
    for name in asked_sinks(config.monitor):
        if line := lack_of_package(name):
            yield f"monitor={name}: {line}"


def lack_of_package(name: str) -> str:
    """Return what the service `name` needs that is not installed here, with the command that installs it; "" if it
    lacks nothing."""
    package = SINKS[name].package
    if package and find_spec(package) is None:
        return f"needs the package {package}: pip install {package}"
    server = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http")
    if name == "mlflow" and not server and find_spec("sqlalchemy") is None:
        return "mlflow-skinny needs the URL of a server in MLFLOW_TRACKING_URI; or: pip install mlflow"
    return ""
