"""Workers of which some are not sound: `SICK="1:products 2:clock"` in the environment says which, and how. As an
extension, `extend=[tests.doubles.sick_worker]`, it makes those of a run by command such."""

from __future__ import annotations

import errno
import os
import time
from typing import Any

import torch

from platform.runtime.process_groups import ProcessGroups
from platform.train import measurements
from platform.train.worker import Worker

SLOWER, LATE, LAG = 30, 100.0, 0.25  # times, seconds, seconds


def products() -> None:
    """Its products take longer."""
    mm = torch.mm
    torch.mm = lambda *args, **kwargs: [mm(*args, **kwargs) for _ in range(SLOWER)][0]  # type: ignore[assignment]


def wrong() -> None:
    """One number of its products is wrong."""
    mm = torch.mm

    def spoilt(*args: Any, out: torch.Tensor) -> torch.Tensor:
        mm(*args, out=out)[3, 5] += 1
        return out

    torch.mm = spoilt  # type: ignore[assignment]


def storage() -> None:
    """What it writes to storage fails."""

    class Full:
        def write(self, path: str, chunks: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    measurements.open_storage = lambda url: Full()  # type: ignore[assignment, return-value]


def forgetful() -> None:
    """What it reads from storage is not what it wrote."""
    opened = measurements.open_storage

    class Forgetful:
        def __init__(self, url: str):
            self.inner = opened(url)
            self.write, self.delete = self.inner.write, self.inner.delete

        def read(self, path: str) -> bytearray:
            return self.inner.read(path)[:-1] + b"?"

    measurements.open_storage = Forgetful  # type: ignore[assignment]


def clock() -> None:
    """Its clock is ahead."""
    now = time.time
    time.time = lambda: now() + LATE


def link() -> None:
    """What it sends and receives takes longer."""
    launch = ProcessGroups.launch

    def slow(self: ProcessGroups, *args: Any, **kwargs: Any) -> Any:
        time.sleep(LAG)
        return launch(self, *args, **kwargs)

    ProcessGroups.launch = slow  # type: ignore[method-assign]


HOW = {f.__name__: f for f in (products, wrong, storage, forgetful, clock, link)}
_well = Worker.read_clock


def _fall_ill(self: Worker) -> float:
    """The doctor's first question is when it happens."""
    for who, how in (word.split(":") for word in os.environ.get("SICK", "").split()):
        if int(who) == self.number and not hasattr(self, how):
            HOW[how]()
            setattr(self, how, True)
    return _well(self)


class SickWorker(Worker):
    read_clock = _fall_ill


if os.environ.get("SICK_BY_EXTENSION"):
    Worker.read_clock = _fall_ill  # type: ignore[method-assign]
