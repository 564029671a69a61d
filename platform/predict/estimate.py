"""Estimate of many contenders at once, in closed form from a sketch: seconds of a step and bytes of a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log2, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.model import build_model
from platform.plan.layout import Mesh, pad_to_multiple
from platform.plan.model_types import Operation, Parameter, Recompute, Spec
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan import ITEMSIZE
from platform.plan.plan_builder import ALIGNED, PlannedOperations, settle_planner
from platform.plan.planner import Planner
from platform.plan.rule import partial_axes
from platform.plan.scheme import CONTEXT, REPLICAS, Scheme
from platform.predict import price
from platform.predict.contenders import Contender
from platform.predict.footprint import ROUNDING, overhead_bytes
from platform.predict.hardware import Hardware
from platform.predict.price import bytes_seconds, group_seconds, hidden_or_summed_seconds, message_seconds, update_bytes
from platform.predict.work import (
    FUSED_BACKWARD,
    SUMMED,
    MatrixProduct,
    attention_flops,
    even_routing_share_of_spec,
    even_sent_share,
    list_group_products,
)

# Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes.
#
# An operation is planned on a mesh whose axes all have two ranks, and once more with each of them doubled: a number
# that halves with an axis has the exponent -1 in its size. So the communication rule itself says how its collectives
# grow, and thousands of meshes are judged at once. Sizes that axes do not divide are judged by `splits`, as a plan
# does.

Columns = Mapping[str, NDArray[Any]]  # variable -> its value in each contender
FEW = 4  # layers of a model from whose last one deeper ones follow
SEQUENCES = "microbatch"  # variable beside the sizes of axes
SIDES = "rows", "columns", "inner", "batch"  # of a product
BASE = 64  # sequences of a microbatch on a replica while numbers are found


class Quantity(NamedTuple):
    """Meaning of a number of an operation: the SIDES of a product and how many such `products` there are; `fused` FLOPs
    of attention; elements of weights whose gradients are `summed` over microbatches; elements that are `touched` so
    often in the forward and the backward pass (`times`), `kept` for the latter, of the `stream` between blocks, of a
    `parameter`, or of a `collective` (`op`, in a `phase`) over `axes`, which goes `ahead` if it is a weight's.
    `inside`: part of attention, done again with recompute=selective."""

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

    def evaluate_columns(self, columns: Columns) -> NDArray[np.float64]:
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


def count_operations(config: Any, layers: int, scheme: Scheme) -> Counter[Operation]:
    """Return the operations of a model with so many layers, equal ones counted together under one of them."""
    model = build_model(replace(config, layers=layers))
    recorder = _SketchRecorder(scheme, config.dropout, Recompute("selective"), config.fused_dropout)
    model.forward(recorder, {name: name for name in model.inputs})
    first: dict[tuple, Operation] = {}
    return Counter(first.setdefault(o.nameless_key, o) for o in recorder.operations)


def sketch_model(config: Any, scheme: Scheme, axes: Sequence[str]) -> Sketch | None:
    """Return the sketch of a configured model under a scheme whose `axes`, of replicas and contexts too, all have two
    ranks; None if no plan of it is legal. `config`: the group model of a configuration."""
    few = min(FEW, config.layers)
    operations = count_operations(config, few, scheme)
    fewer_operations = count_operations(config, few - 1, scheme) if few > 1 else Counter[Operation]()
    anonymous = {o.nameless_key: n for o, n in fewer_operations.items()}
    variables = (*axes, SEQUENCES)
    plannable = [o for o in operations if OPERATIONS[o.kind] not in (Ops.pointwise, Ops.residual)]
    kinds, values, exponents, once, layer = [], [], [], [], []
    try:
        probes = (_build_probe_planner(config, scheme, axes, grown) for grown in (None, *variables))
        planners = [settle_planner(probe, plannable, None)[:2] for probe in probes]
        for o, n in operations.items():
            quantities = [list(_iterate_quantities(*pair, o)) for pair in planners]
            for i, (kind, value) in enumerate(quantities[0]):
                grown = [more[i][1] if len(more) == len(quantities[0]) else value for more in quantities[1:]]
                kinds.append(kind._replace(inside=o.recomputed))
                values.append(value)
                exponents.append([round(log2(g / value)) if g and value else 0 for g in grown])
                once.append(n)
                layer.append(n - anonymous.get(o.nameless_key, 0))
    except ValueError:
        return None
    planner = planners[0][0]
    splits, batch = _find_divided_sizes(planner, operations)
    if any(planner.layout(t).find_conflict() for o in operations for t in (*o.inputs, *o.outputs)):
        return None
    arrays = [np.array(numbers, dtype=float) for numbers in (values, exponents, once, layer)]
    return Sketch(Monomials(tuple(kinds), variables, *arrays), splits, batch)


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
    size = room * even_routing_share_of_spec(planner, output) if output else 0.0
    op, mesh = OPERATIONS[o.kind], planner.mesh
    if op in (Ops.pointwise, Ops.residual):
        accesses = op.memory_accesses if op is Ops.residual else Ops.pointwise.accesses_by_inputs[len(o.inputs)]
        yield Quantity("touched", times=accesses), size
        yield Quantity("kept"), room
        if op is Ops.residual:
            yield Quantity("stream"), size
        return
    planned = planned_operations[o.kind, o.name]
    if planned.groups:
        products = Counter(p for group in planned.groups for p in list_group_products(planner, o, group))
        for product, count in products.items():
            yield from ((Quantity(side), size) for side, size in zip(SIDES, product[: len(SIDES)], strict=True))
            yield Quantity("products"), count
        weights = (e for g in planned.groups for e in g.einsums if isinstance(o.inputs[1 + e.index], Parameter))
        yield Quantity("summed"), sum(prod(e.operand.before) for e in weights)
    else:
        if op.chooses_kernel:
            yield Quantity("fused"), attention_flops(planner, o)
        yield Quantity("touched", times=op.memory_accesses), size
    if any(p.role == "in" for p in o.parameters) or not planned.groups and not op.keeps_nothing:
        yield Quantity("kept"), sum(prod(planner.local_shape(t)) for t in o.outputs)
    for p in o.parameters:
        axes = mesh.order_axes(partial_axes(planner.layout(p), planned.compute_axes))
        yield Quantity("parameter", axes), prod(planner.local_shape(p))
    ahead = Counter(_weight_collectives(planner, planned))
    for c in planned.collectives:
        ahead[c] -= (goes := ahead[c] > 0)
        if c.dtype != "compute" or c.op == "rotate":
            continue
        elements = c.elements * even_sent_share(planner, o, c)
        yield Quantity("ahead" if goes else "collective", mesh.order_axes(c.axes), c.op, c.phase), elements
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


@dataclass(frozen=True)
class Circumstances:
    """Circumstances of all contenders of a search: the `hardware`, the `precision`, the model's `layers`, how many its
    sketch has (`few`), sequences of a step (`batch`), numbers of optimizer state (`moments`), whether collectives
    of parameters go on beside computation (`overlap`), whether devices have libraries that reserve memory, and MiB of
    gradients in a bucket, None if the links say (`bucket_mib`)."""

    hardware: Hardware
    precision: str
    layers: int
    few: int
    batch: int
    moments: int
    overlap: bool
    libraries: bool
    bucket_mib: int | None


class Estimate(NamedTuple):
    """Estimated `seconds` of a step and `memory` in bytes of the worker that needs most, of many contenders."""

    seconds: Column
    memory: Column


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
        self.layer = sketch.numbers.layer
        self.whole = sketch.numbers.once + (setting.layers - setting.few) * sketch.numbers.layer
        self.ends = np.maximum(0.0, sketch.numbers.once - setting.few * sketch.numbers.layer)
        self.size = ITEMSIZE[setting.precision]
        self.stages = columns["stage"]

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

    @cached_property
    def _pass_seconds(self) -> tuple[NDArray, NDArray, NDArray]:
        """Return the seconds of each number, of computing, of waiting and of what goes on beside computing: arrays of
        [forward and backward, numbers, contenders]."""
        h, size = self.setting.hardware, self.size["compute"]
        peak = h.peak_flops(self.setting.precision)
        computing = np.zeros((2, *self.numbers.shape))
        waiting, hidden = np.zeros_like(computing), np.zeros_like(computing)
        for i, kind in enumerate(self.kinds):
            number = self.numbers[i]
            if kind.what == SIDES[0]:
                product, count = MatrixProduct(*self.numbers[i : i + len(SIDES)]), self.numbers[i + len(SIDES)]
                computing[0, i] = count * self._product_seconds(product)
                computing[1, i] = count * sum(map(self._product_seconds, product.gradient_products))
            elif kind.what == "fused":
                seconds = number / (peak * h.reached.attention)
                computing[0, i], computing[1, i] = seconds, FUSED_BACKWARD * seconds
            elif kind.what == "summed":
                computing[1, i] = bytes_seconds(number * SUMMED, h) * (self._num_microbatches > 1)
            elif kind.what == "touched":
                seconds = bytes_seconds(number * size, h)
                computing[0, i], computing[1, i] = kind.times[0] * seconds, kind.times[1] * seconds
            elif kind.what == "collective":
                waiting[int(kind.phase == "backward"), i] = self.collective_seconds(kind.op, kind.axes, number * size)
            elif kind.what == "ahead":
                into = hidden if self.setting.overlap else waiting
                into[int(kind.phase == "backward"), i] = self.collective_seconds(kind.op, kind.axes, number * size)
        return computing, waiting, hidden

    def _product_seconds(self, p: MatrixProduct) -> Column:
        """Return the seconds of a product of every contender, whose sizes are columns."""
        h = self.setting.hardware
        tiled = price.tiling_shares(p.rows, p.columns, p.batch, h.processors, h.tile)
        return price.products_seconds(p, h, self.setting.precision, self.size["compute"], tiled)

    def _sum_passes(self, occurrences: NDArray) -> tuple[Column, Column]:
        """Return the seconds of both passes of the numbers, each so often as `occurrences` says."""
        computing, waiting, hidden = (np.tensordot(part, occurrences, (1, 0)) for part in self._pass_seconds)
        device_seconds = np.maximum(computing, hidden) + waiting
        host = self._kernels @ occurrences * self.setting.hardware.launch
        forward, backward = (
            hidden_or_summed_seconds(device_seconds[i], host[i], self.setting.hardware) for i in (0, 1)
        )
        return forward, backward

    @cached_property
    def _kernels(self) -> NDArray[np.float64]:
        """Return the kernels that each number stands for, [forward and backward, numbers]."""
        launched = {"products": (1, 2), "fused": (1, 3)}
        pairs = (
            (k.times[0] > 0, k.times[1] > 0) if k.what == "touched" else launched.get(k.what, (0, 0))
            for k in self.kinds
        )
        return np.array(list(pairs), dtype=float).T

    @cached_property
    def _layer_times(self) -> tuple[Column, Column, Column, Column, Column, Column]:
        """Return the seconds of the passes, forward and backward, of a layer, of all around the layers, and of all."""
        return (*self._sum_passes(self.layer), *self._sum_passes(self.ends), *self._sum_passes(self.whole))

    @cached_property
    def _recompute_seconds(self) -> Column:
        """Return the seconds in which recompute=selective does the inside of attention again, of a layer."""
        return self._sum_passes(self.layer * [kind.inside for kind in self.kinds])[0]

    def sketch_passes(self, recompute: str) -> PassBytes:
        """Return the bytes of passes by the sketch alone: as many as there are results."""
        kept = np.array([kind.what == "kept" for kind in self.kinds]) * self.size["compute"]
        outside = kept * [not kind.inside for kind in self.kinds]
        until_weights = np.array([kind.what in ("kept", "pending") for kind in self.kinds]) * self.size["compute"]
        layer, outside, ends = (w @ self.numbers for w in (self.layer * kept, self.layer * outside, self.ends * kept))
        pending, pending_ends = self.layer * until_weights @ self.numbers, self.ends * until_weights @ self.numbers
        stream = self._stream_elements * self.size["compute"]
        each = {"full": stream, "selective": outside}.get(recompute, layer)
        return PassBytes((each, ends), (pending, pending_ends), (pending + pending_ends,) * 2)

    @cache  # noqa: B019
    def _pass_bytes(self, recompute: str) -> PassBytes:
        """Return the bytes of passes as the meter would count them."""
        by_sketch, quotients = self.sketch_passes(recompute), self.quotients.get(recompute, USUAL)
        return PassBytes(*(
            tuple(size * q for size, q in zip(*pair, strict=True)) for pair in zip(by_sketch, quotients, strict=True)
        ))  # fmt: skip

    @cache  # noqa: B019
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
            buckets = np.minimum(self._count_buckets(axes), max(1.0, self.whole[rows].sum()))
            bucket_bytes = elements * master / buckets
            each = self.collective_seconds("reduce_scatter" if zero else "all_reduce", axes, bucket_bytes)
            gathered_bytes = bucket_bytes * compute / master / shards
            gather = self.collective_seconds("all_gather", axes, gathered_bytes) if zero else 0.0
            more = elements * held, of_layer * held, buckets * each, each, buckets * gather, elements / state
            costs = _ParameterCosts(*(total + part for total, part in zip(costs, more, strict=True)))
        return costs

    def _parameter_rows(self, axes: tuple[str, ...]) -> list[int]:
        """Return which numbers are of parameters whose gradients are summed over some axes."""
        return [i for i, kind in enumerate(self.kinds) if kind == Quantity("parameter", axes, inside=kind.inside)]

    @cache  # noqa: B019
    def _count_buckets(self, axes: tuple[str, ...]) -> Column:
        """Return in how many buckets all gradients that are summed over some axes are, wherever blocks end."""
        size = self.whole[self._parameter_rows(axes)] @ self.numbers[self._parameter_rows(axes)] * self.size["master"]
        if (mib := self.setting.bucket_mib) is not None:
            return np.ceil(size / max(1, mib * price.MIB))
        latency = self.collective_seconds("all_reduce", axes, np.zeros_like(size))
        transfer = self.collective_seconds("all_reduce", axes, size) - latency
        return price.choose_bucket_count(transfer, np.maximum(LEAST, self.setting.hardware.interference * latency))

    @cached_property
    def _stream_elements(self) -> Column:
        """Return the elements of the activation between two layers, of which each rank keeps or sends its part."""
        candidates = [i for i, kind in enumerate(self.kinds) if kind.what == "stream"]
        candidates = candidates or [i for i, kind in enumerate(self.kinds) if kind.what == "kept"]
        return self.numbers[max(candidates, key=lambda i: self.numbers[i].max(initial=0.0))]

    @cached_property
    def _seconds_per_send(self) -> Column:
        """Return the seconds in which a stage sends an activation to the next."""
        crosses_nodes = self._ranks_by_axis["stage"][1] > 1
        return message_seconds(self._stream_elements * self.size["compute"], crosses_nodes, self.setting.hardware)

    @cached_property
    def _num_microbatches(self) -> Column:
        """Return the microbatches of a step."""
        replicas = self._group_size(tuple(a for a in self.axes if a in REPLICAS))
        return np.ceil(self.setting.batch / (self.columns["microbatch"] * replicas))

    def estimate_contenders(self, mode: Contender, rows: NDArray[np.intp]) -> Estimate:
        """Estimate the contenders `rows` in one mode."""
        s, stages, sent = self.setting, self.stages[rows], self._seconds_per_send[rows]
        m = np.maximum(self._num_microbatches[rows], stages if mode.chunks > 1 else 1)
        forward, backward, ends_forward, ends_backward, all_forward, all_backward = (
            part[rows] for part in self._layer_times
        )
        again = {"full": self._layer_times[0], "selective": self._recompute_seconds}.get(mode.recompute)
        if again is not None:
            backward, all_backward = backward + again[rows], all_backward + s.layers * again[rows]
        layer, ends, whole = forward + backward, ends_forward + ends_backward, all_forward + all_backward
        per = np.ceil(s.layers / (stages * mode.chunks))
        slack = (stages * mode.chunks * per - s.layers) * layer
        deepest = mode.chunks * per * layer + np.maximum(0.0, ends - slack)
        lockstep = 1 + price.LOCKSTEP if mode.chunks > 1 else 1.0
        slowest = lockstep * np.where(stages == 1, whole, np.minimum(whole, deepest))
        lost = whole / stages * (forward / layer if mode.kind == "zb_h1" else 1.0)
        bubble = (stages - 1) * (lost / mode.chunks + 2 * sent)
        handed = np.where(stages > 1, 4 * mode.chunks * sent, 0.0)
        costs = _ParameterCosts(*(part[rows] for part in self._parameter_costs(mode.zero)))
        state = np.where(stages == 1, costs.state, np.minimum(
            costs.state, mode.chunks * per * costs.layer_state + (costs.state - s.layers * costs.layer_state) / 2
        ))  # fmt: skip
        exposed = self._exposed_seconds(mode, m, costs, all_forward, all_backward, stages)
        update = bytes_seconds(costs.updated / stages * update_bytes(self.size, s.moments), s.hardware)
        held = self._activation_bytes(mode, rows, m, mode.chunks * per)
        return Estimate(m * (slowest + handed) + bubble + exposed + update, self._add_library_reserve(state + held))

    def _exposed_seconds(
        self, mode: Contender, m: Column, costs: _ParameterCosts, forward: Column, backward: Column, stages: Column
    ) -> Column:
        """Return the seconds of a step for collectives of parameters that its passes, `forward` and `backward` of the
        whole model in all `stages`, do not hide, and by which those slow the passes that are hidden."""
        passes, interference = forward + backward, self.setting.hardware.interference
        hides = 1.0 if self.setting.overlap else 0.0

        def exposed_seconds(total: Column, beside: Column) -> Column:
            """Return the seconds by which collectives once a step make it longer, in all stages."""
            buckets, each = costs.reduces / np.maximum(costs.last, LEAST**2), hides * beside / mode.chunks
            hidden = price.beside_passes_seconds(total, buckets, mode.chunks, stages, each)
            return total - (1 - interference) * hidden

        gathers = exposed_seconds(costs.gathers, forward) if mode.zero in (1, 2) else 0.0
        if mode.zero < 2:
            return (exposed_seconds(costs.reduces, backward) + gathers) / stages
        moved = costs.reduces + (2 * costs.gathers if mode.zero == 3 else 0.0)
        hidden = np.minimum(moved, hides * passes)
        return (m * (moved - hidden + interference * hidden) + gathers) / stages

    def _activation_bytes(self, mode: Contender, rows: NDArray[np.intp], m: Column, layers: Column) -> Column:
        """Return the bytes of activations in flight on the first stage or the last, of so many `layers`, whichever
        takes more, and of the layer at work."""
        stages, bytes_of_passes, splits = self.stages[rows], self._pass_bytes(mode.recompute), mode.kind == "zb_h1"
        (kept, kept_ends), (pending, pending_ends) = ([part[rows] for part in parts] for parts in bytes_of_passes[:2])
        more = (stages - 1) / mode.chunks if mode.chunks > 1 else 0.0
        first = m if mode.kind == "gpipe" else np.minimum(m, stages + more)
        last = m if mode.kind == "gpipe" else np.minimum(m, 1 + more * (mode.chunks - 1))
        work, per_pass = bytes_of_passes.work[splits][rows], layers / mode.chunks
        if mode.recompute == "full":  # whose stretches keep their inputs, and are whole while they are computed again
            at_once = np.minimum(mode.recompute_every, per_pass)
            work = work + (at_once - 1) * self._pass_bytes("none").kept[0][rows]
            kept = kept * np.ceil(per_pass / at_once) / per_pass
        delayed = np.minimum(m, stages) - 1 if splits else 0.0
        again = np.maximum(0.0, pending - kept) if splits else 0.0  # what the pass at work does not take over
        on_first = first * layers * kept + per_pass * again
        on_last = last * (layers * kept + np.maximum(0.0, kept_ends))
        on_last += per_pass * (delayed * pending + again) + delayed * np.maximum(0.0, pending_ends)
        held = np.where(stages == 1, m * 0 + layers * kept + kept_ends, np.maximum(on_first, on_last))
        return held + work

    def _add_library_reserve(self, memory: Column) -> Column:
        """Return the bytes of a worker with what its device's libraries reserve."""
        return memory * (1 + ROUNDING) + overhead_bytes(GROUPS, 0, 0) if self.setting.libraries else memory
