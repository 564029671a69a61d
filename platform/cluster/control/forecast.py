"""Forecast of a run's training steps: the parts of a step in predicted seconds, beside the measured ones."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

from platform.boundary.documents import error_line
from platform.cluster.control.forming.context import Generation, RunContext
from platform.cluster.control.forming.recruiter import Recruiter
from platform.cluster.control.forming.reform_advisor import ReformProposal
from platform.cluster.crew.base.crew import Crew
from platform.costs.machine import Hardware
from platform.costs.parts import measurable
from platform.costs.price import StepPrice, price_of, simulated
from platform.costs.refit import times_longer
from platform.costs.step_work import StepWork
from platform.monitor import MetricsRow
from platform.monitor.records import step_events
from platform.monitor.step_parts import parts_table, replanning_line, typical
from platform.monitor.timeline import StepForecast
from platform.planning.step_price import hardware_of_device, step_price, work_of

WINDOW = 50  # last steps that are compared with their prediction
FEWEST = 10  # of which a comparison is worth a word
LEFT = 0.2  # share of a prediction by which steps differ that have left it
WORTH = 0.05  # share of a step by which another plan must be quicker: predictions are no better
FITTED = ", fitted"  # at the end of a hardware's name
AGAIN = 500  # steps between two changes of the plan


class Forecast:
    """Forecast of the steps of a run's generation: predicted once its first step is done, and compared with the full
    steps that follow, of the final batch size and length. `parts`: predicted seconds by part, empty if no file
    describes the hardware; `of_step`: all that is predicted of a step of the generation, None if nothing is."""

    def __init__(self, run: RunContext):
        """Prepare to predict the steps of a run's generations."""
        self._run = run
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self.parts: dict[str, float] = {}
        self.of_step: StepForecast | None = None
        self._hardware: Hardware | None = None
        self._work: StepWork | None = None
        self._fitted: Hardware | None = None  # to the run's own steps
        self._first = 0.0  # seconds of the generation's first step
        self._again = 0  # step before which no other plan is taken
        self._proposal: ReformProposal | None = None  # of a better plan, until the mesh re-forms

    def predict(self, generation: Generation, row: MetricsRow) -> None:
        """Predict the steps of a generation, in the journal and for its timeline, if their parts are measured. Done
        after its first step, with that `row`, as it may take a second, which no recovery is to pay."""
        config, run = generation.formed.config, self._run
        self._steps.clear()
        self.of_step = None
        self.parts, self._first, self._proposal = {}, row.step_seconds, None
        if not row.parts:
            return
        try:
            fitted = self._fitted
            self._hardware = fitted or hardware_of_device(config, run.places.device, generation.device)
            self._work = work_of(config, generation.plan) if self._hardware else None
        except Exception as error:  # a run needs no forecast
            return run.monitor.say(f"WARNING: steps cannot be predicted ({error_line(error)})")
        if not (self._hardware and self._work):
            return
        seconds, name = self._set_price(generation, price_of(self._work, self._hardware)), self._hardware.name
        run.journal.write(step_events.PredictedStep(hardware=name, seconds=seconds, parts=self.parts))
        self.of_step = StepForecast(name, self.parts, partial(simulated, self._work, self._hardware))
        if generation.timeline:
            generation.timeline.forecast = self.of_step

    def add(self, row: MetricsRow) -> None:
        """Note a committed step, if it was predicted."""
        if row.predicted_seconds and row.parts and not row.skipped:
            self._steps.append(row.parts)

    def better_plan(self, crew: Crew, recruiter: Recruiter, generation: Generation, done: int) -> ReformProposal | None:
        """Propose to re-form the mesh by a better plan (elastic.replan) if the last WINDOW steps have left their
        prediction: the hardware is fitted to them, and a plan is chosen for it as after a failure. Return None if none
        pays; journal the finding in either case. `done`: steps of the run that are done."""
        able = self._run.config.elastic.replan and crew.elastic and len(self._steps) == WINDOW
        if not (able and self._hardware and self._work):
            return self._proposal
        predicted = sum(self.parts.values())
        found = typical(self._steps)
        measured = {name: found[name] for name in self.parts if name in found}
        seconds = sum(measured.values())
        if abs(seconds - predicted) <= LEFT * predicted or done < self._again:
            return self._proposal
        times = times_longer(self._work, self._hardware, measured)
        name = self._hardware.name.removesuffix(FITTED) + FITTED
        self._fitted = self._hardware = replace(self._hardware.taking(times), name=name)
        recruiter.fit_to(self._fitted)
        now = self._set_price(generation, price_of(self._work, self._fitted))
        self._steps.clear()
        self._again = done + WINDOW
        best = recruiter.best(len(recruiter.usable(crew)))
        if not best or best.plan.mesh.size < generation.size:
            return None
        then = step_price(best.config, best.plan, self._fitted).seconds
        gain, cost = (now - then) * (self._run.steps - done), generation.seconds + max(0.0, self._first - seconds)
        pays = then < (1 - WORTH) * now and gain > cost
        event = step_events.Replanning(
            step=done, predicted=predicted, measured=seconds, times=times, chosen=best.reason, now=now, then=then,
            gain=gain, cost=cost, reforms=pays,
        )  # fmt: skip
        self._run.journal.write(event)
        self._run.monitor.say(replanning_line(event))
        if not pays:
            return None
        self._again = done + AGAIN
        self._proposal = ReformProposal(f"another plan is quicker: {best.reason}")
        return self._proposal

    def _set_price(self, generation: Generation, price: StepPrice) -> float:
        """Note the price of a full step of the generation that runs, and return its seconds."""
        self.parts, generation.predicted_seconds = measurable(price.parts), price.seconds
        return price.seconds

    def report(self) -> None:
        """Report a typical step of the last generation, part by part, to journal and user, if it had enough steps."""
        if len(self._steps) < FEWEST or not self._hardware:
            return
        measured, count = typical(self._steps), len(self._steps)
        event = step_events.MeasuredStep(steps=count, seconds=sum(measured.values()), parts=measured)
        self._run.journal.write(event)
        self._run.monitor.say("\n".join(parts_table(self.parts, measured, self._hardware.name, count)))
