"""Fault injection by `elastic.faults`, for demonstrations and tests of recovery."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from platform.config.run_rules import FAULT

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integer type as wide


class Injected(RuntimeError):
    """Signals a failure of a worker that was injected on purpose, by a fault of kind `raise`."""


@dataclass(frozen=True)
class Fault:
    """Fault to be injected in the worker at `rank`, in training step `step` (from 1), on first entering clock section
    `section`; "" = at once."""

    step: int
    kind: str  # kill | stop | raise | lock | gil | nan | flip
    rank: int
    section: str = ""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse an entry of elastic.faults, STEP:KIND:RANK[:SECTION]. Raises ValueError."""
        if not (match := FAULT.fullmatch(text)):
            raise ValueError(text)
        return cls(int(match["step"]), match["kind"], int(match["rank"]), match["section"] or "")

    def __str__(self) -> str:
        """Format the fault as an entry of elastic.faults."""
        return f"{self.step}:{self.kind}:{self.rank}" + (f":{self.section}" if self.section else "")


class Faults:
    """Faults of elastic.faults that are still to be injected in a run, kept by its driver: each strikes once, even if
    its step is retried. `texts`: the entries."""

    def __init__(self, texts: Sequence[str]):
        """Parse the entries of elastic.faults, STEP:KIND:RANK[:SECTION]: failures to be injected into workers."""
        self._left = [Fault.parse(text) for text in texts]

    def take_due(self, step: int, world_size: int) -> list[Fault]:
        """Take the faults of training step `step` off the list and return them; drop faults of earlier steps, which
        struck under another driver. A fault of a rank beyond the world strikes the last rank."""
        due = [fault for fault in self._left if fault.step == step]
        self._left = [fault for fault in self._left if fault.step > step]
        return [Fault(f.step, f.kind, min(f.rank, world_size - 1), f.section) for f in due]


def inject_failure(kind: str) -> None:
    """Fail this worker process on purpose, for a test of recovery. `kind`: SIGKILL (`kill`), SIGSTOP (`stop`), an
    exception (`raise`), a deadlock on its own lock (`lock`), or holding the interpreter's lock for ever (`gil`)."""
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise Injected("injected by elastic.faults")
        case "lock":
            held = threading.Lock()
            held.acquire()
            held.acquire()
        case "gil":
            ctypes.PyDLL(None).sleep(1 << 30)
        case _:
            raise AssertionError(kind)


def arm_fault(fault: Fault) -> Callable[[str], None]:
    """Return a callback for `SectionClock.entered` that injects `fault` into this worker once, when a training step
    enters the fault's clock section."""
    struck = False

    def inject_once(name: str) -> None:
        """Fail this worker on purpose, once, when its training step enters the fault's clock section `name`."""
        nonlocal struck
        if not struck and fault.section in ("", name):
            struck = True
            inject_failure(fault.kind)

    return inject_once


@torch.no_grad()
def flip_bit(weights: Mapping[str, Tensor]) -> None:
    """Flip one bit of this rank's first weight block in `weights` (name -> block), as silent memory corruption."""
    w = next(w for w in weights.values() if w.numel()).detach()
    words = w.view(-1).view(WORDS[w.element_size()])
    words[len(words) // 2] ^= 1 << {1: 6, 2: 6, 4: 22, 8: 51}[w.element_size()]  # the mantissa's highest
