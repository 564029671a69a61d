"""The FORMING state: makes the live workers a mesh that continues from the run's newest state. `SnapshotLedger` is the
driver's record of the state that members hold in memory, kept from their answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import Any

from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import show_phase, warn_on_write_error
from platform.cluster.control import examination
from platform.cluster.control.recruiter import Recruiter, arrange_seats, find_rank_tiers, member_paths
from platform.cluster.control.references import PairReferences
from platform.cluster.control.run_context import Generation, RunContext
from platform.cluster.control.teacher import RunTeacher
from platform.cluster.crew.crew import ByRank, Crew, Worker
from platform.cluster.crew.failures import GaveUp, Member, Reform
from platform.cluster.crew.job import Job
from platform.monitor import Timeline, events
from platform.plan.accelerators import dense_bf16_peak
from platform.plan.layout import Mesh, format_count
from platform.plan.plan import Plan
from platform.plan.plan_data import plan_digest, plan_summary
from platform.plan.schedule import Schedule, table
from platform.plan.simulate import StageRows, simulate, stage_rows
from platform.plan.step_collectives import may_compile
from platform.plan.whole_blocks import describe_blocks, reasons_against_whole_blocks
from platform.predict.choose_schedule import build_schedules
from platform.predict.recorded_passes import RECORDING, reason_against_graphs
from platform.predict.tier_traffic import farthest_tiers
from platform.train.state_recovery import Formation, MemorySource, find_source, take_seats
from platform.weights.importing import open_initial_weights


class SnapshotLedger:
    """Ledger of the snapshots of the run's state that workers hold in memory, kept by the driver. Members keep a
    generation's until the next generation takes its first step."""

    def __init__(self) -> None:
        """Initialise a ledger without any snapshot in workers' memory."""
        self._newest: dict[int, tuple[Generation, int]] = {}  # by number: the newest step that all its members hold
        self._distrusted: set[tuple[int, int]] = set()  # (generation, member)

    def record_snapshot(self, generation: Generation, step: int) -> None:
        """Record that all members of a generation of workers hold a snapshot of the state after `step`."""
        self._newest[generation.number] = generation, step

    def distrust_members(self, generation: int, members: Collection[int]) -> None:
        """Ignore from now on these members' snapshots of a generation of workers, as their memory is damaged."""
        self._distrusted |= {(generation, member) for member in members}

    def forget_others(self, generation: int) -> None:
        """Forget the snapshots of other generations of workers, which are dropped when this one takes a step."""
        self._newest = {number: held for number, held in self._newest.items() if number == generation}

    def find_state_source(self, alive: Collection[int], size: int) -> tuple[MemorySource | None, list[str]]:
        """Return the newest training state that the members `alive` hold whole in memory, for a new mesh of `size`
        ranks, or None, and why newer states are not whole, a line each; see
        `platform.train.state_recovery.find_source`."""
        known = self._newest.items()
        newest = {number: step for number, (_, step) in known}
        formed = {number: generation.formed for number, (generation, _) in known}
        plans = {number: generation.plan for number, (generation, _) in known}
        return find_source(newest, formed, alive, size, self._distrusted, plans)


_WIDTH = 300  # columns of a schedule table that is still shown


