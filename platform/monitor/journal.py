"""`journal.jsonl`: one line per event of a run, with its time, from which e.g. recovery times are computed; and
`live.json`: the sight of a run's driver at this moment, replaced every second, so that a look at the run directory
names the culprit of a standstill while it lasts. Runs of earlier versions have no `live.json`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import documents, schema
from platform.boundary.redaction import redact_secrets
from platform.boundary.schema import Count, Span
from platform.boundary.terminal import print_line
from platform.monitor import events, json_records
from platform.monitor.events import JournalEvent
from platform.monitor.json_records import JsonLines, Seconds, Steps
from platform.runtime.progress import Activity


class Journal:
    """Append-only file of a run's events. `generation` counts formations of the mesh from 1, over all drivers of the
    run.

    Opening an existing journal cuts a torn last line and continues from its last generation; a new one is at 0.
    """

    def __init__(
        self,
        path: Path | str,
        say: Callable[[str], None] = print_line,
        on_event: Callable[[JournalEvent], None] = lambda event: None,
    ):
        """Open or create the journal's file. JsonLines prints warnings, and keeps the events that cannot be written.
        `on_event` is called with each event after it was written."""
        self._on_event = on_event
        self._lines = JsonLines(path, say)
        self.generation: int = max((event.generation for event in events.read_events(path)), default=0)

    def begin_generation(self) -> int:
        """Begin a generation of workers and return its number, which the journal gives to the events that follow."""
        self.generation += 1
        return self.generation

    def write(self, event: JournalEvent) -> None:
        """Write an event that happens now to the journal, with the time and the workers' present generation."""
        stamp = {"time": time.time(), "generation": self.generation}
        stamped = replace(event, **redact_secrets(dict(vars(event)) | stamp))
        self._lines.append(redact_secrets(events.event_to_plain(stamped)) | {"event": event.word})
        self._on_event(stamped)  # it sees what was recorded, without secrets

    def read_events(self) -> list[JournalEvent]:
        """List every event of the run: from the journal's file, if it can be read, and from the lines not written yet.
        Raises Malformed for a line that is not an event."""
        written: list[JournalEvent] = []
        with suppress(OSError):
            written = list(events.read_events(self._lines.path))
        return written + [events.parse_event(line) for line in self._lines.unwritten_records]

    def close(self) -> None:
        """Close the journal's file, after a last try to write the events that could not be written."""
        self._lines.close()


LIVE = "live.json"  # in the run directory
MOST = 64  # workers and links that are listed, the suspects first


@dataclass(frozen=True)
class SeenWorker:
    """Worker of a run as its driver sees it in the call under way. `answered`: it has done the call; `owes`: seconds
    for which it has owed a heartbeat, None if it owes none; `process`: the state of its process, if it is on the
    driver's machine; `activity`: its newest heartbeat in this call, `age` seconds old."""

    rank: Count
    number: Count
    node: str = ""
    answered: bool = False
    owes: Seconds | None = None
    process: str = ""
    age: Seconds = 0.0
    activity: Activity | None = None


@dataclass(frozen=True)
class SeenLink:
    """Connections from a worker's node to another address. `rate`: bytes per second in which the network alone held up
    more, lately, None if it hardly did; `best`: the highest that it was; `queued`: bytes not acknowledged, nothing of
    them for `quiet` seconds."""

    node: str
    here: str
    there: str
    rate: Annotated[float, Span(0, 1e15)] | None = None
    best: Annotated[float, Span(0, 1e15)] | None = None
    queued: Count = 0
    quiet: Seconds = 0.0


@dataclass(frozen=True)
class LiveState:
    """Sight of a run's driver at `time`, in seconds since the epoch. `doing`: its state in a word, since `since`;
    `step`: the last one done; `usual`: median seconds of a step; `held`: newest step in the workers' memory; `call`:
    the call under way, "" between calls, since `called`, which `pending` workers have not answered; `saving`: the step
    of the checkpoint under way, since `saving_since`; `workers`, `links`: at most MOST of them, the suspects first;
    `stack`: frames of the driver itself."""

    time: Seconds
    generation: Count = 0
    doing: str = ""
    since: Seconds = 0.0
    step: Steps = 0
    usual: Seconds | None = None
    held: Steps | None = None
    call: str = ""
    called: Seconds = 0.0
    pending: Count = 0
    saving: Steps | None = None
    saving_since: Seconds | None = None
    workers: list[SeenWorker] = field(default_factory=list)
    links: list[SeenLink] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    def plain_fields(self) -> dict[str, Any]:
        """Return a run's live state as the plain data of its file live.json."""
        return asdict(self)


def kernel_state(pid: int) -> str:
    """Return the kernel's letter for a process of a run's live state, such as T if stopped; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def read_live_state(directory: Path) -> LiveState:
    """Read a run's live state from live.json, which its driver keeps. Raises Malformed, OSError."""
    raw = documents.read_bytes(directory / LIVE, json_records.LARGEST)
    values = schema.parse_value(dict[str, Any], documents.parse_json(raw, json_records.LARGEST))
    return schema.parse_value(
        LiveState, {name: values[name] for name in LiveState.__dataclass_fields__ if name in values}
    )
