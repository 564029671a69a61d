"""Default run directory, derived from the configuration, so that the same command resumes the same run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from platform.boundary.redaction import redact
from platform.config.fields import Config, digest
from platform.config.identity import differences

_MOST = 100  # directories of one experiment to search
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def default_directory(config: Config, experiment: str) -> str:
    """Return `runs/EXPERIMENT-HASH`, the hash being over the configuration without secrets.

    If that does not exist, returns the directory in which an earlier version, which hashed other keys, began this run.
    """
    values = _of_the_run(config)
    found = Path("runs") / f"{experiment}-{digest(values)}"
    if not found.is_dir():
        older = sorted(Path("runs").glob(f"{experiment}-{'[0-9a-f]' * 12}"))[:_MOST]
        found = next((path for path in older if _began_as(path, values)), found)
    return str(found)


def _of_the_run(config: Config) -> dict[str, Any]:
    values: dict[str, Any] = redact(config.to_dict())
    for key in ("run", "resume"):  # a resumed run is the same run
        del values[key]
    del values["train"]["stop_at"], values["checkpoint"]["resume"], values["checkpoint"]["on_stop"]
    if not isinstance(config.checkpoint.every, int):  # a duration does not affect the steps
        values["checkpoint"]["every"] = 0
    return values


def _began_as(path: Path, values: Mapping[str, Any]) -> bool:
    """Return True if the run in `path` has these values, keys unknown to its version being at their defaults."""
    try:
        there = _of_the_run(Config.from_dict(yaml.load((path / "config.yaml").read_bytes(), _LOADER)))  # noqa: S506
    except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError):
        return False
    as_many = {"parallel.data"} if values["parallel"]["data"] == -1 else set()
    return not differences(there, values).keys() - as_many
