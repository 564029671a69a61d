"""Trackio: on this machine, at TRACKIO_SERVER_URL, or in the Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import Any

from platform.boundary.redaction import bare_url
from platform.monitor.sinks.services.alerts import Alert
from platform.monitor.sinks.services.histograms import binned
from platform.monitor.sinks.services.sink import Numbers, Sink, SinkRun


class TrackioSink(Sink):
    """Trackio's run of a run directory, shared by all its processes. Trackio cannot replace a step that it has."""

    replaces = False
    stored_after = 2.0  # its thread writes twice a second

    def __init__(self, run: SinkRun):
        """Start or continue trackio's run, in the project that monitor.project names."""
        import trackio

        monitor = run.monitor
        name = run.state.setdefault("run", f"{run.directory.name}-{secrets.token_hex(2)}")  # a project has each once
        self._run: Any = trackio.init(
            project=monitor["project"],
            name=name,
            group=monitor.get("group") or None,
            config=run.config | {"tags": monitor.get("tags"), "notes": monitor.get("notes")},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # the driver's machine is not where the work is
            auto_log_cpu=False,
        )
        place = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        show = f"show it with `trackio show --project {monitor['project']}`"
        self.where = f"run {name} at {bare_url(place)}" if place else f"run {name}; {show}"

    def alert(self, alert: Alert) -> None:
        """Send an alert by trackio, which shows it and posts it, as TRACKIO_WEBHOOK_URL says."""
        from trackio import AlertLevel

        self._run.alert(alert.title, alert.text, AlertLevel[alert.level], alert.step)

    def steps(self, rows: Sequence[Numbers]) -> None:
        """Log the numbers and histograms of committed steps with trackio."""
        import trackio

        for row in rows:
            named = {name: value for name, value in row.items() if name != "step"}
            shown = {
                name: trackio.Histogram(np_histogram=binned(value, 512)) if isinstance(value, list) else value
                for name, value in named.items()
            }
            self._run.log(shown, step=int(row["step"]))  # type: ignore[arg-type]

    def close(self, status: int | None) -> None:
        """End trackio's run, once all is stored."""
        self._run.finish()
