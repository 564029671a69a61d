"""Events of `journal.jsonl` about the seconds of steps, which belong to `platform.monitor.records.events`."""

from __future__ import annotations

from platform.monitor.records.journal_event import JournalEvent
from platform.monitor.records.records import Seconds, Steps


class PredictedStep(JournalEvent):
    """Seconds that a full step of this generation should take on a `hardware`, and its `parts` as clocks show them."""

    hardware: str
    seconds: Seconds
    parts: dict[str, Seconds]


class MeasuredStep(JournalEvent):
    """Parts of a typical step of the last generation, in seconds, from so many `steps`."""

    steps: Steps
    seconds: Seconds
    parts: dict[str, Seconds]
