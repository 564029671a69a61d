"""The run directory: one run, one identity, one driver at a time; what is not ours in it is left alone."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from platform.config import Config, ConfigError, changed, identity, violation
from platform.monitor import Journal


class RunDirectory:
    """The directory `path` of a run: configuration, plan, journal, metrics, logs and whatever else belongs to it."""

    def __init__(self, path: Path | str):
        """Touches nothing."""
        self.path = Path(path)
        self.journal = self.path / "journal.jsonl"
        self._config, self._plan = self.path / "config.yaml", self.path / "plan.json"
        self._lock = self.path / "driver.lock"

    def check(self, config: Config) -> None:
        """Raises ConfigError, naming what differs, where the directory holds a run of another identity."""
        try:
            there = identity(Config.from_dict(yaml.safe_load(self._config.read_text())))
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unusable(error) from None
        except (yaml.YAMLError, ValueError, TypeError, AttributeError):
            raise self._refusal("its config.yaml is not a run's configuration; name another directory") from None
        if lines := changed(there, identity(config)):
            first = violation("run.dir", self.path, "holds another run; name another directory. What differs:")
            raise ConfigError([first, *lines])

    def finished(self, steps: int) -> bool:
        """Whether the run there has already done this many updates."""
        try:
            return any(e["event"] == "done" and e["step"] >= steps for e in Journal.read(self.journal))
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextmanager
    def claim(self, config: Config, plan: dict[str, Any]) -> Iterator[None]:
        """Makes the directory and is its only driver; writes `config.yaml` and `plan.json`.

        Raises ConfigError where it cannot be written, another driver is alive, or the identity is another.
        """
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            self._lock_or_refuse(lock)
            self.check(config)  # again: between the first look and the lock another driver may have been here
            _replace(self._config, yaml.safe_dump(_without_secrets(config), sort_keys=False))
            _replace(self._plan, json.dumps(plan, indent=1) + "\n")
            yield
        finally:
            os.close(lock)

    def _lock_or_refuse(self, lock: int) -> None:
        """The kernel frees a lock when its owner dies, so a stale owner is never in the way."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 1000, 0).decode() or "another process"
            raise self._refusal(f"in use by {owner}; wait for it, stop it, or name another directory") from None
        os.truncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _unusable(self, error: OSError) -> ConfigError:
        return self._refusal(f"cannot be used ({error.strerror}); name a directory that you can write to")

    def _refusal(self, constraint: str) -> ConfigError:
        return ConfigError(violation("run.dir", self.path, constraint))


def _without_secrets(config: Config) -> dict[str, Any]:
    values = config.to_dict()
    values["checkpoint"]["url"] = re.sub(r"(?<=://)[^/@]*@", "", config.checkpoint.url)  # user:password@
    return values


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)
