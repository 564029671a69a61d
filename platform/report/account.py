"""Account of the time of a run, from its journal: periods of training, starting, recovery and standstill, and what
each failure cost in seconds of useful work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from platform.boundary.documents import printable_line
from platform.monitor import events
from platform.monitor.events import End, JournalEvent
from platform.monitor.goodput import LINES, compute_goodput
from platform.monitor.metrics import Columns
from platform.plan.plan_summary import format_number
from platform.status.run_facts import clock_text, state_word
from platform.status.seen_run import Look

# kind of period -> its text for people, in the order of a legend
KINDS = {
    "useful": "training",
    "fewer": "training with fewer workers",
    "lost": "steps that were done again, or given up",
    "start": "starting",
    "recover": "recovering from a failure",
    "reshape": "changing the mesh without a failure",
    "down": "no driver",
}
_TRAINING = ("useful", "fewer")
_STANDING = ("recover", "start")  # what a failure costs until the next step
_ENDED = (events.GaveUp, events.Unsaved, events.Stopped, events.NoPlaces)  # not as was asked for
_TONES: dict[type[JournalEvent], str] = {
    events.Failure: "bad", events.TookOver: "bad", events.CheckpointFailed: "bad", events.Damaged: "bad",
    events.Undecided: "bad", **dict.fromkeys(_ENDED, "bad"),
    events.Spike: "warn", events.Slow: "warn", events.Notice: "warn", events.Waiting: "warn", events.Injected: "warn",
    events.Drained: "warn", events.FirstStep: "good", events.Done: "good",
}  # fmt: skip


class Period(NamedTuple):
    """Part of a run's time, of one of KINDS: from `start` to `end`, seconds since the epoch."""

    kind: str
    start: float
    end: float


@dataclass
class FailureCost:
    """Cost of a failure of a worker or of the driver: `stopped`, seconds until the next new step or failure,
    `repeated`, seconds of `steps` that were done again, and `fewer`, seconds of the work of workers that were
    missing."""

    time: float
    step: int
    who: str
    what: str
    stopped: float = 0.0
    repeated: float = 0.0
    fewer: float = 0.0
    steps: int = 0

    @property
    def total_seconds(self) -> float:
        """Return the useful seconds that a failure of the run cost in all."""
        return self.stopped + self.repeated + self.fewer


@dataclass
class Account:
    """Account of a run's time: `periods` in order, and the failures with their costs."""

    periods: list[Period] = field(default_factory=list)
    failures: list[FailureCost] = field(default_factory=list)


def build_account(
    journal: Iterable[JournalEvent], now: float = 0.0, step_seconds: Mapping[int, float] | None = None
) -> Account:
    """Return the account of a run's time from its journal, up to `now` if it goes on: the last sign of its work. The
    `step_seconds` of each step separate the first step of a mesh from the start before it."""
    ledger = _Ledger(step_seconds or {})
    for event in journal:
        ledger.enter_event(event)
    ledger.close_period(max(now, ledger.last))
    return ledger.account


