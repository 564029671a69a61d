"""Controller of a run: its states, the work done in each, and the transitions between them.

It watches the steps: `check_replicas` finds damaged memory of workers, which fail and recover from the others;
`StepPace` knows the usual time of a step, and the time lost when steps are taken back; `LossSpikes` detects loss spikes
(`train.spike`), once for all ranks, and `train.on_spike` says what follows.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from math import inf, isfinite
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

from platform.boundary.terminal import warn_on_write_error
from platform.boundary.world_faults import growing_pauses
from platform.cluster.control.evaluations import Evaluations, StepForecaster, build_metrics_row
from platform.cluster.control.former import GenerationFormer, SnapshotLedger
from platform.cluster.control.profiles import StepProfiles
from platform.cluster.control.recruiter import LOOK_SECONDS, ReformAdvisor
from platform.cluster.control.run_context import Generation, RunContext
from platform.cluster.crew.crew import Crew, Worker
from platform.cluster.crew.failures import ClusterLost, Failure, GaveUp, Member, Reform, WorkerFailed
from platform.cluster.crew.heartbeats import FIRST_STEP_SECONDS
from platform.cluster.run_directory import NOTICE
from platform.monitor import Journal, MetricsRow, events
from platform.monitor.goodput import check_early_stop
from platform.plan.layout import format_count
from platform.predict.remedies import describe_memory_remedies
from platform.predict.tier_traffic import format_traffic, tier_traffic
from platform.train.faults import Faults
from platform.train.replies import StepReport


def check_replicas(
    crew: Crew, generation: Generation, report: StepReport, ledger: SnapshotLedger, journal: Journal
) -> None:
    """Raise WorkerFailed naming the ranks whose weights or optimizer state `report` shows to be damaged, so that they
    are restored from replicas; no snapshot of theirs is used. Raise GaveUp if replicas differ and nothing shows which
    is right. `Trainer.step` has updated nothing in either case."""
    step = report.step
    if unknown := report.differences.undecided:
        ranks, tensor = unknown[0]
        names = " and ".join(generation.job.rank_name(rank) for rank in ranks)
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        journal.write(events.Undecided(step=step, tensors=unknown))
        why = "differ, and nothing tells who is right: their memory is damaged"
        raise GaveUp(f"before step {step} was done, {tensor}{more} of {names} {why}")
    damaged: dict[int, list[str]] = {}
    for rank, tensor in report.differences.damaged:
        damaged.setdefault(rank, []).append(tensor)
    if not damaged:
        return
    ledger.distrust_members(generation.number, [generation.seats[rank] for rank in damaged])
    journal.write(events.Damaged(step=step, ranks=list(damaged.items())))
    raise WorkerFailed([_build_damage_failure(crew, generation, step, *item) for item in damaged.items()])


def _build_damage_failure(crew: Crew, generation: Generation, step: int, rank: int, tensors: Sequence[str]) -> Failure:
    """Return the failure of the rank whose worker's memory is damaged: its `tensors` differ from its replicas'."""
    number, job = generation.seats[rank], generation.job
    more = f" and {len(tensors) - 1} more" if tensors[1:] else ""
    cause = f"its {tensors[0]}{more} is not what its replicas hold"
    member = crew.ready_members_by_number.get(number, Member(number, "", 0))
    return Failure(member, "damaged", f"step({step})", cause, rank, job.rank_name(rank), job.coordinates[rank])


USUAL_STEPS = 32  # steps that `StepPace.median_seconds` takes the median over


class StepPace:
    """Durations of the consecutive training steps that this driver has committed and that were not rolled back; its
    length is their number."""

    def __init__(self) -> None:
        """Initialise the durations of the control loop's steps, of which none is recorded yet."""
        self._before = 0  # the step before the first one recorded
        self._seconds = array("d")

    def __len__(self) -> int:
        """Return how many steps of the control loop have a recorded duration."""
        return len(self._seconds)

    def add_step(self, step: int, seconds: float) -> None:
        """Append the duration of the control loop's step `step`, which must follow the last one added and kept."""
        if not self._seconds:
            self._before = step - 1
        assert step == self._before + len(self._seconds) + 1, f"step {step} does not follow"
        self._seconds.append(seconds)

    def forget_steps_after(self, step: int) -> float:
        """Forget the durations of the control loop's steps after `step`, rolled back; return their sum in seconds."""
        kept_count = max(0, step - self._before)
        lost_seconds = sum(self._seconds[kept_count:])
        del self._seconds[kept_count:]
        return lost_seconds

    def median_seconds(self, after_step: int) -> float | None:
        """Return the median seconds of the control loop's last USUAL_STEPS steps after `after_step`, None without."""
        known = self._seconds[max(0, after_step - self._before) :][-USUAL_STEPS:]
        return median(known) if known else None


