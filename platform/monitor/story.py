"""Summary of a run for people: its journal as a few lines with times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]


def _mesh(event: Event) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in event["mesh"].items() if n > 1) or "1"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


TELL: dict[str, Callable[[Event], str]] = {  # event -> its line; other events are left out
    "injected": lambda e: f"on purpose, in step {e['step']}: {', '.join(e['faults'])}",
    "failure": lambda e: f"rank {e['rank']} {e['kind']} in {e['method']}: {_last_line(e['cause'])}",
    "reforming": lambda e: e["reason"],
    "released": lambda e: (
        f"{_plural(e['alive'], 'worker')} left, free after {e['seconds']:.2f} s" if "alive" in e else ""
    ),
    "waiting": lambda e: f"waits: {e['reason']}",
    "forming": lambda e: f"generation {e['generation']}: {_plural(e['world_size'], 'worker')}, {_mesh(e)}",
    "restored": lambda e: f"goes on after step {e['step']}, from {e.get('source', 'storage')} in {e['seconds']:.2f} s",
    "rolled_back": lambda e: f"{_plural(e['steps_lost'], 'step')} are done again",
    "first_step": lambda e: f"step {e['step']} is done",
    "hiring": lambda e: f"{_plural(e['count'], 'new worker')} starting",
    "slow": lambda e: f"rank {e['rank']} on {e['node']} is slow: {e['ratio']:.1f} times its stage's median",
    "notice": lambda e: f"{_plural(len(e['numbers']), 'worker')} will be taken away",
    "spike": lambda e: f"step {e['step']} has a loss of {e['loss']:g}: {e['policy']}",
    "drained": lambda e: f"stopped by {e['signal']} after step {e['step']}",
    "gave_up": lambda e: f"ends after step {e['step']}",
    "done": lambda e: f"done: step {e['step']}",
}


def story(journal: Iterable[Event]) -> str:
    """Return one line per event of the last driver in a journal that TELL covers: seconds since its start, and text."""
    events = list(journal)
    start = max((i for i, event in enumerate(events) if event["event"] == "starting"), default=0)
    lines = ["what happened (seconds since the start)"]
    for event in events[start:]:
        tell = TELL.get(event["event"])
        if tell and (text := tell(event)):
            lines.append(f"{event['time'] - events[start]['time']:9.2f}  {text}")
    return "\n".join(lines)
