"""The states of a run: FORMING -> RUNNING -> (failure, notice, new capacity) -> RELEASING -> FORMING ... -> DONE."""

from __future__ import annotations

from collections import Counter, deque
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from platform.cluster.context import Run
from platform.cluster.crew import Crew
from platform.cluster.failures import GaveUp, Reform, WorkerFailed
from platform.cluster.forming import Former, Generation
from platform.cluster.metrics import metrics_row
from platform.cluster.spikes import Spikes
from platform.train.faults import Faults

FIRST_STEP_SECONDS = 120.0  # for a generation's first step: buffers are made and connections opened
STEPS = 5  # that a step may last before a worker in it hangs
_MEMORY = 256  # steps whose seconds are known


class Controller:
    """One run. `done`: updates so far."""

    def __init__(self, run: Run, former: Former):
        self._config, self._steps, self._former = run.config, run.steps, former
        self._journal, self._monitor, self._signals = run.journal, run.monitor, run.signals
        self._checkpoints = run.checkpoints
        config = run.config
        self._faults, self._spikes = Faults(config.elastic.faults), Spikes(config.train.spike)
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_MEMORY)  # of the last committed steps
        self._useful = 0.0  # seconds of steps committed since the last event that told them
        self._failures: Counter[int] = Counter()  # by step, of those that were not done since
        self._stall = 0.0  # seconds that saving took since the last row
        self._slow: dict[int, int] = {}  # member -> steps in a row in which it was slow
        self._seen = 0  # members when it was last asked whether the mesh can grow
        self.done = 0

    def run(self, crew: Crew) -> None:
        """Until the last step. Raises GaveUp, Stopped, ConfigError."""
        while True:
            try:
                generation = self._former.form(crew, self.done)
                self._resumed(generation)
                try:
                    with self._signals.deferred():
                        self._train(crew, generation)
                finally:
                    if generation.timeline:
                        generation.timeline.write(Path(self._config.run.dir))
                if tokens := self._config.monitor.sample:
                    self._monitor.say(f"a sample of {tokens} tokens:\n{crew.call('sample', tokens)[0]}")
                return
            except WorkerFailed as failure:
                self._survive(crew, failure)
            except Reform as reason:
                self._journal.event("reforming", reason=str(reason), step=self.done, **self.told())
                self._monitor.say(str(reason))
                self._release(crew)

    def _resumed(self, generation: Generation) -> None:
        """Takes the count back to the state that could be had."""
        if lost := self.done - generation.step:
            if lost > 0:
                seconds = sum(s for step, s in self._seconds if step > generation.step)
                self._journal.event("rolled_back", step=generation.step, steps_lost=lost, lost_seconds=seconds)
                self._monitor.say(f"goes on after step {generation.step}: {lost} steps are done again")
            self.done = generation.step

    # RUNNING

    def _train(self, crew: Crew, generation: Generation) -> None:
        every, first = self._config.eval.every, self.done + 1
        self._drain(crew)
        for step in range(first, self._steps + 1):
            start = perf_counter()
            reports, seconds = self._step(crew, generation, step)
            report = reports[0]
            row = metrics_row(
                report,
                seconds,
                length=self._config.model.length,
                flops_per_token=generation.plan.flops_per_token,
                peak_flops=generation.peak_flops,
                generation=generation.number,
            )
            if self._stall:  # after the step before this one, whose row was written before
                row["seconds"]["checkpoint"], self._stall = row["seconds"]["checkpoint"] + self._stall, 0.0
            if generation.timeline:
                row |= generation.timeline.step(step, start, [report["timeline"] for report in reports])
            if every and step % every == 0:
                row["val_loss"] = crew.call("evaluate")[0]["val_loss"]
            self._commit(generation, step, seconds, row)
            if step == first:
                self._journal.event("first_step", step=step)
                self._former.refill(crew)
            self._save(crew, step)
            self._watch(crew, generation, report)
        self._checkpoints.finish(crew)

    def _step(self, crew: Crew, generation: Generation, step: int) -> tuple[list[dict[str, Any]], float]:
        """The reports of a step and its seconds. What it should not be is done again, skipped or the end, as
        train.on_spike says; `Trainer.step` has updated nothing then."""
        policy = self._config.train.on_spike
        for attempt in range(1, self._config.elastic.attempts + 1):
            faults = [str(fault) for fault in self._faults.take(step, generation.size)]
            if faults:
                self._journal.event("injected", step=step, faults=faults)
            self._former.held.only(generation.number)  # what the workers forget when they take a step
            limit, start = self._spikes.limit, perf_counter()
            reports = crew.call("step", step, limit, faults, within=self._deadline(generation))
            seconds, report = perf_counter() - start, reports[0]
            if not report["skipped"]:
                return reports, seconds
            loss, norm = report["loss"], report["grad_norm"]
            why = f"step {step} has a loss of {loss:g} and a gradient norm of {norm:g}"
            why += f", above the limit of {limit:g}" if limit < inf else ""
            self._journal.event(
                "spike", step=step, loss=loss, grad_norm=norm, limit=limit, policy=policy, attempt=attempt
            )
            if policy == "skip":
                self._monitor.say(f"{why}: it is skipped")
                return reports, seconds
            if policy == "stop":
                raise GaveUp(f"{why}, and train.on_spike=stop")
            self._monitor.say(f"{why}: it is done again")
        raise GaveUp(f"{why}, {self._config.elastic.attempts} times in a row")

    def _deadline(self, generation: Generation) -> float:
        """Seconds for a step, then somebody in it hangs."""
        known = [seconds for step, seconds in self._seconds]
        usual = STEPS * median(known) if known else 0.0
        fresh = 0.0 if self.done > generation.step else FIRST_STEP_SECONDS
        return max(self._config.elastic.hang_seconds, usual, fresh)

    def _commit(self, generation: Generation, step: int, seconds: float, row: dict[str, Any]) -> None:
        """Every rank has acknowledged the step: it counts, and is written down."""
        self.done = step
        self._failures = Counter({failed: n for failed, n in self._failures.items() if failed > step})
        every = self._config.elastic.snapshot_every
        if every and step % every == 0:
            self._hold(generation, step)
        self._seconds.append((step, seconds))
        self._useful += seconds
        self._spikes.add(row["loss"])
        self._monitor.step(row)

    def _hold(self, generation: Generation, step: int) -> None:
        g = generation
        self._former.held.add(g.number, step, g.config, g.stage_of, g.domains, g.seats)

    def _save(self, crew: Crew, step: int) -> None:
        """A checkpoint, where one is due; and the end, where one was asked for."""
        start = perf_counter()
        self._checkpoints.advance(crew)
        if self._checkpoints.superseded:
            raise GaveUp(self._checkpoints.superseded)
        if self._checkpoints.due(step, last=step == self._steps, stopping=self._signals.requested):
            self._checkpoints.save(crew, step)
            self._stall = perf_counter() - start
        self._drain(crew)

    def _drain(self, crew: Crew) -> None:
        """Where the run was asked to end: saves what is not saved, then raises Stopped."""
        if self._signals.requested:
            self._save_now(crew)
            self._signals.check()

    def _save_now(self, crew: Crew) -> None:
        """A checkpoint of the last step, where checkpoints are made and it has none."""
        self._checkpoints.finish(crew)
        if self.done and self._checkpoints.due(self.done, last=False, stopping=True):
            self._checkpoints.save(crew, self.done)
            self._checkpoints.finish(crew)

    def _watch(self, crew: Crew, generation: Generation, report: dict[str, Any]) -> None:
        """Between two steps: who is slow, who is about to go, who has come. Raises Reform."""
        self._note_slow(crew, generation, {generation.seats[int(rank)]: ratio for rank, ratio in report["slow"]})
        if leaving := crew.leaving & set(generation.seats):
            self._journal.event("notice", numbers=sorted(leaving))
            if not self._former.usable(crew):
                self._signals.request("a notice that all workers are about to be taken away")
                self._drain(crew)
            self._save_now(crew)
            raise Reform(f"{len(leaving)} workers are about to be taken away")
        alive = len(self._former.usable(crew))
        if crew.unstarted or self._former.postponed or alive < self._seen:
            self._former.refill(crew)
        if alive == self._seen:
            return
        self._seen = alive
        if alive > generation.size and (found := self._former.best(alive)):
            if found.plan.mesh.size > generation.size:
                self._checkpoints.finish(crew)
                raise Reform(
                    f"{alive} workers are there: the mesh grows from {generation.size} to {found.plan.mesh.size}"
                )

    def _note_slow(self, crew: Crew, generation: Generation, ratios: dict[int, float]) -> None:
        self._slow = {number: self._slow.get(number, 0) + 1 for number in ratios}
        for number, steps in self._slow.items():
            if steps != STEPS:
                continue
            rank, ratio = generation.seats.index(number), ratios[number]
            self._journal.event("slow", number=number, rank=rank, node=generation.domains[rank], ratio=ratio)
            self._monitor.say(
                f"rank {rank} on {generation.domains[rank]} is slow: {ratio:.1f} times its stage's median"
            )
            spare = len(self._former.usable(crew)) > generation.size
            if self._config.elastic.replace_slow and spare:
                self._former.shunned.add(number)
                self._checkpoints.finish(crew)
                raise Reform(f"rank {rank} gives its place to a spare")

    # RELEASING

    def _survive(self, crew: Crew, failure: WorkerFailed) -> None:
        """After a failure: everybody else is out of it, and the next generation can form. Raises GaveUp."""
        culprit, step = failure.culprit, self.done + 1
        self._journal.event(
            "failure",
            number=culprit.member.number,
            rank=culprit.rank,
            coordinates=dict(culprit.coordinates),
            node=culprit.member.node,
            method=culprit.method,
            kind=culprit.kind,
            cause=culprit.cause,
            log=str(culprit.log) if culprit.log else None,
            step=step,
            **self.told(),
        )
        self._monitor.say(str(failure))
        self._failures[step] += 1
        count, attempts = self._failures.total(), self._config.elastic.attempts
        fresh = self._useful == 0.0 and not self._seconds and culprit.kind == "failed"
        if fresh or count >= attempts or not crew.elastic:
            where = f"; its log: {culprit.log}" if culprit.log else ""
            often = f" (failure {count} before step {step} was done)" if count > 1 else ""
            raise GaveUp(f"{failure}{often}{where}")
        self._release(crew)

    def _release(self, crew: Crew) -> None:
        start = perf_counter()
        self._checkpoints.abandon()
        lost = crew.release()
        seconds, alive = perf_counter() - start, len(crew.members)
        self._journal.event("released", lost=[f.member.number for f in lost], alive=alive, seconds=seconds)
        self._seen = 0

    def told(self) -> dict[str, float]:
        """What an event says of the steps committed since the last one that did."""
        useful, self._useful = self._useful, 0.0
        return {"useful_seconds": useful}
