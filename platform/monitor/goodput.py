"""Account of the time of a run, from the events in `journal.jsonl`: periods of training, starting, recovery and
standstill, what each failure cost in seconds of useful work, and goodput; and its summary for people, a few lines with
times (`tell_story`). `check_early_stop` decides by evaluations that a run learns no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import Any, NamedTuple

from platform.boundary.documents import printable_line
from platform.config.fields import Eval
from platform.monitor import events
from platform.monitor.events import Goodput, JournalEvent
from platform.plan.layout import format_count

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
_DRIVER = "the driver"


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
        """Return the useful seconds that a failure cost in all, for the run's goodput."""
        return self.stopped + self.repeated + self.fewer


class TimeAccount:
    """Account of a run's time, which takes the events of its journal one by one: its `periods` in order, and its
    `failures` with their costs. `useful_seconds`: the seconds of committed steps, without steps that a rollback repeats
    or a driver leaves unsaved at its end or death. Other sums are as in Goodput."""

    def __init__(self, step_seconds: Mapping[int, float]) -> None:
        """Begin the goodput's account of a run's time, with nothing in it, of steps that take `step_seconds`."""
        self.periods, self.failures = list[Period](), list[FailureCost]()
        self.recoveries: list[float] = []
        self.transitions = self.steps_lost = self.restarts = 0
        self.useful_seconds = self.restart_seconds = self.last = 0.0
        self._step_seconds = step_seconds
        self._kind, self._since = "", 0.0  # of the open period; "": no driver
        self._workers, self._full = 0, 0  # workers of the mesh, and the most that there have been
        self._saved = self._before = 0.0  # time of the last checkpoint, and of the last event of the driver before
        self._unsaved = 0.0  # of the useful seconds, those after the last checkpoint
        self._failed: list[float] = []  # times of the failures that no step has followed yet
        self._restarted: float | None = None  # start of a driver that took over and that no step has followed yet
        self._failure: FailureCost | None = None  # the last one, as long as it costs

    @property
    def goodput(self) -> Goodput:
        """Return what failures have cost the run so far."""
        seconds = sum((s.end - s.start for s in self.periods if s.kind != "down"), 0.0)
        seconds += self.last - self._since if self._kind else 0.0
        return Goodput(
            failures=sum(failure.who != _DRIVER for failure in self.failures),
            transitions=self.transitions,
            steps_lost=self.steps_lost,
            recoveries=self.recoveries,
            seconds=seconds,
            useful_seconds=self.useful_seconds,
            goodput=self.useful_seconds / seconds if seconds else 0.0,
            restarts=self.restarts,
            restart_seconds=self.restart_seconds,
        )

    def enter_event(self, event: JournalEvent) -> None:
        """Enter the next event of the journal in the goodput's account of time; between two drivers, none counts."""
        if isinstance(event, events.Starting):
            self._begin_driver(event.time)
        elif self._kind:
            if isinstance(event, events.Committed):
                self.useful_seconds += event.useful_seconds or 0.0
                self._unsaved += event.useful_seconds or 0.0
            self._enter_driver_event(event)
        self.last = max(self.last, event.time)

    def close_period(self, time: float) -> None:
        """End the open period in the goodput's account of a run's time, if there is one."""
        if self._kind:
            self._enter_period(self._kind, self._since, time)
        self._kind = ""

    def _begin_driver(self, time: float) -> None:
        """Enter the start of a driver in the goodput's account; if the one before it has no end, it was killed, with
        all that it had not saved."""
        self._restarted = time if self._kind else None
        if self._kind:
            self.restarts += 1
            self.useful_seconds -= self._unsaved
        self._unsaved = 0.0
        self._failed.clear()
        self._before = self.last or time
        self.close_period(self._before)
        self._enter_period("down", self._before, time)
        self._begin_period("start", time)

    def _enter_driver_event(self, event: JournalEvent) -> None:
        """Enter a driver's event of the journal in the goodput's account of a run's time."""
        match event:
            case events.TookOver():
                what = "died without an end"
                self.steps_lost += event.steps_lost
                self._enter_failure(FailureCost(self._before, event.step, _DRIVER, what, steps=event.steps_lost))
                trained = (s for s in self.periods if s.kind in _TRAINING)
                self._mark_time_lost(sum(max(0.0, s.end - max(s.start, self._saved)) for s in trained))
            case events.Forming():
                self._workers, self._full = event.world_size, max(self._full, event.world_size)
            case events.Failure():
                self._begin_period("recover", event.time)
                self._failed.append(event.time)
                who = f"rank {event.rank}" if event.rank is not None else f"worker {event.number}"
                what = f"{event.kind} in {event.method}: {printable_line(events.last_error_line(event.cause))}"
                self._enter_failure(FailureCost(event.time, event.step, who + _name_host(event.node), what))
            case events.Reforming():
                self.transitions += 1
                self._begin_period("reshape", event.time)
            case events.FirstStep():
                self._begin_training(event)
            case events.Checkpoint():
                self._saved, self._unsaved = event.time, 0.0
            case events.RolledBack() | events.End():
                if isinstance(event, events.End):
                    self.close_period(event.time)
                lost, seconds = event.steps_lost or 0, event.lost_seconds or 0.0
                self.steps_lost += lost
                self.useful_seconds -= seconds
                self._unsaved -= seconds
                if self._failure:
                    self._failure.steps += lost
                self._mark_time_lost(seconds)

    def _begin_training(self, event: events.FirstStep) -> None:
        """Enter the first step of a mesh: the time that it took is training, and a failure is charged for it too."""
        self.recoveries += [event.time - then for then in self._failed]
        self._failed.clear()
        self.restart_seconds += event.time - self._restarted if self._restarted is not None else 0.0
        self._restarted = None
        kind = "fewer" if self._workers < self._full else "useful"
        recovers = self._kind in _STANDING
        began = max(self._since, event.time - self._step_seconds.get(event.step, 0.0))
        self._begin_period(kind, began)
        failure, self._failure = self._failure, None
        self._begin_period(kind, event.time)
        if failure and recovers:
            failure.stopped += event.time - began
        self._failure = failure if kind == "fewer" else None

    def _begin_period(self, kind: str, time: float) -> None:
        """Begin a period of another kind in the goodput's account of a run's time, where the one before ends."""
        self.close_period(time)
        self._kind, self._since = kind, time

    def _enter_period(self, kind: str, start: float, end: float) -> None:
        """Enter a period of a run's time in the goodput's account, and charge the last failure for it."""
        if end <= start:
            return
        periods = self.periods
        joins = bool(periods) and (periods[-1].kind, periods[-1].end) == (kind, start)
        periods.append(Period(kind, periods.pop().start if joins else start, end))
        if self._failure and kind in _STANDING:
            self._failure.stopped += end - start
        elif self._failure and kind == "fewer":
            self._failure.fewer += (end - start) * (1 - self._workers / self._full)

    def _enter_failure(self, failure: FailureCost) -> None:
        """Enter a failure in the goodput's account, which is charged for the time from now on."""
        self.failures.append(failure)
        self._failure = failure

    def _mark_time_lost(self, seconds: float) -> None:
        """Turn the last `seconds` of training in the account into lost ones, and charge the last failure for them."""
        if self._failure:
            self._failure.repeated += seconds
        periods, later = self.periods, list[Period]()
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


