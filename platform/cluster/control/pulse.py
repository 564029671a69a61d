"""Pulse of a run's driver: a thread that writes live.json every second, from what the driver's main thread leaves to be
read. It is a sign of life by itself, and shows where the driver stands while that waits for a disk or a service."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from platform.boundary.local_files import replace_text
from platform.boundary.redaction import redact_secrets
from platform.cluster.crew.heartbeats import LOOK_SECONDS, CallMonitor
from platform.monitor.journal import LIVE, LiveState
from platform.runtime.progress import thread_frames

PULSE_SECONDS = 1.0  # between two writes


@dataclass
class Pulse(AbstractContextManager["Pulse"]):
    """Thread that writes a run directory's live.json during a context. `own`: returns the driver's own part of it, in
    that thread; the driver sets `outlook`, on its workers, as soon as there are any."""

    directory: Path
    own: Callable[[], LiveState]
    outlook: CallMonitor | None = None

    def __enter__(self) -> Pulse:
        """Start the thread that writes live.json."""
        self._driver, self._ended = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._write_pulse, name="pulse", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, which a storage that does not answer may hold: then it is left behind."""
        self._ended.set()
        self._thread.join(PULSE_SECONDS)

    def _write_pulse(self) -> None:
        """Write live.json every PULSE_SECONDS until the context ends; an error there is no reason for a run to end."""
        while not self._ended.wait(PULSE_SECONDS):
            with suppress(Exception):
                fields = redact_secrets(self.build_live_state().plain_fields())
                text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
                replace_text(self.directory / LIVE, text + "\n")

    def build_live_state(self) -> LiveState:
        """Return the sight of the driver at this moment. Workers are listed while a call lasts long."""
        live, now, clock = self.own(), time.time(), time.monotonic()
        if not self.outlook:
            return replace(live, time=now, stack=thread_frames(self._driver))
        (doing, since), (call, called) = self.outlook.doing, self.outlook.call
        late = bool(call) and clock - called >= LOOK_SECONDS
        workers = self.outlook.list_workers() if late else []
        return replace(
            live,
            time=now,
            doing=doing,
            since=now - (clock - since),
            call=call,
            called=now - (clock - called),
            pending=len(self.outlook.pending) if call else 0,
            workers=workers,
            links=self.outlook.list_links(),
            stack=[] if workers else thread_frames(self._driver),
        )
