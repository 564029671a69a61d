"""The run directory: it holds one run of one identity, driven by one driver at a time; foreign files are left alone.

Its configuration, journal and metrics are read as untrusted files: each one is validated and a fault is reported in one
line.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml

from platform.boundary import documents, schema
from platform.boundary.local_files import list_missing_directories, remove_empty_directories, remove_files, replace_text
from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import ConfigError, format_violation, refuse_all, refuse_failures
from platform.boundary.schema import Malformed
from platform.config.fields import Config, Eval
from platform.config.identity import run_identity, violations_of_identity
from platform.monitor import events, json_records, metrics
from platform.monitor.goodput import check_early_stop
from platform.monitor.journal import LIVE
from platform.monitor.json_records import JOURNAL, METRICS

NOTICE = "a notice that all workers are about to be taken away"
CONFIG, PLAN, LOCK = "config.yaml", "plan.json", "driver.lock"
_DONE = (events.FirstStep, events.Checkpoint, events.Restored, events.RolledBack, events.End)  # their step is done


def read_configuration(directory: Path) -> Config | None:
    """Return the configuration of a run directory's last driver, None if there is none. Raises Malformed, OSError."""
    try:
        return schema.parse_value(Config, documents.parse_yaml(documents.read_bytes(directory / CONFIG)))
    except FileNotFoundError:
        return None


def find_faults(directory: Path) -> list[str]:
    """Return one line for each file that drivers write into a run directory (configuration, plan, journal, metrics,
    lock) that cannot be read or is not what a run writes there."""
    readers: dict[str, Callable[[Path], Any]] = {METRICS: _read_last_rows}
    readers[JOURNAL] = lambda path: list(events.read_events(path))
    lines = []
    for name in (CONFIG, PLAN, JOURNAL, METRICS, LOCK):
        try:
            documents.open_regular_file(directory / name).close()
            readers.get(name, str)(directory / name)
        except (FileNotFoundError, NotADirectoryError):
            if (directory / name).is_symlink():
                lines.append(f"its {name} is a link to nothing")
        except OSError as error:
            lines.append(f"its {name} cannot be used ({error.strerror})")
        except Malformed as error:
            lines.append(f"its {name} is not a run's ({error})")
    return lines


def read_journal(directory: Path) -> Iterator[events.JournalEvent]:
    """Yield the events that drivers left in a run directory, none without a journal. Raises Malformed, OSError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from events.read_events(directory / JOURNAL)


def split_by_driver(run_events: Iterable[events.JournalEvent]) -> list[list[events.JournalEvent]]:
    """Divide the events in a run directory by driver process: a list for each start of a driver, in order."""
    drivers: list[list[events.JournalEvent]] = []
    for event in run_events:
        if isinstance(event, events.Starting) or not drivers:
            drivers.append([])
        drivers[-1].append(event)
    return drivers


def find_final_step(directory: Path, steps: int, e: Eval) -> int:
    """Return the updates with which the run in a run directory ended, if these are `steps` or more, or it ended early
    as its evaluations no longer improved (`e`: eval.patience); else 0. Raises Malformed, OSError."""
    done = max((event.step for event in read_journal(directory) if isinstance(event, events.Done)), default=0)
    early = 0 < done < steps and e.patience and check_early_stop(metrics.MetricsLog.read_rows(directory / METRICS), e)
    return done if done >= steps or early else 0


def is_ended_by_preemption(directory: Path) -> bool:
    """Return True if a directory's last driver ended as its node or all workers must go. Raises Malformed, OSError."""
    life = events.last_driver_events([*read_journal(directory)])
    return any(isinstance(event, events.Drained) and event.signal == NOTICE for event in life)


def gave_up_on_dead_worker(directory: Path) -> bool:
    """Return True if a run directory's last driver gave up as a worker died. Raises Malformed, OSError."""
    life = events.last_driver_events([*read_journal(directory)])
    failures = [event for event in life if isinstance(event, events.Failure)]
    return any(isinstance(event, events.GaveUp) for event in life) and bool(failures) and failures[-1].kind == "died"