def build_account(
    journal: Iterable[JournalEvent], now: float = 0.0, step_seconds: Mapping[int, float] | None = None
) -> TimeAccount:
    """Return the goodput's account of a run's time from its journal, up to `now` if it goes on: the last sign of its
    work. The `step_seconds` of each step separate the first step of a mesh from the start before it."""
    account = TimeAccount(step_seconds or {})
    for event in journal:
        account.enter_event(event)
    account.close_period(max(now, account.last))
    return account


def compute_goodput(journal: Iterable[JournalEvent]) -> Goodput:
    """Compute what failures cost a run from its journal's events, in order: goodput, steps lost, and recovery times."""
    return build_account(journal).goodput


def cost_line(cost: Goodput) -> str:
    """Format what failures cost a run as one line for people: failures of workers survived, restarts of the driver,
    steps lost, recovery times, goodput."""
    times, survived = cost.recoveries, len(cost.recoveries)
    recovery = f"; to the first new step {median(times):.2f} s median, {max(times):.2f} s longest" if times else ""
    of = f"{survived} of " if survived < cost.failures else ""
    failures = f"{of}{format_count(cost.failures, 'failure')} survived"
    lost = f"{format_count(cost.steps_lost, 'step')} lost"
    often = f"{format_count(cost.restarts, 'restart')} of the driver"
    restarts = f", {often} ({cost.restart_seconds:.2f} s to the first new step)" if cost.restarts else ""
    return f"{failures}{restarts}, {lost}{recovery}; goodput {cost.goodput:.1%} of {cost.seconds:.1f} s"


