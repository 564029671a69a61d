"""Forecast of a run's training steps: the parts of a step in predicted seconds, beside the measured ones."""

from __future__ import annotations

from collections import deque
from functools import partial

from platform.boundary.documents import error_line
from platform.cluster.control.forming.context import Generation, RunContext
from platform.costs.machine import Hardware
from platform.costs.parts import measurable
from platform.costs.price import price_of, simulated
from platform.costs.step_work import StepWork
from platform.monitor import MetricsRow
from platform.monitor.records import step_events
from platform.monitor.step_parts import parts_table, typical
from platform.monitor.timeline import StepForecast
from platform.planning.step_price import hardware_of_device, work_of

WINDOW = 50  # last steps that are compared with their prediction
FEWEST = 10  # of which a comparison is worth a word


class Forecast:
    """Forecast of the steps of a run's generation: predicted once its first step is done, and compared with the full
    steps that follow, of the final batch size and length. `parts`: predicted seconds by part, empty if no file
    describes the hardware."""

    def __init__(self, run: RunContext):
        """Prepare to predict the steps of a run's generations."""
        self._run = run
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self.parts: dict[str, float] = {}
        self._hardware: Hardware | None = None
        self._work: StepWork | None = None

    def predict(self, generation: Generation, row: MetricsRow) -> None:
        """Predict the steps of a generation, in the journal and for its timeline, if their parts are measured. Done
        after its first step, with that `row`, as it may take a second, which no recovery is to pay."""
        config, run = generation.formed.config, self._run
        self._steps.clear()
        self.parts = {}
        if not row.parts:
            return
        try:
            self._hardware = hardware_of_device(config, run.places.device, generation.device)
            self._work = work_of(config, generation.plan) if self._hardware else None
        except Exception as error:  # a run needs no forecast
            return run.monitor.say(f"WARNING: steps cannot be predicted ({error_line(error)})")
        if not (self._hardware and self._work):
            return
        price = price_of(self._work, self._hardware)
        self.parts, generation.predicted_seconds = measurable(price.parts), price.seconds
        name = self._hardware.name
        run.journal.write(step_events.PredictedStep(hardware=name, seconds=price.seconds, parts=self.parts))
        if generation.timeline:
            drawn = partial(simulated, self._work, self._hardware)
            generation.timeline.forecast = StepForecast(name, self.parts, drawn)

    def add(self, row: MetricsRow) -> None:
        """Note a committed step, if it was predicted."""
        if row.predicted_seconds and row.parts and not row.skipped:
            self._steps.append(row.parts)

    def report(self) -> None:
        """Report a typical step of the last generation, part by part, to journal and user, if it had enough steps."""
        if len(self._steps) < FEWEST or not self._hardware:
            return
        measured, count = typical(self._steps), len(self._steps)
        event = step_events.MeasuredStep(steps=count, seconds=sum(measured.values()), parts=measured)
        self._run.journal.write(event)
        self._run.monitor.say("\n".join(parts_table(self.parts, measured, self._hardware.name, count)))