class _Ledger:
    """Bookkeeper of a run's time, which takes the events of its journal one by one."""

    def __init__(self, step_seconds: Mapping[int, float]) -> None:
        """Begin an account of a run's time in which nothing has happened, of steps that take `step_seconds`."""
        self.account, self.last = Account(), 0.0
        self._step_seconds = step_seconds
        self._kind, self._since = "", 0.0  # of the open period; "": none
        self._workers, self._full = 0, 0  # workers of the mesh, and the most that there have been
        self._saved = self._before = 0.0  # time of the last checkpoint, and of the last event of the driver before
        self._failure: FailureCost | None = None  # the last one, as long as it costs

    def enter_event(self, event: JournalEvent) -> None:
        """Take the next event of the journal into the account of a run's time."""
        match event:
            case events.Starting():
                self._before = self.last or event.time
                self.close_period(self._before)
                self._enter_period("down", self._before, event.time)
                self._begin_period("start", event.time)
            case events.TookOver():
                what = "died without an end"
                self._enter_failure(FailureCost(self._before, event.step, "the driver", what, steps=event.steps_lost))
                trained = (s for s in self.account.periods if s.kind in _TRAINING)
                self._mark_time_lost(sum(max(0.0, s.end - max(s.start, self._saved)) for s in trained))
            case events.Forming():
                self._workers, self._full = event.world_size, max(self._full, event.world_size)
            case events.Failure():
                self._begin_period("recover", event.time)
                who = f"rank {event.rank}" if event.rank is not None else f"worker {event.number}"
                node = event.node.partition("/")[0]
                cause = printable_line(event.cause.strip().rpartition("\n")[2])
                what = f"{event.kind} in {event.method}: {cause}"
                self._enter_failure(FailureCost(event.time, event.step, f"{who} on {node}" if node else who, what))
            case events.Reforming():
                self._begin_period("reshape", event.time)
            case events.RolledBack():
                if self._failure:
                    self._failure.steps += event.steps_lost
                self._mark_time_lost(event.lost_seconds)
            case events.FirstStep():
                self._begin_training(event)
            case End():
                self.close_period(event.time)
                if self._failure:
                    self._failure.steps += event.steps_lost or 0
                self._mark_time_lost(event.lost_seconds or 0.0)
        if isinstance(event, events.Checkpoint):
            self._saved = event.time
        self.last = max(self.last, event.time)

    def close_period(self, time: float) -> None:
        """End the open period of a run's time, if there is one."""
        if self._kind:
            self._enter_period(self._kind, self._since, time)
        self._kind = ""

    def _begin_training(self, event: events.FirstStep) -> None:
        """Enter the first step of a mesh: the time that it took is training, and a failure is charged for it too."""
        kind = "fewer" if self._workers < self._full else "useful"
        recovers = self._kind in _STANDING
        began = max(self._since, event.time - self._step_seconds.get(event.step, 0.0)) if self._kind else event.time
        self._begin_period(kind, began)
        failure, self._failure = self._failure, None
        self._begin_period(kind, event.time)
        if failure and recovers:
            failure.stopped += event.time - began
        self._failure = failure if kind == "fewer" else None

    def _begin_period(self, kind: str, time: float) -> None:
        """Begin a period of a run's time of another kind, where the one before ends."""
        self.close_period(time)
        self._kind, self._since = kind, time

    def _enter_period(self, kind: str, start: float, end: float) -> None:
        """Enter a period of a run's time, and charge the last failure for it."""
        if end <= start:
            return
        periods = self.account.periods
        joins = bool(periods) and (periods[-1].kind, periods[-1].end) == (kind, start)
        periods.append(Period(kind, periods.pop().start if joins else start, end))
        if self._failure and kind in _STANDING:
            self._failure.stopped += end - start
        elif self._failure and kind == "fewer":
            self._failure.fewer += (end - start) * (1 - self._workers / self._full)

    def _enter_failure(self, failure: FailureCost) -> None:
        """Enter a failure, which is charged for the time from now on."""
        self.account.failures.append(failure)
        self._failure = failure

    def _mark_time_lost(self, seconds: float) -> None:
        """Turn the last `seconds` of training in the account into lost ones, and charge the last failure for them."""
        if self._failure:
            self._failure.repeated += seconds
        periods, later = self.account.periods, list[Period]()
        while seconds > 0 and periods:
            last = periods.pop()
            if last.kind in _TRAINING:
                cut = max(last.start, last.end - seconds)
                seconds -= last.end - cut
                parts = [Period(last.kind, last.start, cut), Period("lost", cut, last.end)]
                later[:0] = [part for part in parts if part.end > part.start]
            else:
                later.insert(0, last)
        periods += later


def time_shares(journal: Sequence[JournalEvent], account: Account, useful: float | None) -> dict[str, float]:
    """Return where the seconds of a run's drivers went, by kind; `useful`: seconds of a run that goes on, else None."""
    cost = compute_goodput(journal)
    total = sum(s.end - s.start for s in account.periods if s.kind != "down")
    seconds_by_kind = {"useful": cost.useful_seconds if useful is None else useful}
    for kind in ("lost", "start", "recover", "reshape"):
        seconds_by_kind[kind] = sum(s.end - s.start for s in account.periods if s.kind == kind)
    # the rest: saving, evaluating, what lies between steps
    return {**seconds_by_kind, "rest": max(0.0, total - sum(seconds_by_kind.values()))}


def is_unfinished(journal: Sequence[JournalEvent]) -> bool:
    """Return True if a run's journal has no end of its last driver: it trains, or was killed."""
    last = next((e for e in reversed(journal) if isinstance(e, End | events.Starting | events.Refused)), None)
    return isinstance(last, events.Starting)


