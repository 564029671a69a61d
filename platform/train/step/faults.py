"""Faults on purpose: what `elastic.faults` injects, for demonstrations and tests of recovery."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from platform.config.checks import FAULT

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as elements of so many bytes


class Injected(RuntimeError):
    """An exception that was asked for."""


@dataclass(frozen=True)
class Fault:
    """What `rank` does in `step` (from 1), where it enters `section` of the step for the first time; "" = at once."""

    step: int
    kind: str  # kill | stop | raise | lock | gil | nan | flip
    rank: int
    section: str = ""

    @classmethod
    def parse(cls, text: str) -> Fault:
        """STEP:KIND:RANK[:SECTION]. Raises ValueError."""
        if not (match := FAULT.fullmatch(text)):
            raise ValueError(text)
        return cls(int(match["step"]), match["kind"], int(match["rank"]), match["section"] or "")

    def __str__(self) -> str:
        return f"{self.step}:{self.kind}:{self.rank}" + (f":{self.section}" if self.section else "")


class Faults:
    """Those of a run that are still to come: each strikes once, also where its step is done again."""

    def __init__(self, texts: Sequence[str]):
        self._left = [Fault.parse(text) for text in texts]

    def take(self, step: int, world_size: int) -> list[Fault]:
        """The faults of this step, which then count as struck; those of steps before it, which were another driver's,
        too. Those of ranks that are not there strike the last one."""
        due = [fault for fault in self._left if fault.step == step]
        self._left = [fault for fault in self._left if fault.step > step]
        return [Fault(f.step, f.kind, min(f.rank, world_size - 1), f.section) for f in due]


def strike(kind: str) -> None:
    """Does it to this process: SIGKILL, SIGSTOP, an exception, a lock that nobody gives back, the interpreter's own
    lock kept for ever."""
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


def armed(fault: Fault) -> Callable[[str], None]:
    """A `Clock.entered` that strikes this process at the first entry of the fault's section."""
    struck = False

    def entered(name: str) -> None:
        nonlocal struck
        if not struck and fault.section in ("", name):
            struck = True
            strike(fault.kind)

    return entered


@torch.no_grad()
def flip(weights: Mapping[str, Tensor]) -> None:
    """Flip one bit, of the first weight that this rank has: silent corruption of memory."""
    w = next(w for w in weights.values() if w.numel()).detach()
    words = w.view(-1).view(WORDS[w.element_size()])
    words[len(words) // 2] ^= 1 << {2: 6, 4: 22, 8: 51}[w.element_size()]  # the highest bit of the mantissa
