"""Who failed, how, and who is to blame."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Member(NamedTuple):
    """A worker process of a crew. Its number is its own for the whole run, and never given again."""

    number: int
    node: str
    pid: int


@dataclass(frozen=True)
class Failure:
    """How a call ended on one member. `rank` None: it had none, as a spare or at its start."""

    member: Member
    kind: str  # died | failed | hung | damaged
    method: str  # the call, as messages name it
    cause: str  # the traceback; or how the process ended, or where it hangs
    rank: int | None = None
    name: str = ""  # rank3[data1 t1]
    coordinates: Mapping[str, int] = field(default_factory=dict)
    log: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.kind} in {self.method}: {self.cause.strip().rpartition(chr(10))[2]}"

    @property
    def innocence(self) -> int:
        """Lower is guiltier: a process that is dead or hangs, an error of its own, an error because a peer is gone."""
        if self.kind != "failed":
            return 0
        return 2 if re.search(r"DistBackendError|DistNetworkError|DistStoreError|/gloo/|by peer", self.cause) else 1


class WorkerFailed(Exception):
    """A call failed. `failures`: all that are known so far, the likeliest culprit first."""

    def __init__(self, failures: Sequence[Failure]):
        self.failures = sorted(failures, key=lambda failure: failure.innocence)
        super().__init__(str(self.culprit))

    @property
    def culprit(self) -> Failure:
        return self.failures[0]


class GaveUp(Exception):
    """What the run cannot survive, in one line."""


class NoPlaces(Exception):
    """The cluster had no place for the workers in the time that there was to wait: how many, and how many there were.
    The same command may find them later."""


class Reform(Exception):
    """A new generation is wanted, though nothing failed: the reason."""