RECENT_LOSSES = 32  # losses that the median is taken over
_FEWEST = 8  # fewer losses than this: nothing is a spike, as a run's first losses say little


class LossSpikes:
    """Tracks the losses of recent training steps, to detect a loss spike. `factor`: train.spike, how many times their
    median a loss may be; 0: any."""

    def __init__(self, factor: float):
        """Prepare to detect a run's loss spikes; none is known. `factor`: train.spike, in medians of recent losses."""
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=RECENT_LOSSES)

    @property
    def loss_limit(self) -> float:
        """Return the run's highest loss that is no spike: `factor` x the recent median; inf if few or factor is 0."""
        return self._factor * median(self._losses) if self._factor and len(self._losses) >= _FEWEST else inf

    def add_loss(self, loss: float) -> None:
        """Add the loss of the run's committed step to the recent ones, by which spikes are judged, if it is finite."""
        if isfinite(loss):
            self._losses.append(loss)


COLD = 4  # times the usual: for a generation's first step, as the mesh may have shrunk and buffers are allocated
HUNG_AFTER = 3  # usual durations that a step may last before a worker that is blocked in it counts as hung


class RunState(Enum):
    """States of a run's control loop; the journal's events show when each began."""

    FORMING = "the live workers become a mesh, which goes on from the newest state"
    RUNNING = "steps are taken, committed and saved"
    RELEASING = "the workers leave a generation that a failure, a notice or new capacity has ended"
    DONE = "the last step is done"


