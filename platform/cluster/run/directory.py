"""The run directory: one run, one identity, one driver at a time; what is not ours in it is left alone."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from platform.boundary import documents
from platform.boundary.redaction import redact
from platform.boundary.schema import Malformed
from platform.boundary.undo import missing, remove_empty, remove_files
from platform.cluster.run import traces
from platform.config.fields import Config, ConfigError, violation
from platform.config.identity import identity, refusal

OURS = ("journal.jsonl", "metrics.jsonl", "driver.lock", "wandb")  # made before a run's first step; see `claim`


class RunDirectory:
    """The directory `path` of a run: configuration, plan, journal, metrics, logs and whatever else belongs to it."""

    def __init__(self, path: Path | str):
        """Touches nothing."""
        self.path = Path(path)
        self.journal = self.path / "journal.jsonl"
        self._config, self._plan = self.path / "config.yaml", self.path / "plan.json"
        self._lock = self.path / "driver.lock"

    def check(self, config: Config) -> dict[str, Any] | None:
        """Return the configuration that the run there had last, None where there is none. Raises ConfigError where
        the directory's files are no run's, and, naming what differs, where it holds a run of another identity, but for
        what `resume.allow` frees."""
        try:
            there = traces.configuration(self.path)
        except OSError as error:
            raise self.unusable(error) from None
        except Malformed as error:
            reason = f"its config.yaml is not a run's configuration ({error}); name another directory"
            raise self._refusal(reason) from None
        if faults := traces.faults(self.path):
            raise ConfigError(
                [violation("run.dir", self.path, f"{f}; move it away, or name another directory") for f in faults]
            )
        if there is None:
            return None
        what = "holds another run; name another directory"
        if lines := refusal(identity(there), config, "run.dir", self.path, what):
            raise ConfigError(lines)
        return there.to_dict()

    def finished(self, steps: int) -> bool:
        """Return whether the run there has already done this many updates. Raises ConfigError where its journal cannot
        be read."""
        try:
            return traces.finished(self.path, steps)
        except OSError as error:
            raise self.unusable(error) from None

    @contextmanager
    def claim(self, config: Config, plan: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Makes the directory and is its only driver; writes `config.yaml` and `plan.json`. Yields the configuration
        that was there. Where a ConfigError ends the run, both files become again what they were; of a run that is
        refused before its first step nothing stays.

        Raises ConfigError where it cannot be written, another driver is alive, or the identity is another.
        """
        made, own_logs = missing(self.path), (self.path / "logs").exists()
        try:
            self.path.mkdir(0o700, parents=True, exist_ok=True)  # what is there keeps its mode
            (self.path / "logs").mkdir(0o700, exist_ok=True)
            lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # it is emptied
        except OSError as error:
            remove_empty([self.path / "logs", *made])
            raise self.unusable(error) from None
        try:
            self._lock_or_refuse(lock)
            there = self.check(config)  # again: between the first look and the lock another driver may have been here
            with self._left_as_found(made, own_logs), _as_they_were(self._config, self._plan):
                try:
                    _replace(self._config, yaml.safe_dump(redact(config.to_dict()), sort_keys=False))
                    self.write_plan(plan)
                except OSError as error:
                    raise self.unusable(error) from None
                yield there
        finally:
            os.close(lock)

    @contextmanager
    def _left_as_found(self, made: list[Path], own_logs: bool) -> Iterator[None]:
        """Take everything back where a ConfigError ends a run that had not begun before and takes no step."""
        begun = self._config.exists() or self.journal.exists()
        try:
            yield
        except ConfigError:
            metrics = self.path / "metrics.jsonl"
            if not begun and not (metrics.exists() and metrics.stat().st_size):
                remove_files(self.path, OURS if own_logs else (*OURS, "logs"))
                checkpoints = self.path / "checkpoints"
                remove_files(checkpoints, [lease.name for lease in checkpoints.glob("lease-*")])
                remove_empty([checkpoints])
                remove_empty(made)
            raise

    def write_plan(self, plan: dict[str, Any]) -> None:
        """`plan.json`: that of the newest generation. Which one had which, the journal tells (`forming`)."""
        _replace(self._plan, json.dumps(redact(plan), indent=1) + "\n")

    def _lock_or_refuse(self, lock: int) -> None:
        """The kernel frees a lock when its owner dies, so a stale owner is never in the way."""
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = documents.line(os.pread(lock, 1000, 0)) or "another process"
            raise self._refusal(f"in use by {owner}; wait for it, stop it, or name another directory") from None
        try:
            os.truncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        except OSError as error:
            raise self.unusable(error) from None

    def unusable(self, error: OSError) -> ConfigError:
        """Makes the refusal of a directory that takes no files."""
        return self._refusal(f"cannot be used ({error.strerror}); name a directory that you can write to")

    def _refusal(self, constraint: str) -> ConfigError:
        return ConfigError(violation("run.dir", self.path, constraint))


@contextmanager
def _as_they_were(*files: Path) -> Iterator[None]:
    """A configuration that is refused later than most has no run: a value that it alone has must not stay behind."""
    before = {file: file.read_bytes() if file.is_file() else None for file in files}
    try:
        yield
    except ConfigError:
        for file, text in before.items():
            with suppress(OSError):  # a full disk, which is what was refused
                if text is None:
                    file.unlink(missing_ok=True)
                else:
                    _replace(file, text.decode(errors="surrogateescape"))
        raise


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8", errors="surrogateescape")
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise
