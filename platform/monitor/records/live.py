"""`live.json`: the sight of a run's driver at this moment, replaced every second, so that a look at the run directory
names the culprit of a standstill while it lasts. Runs of earlier versions have none."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from platform.boundary import documents, schema
from platform.boundary.schema import Count, Span
from platform.monitor.records import records
from platform.monitor.records.records import Seconds, Steps
from platform.parallel.communicator.progress import Activity

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
class Live:
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

    def plain(self) -> dict[str, Any]:
        """Return the sight of a run's driver as the plain data of live.json."""
        return asdict(self)


def kernel_state(pid: int) -> str:
    """Return the kernel's letter for the state of this machine's process, such as T if stopped; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def read_live(directory: Path) -> Live:
    """Read a run directory's live.json. Raises Malformed, OSError."""
    raw = documents.read_bytes(directory / LIVE, records.LARGEST)
    found = schema.read(dict[str, Any], documents.from_json(raw, records.LARGEST))
    return schema.read(Live, {name: found[name] for name in Live.__dataclass_fields__ if name in found})