class Controller:
    """Drives one run from state to state, as `RunState` lists them. `done`: number of updates in the workers' state
    now; `worked`: at least one training step was committed, even if it was rolled back since; `pace`: durations of the
    committed steps; `held`: the newest step whose state this generation's workers hold in memory."""

    def __init__(self, run: RunContext, former: GenerationFormer):
        """Prepare to drive a run of training steps, from forming its first mesh of workers by `former`."""
        self._config, self._steps, self._former = run.config, run.steps, former
        self._journal, self._monitor, self._signals = run.journal, run.monitor, run.signals
        self._checkpoints, self._evaluations = run.checkpoints, Evaluations(run)
        self._faults, self._spikes = Faults(run.config.elastic.faults), LossSpikes(run.config.train.spike)
        self.pace, self.forecast = StepPace(), StepForecaster(run)
        self._profiles = StepProfiles(run, self.forecast)
        self._useful = 0.0  # seconds of steps committed since the last event that reported them
        self._failures: Counter[int] = Counter()  # number of failures, by the step that failed
        self._stall = 0.0  # seconds that saving has stalled the run since the last metrics row
        self._advisor = ReformAdvisor(run, former.recruiter)
        self._failed: float | None = None  # time of the first failure since the last step
        self._pauses = growing_pauses(run.config.elastic.wait)  # before forming again after a fault of the world
        self.held: int | None = None
        self._does = {
            RunState.FORMING: self._form_generation,
            RunState.RUNNING: self._train_generation,
            RunState.RELEASING: self._release_generation,
        }
        self._generation: Generation | None = None  # the one that runs
        self._traffic_shown, self._sends_in_rings = "", run.places.device == "cuda"
        self.state, self.worked, self.done = RunState.FORMING, False, 0

    def train_to_last_step(self, crew: Crew) -> None:
        """Train to the last step, re-forming after failures. Raise GaveUp, Stopped; at first ConfigError."""
        try:
            while self.state is not RunState.DONE:
                self._advance_state(crew)
        finally:
            self._profiles.close(self.state is RunState.DONE)

    def _advance_state(self, crew: Crew) -> None:
        """Run the work of the run's present state, and enter the next one."""
        try:
            self.state = self._does[self.state](crew)
        except WorkerFailed as failure:
            self._survive_failure(crew, failure)
            self.state = RunState.RELEASING
        except Reform as reason:
            useful = self.take_unreported_seconds()
            self._journal.write(events.Reforming(reason=str(reason), step=self.done, useful_seconds=useful))
            self._monitor.say(str(reason))
            self.state = RunState.RELEASING

    def discard_unsaved_steps(self) -> tuple[int, float]:
        """Return the number of training steps since the newest checkpoint and their seconds, and forget them."""
        steps = max(0, self.done - self._checkpoints.step)
        return steps, self.pace.forget_steps_after(self.done - steps)

    # FORMING

    def _form_generation(self, crew: Crew) -> RunState:
        """Form a generation of workers and return RUNNING. `done` becomes the step of the state that it goes on from;
        steps that were done beyond it are reported as rolled back."""
        if not self._has_unsaved_step:
            self._signals.raise_if_requested()
        self._generation = generation = self._former.form_generation(crew)
        if (lost := self.done - generation.step) > 0:
            seconds = self.pace.forget_steps_after(generation.step)
            self._journal.write(events.RolledBack(step=generation.step, steps_lost=lost, lost_seconds=seconds))
            self._monitor.say(f"goes on after step {generation.step}: {format_count(lost, 'step')} to do again")
        self.done, self.held = generation.step, None
        self._signals.defer_stop()
        return RunState.RUNNING

    # RUNNING

    def _train_generation(self, crew: Crew) -> RunState:
        """Train in the generation that has formed until the run's last step, then show a text sample if monitor.sample
        asks for one, and return DONE. The timeline is written in any case, if monitor.timeline is set."""
        generation = self._generation
        assert generation
        try:
            self._train_steps(crew, generation)
        finally:
            if generation.timeline:
                with warn_on_write_error(self._monitor.say, "the timeline"):
                    generation.timeline.write_files(Path(self._config.run.dir))
        self._evaluations.show_sample(crew, generation.plan, self.done)
        return RunState.DONE

    def _train_steps(self, crew: Crew, generation: Generation) -> None:
        """Take, commit, evaluate and save one training step after another until the last. Raises Reform if another mesh
        of workers is needed or better."""
        every, first = self._config.eval.every, self.done + 1
        self._end_early()
        self._save_if_due(crew, self.done)  # a failure or a signal may have left a save undone
        while (step := self.done + 1) <= self._steps:
            start = perf_counter()
            reports, seconds = self._take_step(crew, generation, step)
            report = reports[0]
            bubble = losses = scores = None
            if generation.timeline:
                timelines = [report.timeline for report in reports]
                bubble = generation.timeline.add_step(step, start, timelines, report.parts)
            if every and step % every == 0:
                within = self._step_timeout_seconds(
                    generation
                )  # per clock section, of which an evaluation may have many
                losses, scores = self._evaluations.evaluate_model(crew, generation.plan, step, within)
            row = build_metrics_row(
                report,
                generation,
                seconds,
                config=self._config,
                stalled=self._stall,  # after the previous step, whose row was already written
                bubble=bubble,
                val_losses=losses,
                task_scores=scores,
                recovery_seconds=None if self._failed is None else perf_counter() - self._failed,
            )
            self._commit_step(generation, row, report.held)
            if losses:
                self._end_early()
            if step == first:
                self._journal.write(events.FirstStep(step=step))
                self._report_traffic(generation)
                self.forecast.forecast_generation(generation, row)
            self._profiles.note_step(generation, row)
            self._save_if_due(crew, step)
            if step < self._steps:
                self._raise_reform_if_needed(crew, generation, report)
        self._checkpoints.finish_save(crew)

    def _end_early(self) -> None:
        """Make the last committed training step the run's last if the evaluations show no more improvement
        (eval.patience); first hand their validation losses to the checkpoints, so that the best one is kept."""
        if self._config.checkpoint.best:
            self._checkpoints.note_evaluations(row for row in self._monitor.read_rows() if row["step"] <= self.done)
        rows = self._monitor.read_rows() if self._config.eval.patience and self.done < self._steps else []
        if best := check_early_stop(rows, self._config.eval):
            self._steps = self.done
            self._journal.write(events.LearnedOut(step=self.done, best_step=best.step, best_loss=best.loss))
            least = f"its lowest val loss was {best.loss:.4f}, after step {best.step}"
            self._monitor.say(f"ends early after step {self.done}: {least}")

    def _report_traffic(self, generation: Generation) -> None:
        """Journal the bytes that a training step on this mesh sends between nodes and other tiers of the cluster,
        if its ranks are in several; print them if they differ from the ones printed last. Done after the first step, as
        counting may take a second, which no recovery is to pay."""
        if len(set(generation.tiers.paths)) == 1:
            return
        rows = tier_traffic(generation.plan, generation.tiers, self._sends_in_rings)
        self._journal.write(events.Traffic(rows=[asdict(row) for row in rows]))
        if (line := format_traffic(rows)) != self._traffic_shown:
            self._monitor.say(line)
            self._traffic_shown = line

    def _take_step(self, crew: Crew, generation: Generation, step: int) -> tuple[list[Any], float]:
        """Let all ranks take training step `step`; return the answers of `_call_step`, rank 0's being the report on
        all, and the seconds that it took. If `Trainer.step` has updated nothing because of a loss spike, the step is
        repeated, skipped, or ends the run with GaveUp, as train.on_spike says; one whose loss scale was too large is
        skipped."""
        policy = self._config.train.on_spike
        for attempt in range(1, self._config.elastic.attempts + 1):
            faults = self._faults.take_due(step, generation.size)
            if faults:
                self._journal.write(events.Injected(step=step, faults=list(map(str, faults))))
            self._former.ledger.forget_others(generation.number)  # workers drop the others when they take a step
            with self._profiles.profile_step(crew, generation, step):
                limit, start = self._spikes.loss_limit, perf_counter()
                reports = self._call_step(crew, generation, step, limit, faults)
                seconds, report = perf_counter() - start, reports[0]
            check_replicas(crew, generation, report, self._former.ledger, self._journal)
            if not report.skipped:
                return reports, seconds
            if report.overflowed:
                scale = f"a loss scale of {report.loss_scale:g}, which falls"
                self._monitor.say(f"step {step} has a gradient that overflows fp16 at {scale}: it is skipped")
                return reports, seconds
            loss, norm = report.loss, report.grad_norm
            why = f"step {step} has a loss of {loss:g} and a gradient norm of {norm:g}"
            why += f", above the limit of {limit:g}" if limit < inf else ""
            spike = events.Spike(step=step, loss=loss, grad_norm=norm, limit=limit, policy=policy, attempt=attempt)
            self._journal.write(spike)
            if policy == "skip":
                self._monitor.say(f"{why}: it is skipped")
                return reports, seconds
            if policy == "stop":
                raise GaveUp(f"{why}, and train.on_spike=stop")
            self._monitor.say(f"{why}: it is done again")
        raise GaveUp(f"{why}, {format_count(self._config.elastic.attempts, 'time')} in a row")

    def _call_step(self, crew: Crew, generation: Generation, step: int, *args: Any) -> list[Any]:
        """Let all ranks take training step `step` once; return rank 0's answer, or all by rank for the timeline."""
        within = self._step_timeout_seconds(generation)
        if generation.timeline:
            return crew.call_ranks(Worker.step, step, *args, within=within)
        return [crew.lead_step(step, *args, within=within)]

    def _step_timeout_seconds(self, generation: Generation) -> float:
        """Return the seconds that a training step may last before a blocked worker counts as hung: HUNG_AFTER times the
        median step of this generation (until that is known, COLD times the run's; until that is known,
        FIRST_STEP_SECONDS), and at least elastic.hang_seconds."""
        usual, ever = self.pace.median_seconds(generation.step), self.pace.median_seconds(0)
        if usual is None:
            usual = FIRST_STEP_SECONDS / HUNG_AFTER if ever is None else COLD * ever
        return max(self._config.elastic.hang_seconds, HUNG_AFTER * usual)

    def _commit_step(self, generation: Generation, row: MetricsRow, snapshot_step: int | None) -> None:
        """Commit a training step that every rank has acknowledged: count it, remember its duration and loss, and hand
        its row to metrics and console. `snapshot_step`: the newest step whose state is in the workers' memory."""
        self.done, self.worked = row.step, True
        self._stall, self._failed, self._pauses = 0.0, None, growing_pauses(self._config.elastic.wait)
        self._failures = Counter({step: n for step, n in self._failures.items() if step > row.step})
        self.held = snapshot_step
        if snapshot_step is not None:
            self._former.ledger.record_snapshot(generation, snapshot_step)
        self.pace.add_step(row.step, row.step_seconds)
        self._useful += row.step_seconds
        self._spikes.add_loss(row.loss)
        self.forecast.add_step(row)
        self._monitor.record_step(row)

    def _snapshot_committed_step(self, crew: Crew, generation: Generation) -> bool:
        """Let all workers keep a snapshot in memory of the run's last committed step, if `Worker.step` takes any (every
        elastic.snapshot_every steps): on GPUs it would take this one beside the next step. Return True if they hold it.
        """
        if not (every := self._config.elastic.snapshot_interval) or self.done % every:
            return False
        if self.held != self.done:
            crew.call_ranks(Worker.take_snapshot, self.done)
            self._former.ledger.record_snapshot(generation, self.done)
            self.held = self.done
        return True

    def _save_if_due(self, crew: Crew, step: int) -> None:
        """Continue the save under way, begin a checkpoint after training step `step` if one is due, and raise Stopped
        if a stop was requested and steps are left. Raise GaveUp if saving keeps failing."""
        start = perf_counter()
        self._checkpoints.advance_save(crew)
        self._checkpoints.check_save_failures()
        if step and self._checkpoints.is_save_due(step, last=step == self._steps, stopping=False):
            self._checkpoints.begin_save(crew, step, self.take_unreported_seconds())
            self._stall = perf_counter() - start
        if step < self._steps:  # else the run is done
            self._drain_if_requested(crew)

    def _drain_if_requested(self, crew: Crew) -> None:
        """Save an unsaved state of the run, then raise Stopped, if a stop of the run was requested, or ClusterLost if
        its cluster is lost; else do nothing."""
        if self._signals.stop_requested or crew.lost:
            self._checkpoints.confirm_newest()
            self._save_now(crew)
            self._signals.raise_if_requested()
            raise ClusterLost(crew.lost)

    @property
    def _has_unsaved_step(self) -> bool:
        """Return True if no checkpoint has the run's state after its last committed step, and a stop would save one."""
        return bool(self.done) and self._checkpoints.is_save_due(self.done, last=False, stopping=True)

    def _save_now(self, crew: Crew) -> bool:
        """Save the last committed step's checkpoint if it is unsaved; return True if storage holds it now."""
        self._checkpoints.finish_save(crew)
        if self._has_unsaved_step:
            self._checkpoints.begin_save(crew, self.done, self.take_unreported_seconds())
            self._checkpoints.finish_save(crew)
        return self._checkpoints.step == self.done

    def _raise_reform_if_needed(self, crew: Crew, generation: Generation, report: StepReport) -> None:
        """Raise Reform, between two training steps, if seated workers are about to be taken away, or if a mesh with a
        spare for a slow worker, or with more workers, can form now without losing a step. `report`: rank 0's on the
        step just committed."""
        if proposal := self._advisor.propose_needed_reform(crew, generation):
            if not self._former.recruiter.usable_members(crew):
                self._signals.request_stop(NOTICE)
                self._drain_if_requested(crew)
            self._snapshot_committed_step(crew, generation)
            self._save_now(crew)  # memory may not hold the whole state without the members that leave
            raise Reform(proposal.reason)
        proposal = self._advisor.propose_optional_reform(crew, generation, report)
        proposal = proposal or self.forecast.propose_better_plan(crew, self._former.recruiter, generation, self.done)
        if proposal and self._can_reform_without_loss(crew, generation):
            self._checkpoints.finish_save(crew)
            self._former.recruiter.barred |= proposal.barred
            raise Reform(proposal.reason)

    def _can_reform_without_loss(self, crew: Crew, generation: Generation) -> bool:
        """Return True if re-forming the mesh of workers loses no training step: their state is in memory or saved."""
        if self._config.elastic.snapshot_interval:
            return self._snapshot_committed_step(crew, generation)
        return bool(self._config.checkpoint.every) and self._save_now(crew)

    # RELEASING

    def _survive_failure(self, crew: Crew, failure: WorkerFailed) -> None:
        """Journal and print the failure of a worker, after which another mesh can form without it. Raise GaveUp if none
        can: the crew is not elastic, the step has failed elastic.attempts times, a worker's own error came before any
        step was done, a worker has no memory left, which the same plan would take again, or the failure, while the run
        trains, is a user's mistake."""
        culprit, step = failure.culprit, self.done + 1
        if culprit.refusal and self.state is RunState.RUNNING:
            raise GaveUp(culprit.refusal)
        self._failed = self._failed or perf_counter()
        useful = self.take_unreported_seconds()
        self._journal.write(events.Failure(**culprit.event_fields(), step=step, useful_seconds=useful))
        self._monitor.say(str(failure))
        if culprit.of_world and crew.elastic and (pause := next(self._pauses, None)):
            return self._pause_before_forming(pause)
        self._failures[step] += 1
        count = self._failures[step]
        # A run that has never worked will not work; but a checkpoint that was to be read may just have been deleted.
        is_hopeless = culprit.kind == "failed" and not self.worked and not culprit.method.startswith("restore(")
        if is_hopeless or culprit.is_out_of_memory or count >= self._config.elastic.attempts or not crew.elastic:
            now = self._generation
            room = describe_memory_remedies(now.formed.config, now.plan) if now and culprit.is_out_of_memory else ""
            where = f"; its log: {culprit.log}" if culprit.log else ""
            often = f" (failure {count} before step {step} was done)" if count > 1 else ""
            raise GaveUp(f"{failure}{often}{room}{where}", culprit.of_world)

    def _pause_before_forming(self, seconds: float) -> None:
        """Wait, unless a stop is requested, before workers form again that a fault of the world has ended: it costs no
        attempt, as a storage or a network may do well later."""
        self._monitor.say(f"tries again in {seconds:.0f} s")
        end = monotonic() + seconds
        while monotonic() < end and not self._signals.stop_requested:
            sleep(min(LOOK_SECONDS, seconds))

    def _release_generation(self, crew: Crew) -> RunState:
        """Make all workers leave their mesh and process groups, journal which were lost, and return FORMING."""
        start = perf_counter()
        self._checkpoints.abandon_save()
        lost = crew.release_members()
        seconds, numbers = perf_counter() - start, [failure.member.number for failure in lost]
        self._journal.write(events.Released(lost=numbers, alive=len(crew.ready_members_by_number), seconds=seconds))
        return RunState.FORMING

    def take_unreported_seconds(self) -> float:
        """Return the seconds of the run's steps committed since a journal event last reported them; reset them to 0."""
        useful, self._useful = self._useful, 0.0
        return useful
