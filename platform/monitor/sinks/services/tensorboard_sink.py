"""TensorBoard: files of events in the run directory; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from platform.monitor.records import events
from platform.monitor.records.events import JournalEvent
from platform.monitor.sinks.services.alerts import Alert
from platform.monitor.sinks.services.sink import Numbers, Sink, SinkRun


class TensorboardSink(Sink):
    """Files of TensorBoard of a run: curves, and texts of samples and alerts in a part of their own, as a step that is
    trained again removes all that its own part has from that step on."""

    def __init__(self, run: SinkRun):
        """Begin new files of TensorBoard for a run; what older ones have stays."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = run.directory / "tensorboard"
        self._curves = EventFileWriter(str(folder / "steps"))
        self._texts = EventFileWriter(str(folder / "texts"))
        # of the newest step, by name, used again: making them takes five times as long
        self._values: dict[str, Any] = {}
        self._next = 0  # the step that the files have not; of earlier processes' it is not known
        self.where = f"show it with `tensorboard --logdir {shlex.quote(str(folder))}`"

    def event(self, event: JournalEvent) -> None:
        """Write a text that the run's model made, for TensorBoard."""
        if isinstance(event, events.Sampled):
            self._text(f"samples/{event.prompt[:40]}", f"{event.prompt}\n\n{event.text}", event.step, event.time)

    def alert(self, alert: Alert) -> None:
        """Write an alert on the run as a text, for TensorBoard."""
        self._text(f"alerts/{alert.kind}", f"{alert.title}: {alert.text}", alert.step, alert.time)

    def _text(self, tag: str, text: str, step: int, time: float) -> None:
        """Write a text of the run under its tag, as TensorBoard's plug-in for texts reads it."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        quoted = "    " + text.replace("\n", "\n    ")  # shown as it is: it is read as Markdown
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[quoted.encode()])
        self._add_values(self._texts, [Summary.Value(tag=tag, metadata=metadata, tensor=tensor)], step, time)

    def steps(self, rows: Sequence[Numbers]) -> None:
        """Write the numbers and histograms of committed steps by their names; one that comes again removes for
        TensorBoard what the files have from it on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for row in rows:
            step = int(row["step"])  # type: ignore[arg-type]
            if step < self._next or not self._next:
                self._curves.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
            self._next = step + 1
            self._add_values(self._curves, [self._value(name, x) for name, x in row.items() if name != "step"], step)

    def _add_values(self, writer: Any, values: list[Any], step: int, time: float | None = None) -> None:
        """Write values of one step of the run into a file of TensorBoard."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer.add_event(Event(step=step, wall_time=time or _now(), summary=Summary(value=values)))

    def _value(self, name: str, value: float | list[int]) -> Any:
        """Return TensorBoard's value of a metric: a number, or a histogram."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if isinstance(value, list):
            return _histogram(name, value)
        if (found := self._values.get(name)) is None:
            found = self._values[name] = Summary.Value(tag=name)
        found.simple_value = float(value)
        return found

    def flush(self) -> None:
        """Store the curves and texts of the run for TensorBoard on disk."""
        self._curves.flush()
        self._texts.flush()

    def close(self, status: int | None) -> None:
        """Close the files of TensorBoard, which know no end of a run."""
        self._curves.close()
        self._texts.close()


def _now() -> float:
    """Return the time that TensorBoard shows beside a step: as it is written."""
    import time

    return time.time()


def _histogram(name: str, value: list[int]) -> Any:
    """Make TensorBoard's histogram of a metric, with a bucket for each of a list's numbers."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    count, total = sum(value), sum(n * x for n, x in enumerate(value))
    squares, edges = sum(n * n * x for n, x in enumerate(value)), range(1, len(value) + 1)
    shape = {"min": 0, "max": len(value), "num": count, "sum": total, "sum_squares": squares}
    return Summary.Value(tag=name, histo=HistogramProto(**shape, bucket_limit=edges, bucket=value))
