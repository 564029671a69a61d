"""Failures: which member failed, how, and which one is to blame; exceptions that end a call, a generation or the
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from platform.boundary.refusals import ConfigError


class Member(NamedTuple):
    """Worker process of a crew. Its number is unique in the run and never reused. `tiers`: cluster tiers of its node,
    from outer to inner, as NAME=VALUE."""

    number: int
    node: str
    pid: int
    tiers: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """Return the host name of this worker's node, without the Ray node id that may follow it."""
        return self.node.partition("/")[0]


@dataclass(frozen=True)
class Failure:
    """Failure of one call of the driver on one member. `rank` is None if the member had none, as a spare or while
    starting."""

    member: Member
    kind: str  # died | failed | hung | damaged
    method: str  # the call as `format_call` formats it: step(3)
    cause: str  # traceback, or how the process ended, or where it hangs
    rank: int | None = None
    name: str = ""  # rank3[data1 t1]
    coordinates: Mapping[str, int] = field(default_factory=dict)
    log: Path | None = None
    refusal: str = ""  # of a user's mistake, which the call has found: its lines
    of_world: bool = False  # what the call raised is a fault of the world
    seen: Sequence[str] = ()  # what other ranks did meanwhile, by their heartbeats
    stack: Sequence[str] = ()  # where a hung member stood, the innermost frame last
    dump: Path | None = None  # folder in which the workers of a hung call have written where they stood

    def __str__(self) -> str:
        """Format this failure of a worker as a line for the user: its name, node, kind, call and error."""
        host, _, node = self.member.node.partition("/")
        where = f" on {host}" + f" (Ray node {node[:8]})" * bool(node) if host else ""
        return f"{self.name}{where} {self.kind} in {self.method}: {self.cause.strip().rpartition(chr(10))[2]}"

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of the journal's event on this failure of a worker, without the run's own."""
        return {
            "number": self.member.number,
            "rank": self.rank,
            "coordinates": dict(self.coordinates),
            "node": self.member.node,
            "method": self.method,
            "kind": self.kind,
            "cause": self.cause,
            "log": str(self.log) if self.log else None,
            "seen": list(self.seen) or None,
            "stack": list(self.stack) or None,
            "dump": str(self.dump) if self.dump else None,
        }

    @property
    def is_out_of_memory(self) -> bool:
        """Return True if a worker failed as its device had no memory left for a tensor, a kernel or a communicator."""
        from platform.monitor.verdict import evidence  # with the whole monitor, which no plan or refusal needs

        return self.kind == "failed" and evidence.is_out_of_memory(self.cause)

    @property
    def innocence(self) -> int:
        """Rank this failure among the failures of one call by how unlikely it caused the others, the lowest being the
        culprit: 0 = the member died, hung, refused a user's mistake, had no memory left, or holds state that differs
        from its replicas (damaged); 1 = it raised an error of its own; 2 = it raised a communication error, as happens
        when another rank is gone."""
        from platform.monitor.verdict import evidence

        if self.kind != "failed" or self.refusal or self.is_out_of_memory:
            return 0
        return 2 if evidence.blames_others(self.cause) else 1


class WorkerFailed(Exception):
    """Signals that a call of the driver failed on some member. `failures`: all known so far, the likeliest culprit
    first."""

    def __init__(self, failures: Sequence[Failure]):
        """Order the failures of workers in one call, the likeliest culprit first, which the message is about."""
        self.failures = sorted(failures, key=lambda failure: failure.innocence)
        super().__init__(str(self.culprit))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes the same failure of, in another process."""
        return type(self), (self.failures,)

    @property
    def culprit(self) -> Failure:
        """Return the worker's failure that most likely caused the others of the same call."""
        return self.failures[0]

    @property
    def of_world(self) -> bool:
        """Return True if what the culprit has raised is a fault of the world, such as a storage without an answer."""
        return self.culprit.of_world


class GaveUp(Exception):
    """Signals a condition that the run cannot survive; the message is one line. `of_world`: it is a fault of the
    world."""

    def __init__(self, message: str, of_world: bool = False):
        """Construct the exception that ends a run and its crew: a condition, `message`, that they cannot survive."""
        super().__init__(message)
        self.of_world = of_world


class NoPlaces(Exception):
    """Signals that the cluster had too few places for the workers within the wait allowed; the message says how many
    were needed and found. The same command may succeed later."""


class ClusterLost(NoPlaces):
    """Signals that the cluster, in which the run has workers, is of no use to it any more; the message says how that
    was seen."""


class NotThere(ConfigError):
    """Refusal for what the cluster lacks now, and may have later: its head, or places."""


class Reform(Exception):
    """Requests to re-form the mesh although nothing failed; the message is the reason."""
