"""Events of `journal.jsonl` about the seconds and the spikes of steps, which belong to
`platform.monitor.records.events`."""

from __future__ import annotations

from math import isfinite

from platform.monitor.records.journal_event import JournalEvent
from platform.monitor.records.records import Number, Seconds, Steps


class PredictedStep(JournalEvent, word="predicted_step"):
    """Seconds that a full step of this generation should take on a `hardware`, and its `parts` as clocks show them."""

    hardware: str
    seconds: Seconds
    parts: dict[str, Seconds]


class Replanning(JournalEvent, word="replanning"):
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


class MeasuredStep(JournalEvent, word="measured_step"):
    """Parts of a typical step of the last generation, in seconds, from so many `steps`."""

    steps: Steps
    seconds: Seconds
    parts: dict[str, Seconds]


class Profiled(JournalEvent, word="profiled"):
    """The trace of profiled steps is written: its file and bytes, the steps in it, and the number of ranks."""

    file: str
    steps: list[int]
    ranks: int
    bytes: int


class Spike(JournalEvent, word="spike"):
    """A step's loss or gradient norm is not finite or above `limit`; `policy`: the value of train.on_spike that is
    followed; `attempt`: number of this try of the step, from 1."""

    step: Steps
    loss: Number
    grad_norm: Number
    limit: Number
    policy: str
    attempt: int

    @property
    def number(self) -> str:
        """Return which number of the step is a spike, and its value: "a loss of nan"."""
        of_loss = not isfinite(self.loss) or isfinite(self.grad_norm)
        return f"a loss of {self.loss:g}" if of_loss else f"a gradient norm of {self.grad_norm:g}"
