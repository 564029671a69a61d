"""Profile of one training step of one rank, by torch's profiler, with ranges by the names that the timeline uses."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from platform.train.replies import Event, PartHead, RankTimeline, build_part
from platform.train.trainer import Trainer


class RankProfile:
    """Recording of a rank's training step `step` by torch's profiler, from its construction to `stop`. `timeline`: the
    notes of the rank's clock on the step."""

    def __init__(self, trainer: Trainer, step: int):
        """Start to record what the rank of `trainer` does, on its CPU and its GPU, if it has one."""
        self.step, self.timeline, self._trainer = step, RankTimeline(), trainer
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # it would say on stderr that it starts and stops
        on_gpu = [ProfilerActivity.CUDA] * (trainer.communicator.device.type == "cuda")
        self._recorder: Any = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._recorder.start()
        trainer.clock.set_detailed(True)
        trainer.clock.ranges = record_function

    def stop(self) -> None:
        """Stop to record this rank's step; its clock makes no ranges any more."""
        trainer = self._trainer
        trainer.clock.ranges = None
        trainer.clock.set_detailed(trainer.config.monitor.timeline)
        self._recorder.stop()

    def export_part(self) -> tuple[PartHead, list[Event]]:
        """Return the record, after `stop`, as a part of the run's profile."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._recorder.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(errors="replace"))
        return build_part(trace, self._trainer.left, self.timeline)
