"""Parts of `benchmarks/gpu_day.py` that measure nothing, each with another end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_day import Place

Figures = Iterator[dict[str, object]]


def measure_all(low: float, high: float, place: Place) -> Figures:
    print("a line that is not a figure")
    yield {"low": low}
    yield {"high": high, "device": place.device, "listed": [1, 2]}


def raise_late(place: Place) -> Figures:
    yield {"low": 1.0}
    raise ValueError("no such kernel\nof many lines")


def hang(pids: str, place: Place) -> Figures:
    """Hang after a first figure, beside a child that would live on; `pids`: the file that gets its number."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(str(child.pid))
    yield {"low": 1.0}
    time.sleep(600)


def leave_child(pids: str, place: Place) -> Figures:
    """End with a child that would live on."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(pids).write_text(str(child.pid))
    yield {"low": 1.0}


def crash(place: Place) -> Figures:
    yield {}
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(place: Place) -> Figures:
    yield {}
    raise SystemExit(3)
