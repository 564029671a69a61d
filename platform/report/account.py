"""Account of a run on its page: the headline (its state in one line, the culprit first, and its most important
numbers), the news of the run, and the shares of its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from platform.boundary.documents import printable_line
from platform.boundary.redaction import REDACTED
from platform.config.key import format_hms
from platform.monitor import events
from platform.monitor.events import End, JournalEvent
from platform.monitor.goodput import LINES, TimeAccount, compute_goodput
from platform.monitor.metrics import MetricColumns
from platform.plan.plan_summary import format_number
from platform.status.run_facts import clock_text, collect_run_facts, state_word
from platform.status.seen_run import Look

_ENDED = (events.GaveUp, events.Unsaved, events.Stopped, events.NoPlaces, events.ClusterLost)  # not as was asked for
_TONES: dict[type[JournalEvent], str] = {
    events.Failure: "bad", events.TookOver: "bad", events.CheckpointFailed: "bad", events.Damaged: "bad",
    events.Undecided: "bad", **dict.fromkeys(_ENDED, "bad"),
    events.Spike: "warn", events.Slow: "warn", events.Notice: "warn", events.Waiting: "warn", events.Injected: "warn",
    events.Drained: "warn", events.FirstStep: "good", events.Done: "good",
}  # fmt: skip


def time_shares(account: TimeAccount, useful: float | None) -> dict[str, float]:
    """Return the shares of time on a run's page, seconds by kind; `useful`: seconds of one that goes on, else None."""
    seconds_by_kind = {"useful": account.useful_seconds if useful is None else useful}
    for kind in ("lost", "start", "recover", "reshape"):
        seconds_by_kind[kind] = sum(s.end - s.start for s in account.periods if s.kind == kind)
    # the rest: saving, evaluating, what lies between steps
    return {**seconds_by_kind, "rest": max(0.0, account.goodput.seconds - sum(seconds_by_kind.values()))}


def is_unfinished(journal: Sequence[JournalEvent]) -> bool:
    """Return True if a page's run has no end of its last driver in its journal: it trains, or was killed."""
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
    """Return the line of a run's page on an event of its journal; "" for one that is no news."""
    line = LINES.get(type(event))
    return printable_line(line(event), 500) if line else ""


def event_tone(event: JournalEvent) -> str:
    """Return whether an event among a page's news is good, bad or neither: "good", "warn", "bad" or ""."""
    return _TONES.get(type(event), "")


def event_step(event: JournalEvent) -> int | None:
    """Return the step that a run's page shows for an event of the journal, None if it has none."""
    return getattr(event, "step", None)


HIDDEN = "monitor.alert_command"  # a page can be mailed, and a webhook's address is a secret


def list_origins(look: Look) -> Iterator[tuple[str, str]]:
    """Yield what a run's page says of its origin: what it trains, on what, by which command and code, as (name,
    text)."""
    if config := look.config:
        m, data = config.model, config.data
        shape = f"{m.kind}, {m.layers} layers of {m.d_model}{f', of {m.source}' if m.source else ''}"
        count = look.plan.get("parameter_count")
        parameters = [f"{count:,} parameters"] if isinstance(count, int) else []
        yield "model", printable_line(", ".join([shape, *parameters, config.precision]), 2000)
        source = printable_line(f"{data.kind} {data.path}", 2000)
        yield "data", f"{source}, {config.train.global_batch} x {m.length} tokens a step"
    if start := next((e for e in reversed(look.evidence.journal) if isinstance(e, events.Starting)), None):
        shown, hidden, _ = (start.command or "").partition(f"{HIDDEN}=")
        yield "command", printable_line(f"{shown}{hidden}{hidden and REDACTED}", 2000)
        versions = {"git": start.git, **(start.code or {})}
        yield "code", printable_line(", ".join(f"{name} {text}" for name, text in versions.items() if text), 2000)


_RECENT = 50  # steps whose median speed is shown


def state_line(look: Look | None, columns: MetricColumns) -> dict[str, Any]:
    """Return the state of a run as `tone` (good, warn, bad, live), `line` and further `details`, lines of text."""
    if look is None:
        line = f"of this run only its metrics are here, up to step {columns.steps[-1]:,}" if columns.steps else ""
        return {"tone": "warn", "line": line or "no run has started here yet", "details": []}
    if verdict := look.verdict:
        stack = ["where it was, the innermost call last:", *verdict.stack] if verdict.stack else []
        when = f"since {clock_text(verdict.since)}; " if verdict.since else ""
        details = [f"{when}{verdict.sure}", *verdict.details, *stack]
        return {"tone": "bad" if verdict.attention else "warn", "line": verdict.line, "details": details}
    of = f" of {look.evidence.steps:,}" if look.evidence.steps else ""
    line = f"{state_word(look).removeprefix('ended: ')}: step {_last_step(look, columns):,}{of}"
    return {"tone": "good" if look.evidence.end_event else "live", "line": line, "details": []}


def last_number(columns: MetricColumns, name: str) -> float | None:
    """Return the last number that a page has in a column of a run's metrics, None if it has none."""
    return next((v for v in reversed(columns.column(name)) if v == v), None)


def _last_step(look: Look, columns: MetricColumns) -> int:
    """Return the last step of a run that is recorded."""
    return columns.steps[-1] if columns.steps else look.evidence.last_step


def list_key_numbers(look: Look | None, columns: MetricColumns) -> Iterator[tuple[str, str, str]]:
    """Yield the most important numbers of a run as (name, value, remark)."""
    if look:
        of = f"of {look.evidence.steps:,}" if look.evidence.steps else ""
        yield "step", f"{_last_step(look, columns):,}", of
        if (left := collect_run_facts(look)["seconds_left"]) is not None:
            yield "time left", format_hms(int(left)), ""
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
