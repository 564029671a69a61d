"""First line of a page: the state of a run and, if it ended or stands still, the culprit."""

from __future__ import annotations

from collections.abc import Sequence

from platform.boundary.documents import one_line
from platform.monitor.records import events
from platform.monitor.records.journal_event import End, JournalEvent
from platform.report.account import line_of

_PATIENCE = 60.0  # seconds, or so many median steps, after which a run counts as silent
_STEPS = 10


def state_line(journal: Sequence[JournalEvent], seen: float, now: float, step_seconds: float) -> tuple[str, str]:
    """Return in one line how a run is, from its journal, as (tone, text). `seen`: when it last wrote something, `now`:
    the time, both in seconds since the epoch; `step_seconds`: length of its median step."""
    if not journal:
        return "warn", "Nothing has started here: there is no journal yet."
    start = max((i for i, event in enumerate(journal) if isinstance(event, events.Starting)), default=0)
    life = journal[start:]
    last = next((e for e in reversed(life) if isinstance(e, End | events.Refused | events.Superseded)), None)
    failed = next((e for e in reversed(life) if isinstance(e, events.Failure)), None)
    blamed = f": {line_of(failed)}" if failed else ""
    match last:
        case events.Done():
            early = next((e for e in life if isinstance(e, events.LearnedOut)), None)
            return "good", f"Done: step {last.step:,}{f', as it {line_of(early)}' if early else ''}."
        case events.Drained():
            return "warn", f"Stopped by {last.signal} after step {last.step:,}; the same command goes on."
        case events.Refused():
            return "bad", f"Refused: {one_line('; '.join(last.reasons), 500)}"
        case events.Superseded():
            return "warn", f"Another driver took over after step {last.step:,}: {one_line(last.reason)}"
        case End():
            cause = one_line(getattr(last, "cause", "") or getattr(last, "signal", ""), 500)
            return "bad", f"Ended after step {last.step:,}{blamed}{f'; {cause}' if cause and not failed else ''}"
    if now - seen > max(_PATIENCE, _STEPS * step_seconds):
        return "bad", f"Has no end, and wrote nothing for {now - seen:,.0f} s{blamed}"
    reached = next((e for e in reversed(life) if isinstance(e, events.FirstStep | events.Failure)), None)
    if isinstance(reached, events.Failure):
        return "warn", f"Recovers from a failure{blamed}"
    return "live", "Trains." if reached else f"Starts: {line_of(life[-1]) or life[-1].word.replace('_', ' ')}."
