"""Answers of workers to the driver's calls: one dataclass each, which the worker returns and the driver reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from platform.boundary import schema
from platform.boundary.schema import Count, OneOf, Real, Span
from platform.checkpoint.storage.report import FileReport


@dataclass(frozen=True)
class Proof:
    """Environment of a process, equal in all processes of a sound run except for `node`, the host's name.

    sees      run.dir, checkpoint.url (if the run saves) and checkpoint.resume (if it names a checkpoint) -> hash of the
              file read there, or why it cannot be read
    code      `platform` and the user's modules -> hash of their source files
    versions  Python, CUDA and libraries -> version
    """

    node: str
    sees: dict[str, str]
    code: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True)
class Joined:
    """Place of a worker in the generation that it has joined."""

    rank: Count
    coordinates: dict[str, Count]
    pid: Count
    node: str


@dataclass(frozen=True)
class Built:
    """Size of a worker's model, and its device: its name, and its `memory` in bytes, None on CPU, where workers share
    that of the host."""

    parameters: Count
    device: str
    memory: Count | None


class SectionSpan(NamedTuple):
    """Stay in a clock section: seconds since the step's barrier."""

    section: str
    start: float
    end: float


class SlowRank(NamedTuple):
    """Rank whose own work takes `ratio` times the median of its stage."""

    rank: Count
    ratio: float


class Damage(NamedTuple):
    """Tensor of a rank that is not what its replicas hold."""

    rank: Count
    tensor: str


class Dispute(NamedTuple):
    """Tensor that replicas hold differently, when nothing tells which of them are right."""

    ranks: list[Count]
    tensor: str


@dataclass(frozen=True)
class Differences:
    """Outcome of a comparison of replicas before an update; false if all agree."""

    damaged: list[Damage] = field(default_factory=list)
    undecided: list[Dispute] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.damaged or self.undecided)


@dataclass(frozen=True)
class Taken:
    """Acknowledgement of a step by a rank other than 0."""

    step: Count
    timeline: list[SectionSpan] = field(default_factory=list)


@dataclass
class StepReport:
    """Report of a step: a rank's own, and combined by `platform.train.step.step_report` that of all ranks, by rank 0.

    If `skipped`, nothing was updated: the loss or the gradient norm is not finite, the loss is too high, or replicas
    differ. `seconds`: by clock section; `comm_bytes`: by collective.
    """

    step: Count
    loss: Real
    grad_norm: Real
    lr: Real
    skipped: bool
    tokens: Count  # of the run so far
    samples: tuple[Count, Count]  # the first of this step, and the first of the next one
    step_seconds: float
    seconds: dict[str, float]
    comm_bytes: dict[str, Count]
    peak_memory_bytes: Count
    world_size: Annotated[int, Span(1, 1 << 53)]
    slow: list[SlowRank]
    differences: Differences = field(default_factory=Differences)
    timeline: list[SectionSpan] = field(default_factory=list)  # empty unless monitor.timeline is set


@dataclass(frozen=True)
class Copied:
    """Copy of a rank's share of the state in host memory, ready to be written. `tensors`: name -> global shape, on rank
    0 alone; `values`: the optimizer's numbers, {} on a rank without parameters."""

    tensors: dict[str, list[Count]]
    values: dict[str, float]


@dataclass(frozen=True)
class Unwritten:
    """Reason why the storage did not take a rank's share of a checkpoint, which is no failure of the worker."""

    error: str


@dataclass(frozen=True)
class Unrestored:
    """Reason why a checkpoint was not restored; `fault`: who or what is to blame for it."""

    fault: Annotated[str, OneOf(("corrupt", "refused", "failed"), "fault")]
    reason: str


_ANSWERS: dict[str, Any] = {
    "prove": Proof,
    "form": Joined,
    "build": Built,
    "step": Taken,
    "evaluate": Real,
    "sample": str,
    "snapshot": Copied,
    "written": FileReport | Unwritten | None,
    "restore": Unrestored | None,
}


def read(method: str, rank: int, value: object) -> Any:
    """Read the answer of `rank` to a call of `method`, plain data, as what its worker returned. Raises Malformed."""
    return schema.read(StepReport if method == "step" and rank == 0 else _ANSWERS.get(method, Any), value)
