"""Reading of a run directory: its configuration, journal and metrics. The files are untrusted, so each one is validated
and a fault is reported in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed
from platform.config.fields import Config, Eval
from platform.monitor.patience import learned_out
from platform.monitor.records import events, metrics, records
from platform.monitor.records.records import JOURNAL, METRICS

NOTICE = "a notice that all workers are about to be taken away"
CONFIG, PLAN, LOCK = "config.yaml", "plan.json", "driver.lock"
_DONE = (events.FirstStep, events.Checkpoint, events.Restored, events.RolledBack, events.End)  # their step is done


def configuration(directory: Path) -> Config | None:
    """Return the last configuration of the run in a directory, None if it holds none. Raises Malformed, OSError."""
    try:
        return schema.read(Config, documents.from_yaml(documents.read_bytes(directory / CONFIG)))
    except FileNotFoundError:
        return None


def faults(directory: Path) -> list[str]:
    """Return one line for each file of a run directory (configuration, plan, journal, metrics, lock) that cannot be
    read or is not what a run writes there."""
    readers: dict[str, Callable[[Path], Any]] = {JOURNAL: lambda path: list(events.read(path)), METRICS: _last_rows}
    lines = []
    for name in (CONFIG, PLAN, JOURNAL, METRICS, LOCK):
        try:
            documents.open_regular(directory / name).close()
            readers.get(name, str)(directory / name)
        except (FileNotFoundError, NotADirectoryError):
            if (directory / name).is_symlink():
                lines.append(f"its {name} is a link to nothing")
        except OSError as error:
            lines.append(f"its {name} cannot be used ({error.strerror})")
        except Malformed as error:
            lines.append(f"its {name} is not a run's ({error})")
    return lines


def journal(directory: Path) -> Iterator[events.JournalEvent]:
    """Yield the events in a run directory's journal.jsonl, none without that file. Raises Malformed, OSError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from events.read(directory / JOURNAL)


def lives(found: Iterable[events.JournalEvent]) -> list[list[events.JournalEvent]]:
    """Divide the events of a run's journal by driver process: a list for each start of the run, in order."""
    drivers: list[list[events.JournalEvent]] = []
    for event in found:
        if isinstance(event, events.Starting) or not drivers:
            drivers.append([])
        drivers[-1].append(event)
    return drivers


def _last_life(directory: Path) -> list[events.JournalEvent]:
    """Return the journal events of the driver that ran last in a run directory; [] if there was none."""
    return next(reversed(lives(journal(directory))), [])


def finished(directory: Path, steps: int, e: Eval) -> int:
    """Return the updates with which the run in a run directory ended, if these are `steps` or more, or it ended early
    as its evaluations no longer improved (`e`: eval.patience); else 0. Raises Malformed, OSError."""
    done = max((event.step for event in journal(directory) if isinstance(event, events.Done)), default=0)
    early = 0 < done < steps and e.patience and learned_out(metrics.MetricsLog.read(directory / METRICS), e)
    return done if done >= steps or early else 0


def noticed(directory: Path) -> bool:
    """Return True if a run's last driver ended as its node, or all workers, were to go. Raises Malformed, OSError."""
    return any(isinstance(event, events.Drained) and event.signal == NOTICE for event in _last_life(directory))


def bereaved(directory: Path) -> bool:
    """Return True if a run directory's last driver gave up because a worker's process died. Raises Malformed,
    OSError."""
    life = _last_life(directory)
    failures = [event for event in life if isinstance(event, events.Failure)]
    return any(isinstance(event, events.GaveUp) for event in life) and bool(failures) and failures[-1].kind == "died"


def has_nothing_saved(directory: Path) -> bool:
    """Return True if a run directory shows steps, and no checkpoint saved or restored. Raises Malformed, OSError."""
    there = any(isinstance(e, events.Checkpoint) or getattr(e, "directory", None) for e in journal(directory))
    return not there and steps(directory) > 0


def steps(directory: Path) -> int:
    """Return the last training step done by a run directory's journal or metrics, or 0. Raises Malformed, OSError."""
    done = [max(e.step, getattr(e, "saved", None) or 0) for e in journal(directory) if isinstance(e, _DONE)]
    with suppress(FileNotFoundError, NotADirectoryError):
        done += [row["step"] for row in _last_rows(directory / METRICS)]
    return max(done, default=0)


def orphaned(directory: Path) -> int | None:
    """Return the last training step that the last driver of a run directory had done, 0 for none, if it died without an
    end; None if it ended, or there was none. Raises Malformed, OSError."""
    life = _last_life(directory)
    if not life or any(isinstance(event, events.End) for event in life):
        return None
    if any(isinstance(event, events.FirstStep) for event in life):
        with suppress(FileNotFoundError, NotADirectoryError):
            return next((int(row["step"]) for row in reversed(_last_rows(directory / METRICS))), 0)
    return 0


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of metrics in a run's metrics.jsonl."""
    return records.last(path, metrics.read_row)
