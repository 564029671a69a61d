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
from platform.plan.accelerators import ROUNDING, overhead_bytes
from platform.plan.layout import Mesh, pad_to_multiple
from platform.plan.model_types import Operation, Parameter, Recompute, Spec
from platform.plan.operation_plan import Collective, Einsum, EinsumGroup, PlannedOperation
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan import ITEMSIZE
from platform.plan.plan_builder import ALIGNED
from platform.plan.planner import Planner
from platform.plan.rule import partial_axes
from platform.plan.scheme import CONTEXT, REPLICAS, Scheme
from platform.predict import price
from platform.predict.contenders import Contender
from platform.predict.hardware import Hardware
from platform.predict.price import bytes_seconds, group_seconds, hidden_or_summed_seconds, message_seconds, update_bytes
from platform.predict.work import FUSED_BACKWARD, share_in_use, share_of_rows, share_sent

# Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes.
#
# An operation is planned on a mesh whose axes all have two ranks, and once more with each of them doubled: a number
# that halves with an axis has the exponent -1 in its size. So the communication rule itself says how its collectives
# grow, and thousands of meshes are judged at once. Sizes that axes do not divide are judged by `splits`, as a plan
# does.

Columns = Mapping[str, NDArray[Any]]  # variable -> its value in each contender
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
    planners = [_build_probe_planner(config, scheme, axes, grown) for grown in (None, *variables)]
    kinds, values, exponents, once, layer = [], [], [], [], []
    try:
        for o, n in operations.items():
            quantities = [list(_iterate_quantities(planner, o)) for planner in planners]
            for i, (kind, value) in enumerate(quantities[0]):
                grown = [more[i][1] if len(more) == len(quantities[0]) else value for more in quantities[1:]]
                kinds.append(kind._replace(inside=o.recomputed))
                values.append(value)
                exponents.append([round(log2(g / value)) if g and value else 0 for g in grown])
                once.append(n)
                layer.append(n - anonymous.get(o.nameless_key, 0))
    except ValueError:
        return None
    splits, batch = _find_divided_sizes(planners[0], operations)
    if any(planners[0].layout(t).find_conflict() for o in operations for t in (*o.inputs, *o.outputs)):
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


def _iterate_quantities(planner: Planner, o: Operation) -> Iterator[tuple[Quantity, float]]:
    """Yield the numbers of an operation on a rank, each with its kind; the same kinds on any mesh. Of experts' rows an
    even routing's are computed and sent, and the worst one's kept, as a run must have room for them."""
    output = o.outputs[0] if o.outputs else None
    room = float(prod(planner.local_shape(output))) if output else 0.0
    size = room * share_in_use(planner, output) if output else 0.0
    op, mesh = OPERATIONS[o.kind], planner.mesh
    if op in (Ops.pointwise, Ops.residual):
        accesses = op.memory_accesses if op is Ops.residual else Ops.pointwise.accesses_by_inputs[len(o.inputs)]
        yield Quantity("touched", times=accesses), size
        yield Quantity("kept"), room
        if op is Ops.residual:
            yield Quantity("stream"), size
        return
    planned = op.plan_operation(planner, o)
    if work := op.count_flops(o, planner.sizes):
        causal = 0.5 if dict(o.attributes).get("causal") else 1.0
        yield Quantity("flops" if planned.groups else "fused"), causal * work / mesh.count_ranks(planned.compute_axes)
    if planned.groups:
        even = share_of_rows(planner, o)
        pairs = [(g, e) for g in planned.groups for e in g.einsums]
        yield Quantity("width"), min(_shortest_side(g, e, even) for g, e in pairs)
        yield Quantity("read"), sum(prod(e.operand.after) for _, e in pairs)
    else:
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
        elements = c.elements * share_sent(planner, o, c)
        yield Quantity("ahead" if goes else "collective", mesh.order_axes(c.axes), c.op, c.phase), elements
        if c.op == "all_gather" and c.phase == "forward":
            yield Quantity("kept"), c.elements * mesh.count_ranks(c.axes)


