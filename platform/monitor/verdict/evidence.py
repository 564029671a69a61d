"""Evidence for the verdict on a run: its journal, its last rows of metrics, and whether its driver lives; causes of
failures as errors' texts show them; and words for the doings of workers. `Verdict` is one line that names the culprit,
and what it follows from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

from platform.monitor import events, json_records
from platform.monitor.events import End, JournalEvent
from platform.monitor.journal import LiveState
from platform.runtime.progress import Activity, Wait

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
    live: LiveState | None = None

    @cached_property
    def last_driver_events(self) -> Sequence[JournalEvent]:
        """Return the events of the run's last driver."""
        return events.last_driver_events(self.journal)

    @cached_property
    def end_event(self) -> End | events.Refused | None:
        """Return the event with which the run's last driver ended, None if it has not."""
        return next((e for e in reversed(self.last_driver_events) if isinstance(e, End | events.Refused)), None)

    def last_event(self, kind: type[Kind], since: float = 0.0) -> Kind | None:
        """Return the last event of a kind in the life of the run's last driver, not older than `since`; else None."""
        return next((e for e in reversed(self.last_driver_events) if isinstance(e, kind) and e.time >= since), None)

    @cached_property
    def phase_event(self) -> JournalEvent | None:
        """Return the event with which the run's last driver entered the state that it is in."""
        return next((e for e in reversed(self.last_driver_events) if type(e) in PHASES), None)

    @property
    def phase_word(self) -> str:
        """Return the state of the run's last driver by its journal, in a word or two; "" before its first event."""
        return PHASES[type(self.phase_event)] if self.phase_event else ""

    @cached_property
    def last_step(self) -> int:
        """Return the last training step that the run has done."""
        done = [e.step for e in self.last_driver_events if isinstance(e, _DONE)]
        return max([*done, *(row["step"] for row in self.rows)], default=0)

    @cached_property
    def save_seconds(self) -> float:
        """Return the median seconds of the run's checkpoints so far, 0 if it has none."""
        seconds = [e.seconds for e in self.journal if isinstance(e, events.Checkpoint)]
        return median(seconds) if seconds else 0.0

    @cached_property
    def workers_by_rank(self) -> dict[int, Mapping[str, Any]]:
        """Return rank -> coordinates, node and member number of the workers of the run's newest mesh."""
        formed = self.last_event(events.Formed)
        return {worker["rank"]: worker for worker in formed.workers if "rank" in worker} if formed else {}

    @cached_property
    def largest_mesh(self) -> Mapping[str, int]:
        """Return the axes of the meshes of the run's last driver, with their largest sizes."""
        largest_sizes: dict[str, int] = {}
        for event in self.last_driver_events:
            for axis, size in event.mesh.items() if isinstance(event, events.Forming) else ():
                largest_sizes[axis] = max(size, largest_sizes.get(axis, 1))
        return largest_sizes

    def name_worker(
        self, rank: int | None, number: int | None = None, node: str = "", at: Mapping[str, int] = {}
    ) -> str:
        """Name a worker of the run for people: its rank with coordinates, its node, and its number in the crew."""
        worker = self.workers_by_rank.get(rank, {}) if rank is not None else {}
        at = at or worker.get("coordinates", {})
        wide = " ".join(f"{axis}{i}" for axis, i in at.items() if self.largest_mesh.get(axis, 2) > 1)
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


_MEMORY = re.compile(r"OutOfMemoryError|out of memory|t allocate memory|\bMemoryError\b")
_OTHERS = re.compile(r"DistBackendError|DistNetworkError|DistStoreError|/gloo/|by peer")
_TOO_FEW = re.compile(r"workers? there, and elastic\.min_workers|^there is no legal plan for")
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
_KEPT = 8  # frames of a stack, the innermost


def is_out_of_memory(error: str) -> bool:
    """Return True if a failed worker's error is evidence that its device or machine had no memory left."""
    return bool(_MEMORY.search(error))


def blames_others(error: str) -> bool:
    """Return True if a failed worker's error is evidence against others: of communication, as when a rank is gone."""
    return bool(_OTHERS.search(error))


def is_too_few(error: str) -> bool:
    """Return True if an error is evidence that a run ended because too few workers were left."""
    return bool(_TOO_FEW.search(error))


def innermost_frames(error: str) -> list[str]:
    """Return as evidence the innermost frames of the traceback in a failed worker's error, the innermost last."""
    matches = [match for line in error.splitlines() if (match := _FRAME.match(line))]
    return [f"{match[1]}:{match[2]} in {match[3]}" for match in matches][-_KEPT:]


def activity_text(beat: Activity) -> str:
    """Format what a worker does, by its heartbeat, for a verdict: "waiting in all_reduce over data"."""
    if not beat.waiting:
        where = f"in {beat.section}" if beat.section else f"in {beat.call}"
        return f"preparing {where}" if beat.preparing else f"at work {where}"
    return f"waiting in {wait_text(beat.wait) if beat.wait else beat.section}"


def format_activities(doings: Iterable[tuple[int, Activity]]) -> list[str]:
    """Format what workers do, by (rank, heartbeat), for a verdict: a line per activity, the most frequent first."""
    ranks_by_activity: dict[str, list[int]] = {}
    for rank, beat in doings:
        ranks_by_activity.setdefault(activity_text(beat), []).append(rank)
    ordered = sorted(ranks_by_activity.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{ranks_text(ranks)} {text}" for text, ranks in ordered]


def wait_text(wait: Wait) -> str:
    """Format for a verdict the collective or message that a worker waits for."""
    if wait.peer >= 0:
        return f"{wait.op} {'to' if wait.op == 'send' else 'from'} rank {wait.peer}"
    name = f" ({wait.name})" if wait.name not in ("", wait.op) else ""
    return f"{wait.op} over {'+'.join(wait.axes)}{name}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks for a verdict: "rank 3", "ranks 0 and 2", "ranks 0, 1, 2 and 61 more"."""
    texts = [str(rank) for rank in sorted(ranks)]
    if len(texts) == 1:
        return f"rank {texts[0]}"
    first, more = (texts[:3], f"{len(texts) - 3} more") if len(texts) > 4 else (texts[:-1], texts[-1])
    return f"ranks {', '.join(first)} and {more}"


# how sure a verdict is, by its evidence
CERTAIN = "certain"  # the run itself recorded it
LIKELY = "likely"  # it follows from what was measured
GUESS = "guess"  # nothing else is known to do this


@dataclass(frozen=True)
class Verdict:
    """Verdict on a run. `why`: a word of the table in docs/troubleshooting.md; `line`: all of it in one line;
    `attention`: True if a person should act. `rank`, `number` and `node`: of the worker to blame, None or "" if none
    is; `since`: seconds since the epoch; `details`: further lines; `stack`: frames of the culprit itself, the innermost
    last.
    """

    why: str
    line: str
    attention: bool = True
    rank: int | None = None
    number: int | None = None
    node: str = ""
    step: int | None = None
    since: float | None = None
    sure: str = CERTAIN
    details: list[str] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)

    def plain_fields(self) -> dict[str, Any]:
        """Return the fields of the verdict on a run as plain data; fields that are None are left out."""
        return json_records.plain_fields(self)
