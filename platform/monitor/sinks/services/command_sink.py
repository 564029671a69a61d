"""A command of the user's that each alert starts, with the alert as JSON at its input."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from dataclasses import asdict

from platform.monitor.sinks.services.alerts import Alert
from platform.monitor.sinks.services.sink import Sink, SinkRun

SECONDS = 60.0  # that a command may take


class CommandSink(Sink):
    """Command of monitor.alert_command. It runs in the run directory, one alert after the other."""

    takes_steps = False

    def __init__(self, run: SinkRun):
        """Prepare to start the run's command for alerts; nothing is started yet."""
        self._of = run
        self.where = "monitor.alert_command gets each alert"

    def alert(self, alert: Alert) -> None:
        """Start the command with an alert on the run, and wait for it; what it prints is in the log."""
        text = json.dumps({"run": str(self._of.directory), **asdict(alert)}) + "\n"
        command, place = ["/bin/sh", "-c", self._of.monitor["alert_command"]], self._of.directory
        with suppress(subprocess.TimeoutExpired):  # the next alert gets its own
            subprocess.run(command, input=text, text=True, timeout=SECONDS, cwd=place)
