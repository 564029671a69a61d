"""Work of a training step of a plan, for any hardware: of each chunk's passes, and of each stage's update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from platform.costs.work import Part, chunk_work
from platform.plan.communication.planned import Collective
from platform.plan.core.chunks import RecordableModel
from platform.plan.core.plan import Plan
from platform.plan.core.step_collectives import BucketCollective, bucket_collectives, transfer
from platform.plan.language.ops import Parameter
from platform.plan.schedule.table import Schedule

EVEN = ("none", "1f1b", "interleaved", "gpipe")  # schedules whose makespan is known without simulating them


@dataclass(frozen=True)
class Execution:
    """Settings beside a plan on which the time of a step depends: the kind of `schedule` and, for one that is not among
    EVEN, its `table`; `overlap`: True if collectives of parameters go on beside computation; `moments`: numbers of
    optimizer state per parameter; `dropout`: the model's rate, and `fused_dropout` if attention's kernel draws its
    masks. Where another system runs the plan: `gradient_bytes` per element that ranks sum, 0 as the plan says;
    `kept_whole`: True if each rank keeps all of the inputs that it recomputes from; `repeats_all`: True if it computes
    a recomputed layer's last product again, whose result no gradient needs; `by_weight`: True if under ZeRO-3 it waits
    for a gather of each weight, in recomputation too, copies what each rank sent by a kernel of its own, and sums whole
    gradients; `stands_by`: True if a stage computes nothing while it sends and receives; `narrow`: the precision of 8
    bits in which it computes the products of layers' weights, "" for the plan's."""

    schedule: str = "none"
    table: Schedule | None = None
    overlap: bool = True
    moments: int = 2
    dropout: float = 0.0
    fused_dropout: bool = False
    gradient_bytes: int = 0
    kept_whole: bool = False
    repeats_all: bool = False
    by_weight: bool = False
    stands_by: bool = False
    narrow: str = ""


Launches = Mapping[Collective, float]  # collective -> how often it is launched


@dataclass(frozen=True)
class PassWork:
    """Work of one pass of a chunk over a microbatch: its `parts`, each with how often it occurs; the collectives of
    parameters that it `hides`, and the gathers that it `fetches` weights by, one by one; and the collectives by which
    it `receives` activations of another stage."""

    parts: tuple[tuple[Part, int], ...]
    hides: Launches
    fetches: Launches
    receives: tuple[Collective, ...]


@dataclass(frozen=True)
class StageWork:
    """Work of a stage once a step: the collectives that sum (`reduces`) the gradients of its `buckets`, and gather
    `updated` parameters; bytes that a `tied` parameter's stages send each other; elements of its `masters`."""

    reduces: Launches
    buckets: int
    updated: Launches
    tied: float
    masters: int


@dataclass(frozen=True)
class StepWork:
    """Work of a training step: by chunk its `stages`, and its passes `forward` and `backward`; by stage what it does
    `once` a step."""

    plan: Plan
    execution: Execution
    stages: tuple[int, ...]
    forward: tuple[PassWork, ...]
    backward: tuple[PassWork, ...]
    once: tuple[StageWork, ...]


def step_work(plan: Plan, model: RecordableModel, execution: Execution) -> StepWork:
    """Return the work of a training step of a plan. `model`: the plan's."""
    whole, everything = execution.kept_whole, execution.repeats_all
    found = chunk_work(plan, model, execution.dropout, execution.fused_dropout, not whole, everything)
    stages = tuple(chunk.stage for chunk in plan.chunks)
    buckets = {stage: list(bucket_collectives(plan.at(stage))) for stage in dict.fromkeys(stages)}
    same: dict[Part, Part] = {}
    alike: dict[frozenset, tuple[tuple[Part, int], ...]] = {}

    def passes(phase: str) -> Iterator[PassWork]:
        """Yield the passes of all chunks in one phase; equal parts are one object."""
        for number, work in enumerate(found):
            counted: Counter[Part] = getattr(work, phase)
            key = frozenset(counted.items())
            if key not in alike:
                alike[key] = tuple((same.setdefault(part, part), n) for part, n in counted.items() if n)
            stage = stages[number]
            moved = _moved(plan, buckets[stage], phase, stages.count(stage), execution.by_weight)
            yield PassWork(alike[key], *moved, tuple(_receives(plan, number, phase)))

    return StepWork(
        plan,
        execution,
        stages,
        tuple(passes("forward")),
        tuple(passes("backward")),
        tuple(_of_stage(plan, stage, buckets[stage], execution.gradient_bytes) for stage in sorted(buckets)),
    )


def _moved(
    plan: Plan, buckets: list[BucketCollective], phase: str, chunks: int, by_weight: bool
) -> tuple[Launches, Launches]:
    """Return the collectives of parameters (ZeRO-2 and 3) that a pass of one of a stage's `chunks` hides, and the
    gathers for which it waits; `by_weight` as in Execution."""
    hides, fetches = Counter[Collective](), Counter[Collective]()
    again = phase == "backward" and plan.recompute.kind == "full"
    for found in buckets:
        c, times = found.collective, found.launches / plan.microbatches / chunks
        if c.phase == phase and by_weight and c.op == "all_gather":
            weights = _weights(plan, found)
            gathers = 2 * weights - 1 if again else weights  # a layer's last weight is there still from recomputation
            fetches[replace(c, elements=c.elements // weights)] += gathers * times  # type: ignore[assignment]
        elif c.phase == phase:
            hides[replace(c, op="all_reduce") if by_weight else c] += times  # type: ignore[assignment]
    return hides, fetches


def _weights(plan: Plan, found: BucketCollective) -> int:
    """Return how many weights a collective of parameters moves; weights that one product joins count once."""
    names = {p.name for p in found.parameters}
    inputs = (o.operation.inputs for o in plan.operations.values() if o.groups)
    return max(1, sum(any(isinstance(t, Parameter) and t.name in names for t in each) for each in inputs))


def _receives(plan: Plan, number: int, phase: str) -> Iterator[Collective]:
    """Yield the collectives that bring chunk `number` what another stage sends it in a pass."""
    chunks = plan.chunks
    first, second = (number - 1, number) if phase == "forward" else (number, number + 1)
    if first >= 0 and second < len(chunks) and chunks[first].stage != chunks[second].stage:
        for _, spec in chunks[first].sends:
            for c, _ in transfer(plan, spec, chunks[first].stage, chunks[second].stage):
                if c.phase == phase:
                    yield c


def _of_stage(plan: Plan, stage: int, buckets: list[BucketCollective], gradient_bytes: int) -> StageWork:
    """Return what a stage does once a step, after its passes; `gradient_bytes` as in Execution."""
    here, at = plan.at(stage), {**plan.mesh.coordinates(0), "stage": stage}
    size = gradient_bytes or plan.itemsize["accumulate"]
    shares = {"reduce": size / plan.itemsize["accumulate"], "update": 1.0}
    moved: dict[str, dict[Collective, float]] = {phase: {} for phase in shares}
    for c, launches in ((found.collective, found.launches) for found in buckets if found.collective.phase in moved):
        moved[c.phase][c] = moved[c.phase].get(c, 0.0) + launches * shares[c.phase]
    shared = [(name, stages) for name, stages in plan.tied.items() if stage in stages]
    tied = sum(2 * (len(stages) - 1) * here.bucket_of[name].shard_elements * size for name, stages in shared)
    return StageWork(moved["reduce"], len(here.buckets), moved["update"], tied, here.masters_at(at))