def _format_mesh(mesh: dict[str, int]) -> str:
    """Format a mesh (axis -> size) for the story of a run, without the axes of size 1."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "1"


def _name_host(node: str) -> str:
    """Return " on HOST" for the story of a run, of a node in its journal, without Ray's own id; "" for none."""
    return f" on {host}" if (host := node.partition("/")[0]) else ""


def _format_fault(text: str) -> str:
    """Format an entry of elastic.faults, STEP:KIND:RANK[:SECTION], for the story: `kill rank 3 in backward`."""
    _, kind, rank, *section = text.split(":")
    return " in ".join([f"{kind} rank {rank}", *section])


# kind -> line of an event; others are left out, as are empty lines
LINES: dict[type[JournalEvent], Callable[[Any], str]] = {
    events.TookOver: lambda e: f"takes over from a driver that died after step {e.step}",
    events.Injected: lambda e: f"injected fault in step {e.step}: {', '.join(map(_format_fault, e.faults))}",
    events.Failure: lambda e: (
        f"rank {e.rank}{_name_host(e.node)} {e.kind} in {e.method}: {events.last_error_line(e.cause)}"
    ),
    events.Reforming: lambda e: e.reason,
    events.Released: lambda e: (
        "" if e.alive is None else f"released {format_count(e.alive, 'worker')} in {e.seconds:.2f} s"
    ),
    events.Examined: lambda e: f"left out: {'; '.join(e.reasons)}" if e.unsound else "",
    events.Waiting: lambda e: f"waits: {e.reason}",
    events.Forming: lambda e: (
        f"generation {e.generation}: {format_count(e.world_size, 'worker')}, {_format_mesh(e.mesh)}"
    ),
    events.Restored: lambda e: f"goes on after step {e.step}, from {e.source or 'storage'} in {e.seconds:.2f} s",
    events.Initialised: lambda e: f"starts from {e.weights}, read in {e.seconds:.2f} s",
    events.RolledBack: lambda e: f"{format_count(e.steps_lost, 'step')} to do again",
    events.LearnedOut: lambda e: (
        f"learns no more: the lowest val loss, {e.best_loss:.4f}, was after step {e.best_step}"
    ),
    events.FirstStep: lambda e: f"step {e.step} is done",
    events.Hiring: lambda e: f"{format_count(e.count, 'new worker')} starting",
    events.Slow: lambda e: f"rank {e.rank}{_name_host(e.node)} is slow: {e.ratio:.1f} times its stage's median",
    events.Notice: lambda e: f"{format_count(len(e.numbers), 'worker')} will be taken away",
    events.Spike: lambda e: f"step {e.step} has {e.number_text}: {e.policy}",
    events.Drained: lambda e: f"stopped by {e.signal} after step {e.step}",
    events.GaveUp: lambda e: f"gives up after step {e.step}",
    events.Done: lambda e: f"done: step {e.step}",
}


def tell_story(journal: Sequence[JournalEvent]) -> str:
    """Summarise a run under its last driver: a title, and a line for each event of the journal that LINES has text for,
    with the seconds since that driver's start."""
    life = events.last_driver_events(journal)
    timed_texts = [(event.time, LINES[type(event)](event)) for event in life if type(event) in LINES]
    lines = [f"{time - life[0].time:9.2f}  {text}" for time, text in timed_texts if text]
    return "\n".join(["what happened (seconds since the start)", *lines])


# Early stopping: whether evaluations say that a run learns no more (`eval.patience`), from its rows of metrics alone,
# so that a run that was resumed decides as one that was not.


class Best(NamedTuple):
    """Lowest validation loss of a run, and the step after which it was measured; 0 and inf: there is none yet."""

    step: int
    loss: float


def check_early_stop(rows: Iterable[Mapping[str, Any]], e: Eval) -> Best | None:
    """Return, by a run's metrics, its best evaluation if eval.patience evaluations in a row have not been better by
    more than eval.least_gain; else None. `rows`: rows of metrics.jsonl, in order."""
    best, worse = Best(0, inf), 0
    for row in rows:
        loss = row.get("val_loss")
        if not isinstance(loss, int | float):
            continue
        if loss < best.loss - e.least_gain:
            best, worse = Best(row["step"], loss), 0
        else:
            worse += 1
        if e.patience and worse >= e.patience:
            return best
    return None


def validation_losses(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the finite validation losses in rows of metrics.jsonl, by step."""
    losses = {row["step"]: row.get("val_loss") for row in rows}
    return {step: loss for step, loss in losses.items() if isinstance(loss, int | float) and isfinite(loss)}
