"""The process beside the driver that sends a run's numbers to one service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from platform.boundary.redaction import redact
from platform.config.fields import Config
from platform.monitor.sinks.sink_table import SINKS

ROOT = Path(__file__).parents[3]
END_SECONDS = 60.0  # that the end of a run waits for its services, all together


class SinkProcess:
    """Process that sends a run's numbers to the service `name`, as `python -m platform.monitor.sinks --follow`. It
    hears of the run's end by its input; should the driver die, it ends by itself once all is sent."""

    def __init__(self, name: str, config: Config, run_dir: Path):
        """Start the process for a service of the run in `run_dir`; what its package prints is in
        logs/sink-NAME.log there."""
        self.title, self._log = SINKS[name].title, run_dir / "logs" / f"sink-{name}.log"
        self._said: deque[str] = deque()
        self._ended = False  # by itself, which is said once
        self._log.parent.mkdir(0o700, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "platform.monitor.sinks", "--follow", str(run_dir), name],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C is for the driver
            )
        self._tell({"config": redact(config.to_dict()), "command": config.monitor.alert_command, "driver": os.getpid()})
        self._reader = threading.Thread(target=self._listen, name=f"sink-{name}", daemon=True)
        self._reader.start()

    def _tell(self, message: Any) -> None:
        """Send a message to the service's process, as a line of JSON; nothing if it has died."""
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Take note of the lines that the service's process has for the run's user, in a thread, until it ends."""
        assert self._process.stdout
        for line in self._process.stdout:
            self._said.append(line.rstrip("\n"))

    def said(self) -> list[str]:
        """Return the new lines that the service has for the run's user."""
        lines = []
        while self._said:
            lines.append(f"{self.title}: {self._said.popleft()}")
        if not self._ended and self._process.poll() not in (None, 0) and not self._reader.is_alive():
            self._ended = True
            lines.append(
                f"{self.title}: stopped (see {self._log}); the run's own files have every step, and "
                "`python -m platform.monitor.sinks RUN_DIR` sends them later"
            )
        return lines

    def close(self, status: int) -> None:
        """Say to the service's process with which exit status the run ends, without waiting for it."""
        self._tell({"status": status})
        with suppress(OSError):
            if self._process.stdin:
                self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait up to so long until the service has all of the run; after that its process goes on alone."""
        try:
            self._process.wait(max(0.0, seconds))
            self._reader.join(1.0)
        except subprocess.TimeoutExpired:
            self._said.append(f"is still being sent; process {self._process.pid} goes on with it")
