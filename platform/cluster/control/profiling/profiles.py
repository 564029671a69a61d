"""Profile of the steps that monitor.profile names: has the workers record them, and merges their parts."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from platform.boundary.documents import error_line
from platform.boundary.schema import Malformed
from platform.boundary.terminal import tolerated
from platform.cluster.control.forecast import Forecast
from platform.cluster.control.forming.context import Generation, RunContext
from platform.cluster.control.profiling.profile_trace import (
    PredictedSpan,
    StepNote,
    merge_parts,
    newest_parts,
    predicted_spans,
    write_step_note,
)
from platform.cluster.crew.base.crew import Crew
from platform.config.rules.profile_rules import EVERY
from platform.costs.parts import OPTIMIZER
from platform.monitor import MetricsRow
from platform.monitor.records.step_events import Profiled
from platform.plan.language.numbers import count_of
from platform.planning.choose_schedule import schedules_of
from platform.train.protocol.profile_part import PARTS, PROFILE
from platform.train.protocol.replies import PartWritten


class Profiles:
    """Profile of a run's steps, as monitor.profile asks for one. The parts of it that workers write stay until the run
    has ended: a step that is done again after a failure replaces its part, and the merged trace is made again."""

    def __init__(self, run: RunContext, forecast: Forecast):
        """Prepare the profile of a run; `forecast`: its predictions of steps."""
        first, last = run.config.monitor.profile or (0, -1)
        self._steps, self._ranks = range(first, last + 1), run.config.monitor.profile_ranks
        self._run, self._forecast, self._say = run, forecast, run.monitor.say
        self._directory = run.job.run_dir
        self.path = self._directory / PROFILE / f"steps-{first}-{last}.json.gz"
        self._merging: threading.Thread | None = None
        self._merged: list[int] = []  # steps in the trace

    def chosen(self, generation: Generation) -> list[int]:
        """Return the ranks of a generation of workers that are profiled: one of each pipeline stage by default."""
        if self._ranks == [EVERY]:
            return list(range(generation.size))
        if self._ranks:
            return sorted({int(rank) for rank in self._ranks if int(rank) < generation.size})
        stages = [at["stage"] for at in generation.job.coordinates]
        return sorted(stages.index(stage) for stage in set(stages))

    @contextmanager
    def of_step(self, crew: Crew, generation: Generation, step: int) -> Iterator[None]:
        """Let the chosen ranks record training step `step` during the block, if it is to be profiled, and write their
        parts after it. A record of a step that fails is dropped."""
        if step not in self._steps:
            yield
            return
        self._wait()
        refused = crew.call("begin_profile", step, self.chosen(generation))
        yield
        written: list[PartWritten | None] = crew.call("end_profile")
        why = [*filter(None, refused), *(part.why for part in written if part and part.why)]
        if why:
            self._say(f"WARNING: step {step} has no profile of {count_of(len(why), 'rank')} ({why[0]})")

    def note(self, generation: Generation, row: MetricsRow) -> None:
        """Write the note on a profiled step that is committed, `row`; merge all parts after the last of these steps."""
        if row.step not in self._steps:
            return
        with tolerated(self._say, str(self._directory / PROFILE)):
            write_step_note(self._directory, row.step, generation.number, self._known(generation, row))
        if row.step == self._steps[-1]:
            self._merging = threading.Thread(target=self._merge, name="profile", daemon=True)
            self._merging.start()

    def _known(self, generation: Generation, row: MetricsRow) -> StepNote:
        """Return the note on a profiled step: names and places of its ranks, its parts as measured and as predicted."""
        nodes, job = generation.formed.domains, generation.job
        names = [f"{job.name(rank)} on {node.partition('/')[0]}" for rank, node in enumerate(nodes)]
        measured, stages = dict(row.parts or {}), [at["stage"] for at in job.coordinates]
        forecast = self._forecast.of_step if row.predicted_seconds else None
        if forecast is None:
            return StepNote(names, nodes, stages, measured)
        schedule = schedules_of(generation.formed.config, generation.plan.replicas)[-1]
        simulated = forecast.simulated(schedule)
        spans: list[list[PredictedSpan]] = []
        for stage in range(schedule.stages):
            own = sorted((e.start, e.end, str(e.action)) for e in simulated.timeline if e.stage == stage)
            of_stage = [(name, start, end) for start, end, name in own]
            spans.append(predicted_spans(of_stage, simulated.makespan, forecast.parts, OPTIMIZER))
        return StepNote(names, nodes, stages, measured, forecast.hardware, dict(forecast.parts), spans)

    def _merge(self) -> None:
        """Merge the parts of the profile so far into one trace, and say which steps and ranks it has. An error there is
        said, and ends nothing."""
        try:
            found = merge_parts(self._directory, self.path)
        except (OSError, Malformed) as error:
            return self._say(f"WARNING: {self.path} cannot be written ({error_line(error)})")
        if not found:
            return self._say(f"WARNING: no step of monitor.profile={[*self._run.config.monitor.profile]} was done here")
        missing = [step for step in self._steps if step not in found.steps]
        self._merged = found.steps
        self._run.journal.write(Profiled(file=str(self.path), steps=found.steps, ranks=found.ranks, bytes=found.bytes))
        lacks = f"; steps {', '.join(map(str, missing))} are not in it" if missing else ""
        cut = f"; the {found.cut} shortest events are left out" if found.cut else ""
        size, ranks = f"{found.bytes / 1e6:.1f} MB", count_of(found.ranks, "rank")
        steps = count_of(len(found.steps), "step")
        self._say(f"profile of {steps} on {ranks}: {self.path} ({size}), for ui.perfetto.dev{lacks}{cut}")

    def _wait(self) -> None:
        """Wait until the trace that is being merged is written."""
        if self._merging:
            self._merging.join()
            self._merging = None

    def close(self, done: bool) -> None:
        """Write the trace of the steps that were profiled, if the last of them were not; if the run is `done`, the
        parts go, as none of its steps can be done again."""
        if not self._steps:
            return
        self._wait()
        if sorted({name.step for name, _ in newest_parts(self._directory)}) != self._merged:
            self._merge()
        if done and self._merged:
            shutil.rmtree(self._directory / PROFILE / PARTS, ignore_errors=True)
