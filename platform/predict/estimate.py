"""Estimate of many contenders at once, in closed form from a sketch: seconds of a step and bytes of a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, wraps
from math import log2, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.model import build_model
from platform.plan.chunks import axes_of_replication, find_recordings
from platform.plan.layout import Mesh, pad_to_multiple
from platform.plan.model_types import Operation, Parameter, Recompute, Spec
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan import ITEMSIZE
from platform.plan.plan_builder import ALIGNED, PlannedOperations, settle_planner
from platform.plan.planner import Planner
from platform.plan.rule import partial_axes
from platform.plan.schedule import place_layers
from platform.plan.scheme import CONTEXT, REPLICAS, Scheme
from platform.predict import price
from platform.predict.contenders import Contender
from platform.predict.footprint import ROUNDING, overhead_bytes
from platform.predict.hardware import Hardware
from platform.predict.price import (
    bytes_seconds,
    group_seconds,
    hidden_or_summed_seconds,
    host_seconds,
    message_seconds,
    update_bytes,
)
from platform.predict.work import (
    CALLS_OF_BLOCK,
    CALLS_OF_KERNEL,
    FUSED_BACKWARD,
    SUMMED,
    MatrixProduct,
    accesses_to_rebuild,
    attention_flops,
    even_sent_share,
    even_share_of_planned_rows,
    even_share_of_planned_rows_of_spec,
    list_group_products,
)

# Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes.
#
# An operation is planned on a mesh whose axes all have two ranks, and once more with each of them doubled: a number
# that halves with an axis has the exponent -1 in its size. So the communication rule itself says how its collectives
# grow, and thousands of meshes are judged at once. Sizes that axes do not divide are judged by `splits`, as a plan
# does.

Columns = Mapping[str, NDArray[Any]]  # variable -> its value in each contender
FEW = 4  # layers of a model from whose last one the bytes of deeper ones follow
SEQUENCES = "microbatch"  # variable beside the sizes of axes
SIDES = "rows", "columns", "inner", "batch"  # of a product
TIMED = SIDES[0], "fused", "summed", "touched", "rebuilt", "collective", "ahead"  # numbers that take time
BASE = 64  # sequences of a microbatch on a replica while numbers are found


class Quantity(NamedTuple):
    """Meaning of a number of an operation: the SIDES of a product and how many such `products` there are; `fused` FLOPs
    of attention; elements of weights whose gradients are `summed` over microbatches; elements that are `touched` so
    often in the forward and the backward pass (`times`), or there to be `rebuilt`, `kept` for the latter, of the
    `stream` between blocks, of a `parameter`, or of a `collective` (`op`, in a `phase`) over `axes`, which goes `ahead`
    if it is a weight's. A stream is replicated over its `axes`. `inside`: part of attention, done again with
    recompute=selective; `again`: done again with recompute=full."""

    what: str
    axes: tuple[str, ...] = ()
    op: str = ""
    phase: str = ""
    times: tuple[float, float] = (0.0, 0.0)
    inside: bool = False
    again: bool = True


@dataclass(frozen=True)
class Monomials:
    """Numbers of a model under a scheme: `kinds`, the values at two ranks along each axis, their `exponents` by
    variable, and how often each is in the model (`whole`), and in a layer of it on average (`layer`)."""

    kinds: tuple[Quantity, ...]
    variables: tuple[str, ...]
    values: NDArray[np.float64]
    exponents: NDArray[np.float64]
    whole: NDArray[np.float64]
    layer: NDArray[np.float64]

    def evaluate_columns(self, columns: Columns) -> NDArray[np.float64]:
        """Return every number for every contender, [numbers, contenders]."""
        base = {SEQUENCES: BASE}
        logs = np.stack([np.log2(columns[v] / base.get(v, 2)) for v in self.variables])
        return self.values[:, None] * np.exp2(self.exponents @ logs)


@dataclass(frozen=True)
class Sketch:
    """Model under a scheme: its numbers, and what axes must divide: `splits`, pairs of a size and axes, and the axes of
    a replica's batch; and whether a compiler can trace its blocks."""

    numbers: Monomials
    splits: tuple[tuple[int, tuple[str, ...]], ...]
    batch: tuple[tuple[str, ...], ...]
    is_traceable: bool

    def mask_legal(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which contenders' axes divide what they split, but for the batch of a replica."""
        ones = np.ones_like(columns["stage"])
        mask = ones > 0
        for size, axes in self.splits:
            mask &= size % prod((columns[a] for a in axes), start=ones) == 0
        return mask

    def mask_batch(self, columns: Columns) -> NDArray[np.bool_]:
        """Return which contenders' axes divide the batch of a replica."""
        ones = np.ones_like(columns[SEQUENCES])
        mask = ones > 0
        for axes in self.batch:
            mask &= columns[SEQUENCES] % prod((columns[a] for a in axes), start=ones) == 0
        return mask


class _SketchRecorder(Recorder):
    """Recorder that takes note of functions element by element too, of which nothing is planned, as operations, and of
    what recompute=full leaves out."""

    @cached_property
    def counted(self) -> Counter[Operation]:
        """Return the operations, equal ones counted together under one of them."""
        first: dict[tuple, Operation] = {}
        return Counter(first.setdefault(o.nameless_key, o) for o in self.operations)

    def recomputed(self, kind, name, function, spec, x, *more):
        """Record a function of activations; the last product of a block is marked if no gradient needs its result."""
        begun = len(self.operations)
        out = super().recomputed(kind, name, function, spec, x, *more)
        if kind == "full":
            self._mark_unneeded_product(begun)
        return out

    def pointwise(self, function: str, *x: Symbol) -> Symbol:
        """Take note of a pointwise function of activations."""
        if function != "identity":
            inputs = tuple(a.spec for a in x)
            self.operations.append(Operation("pointwise", function, inputs, inputs[:1], recomputed=self._recomputing))
        return super().pointwise(function, *x)

    def residual(self, name: str, x: Symbol, y: Symbol, spec: Spec) -> Symbol:
        """Take note of a residual connection."""
        self.operations.append(Operation("residual", name, (spec,), (spec,)))
        return x


def count_operations(config: Any, layers: int, scheme: Scheme) -> Counter[Operation]:
    """Return the operations of a model with so many layers, equal ones counted together under one of them."""
    model = build_model(replace(config, layers=layers))
    sizes = {"memory_length": model.sizes["length"], **model.sizes, "batch": BASE}
    recorder = _SketchRecorder(scheme, config.dropout, Recompute("selective"), config.fused_dropout, sizes=sizes)
    recorded: dict[tuple, Any] = find_recordings(model, recorder)
    if _SketchRecorder not in recorded:
        model.forward(recorder, {name: name for name in model.inputs})
        recorded[_SketchRecorder] = recorder.counted  # type: ignore[index]
    return recorded[_SketchRecorder]  # type: ignore[index]


def sketch_model(
    config: Any, scheme: Scheme, axes: Sequence[str], alike: Mapping[int, int] | None = None
) -> Sketch | None:
    """Return the sketch of a configured model under a scheme whose `axes`, of replicas and contexts too, all have two
    ranks; None if no plan of it is legal. `config`: the group model of a configuration; `alike`: how many of the layers
    behind the first one are as the layer of a number, by default all as the second."""
    alike = {number: n for number, n in (alike or {1: config.layers - 1}).items() if n}
    of_first, deeper = count_operations(config, 1, scheme), Counter[tuple]()
    operations = count_operations(config, max(alike, default=0) + 1, scheme)
    for number, n in alike.items():
        for layers, sign in ((number + 1, n), (number, -n)):
            for o, count in count_operations(config, layers, scheme).items():
                deeper[o.nameless_key] += sign * count
    first = {o.nameless_key: n for o, n in of_first.items()}
    variables = (*axes, SEQUENCES)
    plannable = [o for o in operations if OPERATIONS[o.kind] not in (Ops.pointwise, Ops.residual)]
    kinds, values, exponents, whole, layer = [], [], [], [], []
    try:
        probes = (_build_probe_planner(config, scheme, axes, grown) for grown in (None, *variables))
        planners = [settle_planner(probe, plannable, None)[:2] for probe in probes]
        for o in operations:
            more_layers = deeper[o.nameless_key]
            quantities = [list(_iterate_quantities(*pair, o)) for pair in planners]
            for i, (kind, value) in enumerate(quantities[0]):
                grown = [more[i][1] if len(more) == len(quantities[0]) else value for more in quantities[1:]]
                kinds.append(kind._replace(inside=o.recomputed))
                values.append(value)
                exponents.append([round(log2(g / value)) if g and value else 0 for g in grown])
                whole.append(first.get(o.nameless_key, 0) + more_layers)
                layer.append(more_layers / max(1, config.layers - 1))
    except ValueError:
        return None
    planner = planners[0][0]
    splits, batch = _find_divided_sizes(planner, operations)
    if any(planner.layout(t).find_conflict() for o in operations for t in (*o.inputs, *o.outputs)):
        return None
    arrays = [np.array(numbers, dtype=float) for numbers in (values, exponents, whole, layer)]
    is_traceable = all(
        OPERATIONS[o.kind].is_traceable and not (o.reads and OPERATIONS[o.kind].keys_input >= 0) for o in operations
    )
    return Sketch(Monomials(tuple(kinds), variables, *arrays), splits, batch, is_traceable)


def _build_probe_planner(config: Any, scheme: Scheme, axes: Sequence[str], grown: str | None) -> Planner:
    """Return the planner of a model on a mesh of two ranks along each axis, four along the axis `grown`, or with twice
    the sequences if `grown` is these."""
    mesh = Mesh.arrange_axes({"stage": 1, **{a: 4 if a == grown else 2 for a in axes}})
    batch = BASE * (2 if grown == SEQUENCES else 1) * prod(mesh.axes[a] for a in axes if a in REPLICAS)
    model = build_model(replace(config, layers=1))
    model_sizes = dict(model.sizes)
    sizes = {"memory_length": model_sizes["length"], **model_sizes, "batch": batch}
    if "vocab" in sizes:
        sizes["vocab"] = pad_to_multiple(sizes["vocab"], ALIGNED)
    return Planner(mesh, scheme, sizes, {})


def _iterate_quantities(
    planner: Planner, planned_operations: PlannedOperations, o: Operation
) -> Iterator[tuple[Quantity, float]]:
    """Yield the numbers of an operation on a rank, each with its kind; the same kinds on any mesh. Of experts' rows an
    even routing's are computed and sent, and the worst one's kept, as a run must have room for them."""
    output = o.outputs[0] if o.outputs else None
    room = float(prod(planner.local_shape(output))) if output else 0.0
    size = room * even_share_of_planned_rows_of_spec(planner, output) if output else 0.0
    op, mesh = OPERATIONS[o.kind], planner.mesh
    if op in (Ops.pointwise, Ops.residual):
        accesses = op.memory_accesses if op is Ops.residual else Ops.pointwise.accesses_by_inputs[len(o.inputs)]
        yield Quantity("touched", times=accesses), size
        yield Quantity("kept"), room
        if op is Ops.residual:
            yield Quantity("stream", axes_of_replication(planner.layout(output), mesh)), size
        return
    planned = planned_operations[o.kind, o.name]
    if planned.groups:
        products = Counter(p for group in planned.groups for p in list_group_products(planner, o, group))
        for product, count in products.items():
            sides = zip(SIDES, product[: len(SIDES)], strict=True)
            yield from ((Quantity(side, again=not planned.once), size) for side, size in sides)
            yield Quantity("products", again=not planned.once), count
        for group in (g for g in planned.groups if planned.rebuilds_input(g)):
            rebuilt = prod(group.x.before) * even_share_of_planned_rows(planner, o)
            yield Quantity("rebuilt", times=(0, accesses_to_rebuild(o))), rebuilt
        weights = (e for g in planned.groups for e in g.einsums if isinstance(o.inputs[1 + e.index], Parameter))
        yield Quantity("summed"), sum(prod(e.operand.before) for e in weights)
    else:
        if op.chooses_kernel:
            yield Quantity("fused"), attention_flops(planner, o)
        yield Quantity("touched", times=op.accesses_of_both_passes(o, planned_operations)), size
    if any(p.role == "in" for p in o.parameters) or not planned.groups and not op.keeps_nothing:
        yield Quantity("kept"), sum(prod(planner.local_shape(t)) for t in o.outputs)
    for p in o.parameters:
        axes = mesh.order_axes(partial_axes(planner.layout(p), planned.compute_axes))
        yield Quantity("parameter", axes), prod(planner.local_shape(p))
    ahead, results = Counter(_weight_collectives(planner, planned)), Counter(planned.results if planned.once else ())
    for c in planned.collectives:
        ahead[c] -= (goes := ahead[c] > 0)
        results[c] -= (is_left_out := results[c] > 0)
        if c.dtype != "compute" or c.op == "rotate":
            continue
        elements = c.elements * even_sent_share(planner, o, c)
        kind = Quantity("ahead" if goes else "collective", mesh.order_axes(c.axes), c.op, c.phase)
        yield kind._replace(again=not is_left_out), elements
        if c.op == "all_gather":
            is_kept = c.phase == "forward" and planner.scheme.gathered == "keep"
            if is_kept or not goes:
                yield Quantity("kept" if is_kept else "pending"), c.elements * mesh.count_ranks(c.axes)


def _weight_collectives(planner: Planner, planned: PlannedOperation) -> Iterator[Collective]:
    """Yield the collectives of a planned operation's weights, which go on beside the products before."""
    for e in (e for group in planned.groups for e in group.einsums):
        if isinstance(planned.operation.inputs[1 + e.index], Parameter):
            yield from planner.collectives_of_conversion(e.operand, e.regathered)


def _find_divided_sizes(planner: Planner, operations: Mapping[Operation, int]) -> tuple[tuple, tuple]:
    """Return the pairs of a size and the axes that must divide it, and the axes of a replica's batch, of operations."""
    splits, batch = dict[tuple[int, tuple[str, ...]], None](), dict[tuple[str, ...], None]()
    for t in (t for o in operations for t in (*o.inputs, *o.outputs)):
        sizes = planner.tensor_sizes(t)
        for dim, axes in {**planner.layout(t), **planner.row_expert_axes(t)}.items():
            if dim == "batch":
                batch[tuple(a for a in axes if a not in REPLICAS)] = None
            elif dim not in ("vocab", "kv_heads", "rows"):
                splits[sizes[dim], axes] = None
    return tuple(splits), tuple(axes for axes in batch if axes)


class PassBytes(NamedTuple):
    """Bytes that a microbatch takes on a worker: of each deep layer and of all else those `kept` from the forward to
    the backward pass, and those `pending` from the input gradient to the weight gradient where they are split; and the
    most at `work` beside these, without and with the split."""

    kept: tuple[Any, Any]
    pending: tuple[Any, Any]
    work: tuple[Any, Any]


Column = NDArray[np.float64]
USUAL = PassBytes((1.1, 1.0), (1.0, 1.0), (1.0, 1.0))  # meter by sketch, where a sketch's own sizes have no legal plan
GROUPS = 4  # process groups of a rank, about
LEAST = 1e-9  # seconds, for groups of one rank
QUEUED = 2.0  # times as long as alone do messages take on crowded links, about


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of all contenders of a search: the `hardware`, the `precision`, the model's `layers`, its `units`,
    each with its cost and whether it is of a layer, sequences of a step (`batch`), numbers of optimizer state
    (`moments`), whether collectives of parameters go on beside computation (`overlap`), whether blocks are compiled
    where they can be (`compiles`), whether devices have libraries that reserve memory, and MiB of gradients in a
    bucket, None if the links say (`bucket_mib`)."""

    hardware: Hardware
    precision: str
    layers: int
    units: tuple[tuple[float, bool], ...]
    batch: int
    moments: float
    overlap: bool
    compiles: bool
    libraries: bool
    bucket_mib: int | None


@lru_cache(maxsize=1 << 12)
def share_units(units: Sequence[tuple[float, bool]], stages: int, chunks: int) -> NDArray[np.float64]:
    """Return the shares that each stage has of a model's `units`, as plans place them, [3, stages]: of all layers, and
    of what is around them, by its cost and by its number."""
    totals, shares = [[sum(c for c, of in units if of is kind) for kind in (True, False)], np.zeros((3, stages))]
    around = sum(not of_layer for _, of_layer in units)
    for number, part in enumerate(place_layers([cost for cost, _ in units], stages * chunks)):
        for cost, of_layer in (units[i] for i in part):
            share = (cost / totals[0], 0, 0) if of_layer else (0, cost / totals[1], 1 / around)
            shares[:, number % stages] += share
    return shares


@lru_cache(maxsize=1 << 12)
def distinct_shares(
    units: Sequence[tuple[float, bool]], stages: int, chunks: int, by_number: bool
) -> NDArray[np.float64]:
    """Return the distinct shares that stages have of all layers, and of what is around them, [..., 2], by its cost or
    `by_number` of its units."""
    layers, by_cost, around = share_units(units, stages, chunks)
    return np.unique(np.stack([layers, around if by_number else by_cost], axis=1), axis=0)


class Estimate(NamedTuple):
    """Estimated `seconds` of a step and `memory` in bytes of the worker that needs most, of many contenders."""

    seconds: Column
    memory: Column


class _PassSums(NamedTuple):
    """Seconds of the forward and the backward pass of some numbers, of each contender: `computing`, `waiting`, and
    moving operands `ahead`, beside computing; and seconds of the `host`, or kernels that it launches."""

    computing: Any
    waiting: Any
    ahead: Any
    host: Any

    def scale(self, share: float) -> _PassSums:
        """Return a share of all of it."""
        return _PassSums(*(share * part for part in self))

    def flip(self) -> _PassSums:
        """Return it with what the backward pass has as the forward pass, and the other way around."""
        return _PassSums(*(part[::-1] for part in self))

    def add_backward(self, others: Sequence[_PassSums]) -> _PassSums:
        """Return it with the forward passes of others in the backward pass too."""
        parts = [part + np.stack([0 * part[0]] * 2) for part in self]
        for other in others:
            for part, more in zip(parts, other, strict=True):
                part[1] += more[0]
        return _PassSums(*parts)


class _ParameterCosts(NamedTuple):
    """Costs of parameters on a worker: bytes of `state`, of all and of a deep layer (`layer_state`); seconds in which
    gradients are summed (`reduces`), of all and of the `last` bucket, and parameters gathered (`gathers`); and elements
    `updated`."""

    state: Column
    layer_state: Column
    reduces: Column
    last: Column
    gathers: Column
    updated: Column


def once_each(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of an estimator that computes once for equal arguments."""

    @wraps(method)
    def look_up(self: Estimator, *arguments: Any) -> Any:
        """Return what the method of an estimator has for some arguments."""
        key = method.__name__, *arguments
        if key not in self._computed:
            self._computed[key] = method(self, *arguments)
        return self._computed[key]

    return look_up


class Estimator:
    """Estimates contenders of one scheme, whose axes of more than one rank are the same: `columns` gives, by variable,
    the values of each contender, `axes` the mesh axes, outer to inner; `quotients`, by the kind of recomputation, what
    the memory meter says of passes by what the sketch says."""

    def __init__(
        self,
        sketch: Sketch,
        setting: Circumstances,
        axes: tuple[str, ...],
        columns: Columns,
        quotients: Mapping[str, PassBytes],
    ):
        """Evaluate all numbers of a sketch for all contenders."""
        self.setting, self.axes, self.columns, self.quotients = setting, axes, columns, quotients
        self.kinds, self.numbers = sketch.numbers.kinds, sketch.numbers.evaluate_columns(columns)
        self.layer, self.whole = sketch.numbers.layer, sketch.numbers.whole
        self.ends = np.maximum(0.0, self.whole - setting.layers * self.layer)
        self.size = ITEMSIZE[setting.precision]
        self.stages = columns["stage"]
        alone = set(axes) <= {"data", "zero"}
        self.compiles = setting.compiles and sketch.is_traceable and alone
        self._computed: dict[tuple, Any] = {}

    @cached_property
    def _ranks_by_axis(self) -> dict[str, tuple[Column, Column]]:
        """Return by axis the number of ranks along it, and how many of these share a node, for each contender."""
        ranks, stride = {}, np.ones_like(self.stages, dtype=float)
        for axis in reversed(("stage", *self.axes)):
            n = self.columns[axis].astype(float)
            ranks[axis] = n, np.clip(np.floor(self.setting.hardware.ranks / stride), 1.0, n)
            stride = stride * n
        return ranks

    def _group_size(self, axes: tuple[str, ...]) -> Column:
        """Return the number of ranks along some axes, for each contender."""
        return prod((self._ranks_by_axis[a][0] for a in axes), start=np.ones_like(self.stages, dtype=float))

    def collective_seconds(self, op: str, axes: tuple[str, ...], size: Column) -> Column:
        """Return the seconds of a collective on an input of `size` bytes; 0 along axes of one rank."""
        node_ranks = prod((self._ranks_by_axis[a][1] for a in axes), start=np.ones_like(size))
        return group_seconds(op, size, self._group_size(axes), node_ranks, self.setting.hardware)

    def _price_number(self, i: int) -> tuple[int, Any, Any]:
        """Return of which part of `_PassSums` a number is, and its seconds in the forward and the backward pass."""
        kind, number, h, size = self.kinds[i], self.numbers[i], self.setting.hardware, self.size["compute"]
        if kind.what == SIDES[0]:
            product, count = MatrixProduct(*self.numbers[i : i + len(SIDES)]), self.numbers[i + len(SIDES)]
            backward = sum(map(self._product_seconds, product.gradient_products))
            return 0, count * self._product_seconds(product), count * backward
        if kind.what == "fused":
            seconds = number / (h.peak_flops(self.setting.precision) * h.reached.attention)
            return 0, seconds, FUSED_BACKWARD * seconds
        if kind.what == "summed":
            return 0, 0.0, bytes_seconds(number * SUMMED, h) * (self._num_microbatches > 1)
        if kind.what in ("touched", "rebuilt"):
            seconds = bytes_seconds(number * size, h)
            return 0, kind.times[0] * seconds, kind.times[1] * seconds
        if kind.what in ("collective", "ahead"):
            seconds = self.collective_seconds(kind.op, kind.axes, number * size)
            is_forward = kind.phase == "forward"
            return 1 + (kind.what == "ahead"), seconds * is_forward, seconds * (not is_forward)
        return 0, 0.0, 0.0

    def _product_seconds(self, p: MatrixProduct) -> Column:
        """Return the seconds of a product of every contender, whose sizes are columns."""
        h = self.setting.hardware
        tiled = price.tiling_shares(p.rows, p.columns, p.batch, h.processors, h.tile)
        return price.products_seconds(p, h, self.setting.precision, self.size["compute"], tiled)

    @cached_property
    def _pass_sums(self) -> dict[str, _PassSums]:
        """Return the seconds of passes, and kernels of the host, of all layers and of the `whole` model, and of what of
        all layers is `rebuilt`, and done again with recompute=full, of several blocks at a time (`between`) beside, and
        with recompute=selective."""
        layers = self.setting.layers * self.layer
        rebuilt, again, inside = (
            np.array(flags)
            for flags in zip(*((k.what == "rebuilt", k.again, k.inside) for k in self.kinds), strict=True)
        )
        weights = {
            "layers": layers * ~rebuilt,
            "whole": self.whole * ~rebuilt,
            "rebuilt": layers * rebuilt,
            "full": layers * (again & ~rebuilt),
            "between": layers * ~again,
            "selective": layers * inside,
        }
        often, sums = np.array([*weights.values()]), np.zeros((3, len(weights), 2, len(self.stages)))
        for i, kind in enumerate(self.kinds):
            if kind.what in TIMED:
                part, *seconds = self._price_number(i)
                for phase in (0, 1):
                    sums[part, :, phase] += often[:, i, None] * seconds[phase]
        kernels = (often @ self._kernels.T)[:, :, None]
        return {name: _PassSums(*sums[:, k], kernels[k]) for k, name in enumerate(weights)}

    @once_each
    def _sum_passes(self, name: str, recompute: str, every: int, is_split: bool) -> _PassSums:
        """Return the seconds of passes of all `layers`, or of the `whole` model, with one kind of recomputation of
        `every` so many blocks at a time. `is_split`: True if weight gradients have passes of their own."""
        by_block = self.compiles and not is_split and recompute != "selective"  # each one function
        sums, layers, known = self._pass_sums[name], self._pass_sums["layers"], self._pass_sums
        parts = self.collective_seconds("all_gather", self._stream[1], self._stream[0] * self.size["compute"])
        kept_parts = _PassSums([0.0], [self._blocks / every * parts], [0.0], [0.0])
        more = {
            "none": [] if by_block else [known["rebuilt"].flip()],
            "selective": [known["rebuilt"].flip(), known["selective"]],
            "full": [known["full"], known["between"].scale(1 - 1 / every), kept_parts],
        }[recompute]
        sums, layers = (total.add_backward(more) for total in (sums, layers))
        calls = CALLS_OF_KERNEL * sums.host
        if by_block:
            of_blocks = CALLS_OF_BLOCK * self._blocks * np.array([[1], [1 + (recompute == "full")]])
            calls = of_blocks + CALLS_OF_KERNEL * (sums.host - layers.host)
        return sums._replace(host=host_seconds(sums.host, calls, self.setting.hardware))

    @property
    def _blocks(self) -> int:
        """Return the number of blocks of the model's layers."""
        return sum(of_layer for _, of_layer in self.setting.units)

    def _device_seconds(self, sums: _PassSums, moved: Any = 0.0, slower: float = 1.0) -> NDArray[np.float64]:
        """Return the seconds of both passes, beside which collectives of parameters take `moved` seconds. `slower`: so
        many times as long as alone does computing take."""
        hidden = np.minimum(sums.ahead + moved, sums.computing if self.setting.overlap else 0.0)
        exposed = sums.ahead + moved - (1 - self.setting.hardware.interference) * hidden
        return hidden_or_summed_seconds(
            slower * sums.computing + sums.waiting + exposed, sums.host, self.setting.hardware
        )

    @cached_property
    def _kernels(self) -> NDArray[np.float64]:
        """Return the kernels that each number stands for, [forward and backward, numbers]."""
        launched = {"products": (1, 2), "fused": (1, 3)}
        pairs = (
            (k.times[0] > 0, k.times[1] > 0) if k.what in ("touched", "rebuilt") else launched.get(k.what, (0, 0))
            for k in self.kinds
        )
        return np.array(list(pairs), dtype=float).T

    def sketch_passes(self, recompute: str) -> PassBytes:
        """Return the bytes of passes by the sketch alone: as many as there are results."""
        kept = np.array([kind.what == "kept" for kind in self.kinds]) * self.size["compute"]
        outside = kept * [not kind.inside for kind in self.kinds]
        until_weights = np.array([kind.what in ("kept", "pending") for kind in self.kinds]) * self.size["compute"]
        layer, outside, ends = (w @ self.numbers for w in (self.layer * kept, self.layer * outside, self.ends * kept))
        pending, pending_ends = self.layer * until_weights @ self.numbers, self.ends * until_weights @ self.numbers
        stream = self._stream[0] * self.size["compute"]
        each = {"full": stream, "selective": outside}.get(recompute, layer)
        return PassBytes((each, ends), (pending, pending_ends), (pending + pending_ends,) * 2)

    @once_each
    def _pass_bytes(self, recompute: str) -> PassBytes:
        """Return the bytes of passes as the meter would count them."""
        by_sketch, quotients = self.sketch_passes(recompute), self.quotients.get(recompute, USUAL)
        return PassBytes(*(
            tuple(size * q for size, q in zip(*pair, strict=True)) for pair in zip(by_sketch, quotients, strict=True)
        ))  # fmt: skip

    @once_each
    def _parameter_costs(self, zero: int) -> _ParameterCosts:
        """Return what a worker has of all parameters and does with them, as if they were on one stage."""
        master, compute = self.size["master"], self.size["compute"]
        costs = _ParameterCosts(*(np.zeros_like(self.stages, dtype=float) for _ in _ParameterCosts._fields))
        copies = compute if compute != master or zero in (1, 2) else 0
        for axes in dict.fromkeys(kind.axes for kind in self.kinds if kind.what == "parameter"):
            rows = self._parameter_rows(axes)
            elements, of_layer = (times[rows] @ self.numbers[rows] for times in (self.whole, self.layer))
            shards = self._group_size(tuple(a for a in axes if a in (*REPLICAS, *CONTEXT)))
            state, summed, used = (shards if zero >= least else 1.0 for least in (1, 2, 3))
            held = master * (1 + self.setting.moments) / state + master / summed + copies / used
            blocks = max(1.0, min(self.whole[rows].sum(), self.setting.layers + 2))
            buckets = blocks if zero == 3 else np.minimum(self._count_buckets(axes), blocks)
            elements_at_once = elements / buckets
            summed_bytes = elements_at_once * (compute if zero >= 2 else master)
            each = self.collective_seconds("reduce_scatter" if zero else "all_reduce", axes, summed_bytes)
            gather = self.collective_seconds("all_gather", axes, elements_at_once * compute / shards) if zero else 0.0
            more = elements * held, of_layer * held, buckets * each, each, buckets * gather, elements / state
            costs = _ParameterCosts(*(total + part for total, part in zip(costs, more, strict=True)))
        return costs

    def _parameter_rows(self, axes: tuple[str, ...]) -> list[int]:
        """Return which numbers are of parameters whose gradients are summed over some axes."""
        return [i for i, kind in enumerate(self.kinds) if kind == Quantity("parameter", axes, inside=kind.inside)]

    @once_each
    def _count_buckets(self, axes: tuple[str, ...]) -> Column:
        """Return in how many buckets all gradients that are summed over some axes are, wherever blocks end."""
        size = self.whole[self._parameter_rows(axes)] @ self.numbers[self._parameter_rows(axes)] * self.size["master"]
        if (mib := self.setting.bucket_mib) is not None:
            return np.ceil(size / max(1, mib * price.MIB))
        latency = self.collective_seconds("all_reduce", axes, np.zeros_like(size))
        transfer = self.collective_seconds("all_reduce", axes, size) - latency
        return price.choose_bucket_count(transfer, np.maximum(LEAST, self.setting.hardware.interference * latency))

    @cached_property
    def _stream(self) -> tuple[Column, tuple[str, ...]]:
        """Return the elements of the activation between two layers that each rank keeps or sends, its part of what is
        replicated over some axes, and these axes."""
        candidates = [i for i, kind in enumerate(self.kinds) if kind.what == "stream"]
        candidates = candidates or [i for i, kind in enumerate(self.kinds) if kind.what == "kept"]
        largest = max(candidates, key=lambda i: self.numbers[i].max(initial=0.0))
        axes = tuple(a for a in self.kinds[largest].axes if a in self.axes)
        return self.numbers[largest] / self._group_size(axes), axes

    @cached_property
    def _num_microbatches(self) -> Column:
        """Return the microbatches of a step."""
        replicas = self._group_size(tuple(a for a in self.axes if a in REPLICAS))
        return np.ceil(self.setting.batch / (self.columns["microbatch"] * replicas))

    @cached_property
    def _groups_by_stages(self) -> list[tuple[int, NDArray[np.intp]]]:
        """Return which contenders have so many stages, but for one."""
        return [(int(n), np.flatnonzero(self.stages == n)) for n in np.unique(self.stages) if n > 1]

    def _most_of_stages(self, chunks: int, layers: Column, around: Column, by_number: bool = False) -> Column:
        """Return the most that any stage has of the totals of `layers` and of what is `around` them, by its cost, or
        `by_number` of its units."""
        most = np.asarray(layers + around)
        for n, alike in self._groups_by_stages:
            shares = distinct_shares(self.setting.units, n, chunks, by_number)
            most[alike] = (shares[:, :1] * layers[alike] + shares[:, 1:] * around[alike]).max(axis=0)
        return most

    @once_each
    def _microbatches_of(self, chunks: int) -> Column:
        """Return the microbatches of a step with so many chunks on a stage, of which several have a turn for each
        stage."""
        return np.maximum(self._num_microbatches, self.stages if chunks > 1 else 1)

    @once_each
    def _passes_seconds(self, kind: str, chunks: int, recompute: str, every: int) -> Column:
        """Return the seconds from the first to the last pass of a step, with waits for other stages."""
        h, stages, slower = self.setting.hardware, self.stages, 1 + price.LOCKSTEP * (chunks > 1)
        how = recompute, every, kind == "zb_h1"
        of_layers, of_whole = self._sum_passes("layers", *how), self._sum_passes("whole", *how)
        layers, whole = (self._device_seconds(sums, slower=slower).sum(axis=0) for sums in (of_layers, of_whole))
        slowest = self._most_of_stages(chunks, layers, np.maximum(0.0, whole - layers))
        part = self._stream[0] * self.size["compute"]
        sent = message_seconds(part, self._ranks_by_axis["stage"][1] > 1, h)
        gathered = self.collective_seconds("all_gather", self._stream[1], part)
        crowded = (kind != "1f1b") & (2 * sent > price.CROWDED * whole / (stages * chunks))
        handed = 2 * (chunks - 1 / stages) * (gathered + sent * np.where(crowded, QUEUED, 1.0)) * (stages > 1)
        m, lost = self._microbatches_of(chunks), np.maximum(0.0, whole - slowest)
        if kind == "zb_h1":  # weight gradients fill the pause, if there are enough microbatches
            forward, backward = self._device_seconds(of_layers, slower=slower) / np.maximum(LEAST**2, layers)
            few = lost * (forward + backward / 2) - (m - 1) * forward * slowest
            lost = np.maximum(lost * forward, few)
        return m * (slowest + handed) + (lost + (stages - 1) * handed) / chunks

    @once_each
    def _stage_state(self, zero: int, chunks: int) -> Column:
        """Return the bytes of parameters and of what belongs to them on the worker that has most."""
        costs, layers = self._parameter_costs(zero), self.setting.layers
        of_layers = layers * costs.layer_state
        return self._most_of_stages(chunks, of_layers, np.maximum(0.0, costs.state - of_layers), True)

    @once_each
    def _parameter_seconds(self, zero: int, chunks: int, recompute: str) -> Column:
        """Return the seconds of a step for collectives of parameters that passes do not hide, and by which those slow
        the passes that are hidden, and for the update."""
        s, costs, passes = self.setting, self._parameter_costs(zero), self._sum_passes("whole", recompute, 1, False)
        share = self._stage_state(zero, chunks) / costs.state  # of the stage that has most
        forward, backward = passes.computing / self.stages if s.overlap else 0 * passes.computing

        def exposed_seconds(total: Column, beside: Column) -> Column:
            """Return the seconds by which collectives once a step make it longer."""
            buckets = costs.reduces / np.maximum(costs.last, LEAST**2) * share
            hidden = price.beside_passes_seconds(total * share, buckets, chunks, self.stages, beside / chunks)
            return total * share - (1 - s.hardware.interference) * hidden

        seconds = bytes_seconds(costs.updated * share * update_bytes(self.size, s.moments), s.hardware)
        if zero in (1, 2):
            seconds = seconds + exposed_seconds(costs.gathers, forward)
        if zero < 2:
            return seconds + exposed_seconds(costs.reduces, backward)
        gathers = costs.gathers if zero == 3 else 0 * costs.gathers
        moved = np.stack([gathers, gathers + costs.reduces]) * share * self.stages
        longer = self._device_seconds(passes, moved) - self._device_seconds(passes)
        return seconds + self._microbatches_of(chunks) * longer.sum(axis=0) / self.stages

    def estimate_contenders(self, mode: Contender, rows: NDArray[np.intp]) -> Estimate:
        """Estimate the contenders `rows` in one mode."""
        seconds = self._passes_seconds(mode.kind, mode.chunks, mode.recompute, mode.recompute_every)
        parameters = self._parameter_seconds(mode.zero, mode.chunks, mode.recompute)
        held = self._activation_bytes(mode.kind, mode.chunks, mode.recompute, mode.recompute_every)
        state = self._stage_state(mode.zero, mode.chunks)
        return Estimate(seconds[rows] + parameters[rows], self._add_library_reserve(state[rows] + held[rows]))

    @once_each
    def _activation_bytes(self, kind: str, chunks: int, recompute: str, every: int) -> Column:
        """Return the bytes of activations in flight on the stage that takes most, and of the layer at work."""
        bytes_of_passes, splits, m = self._pass_bytes(recompute), kind == "zb_h1", self._microbatches_of(chunks)
        (kept, kept_ends), (pending, pending_ends) = bytes_of_passes[:2]
        work, layers = bytes_of_passes.work[splits], self.setting.layers
        per_pass = np.ceil(layers / (self.stages * chunks))
        if recompute == "full":  # whose stretches keep their inputs, and are whole while they are computed again
            at_once = np.minimum(every, per_pass)
            work = work + (at_once - 1) * self._pass_bytes("none").kept[0]
            kept = kept * np.ceil(per_pass / at_once) / per_pass
        held = layers * kept + np.maximum(0.0, kept_ends)
        for n, alike in self._groups_by_stages:
            number = np.arange(n)[:, None]
            deep, around, _ = share_units(self.setting.units, n, chunks)[:, :, None]
            more = (n - 1) / chunks if chunks > 1 else 0.0
            first, last = n + more, 1 + more * (chunks - 1)
            flights = np.minimum(m[alike], first - number / (n - 1) * (first - last))
            if kind == "gpipe":
                flights = m[alike]
            of_stage = flights * (deep * layers * kept[alike] + around * np.maximum(0.0, kept_ends[alike]))
            if splits:  # weight gradients wait, the more the later the stage
                delayed = np.minimum(m[alike] - 1, number)
                again = np.maximum(0.0, pending - kept)[alike]  # what the pass at work does not take over
                of_stage = of_stage + deep * layers / chunks * (delayed * pending[alike] + again)
                of_stage = of_stage + delayed * around * np.maximum(0.0, pending_ends[alike])
            held[alike] = of_stage.max(axis=0)
        return held + work

    def _add_library_reserve(self, memory: Column) -> Column:
        """Return the bytes of a worker with what its device's libraries reserve."""
        return memory * (1 + ROUNDING) + overhead_bytes(GROUPS, 0, 0) if self.setting.libraries else memory
