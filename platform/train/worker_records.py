"""Records that a worker keeps of itself, with a seat or without one.

`UnseatedWorker`: a worker as far as the driver examines it before it gets a seat. `RecordingWorker` adds profiles of
steps, launches of collectives, and a dump where the worker does not go on.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch

from platform.boundary.documents import error_line
from platform.boundary.local_files import replace_text
from platform.boundary.redaction import redact_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.terminal import print_line, warn_on_write_error
from platform.config.extensions import import_user_modules
from platform.config.fields import Config
from platform.plan.layout import Mesh
from platform.runtime.communicator import Communicator, Launch
from platform.runtime.compilation import reason_kernel_fails, reason_uncompiled
from platform.runtime.process_groups import connect_process_groups
from platform.runtime.progress import PROGRESS, frames_of_other_threads
from platform.train import replies
from platform.train.calibration_rates import connect_groups, measure_collective_rates, measure_kernel_rates
from platform.train.environment_proof import describe_environment
from platform.train.gauges import read_flight_records
from platform.train.measurements import CONNECTIONS, FULL, QUICK, TOGETHER, measure_worker
from platform.train.rank_parameters import DTYPES
from platform.train.step_profile import RankProfile
from platform.train.trainer import Trainer


class UnseatedWorker:
    """Worker without a seat, which answers what the driver asks to know whether it may get one. `run_dir`: the run
    directory."""

    def __init__(self, config: Config, device: str, run_dir: str):
        """Initialise a worker without a rank yet, on `device` (cpu | cuda). Raises ConfigError if `extend` fails."""
        self._apply_config(config)
        self.run_dir, self.device = Path(run_dir), device
        self.communicator: Communicator | None = None

    def _apply_config(self, config: Config) -> None:
        """Set this worker's configuration and import the user's modules in `extend`. Raises ConfigError."""
        self.config = config
        if mistakes := import_user_modules(self.config.extend):
            raise ConfigError(mistakes)

    def prove_environment(self, probe: str) -> replies.Proof:
        """Return the proof of this worker's environment, for the driver to compare with its own before the worker gets
        a rank: hashes of the run's storage as this worker sees it, hashes and versions of its code, and settings that
        it cannot fulfil. `probe`: name of the file of random bytes that the driver has written to each storage."""
        train, m = self.config.train, self.config.model
        dtype, d_kv = DTYPES[self.config.precision][0], max(m.d_kv or m.d_model // m.heads, m.global_d_kv)
        lacks = {
            "train.compile": reason_uncompiled("on", self.device) if train.compile == "on" else "",
            "train.attention_kernel": reason_kernel_fails(train.attention_kernel, self.device, dtype, d_kv, m.d_value),
        }
        return describe_environment(self.config, self.run_dir, probe, {key: why for key, why in lacks.items() if why})

    def read_clock(self) -> float:
        """Return this worker's clock, in seconds since the epoch, for the doctor to compare with the driver's."""
        return time.time()

    def examine_device(self, thorough: bool) -> replies.Findings:
        """Measure this worker's device and storage for the doctor; `thorough`: at larger sizes, which take seconds."""
        self._select_device()
        return measure_worker(self.config, self.run_dir, self.device, FULL if thorough else QUICK)

    def examine_connection(
        self, check: str, index: int, size: int, name: str, store: tuple[str, int], thorough: bool
    ) -> replies.Findings:
        """Measure for the doctor the bandwidth between this worker and the others of its group, all of which call this
        together. `check`: the measurement, link (a pair) | node (all workers of a node); `index`: this worker's place
        among the `size` of its group; `name`: the group's name in `store`, the driver's TCPStore (host, port);
        `thorough`: True for larger transfers. `leave` must follow."""
        mesh, device = Mesh.arrange_axes({"stage": 1, TOGETHER: size}), self._select_device()
        try:
            self.communicator = connect_process_groups(mesh, index, store, f"doctor/{name}", [(TOGETHER,)], device)
            return CONNECTIONS[check](self.communicator, FULL if thorough else QUICK)
        except Exception as error:
            return replies.Findings(errors={check: error_line(error)})

    # In both: `rank` in a mesh of a `shape`, members of a group by groups, called `name` in `store`, the driver's
    # TCPStore (host, port); `tiny`: sizes that take a moment. `leave` must follow.
    def measure_kernels(
        self, rank: int, shape: tuple[int, int], name: str, store: tuple[str, int], tiny: bool
    ) -> replies.Rates:
        """Measure how fast this worker computes, while all others do, which call this together."""
        self.communicator = connect_groups(rank, shape, name, store, self._select_device())
        return measure_kernel_rates(self.communicator, self.config, tiny)

    def measure_collectives(
        self, rank: int, shape: tuple[int, int], name: str, store: tuple[str, int], tiny: bool
    ) -> replies.Rates:
        """Measure collectives and messages in this worker's group, while all groups do, which call this together."""
        self.communicator = connect_groups(rank, shape, name, store, self._select_device())
        return measure_collective_rates(self.communicator, tiny)

    def _select_device(self) -> str:
        """Return this worker process's torch device, "cpu" or "cuda:0", and make that GPU torch's current one."""
        if self.device != "cuda":
            return self.device
        torch.cuda.set_device(0)  # each worker process sees a single GPU
        return "cuda:0"


