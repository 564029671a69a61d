"""Records that a worker keeps of itself: profiles of steps, launches of collectives, a dump where it does not go on."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from platform.boundary.documents import error_line
from platform.boundary.files.local_files import replace_text
from platform.boundary.redaction import redact
from platform.boundary.terminal import print_line, tolerated
from platform.config.fields import Config
from platform.parallel.communicator.base import Launch
from platform.parallel.communicator.progress import PROGRESS, stacks
from platform.train.candidate import Candidate
from platform.train.health.flight_records import flight_records
from platform.train.protocol.dumped import DUMP, Stand, stand_path
from platform.train.protocol.profile_part import PartName, write_part
from platform.train.protocol.replies import PartWritten, RankTimeline, StepReport
from platform.train.step.rank_profile import RankProfile
from platform.train.step.trainer import Trainer


class Observed(Candidate):
    """Worker as far as it records its own work. `rank`, `generation`: its seat; `number`: in the crew."""

    trainer: Trainer | None = None
    rank = generation = number = 0

    def __init__(self, config: Config, device: str, run_dir: str):
        """Initialise a worker that records nothing yet."""
        super().__init__(config, device, run_dir)
        self._profile: RankProfile | None = None

    def begin_profile(self, step: int, ranks: list[int]) -> str:
        """Prepare to profile training step `step` on `ranks`. All ranks are called, as their clocks are then aligned by
        a barrier. Return why this rank cannot be profiled, "" if it can or need not."""
        assert self.trainer
        self._end_recording()
        self.trainer.aligned = True
        try:
            with PROGRESS.preparing("profile"):
                self._profile = RankProfile(self.trainer, step) if self.rank in ranks else None
        except Exception as error:  # a run needs no profile
            return error_line(error)
        return ""

    def end_profile(self) -> PartWritten | None:
        """End the profile of the last training step, and write this rank's part of it; return what it holds, None if
        this rank was not profiled."""
        assert self.trainer
        self.trainer.aligned = self.config.monitor.timeline
        if (found := self._profile) is None:
            return None
        with PROGRESS.preparing("profile"):
            self._end_recording()
            try:
                head, events = found.part()
                size = write_part(PartName(found.step, self.generation, self.rank).path(self.run_dir), head, events)
            except Exception as error:  # likewise
                return PartWritten(0, 0, 0, error_line(error))
        return PartWritten(head.events, head.cut, size)

    def _noted(self, report: StepReport) -> None:
        """Move the timeline in this rank's report on a training step into the step's profile, if there is one."""
        if self._profile:
            self._profile.timeline = report.timeline
            if not self.config.monitor.timeline:
                report.timeline = RankTimeline()

    def dump(self, name: str) -> None:
        """Write into the run directory's dump `name` where this worker stands: its sections, the collective that it
        waits for, the stacks of all its threads, and torch's records of its last collectives. Called by another thread
        while a call does not go on."""
        here, folder, now = PROGRESS.here(), self.run_dir / DUMP / name, time.time()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        threads = ["\n".join([f"{thread}:", *frames, ""]) for thread, frames in stacks().items()]
        replace_text(folder / f"rank-{self.rank}.stacks.txt", redact("\n".join(threads)))
        trainer, communicator, records = self.trainer, self.communicator, flight_records()
        for backend, record in records.items():
            replace_text(folder / f"rank-{self.rank}.{backend}.json", json.dumps(redact(record), indent=1) + "\n")
        stand = Stand(
            now,
            self.rank,
            self.number,
            self.generation,
            socket.gethostname(),
            os.getpid(),
            here.call,
            trainer.clock.path if trainer else [here.section] * bool(here.section),
            here.waiting,
            here.seconds,
            here.wait,
            {"+".join(of): n for of, n in [*communicator.launched.items()]} if communicator else {},
            [*records],
        )
        replace_text(stand_path(folder, self.rank), json.dumps(redact(asdict(stand)), indent=1) + "\n")

    def _end_recording(self) -> None:
        """End the profile under way, if any."""
        found, self._profile = self._profile, None
        if found:
            with suppress(RuntimeError):  # of a device that no longer works
                found.stop()

    def _write_launches(self, log: list[Launch]) -> None:
        """Append this rank's log of collectives to logs/launches-RANK.jsonl, and empty it; only warn if that fails."""
        path = self.run_dir / "logs" / f"launches-{self.rank}.jsonl"
        with tolerated(print_line, str(path)):
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(vars(launch)) + "\n" for launch in log)
        log.clear()
