"""The plan: everything that the driver decides about a run, as data that workers execute and people read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from platform.plan.chunks import Chunk, Model, einsum_flops, record, replicated_axes
from platform.plan.collectives import plan_operation
from platform.plan.cost import label, moved_bytes
from platform.plan.layout import DIMS, Layout, block, padded
from platform.plan.mesh import Mesh
from platform.plan.ops import KEEP, LOSSES, Operation, Parameter, Recompute, Spec
from platform.plan.planned import Collective, PlannedOperation
from platform.plan.planner import Planner
from platform.plan.recorder import Recorder
from platform.plan.rule import Step
from platform.plan.scheme import REGIONS, Scheme

# precision -> bytes per element of each dtype class (`master`: parameters and optimizer state)
ITEMSIZE = {
    "fp64": {"compute": 8, "accumulate": 8, "master": 8},
    "fp32": {"compute": 4, "accumulate": 4, "master": 4},
    "bf16": {"compute": 2, "accumulate": 4, "master": 4},
}
METRICS = 2  # fp64 numbers that are summed over the world once a step: loss and squared gradient norm


class IllegalPlan(ValueError):
    """A plan that cannot be. `violations` has one line each."""

    def __init__(self, violations: Sequence[str]):
        self.violations = list(violations)
        super().__init__("\n".join(self.violations))


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed over `axes` once a step, by the ranks at index 0 of the axes `only`."""

    axes: tuple[str, ...]
    only: tuple[str, ...]
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class Plan:
    """`sizes` are those of one microbatch of all replicas together (batch = microbatch x data), vocab as configured;
    the planner's have vocab padded. `reductions`: parameter name -> axes over which its gradient is summed once a
    step. `homes`: parameter name -> the stages that use it, the first of which owns it; the others of a tied parameter
    hold copies. `scatter_gather`: stages send 1/n of a tensor that n ranks of a stage replicate. `sharded`: axes over
    which master copies, reduced gradients and optimizer state are kept in shards: equal padded parts of the flattened
    local block, one per rank.
    """

    planner: Planner
    precision: str
    microbatches: int
    sequences: int
    sizes: Mapping[str, int]
    parameters: tuple[Parameter, ...]
    reductions: Mapping[str, tuple[str, ...]]
    homes: Mapping[str, tuple[int, ...]]
    chunks: tuple[Chunk, ...]
    sharded: tuple[str, ...] = ()
    scatter_gather: bool = True
    recompute: Recompute = KEEP
    warnings: tuple[str, ...] = ()

    @cached_property
    def operations(self) -> dict[tuple[str, str], PlannedOperation]:
        """By (kind, name), in order. Chunks that share an operation, such as relative positions, plan it alike."""
        return {key: o for chunk in self.chunks for key, o in chunk.operations.items()}

    @property
    def stages(self) -> int:
        return self.mesh.axes["stage"]

    def at(self, stage: int) -> Plan:
        """What one stage sees of the plan: its chunks and their parameters."""
        chunks = tuple(c for c in self.chunks if c.stage == stage)
        return replace(self, chunks=chunks, parameters=tuple(p for p in self.parameters if stage in self.homes[p.name]))

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters on several stages: their gradients are summed over these once a step."""
        return {p.name: self.homes[p.name] for p in self.parameters if len(self.homes[p.name]) > 1}

    @cached_property
    def neighbours(self) -> list[tuple[int, int]]:
        """Pairs of stages that send each other something, the lower first."""
        pairs = [(a.stage, b.stage) for a, b in zip(self.chunks, self.chunks[1:], strict=False)]
        pairs += [(owner, other) for owner, *others in self.tied.values() for other in others]
        return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})

    def shared_axes(self, spec: Spec) -> tuple[str, ...]:
        """The axes over which a tensor is scattered when it is sent to another stage, and gathered there."""
        return replicated_axes(self.layout(spec), self.mesh) if self.scatter_gather else ()

    def sent_elements(self, spec: Spec) -> int:
        """What each rank sends of an activation, or of its gradient, to another stage."""
        return self.shared_elements(spec, self.shared_axes(spec))

    def kept_axes(self, spec: Spec) -> tuple[str, ...]:
        """The axes over which a tensor that is kept for recomputation is scattered until then."""
        return replicated_axes(self.layout(spec), self.mesh)

    def shared_elements(self, spec: Spec, axes: tuple[str, ...]) -> int:
        """The size of an equal part of a local block, padded, for every rank along `axes`."""
        n = self.mesh.extent(axes)
        return padded(prod(self.local_shape(spec)), n) // n

    @property
    def mesh(self) -> Mesh:
        return self.planner.mesh

    @property
    def scheme(self) -> Scheme:
        return self.planner.scheme

    @property
    def storage(self) -> tuple[str, ...]:
        """Those of the sharded axes over which not even the compute copies are whole between uses."""
        return self.planner.storage

    def layout(self, tensor: Spec | Parameter) -> Layout:
        return self.planner.layout(tensor)

    def local_shape(self, tensor: Spec | Parameter) -> tuple[int, ...]:
        """The shape of the block of every rank that has one."""
        return self.planner.shape(tensor)

    def present(self, tensor: Spec | Parameter, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at `coordinates` has a block of a tensor: some exist on sub-grid 0 alone, and parameters on
        the stages that use them."""
        here = not isinstance(tensor, Parameter) or coordinates["stage"] in self.homes[tensor.name]
        return here and self.layout(tensor).present(coordinates)

    def block(self, tensor: Spec | Parameter, coordinates: Mapping[str, int]) -> list[tuple[int, int]]:
        """(offset, extent) per dim of the block at `coordinates`; the last blocks of vocab may reach into padding."""
        return block(tensor.dims, self.planner.sizes_of(tensor), self.layout(tensor), self.mesh, coordinates)

    def shard(self, p: Parameter, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """(start, stop) of what the rank at `coordinates` keeps of its flattened local block as master copy and as
        optimizer state: all of it, or its chunk without the padding, which may be empty."""
        elements = prod(self.local_shape(p))
        shard = self.planner.shard(p, self.sharded)
        start = self.mesh.index(coordinates, self.sharded) * shard
        return min(start, elements), min(start + shard, elements)

    def master_shape(self, p: Parameter) -> tuple[int, ...]:
        """The shape of a rank's master copy and reduced gradient: its block, or its chunk with the padding."""
        return (self.planner.shard(p, self.sharded),) if self.sharded else self.local_shape(p)

    def stored_shape(self, p: Parameter) -> tuple[int, ...]:
        """The shape of a rank's compute copy between uses, and of its gradient."""
        return self.planner.stored(p)

    def split_over(self, p: Parameter) -> tuple[str, ...]:
        """The axes along which ranks have different parts of the master copy."""
        return (*self.layout(p).axes, *self.sharded)

    def global_shape(self, tensor: Spec | Parameter) -> tuple[int, ...]:
        """The tensor as the model means it: vocab without padding."""
        return tuple({**self.sizes, **dict(tensor.sizes)}[d] for d in tensor.dims)

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """The axes of every process group that a run needs, in one order on all ranks: those of a step; and for text
        those that split the logits, which are gathered one by one, and the stages, which learn the token."""
        used = {self.mesh.ordered(c.axes) for _, c, _ in self.step_collectives() if c.op != "send"}
        used |= {(axis,) for axis in self.scheme.regions["logits"].axes}
        used |= {("stage",)} if self.stages > 1 else set()
        return sorted(used, key=lambda axes: (len(axes), axes))

    @cached_property
    def itemsize(self) -> dict[str, int]:
        return ITEMSIZE[self.precision]

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The deferred gradient reductions, in model order."""
        found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Parameter]] = defaultdict(list)
        for p in self.parameters:
            found[self.reductions[p.name], self.layout(p).only].append(p)
        return [Bucket(axes, only, tuple(parameters)) for (axes, only), parameters in found.items() if axes]

    def scattered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes of a deferred reduction over which it leaves chunks."""
        return tuple(a for a in axes if a in self.sharded)

    def reduction(self, bucket: Bucket) -> list[Step]:
        """The moves of a bucket of gradients [ranks along the scattered axes, elements of a shard]. It is scattered
        first: the fewest bytes."""
        scattered = self.scattered(bucket.axes)
        summed = tuple(a for a in bucket.axes if a not in scattered)
        moves = (("reduce_scatter", scattered), ("all_reduce", summed))
        return [Step(op, over, only=bucket.only) for op, over in moves if over]

    @property
    def gathering(self) -> list[Step]:
        """The moves of a bucket [elements] of updated chunks where the compute copies are whole blocks."""
        return [Step("all_gather", self.sharded)]

    @cached_property
    def parameter_count(self) -> int:
        return sum(prod(self.global_shape(p)) for p in self.parameters)

    @cached_property
    def local_parameter_count(self) -> int:
        """What a worker keeps between uses: compute copies, on the stage and at the coordinates where most are."""
        return max(self.parameters_at({**self.mesh.coordinates(0), "stage": c.stage}) for c in self.chunks)

    def parameters_at(self, coordinates: Mapping[str, int]) -> int:
        """How many elements of parameters the worker at `coordinates` keeps between uses."""
        return sum(prod(self.stored_shape(p)) for p in self.parameters if self.present(p, coordinates))

    def masters_at(self, coordinates: Mapping[str, int]) -> int:
        """What the optimizer of the worker at `coordinates` updates: master copies, each with the optimizer's state."""
        return sum(prod(self.master_shape(p)) for p in self.parameters if self.present(p, coordinates))

    @cached_property
    def elsewhere(self) -> dict[str, int] | None:
        """The coordinates of a worker outside of sub-grid 0, where some tensors exist there alone; else None."""
        only = self.scheme.sub_grid_zero
        return {a: int(a in only) for a in self.mesh.axes} if only else None

    @cached_property
    def tokens_per_step(self) -> int:
        return self.sequences * self.sizes["length"]

    @cached_property
    def flops_per_token(self) -> float:
        """Model FLOPs of forward and backward: every einsum three times, no recomputation, attention not halved for
        its causal mask (6N + 12 layers d_model length, with N the parameters of the einsums)."""
        forward = sum(einsum_flops(o.operation, self.sizes) for o in self.operations.values())
        return 3 * forward / (self.sizes["batch"] * self.sizes["length"])

    @cached_property
    def readers(self) -> dict[str, dict[tuple[str, str], Layout]]:
        """Data tensor -> operation that reads it -> the layout over batch and length in which it does."""
        out: dict[str, dict[tuple[str, str], Layout]] = defaultdict(dict)
        for key, o in self.operations.items():
            if o.operation.reads is not None:
                out[o.operation.reads][key] = o.tokens
        return dict(out)

    @cached_property
    def loss_layout(self) -> Layout:
        """The layout of what a rank's loss is the sum over: all axes over which the loss is a sum of parts."""
        return next(o.tokens for (kind, _), o in self.operations.items() if kind in LOSSES)

    def step_collectives(self) -> list[tuple[str, Collective, int]]:
        """Every collective of one training step: where it belongs, itself, and its launches per rank.

        Those of an operation, a send, and those of gradients and updates belong to the ranks of one stage only.
        """
        found = []
        for chunk in self.chunks:
            for (kind, name), o in chunk.operations.items():
                for c in o.collectives:
                    twice = o.operation.recomputed and c.phase == "forward"
                    found.append((f"{kind} {name}", c, self.microbatches * (2 if twice else 1)))
            for spec in chunk.kept:
                if axes := self.kept_axes(spec):
                    n = self.shared_elements(spec, axes)
                    when = "compute", "backward", "recomputation", "at once"
                    c = Collective("all_gather", axes, n, *when, self.layout(spec).only)
                    found.append((f"kept {spec}", c, self.microbatches))
        for here, there in zip(self.chunks, self.chunks[1:], strict=False):
            if here.stage != there.stage:
                for name, spec in here.sends:
                    where = f"stage {here.stage} to {there.stage} {name}"
                    found += [(where, c, self.microbatches) for c in self._transfer(spec)]
        for stage in dict.fromkeys(c.stage for c in self.chunks):
            found += self.at(stage).update_collectives()
        for p in self.parameters:
            if others := len(self.tied.get(p.name, ())[1:]):
                elements = prod(self.master_shape(p))
                when = "accumulate", "reduce", "gradients", "optimizer"
                c = Collective("send", ("stage",), elements, *when, self.layout(p).only)
                found.append((f"tied {p.name}", c, 2 * others))
        if world := self.mesh.ordered(self.mesh.axes):
            c = Collective("all_reduce", world, METRICS, "metrics", "reduce", "gradients", "clipping")
            found.append(("loss and norm", c, 1))
        return found

    def update_collectives(self) -> list[tuple[str, Collective, int]]:
        """Of one stage: its gradients are summed, and its updated parameters gathered."""
        found = []
        for b in self.buckets:
            shape = self.mesh.extent(self.scattered(b.axes)), sum(prod(self.master_shape(p)) for p in b.parameters)
            when = "reduce", "last backward", "clipping"
            planned = self.planner.collectives(self.reduction(b), shape, *when, "accumulate")
            found += [("gradients", c, 1) for c in planned]
        if self.sharded and not self.storage:
            when = "update", "optimizer", "next step"
            elements = sum(prod(self.master_shape(p)) for p in self.parameters)
            planned = self.planner.collectives(self.gathering, (elements,), *when)
            found += [("parameters", c, 1) for c in planned]
        return found

    def _transfer(self, spec: Spec) -> list[Collective]:
        """An activation goes from stage to stage, and its gradient back."""
        found = []
        elements, axes, only = self.sent_elements(spec), self.shared_axes(spec), self.layout(spec).only
        for phase in ("forward", "backward"):
            found.append(Collective("send", ("stage",), elements, "compute", phase, phase, "next stage", only))
            if axes:
                found.append(Collective("all_gather", axes, elements, "compute", phase, "received", "next stage", only))
        return found

    def moved_bytes(self, c: Collective) -> int:
        """Bytes that all workers together move in one launch of `c`, which one stage makes unless it spans stages."""
        everywhere = moved_bytes(c, self.mesh, {**self.itemsize, "metrics": 8})
        return everywhere if "stage" in c.axes and c.op != "send" else everywhere // self.stages

    def communication(self) -> dict[str, int]:
        """`OP/AXES` -> bytes that all workers move in one training step: what the counters will measure."""
        out: dict[str, int] = defaultdict(int)
        for _, c, launches in self.step_collectives():
            out[label(c.op, self.mesh.ordered(c.axes))] += launches * self.moved_bytes(c)
        return dict(sorted(out.items()))

    def describe(self) -> str:
        return describe(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data: `plan.json` of the run directory."""
        return {
            "mesh": self.mesh.axes,
            "scheme": self.scheme.name,
            "precision": self.precision,
            "microbatches": self.microbatches,
            "sharded": list(self.sharded),
            "storage": list(self.storage),
            "sizes": dict(self.sizes),
            "regions": {r: dict(layout) for r, layout in self.scheme.regions.items()},
            "only": {r: list(layout.only) for r, layout in self.scheme.regions.items() if layout.only},
            "parameters": [
                {
                    "name": p.name,
                    "dims": list(p.dims),
                    "shape": list(self.global_shape(p)),
                    "layout": dict(self.layout(p)),
                    "only": list(self.layout(p).only),
                    "reduce": list(self.reductions[p.name]),
                }
                for p in self.parameters
            ],
            "operations": [
                {
                    "kind": kind,
                    "name": name,
                    "compute_axes": list(o.compute_axes),
                    "collectives": [vars(c) | {"axes": list(c.axes)} for c in o.collectives],
                }
                for (kind, name), o in self.operations.items()
            ],
            "communication": self.communication(),
            "parameter_count": self.parameter_count,
            "parameters_per_worker": self.local_parameter_count,
            "flops_per_token": self.flops_per_token,
        }


def build(
    model: Model,
    scheme: Scheme,
    *,
    data: int,
    microbatch: int,
    microbatches: int,
    sequences: int | None = None,
    stage_of: Sequence[int] = (0,),
    scatter_gather: bool = True,
    recompute: Recompute = KEEP,
    precision: str = "fp32",
    zero: int = 0,
    dropout: float = 0.0,
) -> Plan:
    """Records the model and plans every operation.

    `microbatch`: sequences per microbatch and replica; `sequences`: per step, fewer if the last microbatch is partial;
    `stage_of`: the pipeline stage of every model chunk. `zero`:
    what is sharded over `data` (ZeRO, Rajbhandari et al. 2020): 0 nothing, 1 master copies and optimizer state, 3 the
    parameters too, whose storage axis `data` then is. Raises IllegalPlan with all violations: an axis that would split
    two dims of one operation, or a dim (other than vocab) that its axes do not divide, or more chunks than the model
    has units.
    """
    mesh = Mesh.of({"stage": max(stage_of) + 1, **scheme.mesh_axes(data)})
    sizes = {"memory_length": model.sizes["length"], **model.sizes, "batch": microbatch * data}
    vocab_axes = {a for layout in (*scheme.regions.values(), *scheme.parameters.values()) for a in layout["vocab"]}
    padded_sizes = {**sizes, "vocab": padded(sizes["vocab"], mesh.extent(sorted(vocab_axes)))}
    sharded = mesh.ordered(("data",)) if zero else ()
    planner = Planner(mesh, scheme, padded_sizes, {}, storage=sharded if zero == 3 else ())

    try:
        recorded = record(model, lambda: Recorder(scheme, dropout, recompute), len(stage_of), sizes)
    except ValueError as error:
        raise IllegalPlan([str(error)]) from None
    everything = [o for chunk in recorded for o in chunk.operations]
    parameters = tuple(model.parameters())
    if violations := _violations(planner, everything, microbatch):
        raise IllegalPlan(violations)

    uses: dict[str, list[tuple[Operation, tuple[str, ...]]]] = defaultdict(list)
    for operation in everything:
        for name, axes in planner.partial(operation).items():
            uses[name].append((operation, mesh.ordered(axes)))
    assert set(uses) == {p.name for p in parameters}, "every declared parameter is used, and no other"
    reductions, at_use = {}, {}
    for name, found in uses.items():
        common = set.intersection(*(set(axes) for _, axes in found))
        reductions[name] = mesh.ordered(common)
        for operation, axes in found:
            if extra := tuple(a for a in axes if a not in common):
                at_use[operation.name, operation.kind, name] = extra

    assert all({*planner.storage, *axes} >= set(sharded) for axes in reductions.values()), "batch is split over data"
    planner = replace(planner, reduced_at_use=at_use)
    chunks = []
    for number, (stage, r) in enumerate(zip(stage_of, recorded, strict=True)):
        operations = {(o.kind, o.name): plan_operation(planner, o) for o in r.operations}
        assert len(operations) == len(r.operations), "operation names are unique within their kind"
        chunks.append(Chunk(number, stage, r.units, r.receives, r.sends, operations, r.kept))
    homes = {p.name: tuple(dict.fromkeys(c.stage for c in chunks if p.name in c.parameters)) for p in parameters}
    plan = Plan(
        planner=planner,
        precision=precision,
        microbatches=microbatches,
        sequences=microbatches * microbatch * data if sequences is None else sequences,
        sizes=sizes,
        parameters=parameters,
        reductions=reductions,
        homes=homes,
        chunks=tuple(chunks),
        sharded=sharded,
        scatter_gather=scatter_gather,
        recompute=recompute,
    )
    return replace(plan, warnings=tuple(_replicated(mesh, plan.operations, sizes)))


_ELSEWHERE = "on another axis, or on none"
KEYS = {"batch": "train.microbatch", "length": "model.length", "memory_length": "model.length"}


def _violations(planner: Planner, operations: Sequence[Operation], microbatch: int) -> list[str]:
    """One line per clash of two dims on one axis and per dim that its axes do not divide, naming where it occurs."""
    clashes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)  # (axis, dim, dim) -> operations
    splits: dict[tuple[str, int, tuple[str, ...]], dict[str, None]] = defaultdict(dict)  # (dim, size, axes) -> regions
    for o in operations:
        for t in (*o.inputs, *o.outputs):
            layout = planner.layout(t)
            if clash := layout.conflict():
                clashes[clash][f"{o.kind} {o.name}: {t if isinstance(t, Spec) else ' '.join(t.dims)}"] = None
            sizes = {**planner.sizes_of(t), "batch": microbatch}
            for d, axes in layout.items():
                splits[d, sizes[d], axes][t.region if isinstance(t, Spec) else "parameters"] = None
    lines = [_clash(*clash, list(found)) for clash, found in clashes.items()]
    for (d, size, axes), regions in splits.items():
        if line := _indivisible(planner, d, size, axes, list(regions)):
            lines.append(line)
    if not lines:  # what no tensor shows by itself: the operations' iteration spaces
        for o in operations:
            try:
                planner.partial(o)
                plan_operation(planner, o)
            except ValueError as error:
                lines.append(f"tensor: illegal layout: in {o.kind} {o.name}, {error}; legal: one of them {_ELSEWHERE}")
    return lines


def _clash(axis: str, first: str, second: str, found: Sequence[str]) -> str:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"tensor: illegal layout: axis {axis} would split both {first} and {second} in {found[0]}{more};"
        f" legal: {first} or {second} {_ELSEWHERE}"
    )


def _indivisible(planner: Planner, d: str, size: int, axes: Sequence[str], found: Sequence[str]) -> str | None:
    """A dim whose size its axes do not divide. `data` always divides batch; vocab is padded."""
    axes = [a for a in axes if (d, a) != ("batch", "data")]
    n = planner.mesh.extent(axes)
    if d == "vocab" or size % n == 0:
        return None
    own = d in ("length", "memory_length") and size != planner.sizes[d]
    key = "model.source_length" if own else KEYS.get(d, f"model.{d}")
    divisors = [k for k in range(1, size + 1) if size % k == 0]
    parts = [max(k for k in divisors if k < n), *(k for k in divisors if k > n)][:2]
    product = " x ".join(planner.scheme.key(a) for a in axes)
    given = " x ".join(f"{planner.scheme.key(a)}={planner.mesh.axes[a]}" for a in axes)
    sizes = " or ".join(str(k) for k in _legal_sizes(planner, d, size, n) if k)
    either = f"{key}={sizes}, or " if sizes else ""
    return (
        f"{key}={size} is not divisible by {given} ({', '.join(found)});"
        f" nearest legal: {either}{product}={' or '.join(map(str, parts))}"
    )


def _legal_sizes(planner: Planner, d: str, size: int, n: int) -> list[int]:
    """The multiples of n next to `size`; of heads only those that divide d_model, where they share it."""
    shared = planner.sizes["d_model"] if d == "heads" else 0
    multiples = [k for k in range(n, 2 * max(size, n) + 1, n) if shared % k == 0]
    return [max((k for k in multiples if k < size), default=0), min((k for k in multiples if k > size), default=0)]


def _replicated(mesh: Mesh, operations: Mapping[tuple[str, str], PlannedOperation], sizes: Mapping[str, int]):
    """Warns of einsums whose work is repeated because an axis splits none of their dims."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for o in operations.values():
        if einsum_flops(o.operation, sizes):
            if unused := mesh.ordered(a for a in mesh.axes if a not in ("stage", *o.compute_axes, *o.only)):
                names[unused].append(o.operation.name.split(".", 2)[-1])
    for unused, found in names.items():
        times = mesh.extent(unused)
        yield f"axes {'+'.join(unused)} split no dim of {', '.join(dict.fromkeys(found))}: computed {times} times over"


def describe(plan: Plan) -> str:
    """The plan as the small table that a run prints first."""
    split = dict.fromkeys((*DIMS, *(d for r in REGIONS for d in plan.scheme.regions[r])))
    dims = [d for d in split if d in plan.sizes and any(plan.scheme.regions[r][d] for r in REGIONS)]
    head, *rest = rows = [["region", *dims]] + [
        [r, *("+".join(plan.scheme.regions[r][d]) or "-" for d in dims)]
        for r in REGIONS
        if r != "core" or plan.scheme.regions["core"] != plan.scheme.regions["attention"]
    ]
    if zero := "+".join(plan.scheme.sub_grid_zero):
        rows = [[*head, "only at"], *([*row, f"{zero}=0" if plan.scheme.regions[row[0]].only else "-"] for row in rest)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    moved = plan.communication()
    traffic = ", ".join(f"{k} {human(v)}B" for k, v in sorted(moved.items(), key=lambda kv: -kv[1])[:4]) or "none"
    more = f", and {len(moved) - 4} more" if len(moved) > 4 else ""
    elsewhere = f", {plan.parameters_at(plan.elsewhere):,} where {zero}>0" if plan.elsewhere else ""
    lines = [
        f"plan  {plan.mesh.size} workers = {plan.mesh}; tensor scheme {plan.scheme.name}; {plan.precision}",
        *(table if dims or zero else []),
        f"  parameters      {plan.parameter_count:,} ({plan.local_parameter_count:,} per worker{elsewhere})"
        + _sharding(plan),
        *(f"  stage {stage}         {units}" for stage, units in _stages(plan)),
        f"  step            {plan.tokens_per_step:,} tokens in {plan.microbatches} microbatches{_padding(plan)};"
        f" {human(plan.flops_per_token * plan.tokens_per_step)}FLOP",
        f"  communication   {human(sum(moved.values()))}B per step: {traffic}{more}",
        *(f"  warning         {w}" for w in plan.warnings),
    ]
    return "\n".join(lines)


def _stages(plan: Plan) -> list[tuple[int, str]]:
    """Each stage of several with the units of its chunks: `embedding .. layers.3 | layers.8 .. layers.11`."""

    def shown(units: Sequence[str]) -> str:
        return units[0] if len(units) == 1 else f"{units[0]} .. {units[-1]}"

    stages = range(plan.stages if plan.stages > 1 else 0)
    return [(stage, " | ".join(shown(c.units) for c in plan.chunks if c.stage == stage)) for stage in stages]


def _padding(plan: Plan) -> str:
    dealt, replicas = plan.microbatches * plan.sizes["batch"], plan.mesh.axes["data"]
    over = f" x {replicas} replicas" if replicas > 1 else ""
    return f"{over}, {dealt - plan.sequences} of {dealt} sequences are padding" if dealt > plan.sequences else ""


def _sharding(plan: Plan) -> str:
    if not plan.sharded:
        return ""
    over = f"chunks over {'+'.join(plan.sharded)}"
    return (
        f", kept in {over}"
        if plan.storage
        else f", updated in {over} ({plan.masters_at(plan.mesh.coordinates(0)):,} per worker)"
    )


def human(x: float) -> str:
    """1234567 -> '1.23 M': three digits and a decimal prefix."""
    for unit in ("", "k", "M", "G", "T", "P", "E"):
        if abs(x) < 999.5:
            return f"{x:.3g} {unit}"
        x /= 1000
    return f"{x:.3g} Z"