class RecordingWorker(UnseatedWorker):
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
        self.trainer.drop_passes_ahead()
        self.trainer.aligned = True
        try:
            with PROGRESS.mark_preparing("profile"):
                self._profile = RankProfile(self.trainer, step) if self.rank in ranks else None
        except Exception as error:  # a run needs no profile
            return error_line(error)
        return ""

    def end_profile(self) -> replies.PartWritten | None:
        """End the profile of the last training step, and write this rank's part of it; return what it holds, None if
        this rank was not profiled."""
        assert self.trainer
        self.trainer.aligned = self.config.monitor.timeline
        if (profile := self._profile) is None:
            return None
        with PROGRESS.mark_preparing("profile"):
            self._end_recording()
            try:
                head, events = profile.export_part()
                name = replies.PartName(profile.step, self.generation, self.rank)
                size = replies.write_part(name.file_path(self.run_dir), head, events)
            except Exception as error:  # likewise
                return replies.PartWritten(0, 0, 0, error_line(error))
        return replies.PartWritten(head.events, head.cut, size)

    def _move_timeline_into_profile(self, report: replies.StepReport) -> None:
        """Move the timeline in this rank's report on a training step into the step's profile, if there is one."""
        if self._profile:
            self._profile.timeline = report.timeline
            if not self.config.monitor.timeline:
                report.timeline = replies.RankTimeline()

    def dump(self, name: str) -> None:
        """Write into the run directory's dump `name` where this worker stands: its sections, the collective that it
        waits for, the stacks of all its threads, and torch's records of its last collectives. Called by another thread
        while a call does not go on."""
        progress, folder, now = PROGRESS.current_activity(), self.run_dir / replies.DUMP / name, time.time()
        folder.mkdir(0o700, parents=True, exist_ok=True)
        threads = ["\n".join([f"{thread}:", *frames, ""]) for thread, frames in frames_of_other_threads().items()]
        replace_text(folder / f"rank-{self.rank}.stacks.txt", redact_secrets("\n".join(threads)))
        trainer, communicator, records = self.trainer, self.communicator, read_flight_records()
        for backend, log in records.items():
            replace_text(folder / f"rank-{self.rank}.{backend}.json", json.dumps(redact_secrets(log), indent=1) + "\n")
        seat = self.rank, self.number, self.generation, socket.gethostname(), os.getpid()
        sections = trainer.clock.open_sections if trainer else [progress.section] * bool(progress.section)
        wait = progress.waiting, progress.seconds, progress.wait
        launched = {"+".join(of): n for of, n in [*communicator.launched.items()]} if communicator else {}
        stand = replies.Stand(now, *seat, progress.call, sections, *wait, launched, [*records])
        replace_text(
            replies.dump_file_path(folder, self.rank), json.dumps(redact_secrets(asdict(stand)), indent=1) + "\n"
        )

    def _end_recording(self) -> None:
        """End the profile under way, if any."""
        profile, self._profile = self._profile, None
        if profile:
            with suppress(RuntimeError):  # of a device that no longer works
                profile.stop()

    def _write_collective_log(self, log: list[Launch]) -> None:
        """Append this rank's log of collectives to logs/launches-RANK.jsonl, and empty it; only warn if that fails."""
        path = self.run_dir / "logs" / f"launches-{self.rank}.jsonl"
        with warn_on_write_error(print_line, str(path)):
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.writelines(json.dumps(vars(launch)) + "\n" for launch in log)
        log.clear()
