"""Replies of workers to the driver's calls: one dataclass each, which the worker returns and the driver reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from platform.boundary import schema
from platform.boundary.schema import Count, OneOf, Real, Span
from platform.checkpoint.storage.file_report import FileReport
from platform.train.protocol.asked import Scored, Written


@dataclass(frozen=True)
class Proof:
    """Environment of a worker or of the driver, equal in all processes of a sound run except for `node`, the host's
    name.

    sees      run.dir, checkpoint.url (if the run saves) and checkpoint.resume (if it names a checkpoint) -> hash of the
              file read there, or why it cannot be read
    code      `platform` and the user's modules -> hash of their source files
    versions  Python, CUDA and libraries -> version
    lacks     train.compile (if it is on) and train.attention_kernel (if it names one) -> what keeps a worker from doing
              as they say, in a line
    """

    node: str
    sees: dict[str, str]
    code: dict[str, str]
    versions: dict[str, str]
    lacks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """Findings of the doctor on a worker. `readings`: check -> measurement; `errors`: check -> why there is none;
    `facts`: name -> text, equal on all workers of a sound cluster."""

    readings: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)


class Timing(NamedTuple):
    """Time that a worker has measured: what (`kind`) of which `sizes`, as `platform.train.health.rates` has them."""

    kind: str
    sizes: list[float]
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Measurements of a worker for a description of the hardware: its `device`, that one's `memory` in bytes (0 on a
    CPU) and number of `processors`, and `timings`."""

    device: str
    memory: float
    processors: Count
    timings: list[Timing]


@dataclass(frozen=True)
class Joined:
    """Place of a worker in the generation that it has joined: rank, mesh coordinates (axis -> index), and the
    process."""

    rank: Count
    coordinates: dict[str, Count]
    pid: Count
    node: str


@dataclass(frozen=True)
class Built:
    """Size of the model built on a worker, in parameters, and its device: the name, and `memory` in bytes, None on CPU,
    where workers share the host's. `moments`: the names of the optimizer's. `uncompiled`: what kept the crew from
    compiling, in a line, where train.compile=auto would have; "" otherwise. `shared`: the ranks of each node share the
    memory of their snapshots, the same on all."""

    parameters: Count
    device: str
    memory: Count | None
    moments: list[str]
    uncompiled: str = ""
    shared: bool = False


class SectionSpan(NamedTuple):
    """Span of time that a rank spent in a clock section or a span of the model in a training step, from `start` to
    `end`: seconds since the step's barrier."""

    section: str
    start: float
    end: float


class CollectiveSpan(NamedTuple):
    """Collective of a training step on one rank: what it is called, its operation and axes (joined by "+"), the bytes
    that its group moves, and its `start`, when the rank began to wait for it (`wanted`), and its `end`: seconds since
    the step's barrier."""

    name: str
    op: str
    axes: str
    bytes: Count
    start: float
    wanted: float
    end: float


@dataclass(frozen=True)
class RankTimeline:
    """Record of a rank's training step, empty unless monitor.timeline is set: the sections of its clock, ordered by
    end; the spans of the model that it computed, where weights are gathered span by span (ZeRO-3); its collectives, in
    order of launch."""

    sections: list[SectionSpan] = field(default_factory=list)
    spans: list[SectionSpan] = field(default_factory=list)
    collectives: list[CollectiveSpan] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if a rank's timeline of a training step has records: all lie in clock sections."""
        return bool(self.sections)


class SlowRank(NamedTuple):
    """Rank whose own work in a training step takes `ratio` times the median of its pipeline stage, mostly more of it in
    the section `section`."""

    rank: Count
    ratio: float
    section: str = ""


# Of a worker: processors that its process keeps busy, and the share of time in which its GPU is at work; bytes that are
# resident, and in use on its GPU; watts; degrees Celsius. `platform.train.health.gauges` reads them.
GAUGES = ("cpu", "gpu", "memory", "device_memory", "power", "temperature")


class RankRange(NamedTuple):
    """Range of a number over the ranks of a step: the least, the median and the most, and the ranks that have the
    least and the most."""

    least: Real
    median: Real
    most: Real
    least_rank: Count
    most_rank: Count


class Damage(NamedTuple):
    """Tensor (KIND.PARAMETER) of a rank that is not what its replicas hold, and so was corrupted in memory."""

    rank: Count
    tensor: str