def has_steps_but_no_checkpoint(directory: Path) -> bool:
    """Return True if a directory's drivers did steps, and saved or restored nothing. Raises Malformed, OSError."""
    journal = read_journal(directory)
    has_checkpoint = any(isinstance(e, events.Checkpoint) or getattr(e, "directory", None) for e in journal)
    return not has_checkpoint and find_last_step(directory) > 0


def find_last_step(directory: Path) -> int:
    """Return the last training step done by a run directory's journal or metrics, or 0. Raises Malformed, OSError."""
    done = [max(e.step, getattr(e, "saved", None) or 0) for e in read_journal(directory) if isinstance(e, _DONE)]
    with suppress(FileNotFoundError, NotADirectoryError):
        done += [row["step"] for row in _read_last_rows(directory / METRICS)]
    return max(done, default=0)


def find_dead_driver_step(directory: Path) -> int | None:
    """Return the last step that the last driver in a run directory had done, 0 for none, if it died without an end;
    None if it ended, or there was none. Raises Malformed, OSError."""
    life = events.last_driver_events([*read_journal(directory)])
    if not life or any(isinstance(event, events.End) for event in life):
        return None
    if any(isinstance(event, events.FirstStep) for event in life):
        with suppress(FileNotFoundError, NotADirectoryError):
            return next((int(row["step"]) for row in reversed(_read_last_rows(directory / METRICS))), 0)
    return 0


def _read_last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of metrics that drivers left in a run directory's metrics.jsonl."""
    return json_records.read_last_lines(path, metrics.validate_row)


# They may exist before the first step; see `claim`.
OURS = (JOURNAL, METRICS, LOCK, LIVE, "sinks", "wandb", "tensorboard")