def shown_events(journal: Sequence[JournalEvent], most: int) -> tuple[list[JournalEvent], int]:
    """Return the newest events of a run's journal that are news, and older bad news, and how many are left out."""
    news = [e for e in journal if event_line(e)]
    left_out = max(0, len(news) - most)
    if left_out:
        bad = [e for e in news[: -most // 2] if event_tone(e) == "bad"][-(most // 2) :]
        news = bad + news[-(most - len(bad)) :]
    return news, left_out


def event_line(event: JournalEvent) -> str:
    """Return an event of a run's journal as a line of text; "" for one that is no news."""
    line = LINES.get(type(event))
    return printable_line(line(event), 500) if line else ""


def event_tone(event: JournalEvent) -> str:
    """Return whether an event of a run's journal is good, bad or neither: "good", "warn", "bad" or ""."""
    return _TONES.get(type(event), "")


def event_step(event: JournalEvent) -> int | None:
    """Return the step that an event of a run's journal is about, None if it has none."""
    return getattr(event, "step", None)


# Headline of a page: the state of a run in one line, the culprit first, and its most important numbers.

_RECENT = 50  # steps whose median speed is shown


def state_line(look: Look | None, columns: Columns) -> dict[str, Any]:
    """Return the state of a run as `tone` (good, warn, bad, live), `line` and further `details`, lines of text."""
    if look is None:
        line = f"of this run only its metrics are here, up to step {columns.steps[-1]:,}" if columns.steps else ""
        return {"tone": "warn", "line": line or "no run has started here yet", "details": []}
    if verdict := look.verdict:
        stack = ["where it was, the innermost call last:", *verdict.stack] if verdict.stack else []
        when = f"since {clock_text(verdict.since)}; " if verdict.since else ""
        return {
            "tone": "bad" if verdict.attention else "warn",
            "line": verdict.line,
            "details": [f"{when}{verdict.sure}", *verdict.details, *stack],
        }
    of = f" of {look.evidence.steps:,}" if look.evidence.steps else ""
    line = f"{state_word(look).removeprefix('ended: ')}: step {_last_step(look, columns):,}{of}"
    return {"tone": "good" if look.evidence.end_event else "live", "line": line, "details": []}


def last_number(columns: Columns, name: str) -> float | None:
    """Return the last number in a column of a run's metrics, None if it has none."""
    return next((v for v in reversed(columns.column(name)) if v == v), None)


def _last_step(look: Look, columns: Columns) -> int:
    """Return the last step of a run that is recorded."""
    return columns.steps[-1] if columns.steps else look.evidence.last_step


def list_key_numbers(look: Look | None, columns: Columns) -> Iterator[tuple[str, str, str]]:
    """Yield the most important numbers of a run as (name, value, remark)."""
    if look:
        of = f"of {look.evidence.steps:,}" if look.evidence.steps else ""
        yield "step", f"{_last_step(look, columns):,}", of
    if (loss := last_number(columns, "train/loss")) is not None:
        yield "loss", f"{loss:.4f}", ""
    if (loss := last_number(columns, "val/loss")) is not None:
        lowest = min(v for v in columns.column("val/loss") if v == v)
        yield "validation loss", f"{loss:.4f}", f"lowest {lowest:.4f}"
    if recent := [v for v in columns.column("perf/tokens_per_second")[-_RECENT:] if v == v]:
        yield "tokens/s", f"{median(recent):,.0f}", f"median of {len(recent)}"
    if (mfu := last_number(columns, "perf/mfu")) is not None:
        yield "MFU", f"{mfu:.1%}", ""
    if (tokens := last_number(columns, "tokens")) is not None:
        yield "tokens", format_number(tokens).strip(), ""
    if (workers := last_number(columns, "elastic/world_size")) is not None:
        yield "workers", f"{workers:,.0f}", ""
    if (peak := last_number(columns, "memory/peak_bytes")) is not None:
        yield "peak memory", f"{format_number(peak)}B", "largest worker"
    if look and look.evidence.journal:
        cost = compute_goodput(look.evidence.journal)
        if isinstance(look.evidence.end_event, End):
            yield "goodput", f"{cost.goodput:.1%}", f"of {cost.seconds:,.0f} s"
        survived = [f"{len(cost.recoveries)} survived"] if cost.failures else []
        of_driver = [f"{cost.restarts} of the driver"] if cost.restarts else []
        yield "failures", f"{cost.failures + cost.restarts}", ", ".join([*survived, *of_driver])