def _weight_collectives(planner: Planner, planned: PlannedOperation) -> Iterator[Collective]:
    """Yield the collectives of a planned operation's weights, which go on beside the products before."""
    for e in (e for group in planned.groups for e in group.einsums):
        if isinstance(planned.operation.inputs[1 + e.index], Parameter):
            yield from planner.collectives_of_conversion(e.operand, e.regathered)


def _shortest_side(group: EinsumGroup, e: Einsum, even: float) -> float:
    """Return the shortest side of a product on a rank: of each expert's rows, of which an `even` share is used."""
    weights = dict(zip(e.dims, e.operand.after, strict=True))
    experts = weights.pop("experts", 1) if "rows" in e.x_dims else 1
    inner = prod(n for d, n in weights.items() if d not in e.out_dims)
    rows = prod(group.x.after) * even / max(1, inner) / experts
    return max(1.0, min(inner, prod(weights.values()) / max(1, inner), rows))


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


Column = NDArray[np.float64]
KEPT, DELAYED = 0.8, 1.6  # share of the results counted that plans keep; and times that, with delayed weight gradients
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


class Estimator:
    """Estimates contenders of one scheme, whose axes of more than one rank are the same: `columns` gives, by variable,
    the values of each contender, `axes` the mesh axes, outer to inner."""

    def __init__(self, sketch: Sketch, setting: Circumstances, axes: tuple[str, ...], columns: Columns):
        """Evaluate all numbers of a sketch for all contenders."""
        self.setting, self.axes, self.columns = setting, axes, columns
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
        speed = peak * h.reached.products
        computing = np.zeros((2, *self.numbers.shape))
        waiting, hidden = np.zeros_like(computing), np.zeros_like(computing)
        for i, kind in enumerate(self.kinds):
            number = self.numbers[i]
            if kind.what == "flops":
                width, read = self.numbers[i + 1], self.numbers[i + 2] * size
                seconds = number / (speed * width / (width + h.fill))
                seconds = hidden_or_summed_seconds(seconds, bytes_seconds(read, h), h)
                computing[0, i], computing[1, i] = seconds, 2 * seconds
            elif kind.what == "fused":
                seconds = number / (peak * h.reached.attention)
                computing[0, i], computing[1, i] = seconds, FUSED_BACKWARD * seconds
            elif kind.what == "touched":
                seconds = bytes_seconds(number * size, h)
                computing[0, i], computing[1, i] = kind.times[0] * seconds, kind.times[1] * seconds
            elif kind.what == "collective":
                waiting[int(kind.phase == "backward"), i] = self.collective_seconds(kind.op, kind.axes, number * size)
            elif kind.what == "ahead":
                into = hidden if self.setting.overlap else waiting
                into[int(kind.phase == "backward"), i] = self.collective_seconds(kind.op, kind.axes, number * size)
        return computing, waiting, hidden

    def _sum_passes(self, occurrences: NDArray) -> tuple[Column, Column]:
        """Return the seconds of both passes of the numbers, each so often as `occurrences` says."""
        computing, waiting, hidden = (np.tensordot(part, occurrences, (1, 0)) for part in self._pass_seconds)
        device_seconds = np.maximum(computing, hidden) + waiting
        kernels = float(occurrences @ [kind.what in ("touched", "flops", "fused") for kind in self.kinds])
        hardware = self.setting.hardware
        host = kernels * hardware.launch
        backward = hidden_or_summed_seconds(device_seconds[1], 2 * host, hardware)
        return hidden_or_summed_seconds(device_seconds[0], host, hardware), backward

    @cached_property
    def _layer_times(self) -> tuple[Column, Column, Column, Column]:
        """Return the seconds of the passes, forward and backward, of a layer and of all around the layers."""
        return (*self._sum_passes(self.layer), *self._sum_passes(self.ends))

    @cached_property
    def _recompute_seconds(self) -> Column:
        """Return the seconds in which recompute=selective does the inside of attention again, of a layer."""
        return self._sum_passes(self.layer * [kind.inside for kind in self.kinds])[0]

    @cached_property
    def _kept_bytes(self) -> tuple[Column, Column, Column]:
        """Return the bytes kept for the backward pass: of a layer, of it without attention, and of all else."""
        kept = np.array([kind.what == "kept" for kind in self.kinds]) * self.size["compute"]
        outside = kept * [not kind.inside for kind in self.kinds]
        return tuple(w @ self.numbers for w in (self.layer * kept, self.layer * outside, self.ends * kept))

    @cache  # noqa: B019
    def _parameter_costs(self, zero: int) -> tuple[Column, Column, Column]:
        """Return, of all parameters as if they were on one stage, the bytes of a worker's state, the seconds in which
        gradients are summed and updated parameters gathered, and the elements that it updates."""
        master, compute = self.size["master"], self.size["compute"]
        memory, seconds, updated = (np.zeros_like(self.stages, dtype=float) for _ in range(3))
        copies = compute if compute != master or zero in (1, 2) else 0
        for axes in dict.fromkeys(kind.axes for kind in self.kinds if kind.what == "parameter"):
            rows = self._parameter_rows(axes)
            elements = self.whole[rows] @ self.numbers[rows]
            shards = self._group_size(tuple(a for a in axes if a in (*REPLICAS, *CONTEXT)))
            state, summed, used = (shards if zero >= least else 1.0 for least in (1, 2, 3))
            held = master * (1 + self.setting.moments) / state + master / summed + copies / used
            memory += elements * held
            updated += elements / state
            buckets = np.minimum(self._count_buckets(axes), max(1.0, self.whole[rows].sum()))
            bucket_bytes = elements * master / buckets
            if zero:
                seconds += buckets * self.collective_seconds("reduce_scatter", axes, bucket_bytes)
                gathered_bytes = bucket_bytes * compute / master / shards
                seconds += buckets * self.collective_seconds("all_gather", axes, gathered_bytes)
            else:
                seconds += buckets * self.collective_seconds("all_reduce", axes, bucket_bytes)
        return memory, seconds, updated

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
        forward, backward, ends_forward, ends_backward = (part[rows] for part in self._layer_times)
        again = {"full": self._layer_times[0], "selective": self._recompute_seconds}.get(mode.recompute)
        backward = backward if again is None else backward + again[rows]
        layer, ends = forward + backward, ends_forward + ends_backward
        per = np.ceil(s.layers / (stages * mode.chunks))
        slack = (stages * mode.chunks * per - s.layers) * layer
        slowest = mode.chunks * per * layer + np.maximum(0.0, ends - slack)
        average = (s.layers * layer + ends) / stages
        lost = average * (forward / layer if mode.kind == "zb_h1" else 1.0)
        bubble = (stages - 1) * (lost / mode.chunks + 2 * sent)
        handed = np.where(stages > 1, 4 * mode.chunks * sent, 0.0)
        state, moved, updated = (part[rows] / stages for part in self._parameter_costs(mode.zero))
        hidden = (s.layers * backward + ends_backward) / stages / mode.chunks if s.overlap else 0.0
        exposed = (m if mode.zero > 1 else 1.0) * np.maximum(0.1 * moved, moved - hidden)
        update = bytes_seconds(updated * update_bytes(self.size, s.moments), s.hardware)
        held = self._activation_bytes(mode, rows, m, mode.chunks * per)
        return Estimate(m * (slowest + handed) + bubble + exposed + update, self._add_library_reserve(state + held))

    def _activation_bytes(self, mode: Contender, rows: NDArray[np.intp], m: Column, layers: Column) -> Column:
        """Return the bytes of activations in flight on a stage of so many `layers`, and of the layer at work."""
        stages, (layer, outside, ends) = self.stages[rows], (part[rows] for part in self._kept_bytes)
        more = (stages - 1) / mode.chunks if mode.chunks > 1 else 0.0
        passes = m if mode.kind == "gpipe" else np.minimum(m, stages + more)
        stream = self._stream_elements[rows] * self.size["compute"]
        kept = {"full": stream, "selective": outside}.get(mode.recompute, layer)
        share = KEPT * (DELAYED if mode.kind == "zb_h1" else 1.0)
        return share * passes * layers * kept + layer + ends / np.maximum(1, stages / 2)

    def _add_library_reserve(self, memory: Column) -> Column:
        """Return the bytes of a worker with what its device's libraries reserve."""
        return memory * (1 + ROUNDING) + overhead_bytes(GROUPS, 0, 0) if self.setting.libraries else memory
