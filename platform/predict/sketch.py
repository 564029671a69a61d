"""Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from platform.config.groups import Tune
from platform.model import build_model
from platform.model.tuning import find_adapters
from platform.plan.adapters import adapter_sizes, can_quantise
from platform.plan.async_products import fuse_operation
from platform.plan.chunks import axes_of_replication, find_recordings
from platform.plan.gathered_tiles import find_gathered_tiles
from platform.plan.layout import Mesh, base_axis, pad_to_multiple
from platform.plan.model_types import Adapter, Operation, Parameter, Recompute, Spec
from platform.plan.operation_plan import Collective, EinsumGroup, PlannedOperation
from platform.plan.operations.fused_attention import hides_most
from platform.plan.operations.pointwise import keeps_hidden_rows_local
from platform.plan.operations.recorder import Recorder, Symbol
from platform.plan.operations.registry import OPERATIONS, Ops
from platform.plan.plan_builder import ALIGNED, PlannedOperations, settle_planner
from platform.plan.planner import Planner
from platform.plan.quantisation import ROLES, mark_quantised
from platform.plan.rule import partial_axes
from platform.plan.scheme import REPLICAS, Scheme
from platform.predict.work import (
    MatrixProduct,
    accesses_to_rebuild,
    attention_flops,
    divide_products,
    even_sent_share,
    even_share_of_planned_rows,
    even_share_of_planned_rows_of_spec,
    find_accessed_spec,
    find_axes_of_experts,
    list_collectives_beside,
    list_group_products,
)

# Sketch of a model under a scheme: what a rank computes, moves and keeps, as monomials in the sizes of mesh axes.
#
# An operation is planned on a mesh whose axes all have two ranks, and once more with each of them doubled: a number
# that halves with an axis has the exponent -1 in its size. So the communication rule itself says how its collectives
# grow, and thousands of meshes are judged at once. Sizes that axes do not divide are judged by `splits`, as a plan
# does.

Columns = Mapping[str, NDArray[Any]]  # variable -> its value in each contender
SEQUENCES = "microbatch"  # variable beside the sizes of axes
SIDES = "rows", "columns", "inner", "batch"  # of a product
BASE = 64  # sequences of a microbatch on a replica while numbers are found
UNTUNED = Tune()
HIDDEN = "hidden"  # attribute of what makes hidden rows of a feed-forward layer, and (False) of the product behind it
PARAMETERS = "parameter", "frozen", "quantised"  # elements of weights that are trained, or not, or not and in 4 bits


class Quantity(NamedTuple):
    """Meaning of a number of an operation: the SIDES of a product and how many such `products` there are; `fused` FLOPs
    of attention; elements of weights whose gradients are `summed` over microbatches; elements that are `touched` so
    often in the forward and the backward pass (`times`), or there to be `rebuilt`, `kept` for the latter, of the
    `stream` between blocks, of PARAMETERS, or of a `collective` (`op`, in a `phase`) over `axes`, which goes `ahead`
    if it is a weight's, or `beside` so many different products, of which SIDES and number follow: all of it, or but for
    one of its `in_parts`. A stream is replicated over its `axes`. `inside`: part of attention, done again with
    recompute=selective; `again`: done again with recompute=full; `hidden`: done again if feed-forward layers are in
    chunks of rows; `roles`: ROLES of products that are computed; `narrow`: ROLES of products in 8 bits; `tiled`:
    a weight that ZeRO-3 can gather in 8 bits; `copies`: axes, of whose ranks each gets a token once, number of experts,
    and how many a token chooses."""

    what: str
    axes: tuple[str, ...] = ()
    op: str = ""
    phase: str = ""
    times: tuple[float, float] = (0.0, 0.0)
    inside: bool = False
    again: bool = True
    hidden: bool = False
    roles: tuple[str, ...] = ()
    beside: int = 0
    in_parts: bool = False
    copies: tuple[tuple[str, ...], int, int] | None = None
    narrow: tuple[str, ...] = ()
    tiled: bool = False


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
        first: dict[object, Operation] = {}
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

    def mlp(self, function, x, spec, inner, hidden, biases, down, out, bias, counts=None):
        """Record a feed-forward layer; mark what chunks of rows compute twice, and the product behind it."""
        begun = len(self.operations)
        y = Ops.mlp.compose_operation(self, function, x, spec, inner, hidden, biases, down, out, bias, counts)
        if counts is None and "experts" not in down.dims and not any(p.name in self.adapters for p in (*inner, down)):
            last = next(i for i, o in enumerate(self.operations) if down in o.parameters)
            for i in range(begun, last + 1):
                o = self.operations[i]
                self.operations[i] = replace(o, attributes=(*o.attributes, (HIDDEN, i < last)))
        return y

    def residual(self, name: str, x: Symbol, y: Symbol, spec: Spec) -> Symbol:
        """Take note of a residual connection."""
        self.operations.append(Operation("residual", name, (spec,), (spec,)))
        return x


def count_operations(config: Any, layers: int, scheme: Scheme, adapters: Mapping[str, Adapter]) -> Counter[Operation]:
    """Return the operations of a model with so many layers, equal ones counted together under one of them."""
    model = build_model(replace(config, layers=layers))
    sizes = {"memory_length": model.sizes["length"], **model.sizes, **adapter_sizes(adapters), "batch": BASE}
    options = scheme, config.dropout, Recompute("selective"), config.fused_dropout
    recorder = _SketchRecorder(*options, sizes=sizes, adapters=adapters)
    recorded: dict[tuple, Any] = find_recordings(model, recorder)
    if _SketchRecorder not in recorded:
        model.forward(recorder, {name: name for name in model.inputs})
        recorded[_SketchRecorder] = recorder.counted  # type: ignore[index]
    return recorded[_SketchRecorder]  # type: ignore[index]


def _computes_by_chunks(operations: Sequence[Operation], planned: PlannedOperations) -> bool:
    """Return True if a rank computes feed-forward layers in chunks of rows where the configuration asks for them."""
    products = [o for o in operations if o.kind == Ops.project.kind and HIDDEN in dict(o.attributes)]
    return all(keeps_hidden_rows_local(planned[o.kind, o.name], not o[HIDDEN]) for o in products)


def _count_marked(operations: Counter[Operation], quantise: tuple | None) -> Counter[Operation]:
    """Return counted operations with products in 8 bits marked, by `quantise`, arguments of `mark_quantised`."""
    if not quantise:
        return operations
    marked = mark_quantised([*operations], [True] * len(operations), *quantise)
    return Counter(dict(zip(marked, operations.values(), strict=True)))


def sketch_model(
    config: Any,
    scheme: Scheme,
    axes: Sequence[str],
    alike: Mapping[int, int] | None = None,
    quantise: tuple | None = None,
    tune: Tune = UNTUNED,
    fuses: bool = False,
) -> Sketch | None:
    """Return the sketch of a configured model under a scheme whose `axes`, of replicas and contexts too, all have two
    ranks; None if no plan of it is legal. `config`, `tune`: groups of a configuration; `alike`: numbers of
    layers, each with how many of those behind the first one are like it; by default all are like the second;
    `quantise`: arguments of `mark_quantised`, if products are in 8 bits; `fuses`: True if products that can be are one
    with their collectives."""
    adapters = find_adapters(config, tune, build_model(config))
    alike = {number: n for number, n in (alike or {1: config.layers - 1}).items() if n}
    of_first, operations = (
        _count_marked(count_operations(config, layers, scheme, adapters), quantise)
        for layers in (1, max(alike, default=0) + 1)
    )
    deeper = Counter[object]()
    for number, n in alike.items():
        for layers, sign in ((number + 1, n), (number, -n)):
            for o, count in _count_marked(count_operations(config, layers, scheme, adapters), quantise).items():
                deeper[o.nameless_key] += sign * count
    first = {o.nameless_key: n for o, n in of_first.items()}
    variables = (*axes, SEQUENCES)
    plannable = [o for o in operations if OPERATIONS[o.kind] not in (Ops.pointwise, Ops.residual)]
    of_adapters = {part.name for adapter in adapters.values() for part in (adapter.down, adapter.up)}
    frozen = tuple({p.name for o in operations for p in o.parameters if p.name not in of_adapters}) if adapters else ()
    kinds, values, exponents, whole, layer = [], [], [], [], []
    try:
        probes = (
            _build_probe_planner(config, scheme, axes, grown, adapter_sizes(adapters), frozen)
            for grown in (None, *variables)
        )
        planners = [_settle_probe(probe, plannable, fuses) for probe in probes]
        by_chunks = _computes_by_chunks(plannable, planners[0][1])
        for o in operations:
            more_layers = deeper[o.nameless_key]
            quantities = [list(_iterate_quantities(*pair, o, tune.kind == "qlora")) for pair in planners]
            for i, (kind, value) in enumerate(quantities[0]):
                grown = [more[i][1] if len(more) == len(quantities[0]) else value for more in quantities[1:]]
                is_hidden = by_chunks and dict(o.attributes).get(HIDDEN, False)
                kinds.append(kind._replace(inside=o.recomputed, hidden=is_hidden))
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
    is_traceable = quantise is None and all(_can_trace(o, config.length) for o in operations)
    return Sketch(Monomials(tuple(kinds), variables, *arrays), splits, batch, is_traceable)


def _can_trace(o: Operation, length: int) -> bool:
    """Return True if a compiler can trace an operation of sequences of this length."""
    op = OPERATIONS[o.kind]
    return op.is_traceable and not (op.keys_input >= 0 and hides_most("cuda", length, o["window"], o["begins"]))


def _settle_probe(probe: Planner, operations: Sequence[Operation], fuses: bool) -> tuple[Planner, PlannedOperations]:
    """Plan a model's operations on a probe's mesh; return its planner and them, asynchronous if they `fuses`."""
    planner, planned, _ = settle_planner(probe, operations, None)
    if not fuses:
        return planner, planned
    return planner, {key: fuse_operation(o, lambda _: True) for key, o in planned.items()}


def _build_probe_planner(
    config: Any,
    scheme: Scheme,
    axes: Sequence[str],
    grown: str | None,
    more: Mapping[str, int],
    frozen: tuple[str, ...],
) -> Planner:
    """Return the planner of a model on a mesh of two ranks along each axis, four along the axis `grown`, or with twice
    the sequences if `grown` is these. `more`: sizes of adapters; `frozen`: names of what has them."""
    mesh = Mesh.arrange_axes({"stage": 1, **{a: 4 if a == grown else 2 for a in axes}})
    batch = BASE * (2 if grown == SEQUENCES else 1) * prod(mesh.axes[a] for a in axes if a in REPLICAS)
    model = build_model(replace(config, layers=1))
    model_sizes = dict(model.sizes)
    sizes = {"memory_length": model_sizes["length"], **model_sizes, **more, "batch": batch}
    if "vocab" in sizes:
        sizes["vocab"] = pad_to_multiple(sizes["vocab"], ALIGNED)
    return Planner(mesh, scheme, sizes, {}, frozen=frozen)


def _iterate_quantities(
    planner: Planner, planned_operations: PlannedOperations, o: Operation, quantises: bool
) -> Iterator[tuple[Quantity, float]]:
    """Yield the numbers of an operation on a rank, each with its kind; the same kinds on any mesh. Of experts' rows an
    even routing's are computed and sent, and the worst one's kept. `quantises`: True if frozen ones are in 4 bits."""
    output = o.outputs[0] if o.outputs else None
    room = float(prod(planner.local_shape(output))) if output else 0.0
    size = room * even_share_of_planned_rows_of_spec(planner, output) if output else 0.0
    op, mesh = OPERATIONS[o.kind], planner.mesh
    if op in (Ops.pointwise, Ops.residual):
        accesses = op.memory_accesses if op is Ops.residual else Ops.pointwise.accesses_by_inputs[len(o.inputs)]
        yield Quantity("touched", times=accesses), size
        yield Quantity("kept"), room
        if op is Ops.residual:
            yield Quantity("stream", axes_of_replication(planner.layout(o.outputs[0]), mesh)), size
        return
    planned = planned_operations[o.kind, o.name]
    if planned.groups:
        for (product, roles, narrow), count in _count_products(planner, planned).items():
            how = {"again": not planned.once, "roles": roles, "narrow": narrow}
            numbers = zip((*SIDES, "products"), (*product[: len(SIDES)], count), strict=True)
            yield from ((Quantity(what, **how), number) for what, number in numbers)  # type: ignore[arg-type]
        for group in (g for g in planned.groups if planned.rebuilds_input(g)):
            rebuilt = prod(group.x.before) * even_share_of_planned_rows(planner, o)
            yield Quantity("rebuilt", times=(0, accesses_to_rebuild(o))), rebuilt
            yield from ((Quantity("kept"), -prod(group.x.before)), (Quantity("pending"), prod(group.x.before)))
        einsums = (e for g in planned.groups for e in g.einsums if not e.frozen)
        weights = (e for e in einsums if isinstance(o.inputs[1 + e.index], Parameter))
        yield Quantity("summed"), sum(prod(e.operand.before) for e in weights)
    else:
        if flops := attention_flops(planner, o) if op.chooses_kernel else op.count_block_flops(planner, o):
            yield Quantity("fused"), flops
        if (accessed := find_accessed_spec(o)) is not output:
            size = prod(planner.local_shape(accessed)) * even_share_of_planned_rows_of_spec(planner, accessed)
        yield Quantity("touched", times=op.accesses_of_both_passes(o, planned_operations)), size
    if not op.keeps_nothing and (any(p.role == "in" for p in o.parameters) or not planned.groups):
        yield Quantity("kept"), sum(prod(planner.local_shape(t)) for t in o.outputs)
    for p in o.parameters:
        axes = mesh.order_axes(partial_axes(planner.layout(p), planned.compute_axes))
        what = PARAMETERS[planner.is_frozen(p) * (1 + (quantises and can_quantise(p)))]
        tiled = p.name in find_gathered_tiles(planner, [planned], {p.name: p}, ()).tiles
        yield Quantity(what, axes, again=False, tiled=tiled), prod(planner.local_shape(p))
    yield from _iterate_quantities_of_collectives(planner, planned)


def _iterate_quantities_of_collectives(planner: Planner, planned: PlannedOperation) -> Iterator[tuple[Quantity, float]]:
    """Yield the numbers of a planned operation's collectives, each with its kind."""
    o, mesh = planned.operation, planner.mesh
    ahead, results = Counter(_weight_collectives(planner, planned)), Counter(planned.results if planned.once else ())
    beside = [
        (c, products, group)
        for group in planned.groups
        for c, products, _ in list_collectives_beside(planner, o, group)
    ]
    for c in planned.collectives:
        ahead[c] -= (goes := ahead[c] > 0)
        results[c] -= (is_left_out := results[c] > 0)
        if c.dtype != "compute" or c.op == "rotate":
            continue
        elements = c.elements * even_sent_share(planner, o, c, by_pair=True)
        axes = tuple(map(base_axis, mesh.order_axes(c.axes)))
        kind = Quantity("ahead" if goes else "collective", axes, c.op, c.phase, again=not is_left_out)
        if c.op == "all_to_allv" and OPERATIONS[o.kind].moves_rows:  # copies are no power of the ranks
            divided = tuple(map(base_axis, mesh.order_axes(find_axes_of_experts(planner, o))))
            kind = kind._replace(copies=(divided, planner.sizes["experts"], o["chosen"]))
        if of_c := next((pair for pair in beside if pair[0] == c), None):
            beside.remove(of_c)
            yield from _describe_collective_beside(kind, elements, *of_c[1:])
        else:
            yield kind, elements
        if c.op == "all_gather":
            what = "kept" if c.phase == "forward" and planner.scheme.gathered == "keep" else "pending"
            if what == "kept" or not goes:
                yield Quantity(what), c.elements * mesh.count_ranks(c.axes)
            if what == "kept" and not goes:  # in place of its part
                yield Quantity(what), -c.elements


