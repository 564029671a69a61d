"""An extension that makes one process of a run ill at one moment: `extend=[tests.doubles.ailing]`, with
`AILING="WHO:HOW:STEP"` in the environment. WHO: `driver`, or the number of a worker; HOW: a function below."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from platform.boundary.local_files import LocalStorage
from platform.cluster.control import controller
from platform.data.corpus import Corpus
from platform.monitor.metrics import MetricsLog
from platform.train.stage_passes import StagePasses
from platform.train.trainer import Trainer
from platform.train.worker import Worker

LONG, LAZY = 1000.0, 0.4  # seconds


def before(owner: Any, name: str, strike: Callable[[], None]) -> None:
    """Let `strike` happen before each call of a method or function; of a storage's, if it is about a checkpoint."""
    real = getattr(owner, name)

    @wraps(real)
    def struck(*args: Any, **more: Any) -> Any:
        if owner is not LocalStorage or args[1].startswith("step-"):
            strike()
        return real(*args, **more)

    setattr(owner, name, struck)


def at(step: int, strike: Callable[[], None]) -> Callable[[], None]:
    """Return `strike` for the calls from number `step` on."""
    seen = [0]

    def count() -> None:
        seen[0] += 1
        if seen[0] >= step:
            strike()

    return count


def toil() -> None:
    """Compute for long."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        sum(range(1000))


def lag() -> None:
    """Compute for a moment."""
    end = time.monotonic() + LAZY
    while time.monotonic() < end:
        sum(range(1000))


def no_memory() -> None:
    raise MemoryError("can't allocate memory: you tried to allocate 1 TB")


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrong() -> None:
    raise KeyError("a mistake in the driver")


HOW = {  # name -> where it strikes, and what
    "memory": (Trainer, "_run_forward_backward", no_memory),
    "toil": (Trainer, "_run_forward_backward", toil),
    "lag": (StagePasses, "run_chunk", lag),
    "lag in a step": (Trainer, "_run_forward_backward", lag),
    "lag between steps": (Worker, "_move_timeline_into_profile", lambda: time.sleep(LAZY)),
    "lag before a step": (Worker, "step", lambda: time.sleep(LAZY)),
    "sleep": (Trainer, "_run_forward_backward", lambda: time.sleep(LONG)),
    "data": (Corpus, "batch", lambda: time.sleep(LONG)),
    "lazy data": (Corpus, "batch", lambda: time.sleep(LAZY)),
    "full": (LocalStorage, "write", full),
    "slow disk": (LocalStorage, "write", lambda: time.sleep(LONG)),
    "error": (controller, "build_metrics_row", wrong),
    "dead disk": (MetricsLog, "write_row", lambda: time.sleep(LONG)),
}


def fall_ill() -> None:
    who, how, step = os.environ["AILING"].split(":")
    name = multiprocessing.current_process().name.replace("MainProcess", "driver").replace("worker", "")
    if who == name and how == "late":
        time.sleep(LONG)  # while it is imported: this worker is never there
    elif who in (name, "all"):
        owner, method, strike = HOW[how]
        before(owner, method, at(int(step), strike))


if "AILING" in os.environ:
    fall_ill()