class Dispute(NamedTuple):
    """Tensor (KIND.PARAMETER) that replicas, at these ranks, hold differently, when it is unknown which of them are
    right."""

    ranks: list[Count]
    tensor: str


@dataclass(frozen=True)
class Differences:
    """Outcome of a comparison of replicas' weights and optimizer state before an update; false if all agree."""

    damaged: list[Damage] = field(default_factory=list)
    undecided: list[Dispute] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return True if replicas of weights or optimizer state differ on any ranks."""
        return bool(self.damaged or self.undecided)


@dataclass(frozen=True)
class Taken:
    """Acknowledgement of a training step by a rank other than 0; the report of rank 0 covers all ranks."""

    step: Count
    timeline: RankTimeline = field(default_factory=RankTimeline)


@dataclass
class StepReport:
    """Report of a training step: a rank's own, or the report of all ranks that `platform.train.step.step_report`
    combines on rank 0.

    If `skipped`, nothing was updated: the loss or the gradient norm is not finite, the loss is too high, or replicas
    differ. `overflowed`: True if the loss scale was too large, and has fallen. `seconds`: seconds by clock section;
    `waits`: a rank's own of waiting for collectives, by their axes; `parts`: combined, of the parts of the step
    (`platform.costs.parts`) on the stage that computes longest; `comm_bytes`: bytes by collective. `layer_gradients`,
    `layer_activations`: sizes by layer, where monitor.layers asks for them: a rank's own sums of squares; combined, the
    norm of the gradient, and the root mean square of the layer's output. `routed`: tokens that chose each expert, in
    all layers, and then tokens that each took; [] without experts. `gauges`: a rank's own, by GAUGES; `workers`:
    combined, the ranges of gauges and of bandwidths by tier, "bandwidth/TIER".
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
    overflowed: bool = False
    loss_scale: Real | None = None  # of this step; None unless it computed in fp16
    differences: Differences = field(default_factory=Differences)
    timeline: RankTimeline = field(default_factory=RankTimeline)
    layer_gradients: dict[str, Real] = field(default_factory=dict)
    layer_activations: dict[str, Real] = field(default_factory=dict)
    routed: list[Count] = field(default_factory=list)
    waits: dict[str, Real] = field(default_factory=dict)
    parts: dict[str, Real] = field(default_factory=dict)
    gauges: dict[str, Real] = field(default_factory=dict)
    workers: dict[str, RankRange] = field(default_factory=dict)
    held: Count | None = None  # the newest step whose state all ranks hold in memory; None if there is none


@dataclass(frozen=True)
class Copied:
    """Answer of a rank that has copied its share of the training state to host memory, ready to be written. `tensors`:
    name -> global shape, on rank 0 alone; `values`: all that is no tensor, from `State.values`."""

    tensors: dict[str, list[Count]]
    values: dict[str, Any]


@dataclass(frozen=True)
class PartWritten:
    """Part of a run's profile that a rank has written: its number of `events`, how many were `cut`, and its bytes; or
    `why` there is none."""

    events: Count
    cut: Count
    bytes: Count
    why: str = ""


@dataclass(frozen=True)
class Unwritten:
    """Reason why the checkpoint storage did not take a rank's share of a checkpoint, which is no failure of the
    worker."""

    error: str


@dataclass(frozen=True)
class Unrestored:
    """Reason why a checkpoint was not restored. `fault`: its data is corrupt, this run refused it, or the storage
    failed."""

    fault: Annotated[str, OneOf(("corrupt", "refused", "failed"), "fault")]
    reason: str


_REPLIES: dict[str, Any] = {
    "prove": Proof,
    "read_clock": float,
    "examine": Findings,
    "examine_connection": Findings,
    "measure_kernels": Rates,
    "measure_collectives": Rates,
    "form": Joined,
    "build": Built,
    "step": Taken,
    "evaluate": dict[str, Real],
    "snapshot": Copied,
    "written": FileReport | Unwritten | None,
    "restore": Unrestored | None,
    "begin": Unrestored | None,
    "rehearse": str,
    "begin_profile": str,
    "end_profile": PartWritten | None,
    "continue_texts": list[Written],
    "score_texts": list[Scored],
}


def read(method: str, rank: int, value: object) -> Any:
    """Read a worker's reply to the driver's call of `method`, from `rank`, as its declared type. Raises Malformed."""
    return schema.read(StepReport if method == "step" and rank == 0 else _REPLIES.get(method, Any), value)