def _describe_collective_beside(
    kind: Quantity, elements: float, products: Sequence[MatrixProduct], group: EinsumGroup
) -> Iterator[tuple[Quantity, float]]:
    """Yield the number of a collective's elements, and sizes of the products of a group that it goes beside."""
    counted, narrow = Counter(products), _list_narrow_roles(group)
    yield kind._replace(what="beside", beside=len(counted), in_parts=bool(group.fuses), narrow=narrow), elements
    for product, count in counted.items():
        yield from ((Quantity("under"), size) for size in (*product[: len(SIDES)], count))


def _list_narrow_roles(group: EinsumGroup) -> tuple[str, ...]:
    """Return the ROLES of a group's products that are in 8 bits."""
    return scaled.products if (scaled := group.einsums[0].scaled) else ()


def _count_products(
    planner: Planner, planned: PlannedOperation
) -> Counter[tuple[MatrixProduct, tuple[str, ...], tuple[str, ...]]]:
    """Return the products of an operation on a rank, ROLES in which each is computed, and ROLES of it in 8 bits."""
    counted = Counter[tuple[MatrixProduct, tuple[str, ...], tuple[str, ...]]]()
    for group in planned.groups:
        parts, count = divide_products(planner, planned.operation, group)
        whole, narrow = list_group_products(planner, planned.operation, group), _list_narrow_roles(group)
        of_both, of_weights = tuple(ROLES)[:2], tuple(ROLES)[2 : 2 + (not group.is_frozen)]
        if count == 1:
            counted.update((product, of_both + of_weights, narrow) for product in whole)
            continue
        counted.update([(part, of_both, narrow) for part in parts] * count)
        counted.update((product, of_weights, narrow) for product in whole if of_weights)
    return counted


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
