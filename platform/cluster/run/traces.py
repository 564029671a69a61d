"""Reading of a run directory: its configuration, journal and metrics. The files may be anybody's, so each one is
validated and a fault is reported in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed
from platform.config.fields import Config
from platform.monitor.records import records

CONFIG, PLAN, JOURNAL, METRICS, LOCK = "config.yaml", "plan.json", "journal.jsonl", "metrics.jsonl", "driver.lock"
_DONE = ("first_step", "checkpoint", "restored", "rolled_back", "unsaved", "done", "gave_up", "drained", "stopped")


def configuration(directory: Path) -> Config | None:
    """Return the configuration that the run had last, None if the directory holds no run. Raises Malformed, OSError."""
    try:
        found: Config = schema.read(Config, documents.from_yaml(documents.read_bytes(directory / CONFIG)))
        return found
    except FileNotFoundError:
        return None


def faults(directory: Path) -> list[str]:
    """Return one line for each file of a run directory that is not what a run writes there."""
    lines = []
    for name in (CONFIG, PLAN, JOURNAL, METRICS, LOCK):
        try:
            documents.open_regular(directory / name).close()
            if name == JOURNAL:
                list(events(directory))
            elif name == METRICS:
                records.last(directory / name, records.ROW)
        except (FileNotFoundError, NotADirectoryError):
            if (directory / name).is_symlink():
                lines.append(f"its {name} is a link to nothing")
        except OSError as error:
            lines.append(f"its {name} cannot be used ({error.strerror})")
        except Malformed as error:
            lines.append(f"its {name} is not a run's ({error})")
    return lines


def events(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the journal's events; none if there is no journal. Raises Malformed, OSError."""
    try:
        yield from records.lines(directory / JOURNAL, records.EVENT)
    except (FileNotFoundError, NotADirectoryError):
        return


def finished(directory: Path, steps: int) -> bool:
    """Return True if the run has already done this many updates. Raises Malformed, OSError."""
    return any(e["event"] == "done" and e.get("step", 0) >= steps for e in events(directory))


def steps(directory: Path) -> int:
    """Return the highest step that the journal, or the end of the metrics, shows as done; 0 if neither shows any.
    Raises Malformed, OSError."""
    done = [max(e.get("step", 0), e.get("saved", 0)) for e in events(directory) if e["event"] in _DONE]
    try:
        done += [row["step"] for row in records.last(directory / METRICS, records.ROW)]
    except (FileNotFoundError, NotADirectoryError):
        pass
    return max(done, default=0)
