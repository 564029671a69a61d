"""Evidence for the verdict on a run: its journal, its last rows of metrics, and whether its driver lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from platform.monitor.records import events
from platform.monitor.records.journal_event import End, JournalEvent
from platform.monitor.records.live import Live

Kind = TypeVar("Kind", bound=JournalEvent)

# what is known of a run's driver process
ALIVE, STOPPED, GONE, UNKNOWN = "alive", "stopped", "gone", "unknown"  # UNKNOWN: on another machine


@dataclass(frozen=True)
class Evidence:
    """Evidence on a run at the time `now` (seconds since the epoch). `journal`: its events;
    `rows`: its last rows of metrics; `steps`: its last step; `driver`: ALIVE, STOPPED (by a signal), GONE or UNKNOWN;
    `owner`: the driver's process and machine, as its lock names them; `wrote`: when it wrote last; `live`: its sight of
    the workers, None of a run of an earlier version."""

    journal: Sequence[JournalEvent]
    rows: Sequence[Mapping[str, Any]] = ()
    now: float = 0.0
    steps: int | None = None
    driver: str = UNKNOWN
    owner: str = ""
    wrote: float = 0.0
    live: Live | None = None

    @cached_property
    def life(self) -> Sequence[JournalEvent]:
        """Return the events of the run's last driver."""
        starts = [i for i, event in enumerate(self.journal) if isinstance(event, events.Starting)]
        return self.journal[starts[-1] :] if starts else self.journal

    @cached_property
    def end(self) -> End | events.Refused | None:
        """Return the event with which the run's last driver ended, None if it has not."""
        return next((e for e in reversed(self.life) if isinstance(e, End | events.Refused)), None)

    def last(self, kind: type[Kind], since: float = 0.0) -> Kind | None:
        """Return the last event of a kind in the life of the run's last driver, not older than `since`; else None."""
        return next((e for e in reversed(self.life) if isinstance(e, kind) and e.time >= since), None)

    @cached_property
    def phase(self) -> JournalEvent | None:
        """Return the event with which the run's last driver entered the state that it is in."""
        return next((e for e in reversed(self.life) if type(e) in PHASES), None)

    @property
    def phase_word(self) -> str:
        """Return the state of the run's last driver by its journal, in a word or two; "" before its first event."""
        return PHASES[type(self.phase)] if self.phase else ""

    @cached_property
    def step(self) -> int:
        """Return the last training step that the run has done."""
        done = [e.step for e in self.life if isinstance(e, _DONE)]
        rows = [row["step"] for row in self.rows]
        return max([*done, *rows], default=0)

    @cached_property
    def save_seconds(self) -> float:
        """Return the median seconds of the run's checkpoints so far, 0 if it has none."""
        seconds = [e.seconds for e in self.journal if isinstance(e, events.Checkpoint)]
        return median(seconds) if seconds else 0.0

    @cached_property
    def workers(self) -> dict[int, Mapping[str, Any]]:
        """Return rank -> coordinates, node and member number of the workers of the run's newest mesh."""
        formed = self.last(events.Formed)
        return {worker["rank"]: worker for worker in formed.workers if "rank" in worker} if formed else {}

    @cached_property
    def mesh(self) -> Mapping[str, int]:
        """Return the axes of the meshes of the run's last driver, with their largest sizes."""
        found: dict[str, int] = {}
        for event in self.life:
            for axis, size in event.mesh.items() if isinstance(event, events.Forming) else ():
                found[axis] = max(size, found.get(axis, 1))
        return found

    def name(self, rank: int | None, number: int | None = None, node: str = "", at: Mapping[str, int] = {}) -> str:  # noqa: B006
        """Name a worker of the run for people: its rank with coordinates, its node, and its number in the crew."""
        worker = self.workers.get(rank, {}) if rank is not None else {}
        at = at or worker.get("coordinates", {})
        wide = " ".join(f"{axis}{i}" for axis, i in at.items() if self.mesh.get(axis, 2) > 1)
        who = f"worker {number}" if rank is None else f"rank {rank}" + (f" [{wide}]" if wide else "")
        host = (node or worker.get("node", "")).partition("/")[0]
        number = worker.get("number") if number is None else number
        more = f" (worker {number})" if rank is not None and number is not None else ""
        return who + (f" on {host}" if host else "") + more


# event -> the state that it begins
PHASES: dict[type[JournalEvent], str] = {
    events.Starting: "forming",
    events.Forming: "forming",
    events.Waiting: "waiting for workers",
    events.Running: "training",
    events.FirstStep: "training",
    events.Failure: "re-forming",
    events.Reforming: "re-forming",
    events.Released: "re-forming",
}
_DONE = (events.FirstStep, events.Checkpoint, events.Restored, events.RolledBack, End)