class GenerationFormer:
    """Forms the generations of a run: seats workers as a mesh that goes on from the newest state. `recruiter` chooses
    members and plan; `ledger` lists the snapshots in the workers' memory."""

    def __init__(self, run: RunContext):
        """Prepare to form the generations of a run's workers, one mesh after the other; no mesh has formed and no
        snapshot in workers' memory is known."""
        self._run, self._config, self._job = run, run.config, run.job
        self._journal, self._monitor, self._checkpoints = run.journal, run.monitor, run.checkpoints
        self._corpus = str(run.corpus.entry or "")
        self.recruiter, self.ledger, self._references = Recruiter(run), SnapshotLedger(), PairReferences(run)
        self._teacher = RunTeacher(run)
        self._proven: set[int] = set()
        self._formed = self._tried = False  # a mesh was formed; a restore from storage was tried
        self._shown = run.plan  # the plan that the user has seen

    def form_generation(self, crew: Crew) -> Generation:
        """Form the next generation of workers: wait for workers, seat them, build their part of the model and bring it
        to the newest state, from survivors' memory or from storage.

        Raises WorkerFailed if a call on a worker fails; Reform if a new worker turns out to see other files or to run
        other code than the driver, and was barred; GaveUp if too few workers come within elastic.wait seconds, none can
        be hired, or no state can be had; Stopped if the run was asked to stop while too few were there; ConfigError in
        a run's first generation, for what the user has to correct.
        """
        with show_phase("waiting for workers"):
            members, replanned = self.recruiter.await_members(crew)
        start = perf_counter()
        plan, size = replanned.plan, replanned.plan.mesh.world_size
        schedules = build_schedules(replanned.config, plan.num_replicas, plan.pairs_passes)
        schedule = schedules[-1]
        number = self._journal.begin_generation()
        mesh, new_digest, alive = dict(plan.mesh.axes), plan_digest(plan), len(members)
        forming = events.Forming(world_size=size, mesh=mesh, plan=new_digest, reason=replanned.reason, alive=alive)
        self._journal.write(forming)
        self._show_plan(plan, schedule, replanned.reason)
        seats, source = self._assign_seats(members, plan.mesh)
        if source and source.gathered:
            self._hand_over_snapshots(crew, source, number)
        job = replace(self._job, coordinates=[plan.mesh.rank_coordinates(rank) for rank in range(size)])
        crew.assign_ranks(job, seats)
        self._check_environments(crew, seats)
        for model in (self._references, self._teacher):
            step = source.step if source else self._checkpoints.step
            model.ask_workers(crew, job, seats, replanned.config, number, step)
        stage_of = list(schedule.placement)
        seating = size, replanned.config, crew.store, number, stage_of, new_digest
        workers = crew.call_ranks(Worker.join_mesh, ByRank(range(size)), *seating)
        numbered = [vars(worker) | {"number": number} for worker, number in zip(workers, seats, strict=True)]
        self._journal.write(events.Formed(workers=numbered))
        domains, of_stage = [members[number].node for number in seats], stage_rows(schedules)
        plain = [stage.encode_rows() for stage in of_stage]
        init = not source and self._config.train.init not in ("", "random")
        fresh = not source and not self._checkpoints.step and not init
        tiers = find_rank_tiers(seats, member_paths(members))
        rows = ByRank(plain[c["stage"]] for c in job.coordinates)
        build = Worker.build_trainer, rows, domains, self._corpus, farthest_tiers(plan, tiers), fresh
        built = crew.call_ranks(*build)
        self.recruiter.memory = min(self.recruiter.memory, *(b.memory or inf for b in built))
        step = self._recover_state(crew, source) if source else self._restore_state(crew, build, initializes=not init)
        if init and not step:
            self._load_initial_weights(crew)
        self._references.hand_over(crew, replanned.config, plan, step)
        self._teacher.hand_over(crew, step)
        self._formed = True
        uncompiled = self._rehearse_step(crew, job, plan, step + 1, built[0].uncompiled)
        compiled = self._say_what_compiles(plan, job.device, uncompiled)
        self._journal.write(events.Running(step=step + 1, parameters_per_worker=built[0].parameters, **compiled))
        timeline = self._begin_timeline(job, schedules, of_stage)
        peak = dense_bf16_peak(built[0].device)
        formed = Formation(replanned.config, stage_of, domains, seats, built[0].moments, built[0].shared)
        seconds = perf_counter() - start
        generation = Generation(number, plan, formed, tiers, step, built[0].device, peak, timeline, job, seconds)
        if source or (step and self._config.elastic.snapshot_interval):
            self.ledger.record_snapshot(generation, step)
        return generation

    def _begin_timeline(
        self, job: Job, schedules: Sequence[Schedule], of_stage: Sequence[StageRows]
    ) -> Timeline | None:
        """Return the timeline of the job's ranks in a generation, if the run keeps one."""
        if not self._config.monitor.timeline:
            return None
        names = [job.rank_name(rank) for rank in range(len(job.coordinates))]
        stages = [c["stage"] for c in job.coordinates]
        return Timeline(schedules, [stage.steps for stage in of_stage], names, stages)

    def _assign_seats(self, members: Mapping[int, Member], mesh: Mesh) -> tuple[list[int], MemorySource | None]:
        """Return the member at every rank of a new mesh, and the state in survivors' memory that they recover from;
        None instead if no state in memory is whole or a checkpoint is newer. `members`: members that may be seated."""
        paths = member_paths(members)
        source, reasons = self.ledger.find_state_source(members.keys(), mesh.world_size)
        for reason in reasons:
            self._journal.write(events.NotWhole(reason=reason))
        if source is None or source.step < self._checkpoints.step:
            return arrange_seats(paths, mesh, {}), None
        member_of_rank = dict(zip(source.kept, source.members_of_ranks(source.kept), strict=True))
        seated_source = take_seats(source, arrange_seats(paths, mesh, member_of_rank))
        if not seated_source:  # what they hold is worth more than to be near each other
            others = [number for number in members if number not in member_of_rank.values()]
            seatable = [*member_of_rank.values(), *others][: mesh.world_size]
            seatable_paths = {number: paths[number] for number in seatable}
            seated_source = take_seats(source, arrange_seats(seatable_paths, mesh, member_of_rank))
        assert seated_source
        return seated_source.seats, seated_source

    def _show_plan(self, plan: Plan, schedule: Schedule, reason: str) -> None:
        """Print the plan of the mesh of workers that forms, if it differs from the one shown last, and its pipeline
        schedule; write plan.json."""
        if plan is not self._shown:
            self._monitor.say(reason or f"{format_count(plan.mesh.world_size, 'worker')}: as configured")
            with warn_on_write_error(self._monitor.say, "plan.json"):
                self._run.directory.write_plan(plan_summary(plan))
        self._shown = self._checkpoints.plan = plan
        if schedule.stages > 1:
            self._monitor.say(_describe_schedule(schedule))

    def _hand_over_snapshots(self, crew: Crew, source: MemorySource, number: int) -> None:
        """Let survivors that hold state in memory but get no seat in the new mesh send it to the seated ones, in a
        temporary group of all holders. `number`: number of the next generation."""
        order = source.members_of_ranks(source.gathered)
        crew.assign_ranks(replace(self._job, coordinates=[{"data": i} for i in range(len(order))]), order)
        crew.call_ranks(Worker.exchange_snapshots, source, ByRank(range(len(order))), crew.store, f"{number}/gather")
        crew.release_members()

    def _check_environments(self, crew: Crew, seats: Sequence[int]) -> None:
        """Check that the seated members not checked before see the same storage and run the same code as the driver.
        Raise ConfigError if one does not in the first generation; in a later one bar it, and raise Reform."""
        new = set(seats) - self._proven
        if not new:
            return
        try:
            refused = examination.compare_worker_environments(crew, self._config, self._job.run_dir)
        except ConfigError as error:  # the driver itself cannot write, which does not tell against workers
            if not self._proven:
                raise
            self._journal.write(events.NotProven(numbers=sorted(new), reasons=error.violations))
            return
        reasons = list(dict.fromkeys(line for lines in refused.values() for line in lines))
        if refused and not self._proven:
            raise ConfigError(reasons)
        barred = {seats[rank] for rank in refused}
        self._proven |= new - barred
        if barred:
            self.recruiter.barred |= barred
            self._journal.write(events.Barred(numbers=sorted(barred), reasons=reasons))
            raise Reform(f"a new worker gets no seat: {reasons[0]}")

    def _recover_state(self, crew: Crew, source: MemorySource) -> int:
        """Let all ranks recover the state from survivors' memory, journal it, and return the step of that state."""
        start = perf_counter()
        crew.call_ranks(Worker.recover_state, source)
        self._journal.write(events.Restored(step=source.step, source="memory", seconds=perf_counter() - start))
        return source.step

    def _load_initial_weights(self, crew: Crew) -> None:
        """Let all workers of a new generation start from the weights of train.init, and journal it. Raise GaveUp if
        they cannot be read and a generation had formed before; ConfigError if none had."""
        start = perf_counter()
        try:
            weights = open_initial_weights(self._config)
            failure = crew.call_ranks(Worker.load_initial_weights)[0]
            if failure:
                raise ConfigError("train.init", weights.url, failure.reason)
        except ConfigError as error:
            if not self._formed:
                raise
            raise GaveUp(str(error)) from None
        seconds, notes = perf_counter() - start, list(weights.notes)
        self._journal.write(events.Initialised(weights=weights.url, differences=notes, seconds=seconds))
        self._monitor.say("\n".join([f"weights  of {weights.url}", *(f"         {line}" for line in notes)]))

    def _rehearse_step(self, crew: Crew, job: Job, plan: Plan, step: int, uncompiled: str) -> str:
        """Let all workers compile the model, unless it stays `uncompiled`, and record its passes; return why not."""
        unrecorded = reason_against_graphs(self._config, plan, job.device)
        if job.device in RECORDING:
            said = f"none: {unrecorded}" if unrecorded else "passes are recorded, but where a log says why not"
            self._monitor.say(f"graphs   {said}")
        if unrecorded and (uncompiled or not may_compile(self._config.train.compile, job.device)):
            return uncompiled
        failed = ((rank, why) for rank, why in enumerate(crew.call_ranks(Worker.rehearse_steps, step)) if why)
        return next((f"{job.rank_name(rank)} cannot compile {why}" for rank, why in failed), uncompiled)

    def _say_what_compiles(self, plan: Plan, device: str, uncompiled: str) -> dict[str, Any]:
        """Say which blocks are compiled whole, and why not others; return the fields of the journal's record."""
        blocks, rate = list[str](), self._config.model.dropout
        if not uncompiled and may_compile(self._config.train.compile, device):
            blocks = describe_blocks(reasons_against_whole_blocks(plan, device, rate))
        for line in [f"off: {uncompiled}"] if uncompiled else blocks:
            self._monitor.say(f"compile  {line}")
        return {"uncompiled": uncompiled or None, "blocks": blocks or None}

    def _restore_state(self, crew: Crew, build_arguments: tuple[Any, ...], initializes: bool) -> int:
        """Restore the workers' state from storage, as nothing in memory is usable, or leave them at step 0 if there is
        no checkpoint; return the step. `build_arguments`: the call that builds the workers' models, repeated after each
        corrupt checkpoint; its last argument is True if it gives them initial values; `initializes`: True if
        they need these when there is no checkpoint. Raise GaveUp if storage cannot be read and a generation had formed
        before; ConfigError or OSError if none had."""
        try:
            if self._tried:
                self._checkpoints.select_newest_again()
            self._tried = True
            while not self._checkpoints.restore_workers(crew):
                crew.call_ranks(*build_arguments)
            if (
                not self._checkpoints.step and initializes and not build_arguments[-1]
            ):  # the checkpoint that was there is gone
                crew.call_ranks(*build_arguments[:-1], True)
        except (ConfigError, OSError) as error:
            if not self._formed:
                raise
            raise GaveUp(f"no state is whole in memory, and none can be read from storage: {error}") from None
        return self._checkpoints.step


def _describe_schedule(schedule: Schedule) -> str:
    """Describe a generation's pipeline schedule as it forms: size, simulated bubble, table unless wider than _WIDTH."""
    bubble = simulate(schedule).bubble
    title = f"schedule  {schedule.name}: {schedule.stages} stages x {schedule.chunks} chunks, {schedule.microbatches}"
    lines = [f"{title} microbatches; bubble {bubble:.1%} of the work", *table(schedule.rows).splitlines()]
    return "\n".join(lines[: None if max(map(len, lines)) <= _WIDTH else 1])
