"""Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes.

An operation is planned on a mesh whose axes all have two ranks, and once more with each of them doubled: a number that
halves with an axis has the exponent -1 in its size. So the communication rule itself says how its collectives grow, and
thousands of meshes are judged at once. Sizes that axes do not divide are judged by `splits`, as a plan does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.costs.work import ACCESSES, FUNCTION, RESIDUAL, USUAL, share_in_use, share_of_rows, share_sent
from platform.model import build_model
from platform.plan.communication.planned import Collective, Einsum, EinsumGroup, PlannedOperation
from platform.plan.communication.planner import Planner
from platform.plan.communication.rule import partial_axes
from platform.plan.core.build import ALIGNED
from platform.plan.language.layout import padded
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation, Parameter, Recompute, Spec
from platform.plan.language.scheme import REPLICAS, Scheme
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.words import flops, word_of

Columns = Mapping[str, NDArray[Any]]  # variable -> its value in each contender
PASSING = ("shift", "relayout", "expand_kv", "cross_entropy")  # operations that keep nothing of their own
FEW = 4  # layers of a model from whose last one deeper ones follow
SEQUENCES = "microbatch"  # variable beside the sizes of axes
BASE = 64  # sequences of a microbatch on a replica while numbers are found


class Quantity(NamedTuple):
    """Meaning of a number of an operation: `flops` of products or `fused` ones of attention; a product's `width`, its
    shortest side, and the elements of weights `read` by it; elements that are `touched` so often in the forward and the
    backward pass (`times`), `kept` for the latter, of the `stream` between blocks, of a `parameter`, or of a
    `collective` (`op`, in a `phase`) over `axes`, which goes `ahead` if it is a weight's. `inside`: part of
    attention, done again with recompute=selective."""

    what: str
    axes: tuple[str, ...] = ()
    op: str = ""
    phase: str = ""
    times: tuple[float, float] = (0.0, 0.0)
    inside: bool = False


@dataclass(frozen=True)
class Monomials:
    """Numbers of a model under a scheme: `kinds`, the values at two ranks along each axis, their `exponents` by
    variable, and how often each is in the model without its deepest layers (`once`), and in each of those (`layer`)."""

    kinds: tuple[Quantity, ...]
    variables: tuple[str, ...]
    values: NDArray[np.float64]
    exponents: NDArray[np.float64]
    once: NDArray[np.float64]
    layer: NDArray[np.float64]

    def at(self, columns: Columns) -> NDArray[np.float64]:
        """Return every number for every contender, [numbers, contenders]."""
        base = {SEQUENCES: BASE}
        logs = np.stack([np.log2(columns[v] / base.get(v, 2)) for v in self.variables])
        return self.values[:, None] * np.exp2(self.exponents @ logs)


@dataclass(frozen=True)
class Sketch:
    """Model under a scheme: its numbers, and what axes must divide: `splits`, pairs of a size and axes, and the axes of
    a replica's batch."""

    numbers: Monomials
    splits: tuple[tuple[int, tuple[str, ...]], ...]
    batch: tuple[tuple[str, ...], ...]

    def legal(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which contenders' axes divide what they split, but for the batch of a replica."""
        ones = np.ones_like(columns["stage"])
        found = ones > 0
        for size, axes in self.splits:
            found &= size % prod((columns[a] for a in axes), start=ones) == 0
        return found

    def takes(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which contenders' axes divide the batch of a replica."""
        ones = np.ones_like(columns[SEQUENCES])
        found = ones > 0
        for axes in self.batch:
            found &= columns[SEQUENCES] % prod((columns[a] for a in axes), start=ones) == 0
        return found


class _SketchRecorder(Recorder):
    """Recorder that takes note of functions element by element too, of which nothing is planned, as operations."""

    def pointwise(self, function: str, *x: Symbol) -> Symbol:
        """Take note of a pointwise function of activations."""
        if function != "identity":
            inputs = tuple(a.spec for a in x)
            self.operations.append(Operation("pointwise", function, inputs, inputs[:1], recomputed=self._recomputing))
        return x[0]

    def residual(self, name: str, x: Symbol, y: Symbol, spec: Spec) -> Symbol:
        """Take note of a residual connection."""
        self.operations.append(Operation("residual", name, (spec,), (spec,)))
        return x


def counted(config: Any, layers: int, scheme: Scheme) -> Counter[Operation]:
    """Return the operations of a model with so many layers, equal ones counted together under one of them."""
    model = build_model(replace(config, layers=layers))
    recorder = _SketchRecorder(scheme, config.dropout, Recompute("selective"), config.fused_dropout)
    model.forward(recorder, {name: name for name in model.inputs})
    first: dict[tuple, Operation] = {}
    return Counter(first.setdefault(o.anonymous, o) for o in recorder.operations)


def sketched(config: Any, scheme: Scheme, axes: Sequence[str]) -> Sketch | None:
    """Return the sketch of a configured model under a scheme whose `axes`, of replicas and contexts too, all have two
    ranks; None if no plan of it is legal. `config`: the group model of a configuration."""
    few = min(FEW, config.layers)
    whole = counted(config, few, scheme)
    less = counted(config, few - 1, scheme) if few > 1 else Counter[Operation]()
    anonymous = {o.anonymous: n for o, n in less.items()}
    variables = (*axes, SEQUENCES)
    planners = [_grown_planner(config, scheme, axes, grown) for grown in (None, *variables)]
    kinds, values, exponents, once, layer = [], [], [], [], []
    try:
        for o, n in whole.items():
            found = [list(_quantities(planner, o)) for planner in planners]
            for i, (kind, value) in enumerate(found[0]):
                grown = [more[i][1] if len(more) == len(found[0]) else value for more in found[1:]]
                kinds.append(kind._replace(inside=o.recomputed))
                values.append(value)
                exponents.append([round(log2(g / value)) if g and value else 0 for g in grown])
                once.append(n)
                layer.append(n - anonymous.get(o.anonymous, 0))
    except ValueError:
        return None
    splits, batch = _divided_sizes(planners[0], whole)
    if any(planners[0].layout(t).conflict() for o in whole for t in (*o.inputs, *o.outputs)):
        return None
    arrays = [np.array(given, dtype=float) for given in (values, exponents, once, layer)]
    return Sketch(Monomials(tuple(kinds), variables, *arrays), splits, batch)


def _grown_planner(config: Any, scheme: Scheme, axes: Sequence[str], grown: str | None) -> Planner:
    """Return the planner of a model on a mesh of two ranks along each axis, four along the axis `grown`, or with twice
    the sequences if `grown` is these."""
    mesh = Mesh.of({"stage": 1, **{a: 4 if a == grown else 2 for a in axes}})
    batch = BASE * (2 if grown == SEQUENCES else 1) * prod(mesh.axes[a] for a in axes if a in REPLICAS)
    model = build_model(replace(config, layers=1))
    own = dict(model.sizes)
    sizes = {"memory_length": own["length"], **own, "batch": batch}
    if "vocab" in sizes:
        sizes["vocab"] = padded(sizes["vocab"], ALIGNED)
    return Planner(mesh, scheme, sizes, {})


def _quantities(planner: Planner, o: Operation) -> Iterator[tuple[Quantity, float]]:
    """Yield the numbers of an operation on a rank, each with its kind; the same kinds on any mesh. Of experts' rows an
    even routing's are computed and sent, and the worst one's kept, as a run must have room for them."""
    out = o.outputs[0] if o.outputs else None
    room = float(prod(planner.shape(out))) if out else 0.0
    size = room * share_in_use(planner, out) if out else 0.0
    if o.kind in ("pointwise", "residual"):
        yield Quantity("touched", times=RESIDUAL if o.kind == "residual" else FUNCTION[len(o.inputs)]), size
        yield Quantity("kept"), room
        if o.kind == "residual":
            yield Quantity("stream"), size
        return
    planned, mesh = word_of(o).plan(planner, o), planner.mesh
    if work := flops(o, planner.sizes):
        causal = 0.5 if dict(o.attributes).get("causal") else 1.0
        yield Quantity("flops" if planned.groups else "fused"), causal * work / mesh.extent(planned.compute_axes)
    if planned.groups:
        even = share_of_rows(planner, o)
        pairs = [(g, e) for g in planned.groups for e in g.einsums]
        yield Quantity("width"), min(_shortest_side(g, e, even) for g, e in pairs)
        yield Quantity("read"), sum(prod(e.operand.after) for _, e in pairs)
    else:
        yield Quantity("touched", times=ACCESSES.get(o.kind, USUAL)), size
    if any(p.role == "in" for p in o.parameters) or not planned.groups and o.kind not in PASSING:
        yield Quantity("kept"), sum(prod(planner.shape(t)) for t in o.outputs)
    for p in o.parameters:
        axes = mesh.ordered(partial_axes(planner.layout(p), planned.compute_axes))
        yield Quantity("parameter", axes), prod(planner.shape(p))
    ahead = Counter(_of_weights(planner, planned))
    for c in planned.collectives:
        ahead[c] -= (goes := ahead[c] > 0)
        if c.dtype != "compute" or c.op == "rotate":
            continue
        elements = c.elements * share_sent(planner, o, c)
        yield Quantity("ahead" if goes else "collective", mesh.ordered(c.axes), c.op, c.phase), elements
        if c.op == "all_gather" and c.phase == "forward":
            yield Quantity("kept"), c.elements * mesh.extent(c.axes)


def _of_weights(planner: Planner, planned: PlannedOperation) -> Iterator[Collective]:
    """Yield the collectives of a planned operation's weights, which go on beside the products before."""
    for e in (e for group in planned.groups for e in group.einsums):
        if isinstance(planned.operation.inputs[1 + e.index], Parameter):
            yield from planner.collectives(e.operand, e.regathered)


def _shortest_side(group: EinsumGroup, e: Einsum, even: float) -> float:
    """Return the shortest side of a product on a rank: of each expert's rows, of which an `even` share is used."""
    weights = dict(zip(e.dims, e.operand.after, strict=True))
    experts = weights.pop("experts", 1) if "rows" in e.x_dims else 1
    inner = prod(n for d, n in weights.items() if d not in e.out_dims)
    rows = prod(group.x.after) * even / max(1, inner) / experts
    return max(1.0, min(inner, prod(weights.values()) / max(1, inner), rows))


def _divided_sizes(planner: Planner, operations: Mapping[Operation, int]) -> tuple[tuple, tuple]:
    """Return the pairs of a size and the axes that must divide it, and the axes of a replica's batch, of operations."""
    splits, batch = dict[tuple[int, tuple[str, ...]], None](), dict[tuple[str, ...], None]()
    for t in (t for o in operations for t in (*o.inputs, *o.outputs)):
        sizes = planner.sizes_of(t)
        for dim, axes in {**planner.layout(t), **planner.picked(t)}.items():
            if dim == "batch":
                batch[tuple(a for a in axes if a not in REPLICAS)] = None
            elif dim not in ("vocab", "kv_heads", "rows"):
                splits[sizes[dim], axes] = None
    return tuple(splits), tuple(axes for axes in batch if axes)