class RunDirectory:
    """Directory `path` of a run: holds its configuration, plan, journal, metrics and logs, and lets in one driver at a
    time."""

    def __init__(self, path: Path | str):
        """Set the paths of the files in a run directory: nothing is read or created."""
        self.path = Path(path)
        self.journal = self.path / JOURNAL
        self._config, self._plan, self._lock = (self.path / name for name in (CONFIG, PLAN, LOCK))

    def check_identity(self, config: Config) -> dict[str, Any] | None:
        """Return the configuration that the run in this directory had last, as nested dicts; None if it holds no run.
        Raises ConfigError if its files are not a run's, or if its run has another identity than `config`: the message
        names each differing key, and keys freed by `resume.allow` do not count."""
        why = "its config.yaml is not a run's configuration ({}); name another directory"
        with self.refuse_os_errors(), refuse_failures("run.dir", self.path, Malformed, why=why):
            previous_config = read_configuration(self.path)
        cure = "move it away, or name another directory"
        refuse_all(format_violation("run.dir", self.path, f"{fault}; {cure}") for fault in find_faults(self.path))
        if previous_config is None:
            return None
        what = "holds another run; name another directory"
        refuse_all(violations_of_identity(run_identity(previous_config), config, "run.dir", self.path, what))
        return previous_config.to_dict()

    def find_final_step(self, steps: int, e: Eval) -> int:
        """Return the updates of a run that ended in this directory, else 0; raise ConfigError if it is unreadable."""
        with self.refuse_os_errors():
            return find_final_step(self.path, steps, e)

    def find_dead_driver_step(self) -> int | None:
        """Return the last step of a driver that died in this run directory, else None. Raises ConfigError."""
        with self.refuse_os_errors():
            return find_dead_driver_step(self.path)

    def refuse_if_locked(self) -> None:
        """Raise ConfigError, naming the process, if another driver is alive in this run directory; before a run waits
        for places that the other one may have. `claim` decides."""
        with suppress(OSError, Malformed), documents.open_regular_file(self._lock) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                self._refuse_owner(documents.printable_line(lock.read(1000)))

    @contextmanager
    def claim(self, config: Config, plan: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        """Create the run directory, lock it for this driver, write `config.yaml` and `plan.json` (`plan`: its summary),
        and yield the configuration that was there before, None if there was none. If a ConfigError ends the run, both
        files get their previous contents back, and a new run that was refused before its first step leaves nothing
        behind.

        Raises ConfigError if the directory cannot be written, another driver is alive, or the identity differs.
        """
        missing_folders, had_logs = list_missing_directories(self.path), (self.path / "logs").exists()
        try:
            with self.refuse_os_errors():
                self.path.mkdir(0o700, parents=True, exist_ok=True)  # an existing directory keeps its mode
                (self.path / "logs").mkdir(0o700, exist_ok=True)
                lock = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # no symlink: it is truncated
        except ConfigError:
            remove_empty_directories([self.path / "logs", *missing_folders])
            raise
        try:
            self._lock_or_refuse(lock)
            # again: another driver may have written since the first check
            previous_config = self.check_identity(config)
            restored = _restore_files_if_refused(self._config, self._plan)
            with self._clean_up_if_refused(missing_folders, had_logs), restored:
                with self.refuse_os_errors():
                    replace_text(self._config, yaml.safe_dump(redact_secrets(config.to_dict()), sort_keys=False))
                    self.write_plan(plan)
                yield previous_config
        finally:
            os.close(lock)

    @contextmanager
    def _clean_up_if_refused(self, missing_folders: list[Path], had_logs: bool) -> Iterator[None]:
        """Remove the run directory's files and directories that this driver created, if a ConfigError ends a run that
        had not begun before and took no step. `missing_folders`: directories that did not exist; `had_logs`: the user
        already had a folder `logs` there."""
        begun = self._config.exists() or self.journal.exists()
        try:
            yield
        except ConfigError:
            metrics = self.path / METRICS
            if not begun and not (metrics.exists() and metrics.stat().st_size):
                remove_files(self.path, OURS if had_logs else (*OURS, "logs"))
                checkpoints = self.path / "checkpoints"
                remove_files(checkpoints, [lease.name for lease in checkpoints.glob("lease-*")])
                remove_empty_directories([checkpoints])
                remove_empty_directories(missing_folders)
            raise

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write the run directory's `plan.json`, the summary of the newest mesh's plan; the journal has each mesh."""
        replace_text(self._plan, json.dumps(redact_secrets(plan), indent=1) + "\n")

    def _lock_or_refuse(self, descriptor: int) -> None:
        """Lock the run directory for this driver, by the open lock file `descriptor` (a descriptor), or raise
        ConfigError naming the process that holds it. The kernel frees the lock of a process that dies, so no lock is
        ever stale."""
        with self.refuse_os_errors():
            owner = lock_or_read_owner(descriptor)
        if owner:
            self._refuse_owner(owner)

    def _refuse_owner(self, owner: str) -> NoReturn:
        """Raise ConfigError naming the process that drives a run in this directory."""
        constraint = f"in use by {owner or 'another process'}; wait for it, stop it, or name another directory"
        raise ConfigError("run.dir", self.path, constraint)

    def refuse_os_errors(self) -> AbstractContextManager[None]:
        """Raise ConfigError, for the user, where the run directory cannot be used inside the block."""
        why = "cannot be used ({.strerror}); name a directory that you can write to"
        return refuse_failures("run.dir", self.path, OSError, why=why)


def lock_or_read_owner(descriptor: int) -> str:
    """Lock the lock file of a run directory for this process, by its descriptor, write this process's id and host into
    it, and return ""; if another process has locked it, return that process's id and host. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return documents.printable_line(os.pread(descriptor, 1000, 0)) or "another process"
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return ""


@contextmanager
def _restore_files_if_refused(*files: Path) -> Iterator[None]:
    """Restore the previous contents of `files`, the run's config.yaml and plan.json, if the body raises ConfigError: a
    refused configuration must not stay on disk as the run's own."""
    before = {file: file.read_bytes() if file.is_file() else None for file in files}
    try:
        yield
    except ConfigError:
        for file, text in before.items():
            with suppress(OSError):  # the disk may be full, which may be why the run was refused
                if text is None:
                    file.unlink(missing_ok=True)
                else:
                    replace_text(file, text.decode(errors="surrogateescape"))
        raise
