"""Events of `journal.jsonl` about the seconds of steps, which belong to `platform.monitor.records.events`."""

from __future__ import annotations

from platform.monitor.records.journal_event import JournalEvent
from platform.monitor.records.records import Seconds, Steps


class PredictedStep(JournalEvent):
    """Seconds that a full step of this generation should take on a `hardware`, and its `parts` as clocks show them."""

    hardware: str
    seconds: Seconds
    parts: dict[str, Seconds]


class Replanning(JournalEvent):
    """Steps left their prediction (elastic.replan): a typical one of `measured` seconds is `times` as long as described
    by device, node and network. By that, steps take `now` seconds, and under the plan `chosen` `then`; `gain`: seconds
    of all steps left; `cost`: seconds of re-forming; `reforms`: True if it pays."""

    step: Steps
    predicted: Seconds
    measured: Seconds
    times: dict[str, float]
    chosen: str
    now: Seconds
    then: Seconds
    gain: Seconds
    cost: Seconds
    reforms: bool


class MeasuredStep(JournalEvent):
    """Parts of a typical step of the last generation, in seconds, from so many `steps`."""

    steps: Steps
    seconds: Seconds
    parts: dict[str, Seconds]


class Profiled(JournalEvent):
    """The trace of profiled steps is written: its file and bytes, the steps in it, and the number of ranks."""

    file: str
    steps: list[int]
    ranks: int
    bytes: int
