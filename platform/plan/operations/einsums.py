"""Einsums: products of an activation with parameters (`project`) or with another activation (`einsum`); groups of them
that share a gather, and SUMMA's panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import lcm, prod
from typing import Any

from platform.plan.layout import Layout, Mesh
from platform.plan.model_types import Parameter
from platform.plan.operation_plan import (
    JOINS_GRADIENTS,
    Collective,
    Einsum,
    EinsumGroup,
    Panels,
    PlannedOperation,
    shapes_along_steps,
)
from platform.plan.operations.adapted import add_products_of_adapters
from platform.plan.operations.op import Gradients, MeteredStorage, Op, Saved, Value, global_extents
from platform.plan.operations.scaled_products import keep_blocks, list_maxima, plan_scaled_products
from platform.plan.planner import Planner
from platform.plan.quantisation import EXACT, SCALE_BYTES
from platform.plan.rule import Contraction, Conversion
from platform.plan.scheme import ModelMistake


class _Products(Op):
    """Products of the first input with each of the others, one result each. A result of the type of statistics is
    computed in it, of operands in the compute type."""

    wide = ("outputs",)
    open = {"inputs": "gradient", "outputs": "value"}

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan compute layouts, conversions and collectives of the einsums; einsums that convert x to the same compute
        layout, for results of one dtype, form a group, which gathers x once."""
        x = operation.inputs[0]
        lends = "rows" in x.dims and planner.scheme.lent > 0
        regathers = planner.scheme.gathered == "again"
        grouped: dict[tuple[Conversion, Layout, str], list[tuple[Einsum, Contraction]]] = {}
        for index, (operand, out) in enumerate(zip(operation.inputs[1:], operation.outputs, strict=True)):
            c = planner.plan_contraction((x, operand), out)
            enter_operand = c.inputs[1]
            if isinstance(operand, Parameter):
                enter_operand = planner.parameter_conversion(operation, operand, enter_operand)
            again = regathers or lends
            scaled = plan_scaled_products(planner, operation, operand, out, c.compute)
            frozen = planner.is_frozen(operand)
            einsum = Einsum(index, x.dims, operand.dims, out.dims, enter_operand, c.output, again, frozen, scaled)
            grouped.setdefault((c.inputs[0], c.compute.restrict_dims(x.dims), out.dtype), []).append((einsum, c))
        groups, collectives, maxima = [], [], list[Collective]()
        for (enter_x, *_), entries in grouped.items():
            einsums = tuple(einsum for einsum, _ in entries)
            group = EinsumGroup(enter_x, einsums, regathered=regathers and not all(e.frozen for e in einsums))
            if planner.scheme.gathered == "panels":
                group = _split_into_panels(group, planner.mesh) or group
            groups.append(group)
            collectives += _group_collectives(planner, group, entries[0][1].compute.only)
            maxima += list_maxima(planner, operation, group, [c.compute for _, c in entries])
        contractions = [c for entries in grouped.values() for _, c in entries]
        axes = tuple(dict.fromkeys(a for c in contractions for a in c.axes))
        only = tuple(a for a in contractions[0].compute.only if all(a in c.compute.only for c in contractions))
        everywhere = not only and not any(planner.layout(out).only for out in operation.outputs)
        once = operation.once and everywhere and not any(group.panels or group.has_wide_dtype for group in groups)
        converted = [c for group in groups for e in group.einsums for c in planner.collectives_of_conversion(e.output)]
        moves = tuple(c for c in (*converted, *maxima) if c.phase == "forward" and once)
        planned = (*collectives, *maxima), tuple(groups)
        return PlannedOperation(operation, *planned, compute_axes=axes, only=only, once=once, results=moves)

    def parameter_compute_axes(self, planner, operation) -> list[Sequence[str]]:
        """Return, for each parameter among the operands, the mesh axes that split its einsum's iteration space."""
        x, pairs = operation.inputs[0], zip(operation.inputs[1:], operation.outputs, strict=True)
        return [planner.plan_contraction((x, y), out).axes for y, out in pairs if isinstance(y, Parameter)]

    def count_flops(self, operation, sizes) -> float:
        """Return the forward FLOPs of all of the operation's einsums, on all ranks together."""
        x = global_extents(operation.inputs[0], sizes)
        of_one = {"experts": 1} if "rows" in x else {}  # a row is multiplied by the matrix of one
        return sum(2 * prod({**x, **global_extents(y, sizes), **of_one}.values()) for y in operation.inputs[1:])


class ProductOp(_Products):
    """Einsum of two activations as `out`. A dim that `out` lacks is contracted: both have it."""

    def record_operation(self, ops, name, x, x_spec, y, y_spec, out):
        return ops.record_operation(self.kind, name, [x, y], [x_spec, y_spec], [out])

    def run_on_blocks(self, ops, name, x, x_spec, y, y_spec, out):
        """Compute the einsum of two activations, x and y, on this rank's blocks, with the planned conversions."""
        return _execute_einsums_by_group(ops, ops.operation_plan(self.kind, name), x, [y], [out])[0]

    meter_memory = run_on_blocks


class ProjectOp(_Products):
    """Einsums of activation x with several parameters `weights`, one result per weight and its type in `outs`; those
    with equal compute layouts share one gather of x and one reduction of its gradient. `biases`, one per weight or
    none, are added once, in the output layout. Rows of experts come with their `counts`, as `dispatch_rows` has given
    both: each is multiplied by the matrix of its expert."""

    multiplies_matrices = True

    @add_products_of_adapters
    def record_operation(self, ops, x, spec, weights, outs, biases=(), counts=None, name=""):
        """Record the products of x, and the biases behind them; return a symbol for each weight. `name`: the name of a
        further use of a weight in the model, by default the first weight's."""
        if ("rows" in spec.dims) != (counts is not None):
            raise ModelMistake(weights[0].name, f"rows, and these alone, have counts, unlike {spec}")
        of_rows = {} if counts is None else {"layer": counts}
        of_rows |= {} if "vocab" in outs[0].dims else ops.origin_attributes(x)  # a loss that is one with it keeps x
        products = ops.record_operation(self.kind, name or weights[0].name, [x], [spec, *weights], outs, **of_rows)
        products = products if len(outs) > 1 else (products,)
        for y, bias, out in zip(products, biases, outs, strict=bool(biases)):
            ops.shift(y, out, bias, counts)
        return products

    @add_products_of_adapters
    def run_on_blocks(self, ops, x, spec, weights, outs, biases=(), counts=None, name=""):
        """Return the products with their biases: fused where nothing is converted between, else shifted."""
        planned = ops.operation_plan(self.kind, name or weights[0].name)
        fused = planned.adds_biases(ops.operation_plan("shift", b.name) for b in biases)
        added = [ops.parameter_block(b) for b in biases] if fused else ()
        operands = [ops.parameter_block(w) for w in weights]
        results = _execute_einsums_by_group(ops, planned, x, operands, outs, added, ops.deferred, counts)
        if fused or not biases:
            return tuple(results)
        return tuple(ops.shift(y, out, b, counts) for y, out, b in zip(results, outs, biases, strict=True))

    meter_memory = run_on_blocks


def _execute_einsums_by_group(ops, planned, x, operands, outs, biases=(), deferred=None, counts=None):
    """Return the results, of the types `outs`, of the planned einsums of activation x with `operands` (parameters or
    one activation), which are computed or metered group by group. `biases`, `deferred`, `counts`: see
    `platform.runtime.einsum.compute_einsums`."""
    of_group = _meter_einsum_group if isinstance(x, Value) else _run_einsum_group
    results: dict[int, Any] = {}
    for n, group in enumerate(planned.groups):
        indices = [e.index for e in group.einsums]
        mine, types, added = ([tensors[i] for i in indices] if tensors else () for tensors in (operands, outs, biases))
        results.update(zip(indices, of_group(ops, planned, n, x, mine, types, added, deferred, counts), strict=True))
    return tuple(results[i] for i in range(len(operands)))


def _run_einsum_group(ops, planned, number: int, x, operands, outs, biases, deferred, counts):
    """Compute group `number` of a planned operation's einsums of x with `operands`."""
    # of which a recomputed forward pass may leave out the products
    left_out = [[n for _, n in ops.blocks[out]] for out in outs] if planned.once and ops.ahead.again else ()
    return ops.kernels.einsum.compute_einsums(
        ops.group_operands(planned, number),
        x,
        operands,
        biases,
        deferred=deferred,
        expert_groups=counts,
        unneeded_shapes=left_out,
        rebuild=ops.kernels.recompute.find_rebuild(x) if planned.rebuilds_input(planned.groups[number]) else None,
    )


def _meter_einsum_group(ops, planned, number: int, x: Value, operands, outs, biases, deferred, counts) -> list[Value]:
    """Count the memory of group `number` of a planned operation's einsums of x with `operands`: in SUMMA panels, as
    local products, or with communication; return their results."""
    group = planned.groups[number]
    if group.panels:
        return _meter_panels(ops, group, ops.convert_block(x, group.x), operands, outs)
    if group.is_local and not group.has_wide_dtype and not any(isinstance(w.key, str) for w in operands):
        result_blocks = [ops.block(out) for out in outs]
        return [ops.plain(y, [x, w], (x.storage, w.storage)) for y, w in zip(result_blocks, operands, strict=True)]
    return meter_converted_group(ops, planned, number, x, operands, biases, deferred, outs=outs)


def _split_into_panels(group: EinsumGroup, mesh: Mesh) -> EinsumGroup | None:
    """Return the group of einsums computed by SUMMA, one panel of the contracted dim at a time, or None if it cannot
    be: x and all operands must gather one contracted dim in their last step, and no einsum's output may need a
    conversion, be computed in the type of statistics, or have rows of experts."""
    converts = any(e.output.forward or e.output.backward for e in group.einsums)
    if converts or group.has_wide_dtype or "rows" in group.x_dims:
        return None
    for dim in group.x_dims:
        if not all(dim in e.dims and dim not in e.out_dims for e in group.einsums):
            continue
        x, x_axes = _remove_last_gather(group.x, group.x_dims.index(dim), mesh)
        operands = [_remove_last_gather(e.operand, e.dims.index(dim), mesh) for e in group.einsums]
        axes = operands[0][1]
        if all(gathered_axes == axes for _, gathered_axes in operands) and (x_axes or axes):
            count = lcm(mesh.count_ranks(x_axes), mesh.count_ranks(axes))
            triples = zip(group.einsums, operands, map(keep_blocks, group.einsums), strict=True)
            einsums = (replace(e, operand=c, scaled=scaled) for e, (c, _), scaled in triples)
            return EinsumGroup(x, tuple(einsums), Panels(dim, x_axes, axes, count))
    return None


def _remove_last_gather(c: Conversion, position: int, mesh: Mesh) -> tuple[Conversion, tuple[str, ...]]:
    """Return an operand's conversion without its last step, and that step's axes, if the step all-gathers equal blocks
    of the dim at `position` and its adjoint is a reduce-scatter; else the conversion itself and (). SUMMA broadcasts
    panels in place of that gather."""
    if c.forward and c.backward:
        last, first = c.forward[-1], c.backward[0]
        gathers = (last.op, first.op) == ("all_gather", "reduce_scatter") and last.dim == first.dim == position
        if gathers and not last.uneven_cut_of_dim(position):
            *_, (_, split, _) = shapes_along_steps(c.forward, c.before, mesh)
            return Conversion(c.forward[:-1], c.backward[1:], c.before, split, cuts=c.cuts), last.axes
    return c, ()


def _group_collectives(planner: Planner, group: EinsumGroup, only: tuple[str, ...]) -> list[Collective]:
    """Return every collective of a group of einsums that the ranks at index 0 of the axes `only` compute."""
    collectives = planner.collectives_of_conversion(group.x, group.regathered)
    if panels := group.panels:
        collectives += _list_panel_collectives(planner, panels, panels.x_axes, group.x, only, frozen=False)
    for e in group.einsums:
        collectives += planner.collectives_of_conversion(e.operand, e.regathered)
        if panels:
            collectives += _list_panel_collectives(planner, panels, panels.operand_axes, e.operand, only, e.frozen)
        collectives += planner.collectives_of_conversion(e.output)
    return collectives


def _list_panel_collectives(
    planner: Planner, panels: Panels, axes: tuple[str, ...], operand: Conversion, only: tuple[str, ...], frozen: bool
) -> list[Collective]:
    """Return the collectives by which SUMMA passes one operand of a group, split over `axes`, around in panels: each
    panel is broadcast in both passes, and its gradient is reduced, unless it is `frozen`. `operand`: its remaining
    conversion; `only`: the axes at whose index 0 alone ranks compute."""
    if not axes:
        return []
    elements = panels.panel_elements(prod(operand.after), axes, planner.mesh)
    cuts = tuple(cut for _, cut in operand.cuts[1])
    kinds = [("broadcast", "forward"), ("broadcast", "backward"), *([] if frozen else [("reduce", "backward")])]
    collectives = [Collective(op, axes, elements, "compute", phase, only, 0, cuts) for op, phase in kinds]
    return [c for c in collectives for _ in range(panels.count)]


def meter_converted_group(
    ops, planned, number: int, x: Value, operands, biases, deferred, *, outs=(), scaled: bool = False
) -> list[Value]:
    """Return group `number` of an operation's einsums of x with `operands`, of types `outs` if they may be left out;
    count its memory. `scaled`: gradients of operands are products of a multiple of x, and are added with others."""
    group, use = planned.groups[number], (planned.operation.kind, planned.operation.name, number)
    einsums, converted_operands = group.einsums, ops.operands(use, group, operands)
    converted = ops.relayout_forward(x, group.x), *converted_operands
    ops.ahead.start_next_gathers(use)
    adjacent = [_are_adjacent_in_bucket(ops, values) for values in (operands, biases) if values]
    joined = group.can_join_operands and all(adjacent)
    left_out = planned.once and ops.ahead.again and [ops.block(o) for o in outs]
    group_results = left_out or _meter_einsum_results(ops, planned, group, converted, joined)
    stored, rebuild = [x, *operands], x.rebuild if planned.rebuilds_input(group) and not ops.wholly else None
    saved = _list_saved_storages(group, stored, converted, rebuild)
    widths, lengths, (width, *sizes) = ([v.elements for v in values] for values in (stored, group_results, converted))
    keys, added = [w.key for w in (*operands, *biases)], [b.elements for b in biases]
    trains = any(map(ops.takes_gradient, (*operands, *biases)))

    def meter_operand_gradients(held: tuple) -> Gradients:
        """Count the memory of the gradients of operands and biases, in place where possible."""
        cast = ops.new(width) if scaled else _meter_cast(ops, group, held[0], width)
        # all gradients are there until the first is reduced, but for sums in place, which have their memory before
        stays = [not e.operand.backward and ops.adds_in_place(k) for k, e in zip(keys, einsums, strict=False)]
        read = cast, _meter_scaled_operands(ops, group, [width, *lengths])  # noqa: F841  (until all is reduced)
        ops.new(max((n for s, n in zip(stays, sizes, strict=True) if s), default=0) * group.is_scaled)  # beside the sum
        products = [None if s else _meter_operand_gradient(ops, group, n) for s, n in zip(stays, sizes, strict=True)]
        steps = [g and ops.relayout_backward(g, n, e.operand) for g, n, e in zip(products, sizes, einsums, strict=True)]
        steps += [ops.new(n) for n in added]
        for i, key in enumerate(keys):
            if isinstance(key, str) and (g := steps[i]):
                if scaled or not ops.leaves.adds_in_place(key):
                    ops.leaves.setdefault(key, g)
                steps[i] = None
        return steps

    def meter_backward(gs: Gradients, saved: Saved) -> Gradients:
        """Count the memory of the einsums' backward pass; `deferred` leaves the operands' gradients for later."""
        local = [ops.relayout_backward(g, n, e.output) for g, n, e in zip(gs, lengths, einsums, strict=True)]
        local = [ops.new(n) if g and g.permuted else g for g, n in zip(local, lengths, strict=True)]
        stored = [Value(w, n, key) for w, n, key in zip(saved[1:], widths[1:], keys, strict=False)]
        regathered_operands = ops.operands(use, group, stored, back=True)
        x = rebuild.allocate() if rebuild else saved[0]
        x = ops.relayout_forward(Value(x, widths[0]), group.x).storage if group.regathered else x
        ops.ahead.start_next_gathers(use, in_backward=True)
        if joined and (ops.wholly or group.fuses or JOINS_GRADIENTS.get(ops.device, True)):  # read to the end
            local = [*(local if deferred is None else ()), ops.new(sum(lengths))]
        x_gradient = _meter_operand_gradient(
            ops, group, width, [*lengths, *sizes]
        )  # until it is reduced, after the operands' gradients
        dx = ops.relayout_backward(x_gradient, width, group.x)
        if deferred is None:
            return [dx, *(meter_operand_gradients((x, local)) if trains else (None for _ in keys))]
        del regathered_operands, x_gradient
        if trains:
            deferred.append(partial(meter_operand_gradients, (x, local)))
        return [dx, *(None for _ in keys)]

    ops.note_operation(group_results, [x, *operands, *biases], saved, meter_backward)
    return group_results


def _list_saved_storages(group: EinsumGroup, stored: Sequence[Value], converted: Sequence[Value], rebuild) -> Saved:
    """Return the storages that an einsum group keeps: of x and its operands, then of what makes x again."""
    regathered = [group.regathered, *(e.regathered for e in group.einsums)]
    choices = zip(stored, converted, regathered, strict=True)
    kept, *others = [(s if again else t).storage for s, t, again in choices]
    return (None, *others, *rebuild.kept) if rebuild else (None if group.is_frozen else kept, *others)


def _meter_einsum_results(ops, planned, group: EinsumGroup, read: Sequence[Value], joined: bool) -> list[Value]:
    """Count the results of an einsum group, and the products that are converted to them, of which operands are read."""
    cast = [_meter_cast(ops, group, v.storage, v.elements) for v in read]  # noqa: F841  (until the products are converted)
    in_bits = _meter_scaled_operands(ops, group, [v.elements for v in read])  # noqa: F841
    products = _meter_products(ops, planned, group, joined)
    return [ops.relayout_forward(y, e.output) for y, e in zip(products, group.einsums, strict=True)]


def _meter_cast(ops, group: EinsumGroup, operand: MeteredStorage | None, elements: int) -> MeteredStorage | None:
    """Count the cast of an operand to the type in which an einsum group multiplies."""
    return ops.widened(operand, elements) if group.has_wide_dtype else operand


def _meter_scaled_operands(ops, group: EinsumGroup, sizes: Sequence[int]) -> list[MeteredStorage]:
    """Count the operands of a group's products in 8 bits, of so many elements. The largest two are numbers again."""
    how = next((e.scaled.how for e in group.einsums if e.scaled), None)
    if how is None:
        return []
    held = []
    for n in sizes:
        scales = n // how.block if how.scale in EXACT else 0
        scratch = ops.new(n), ops.new(n, ops.wide), ops.new(2 * scales, SCALE_BYTES)
        held += [ops.new(n, 1), ops.new(scales, SCALE_BYTES)]
        del scratch
    return [*held, *(ops.new(n, 0 if how.powers else ops.wide) for n in sorted(sizes)[-2:])]


def _meter_operand_gradient(ops, group: EinsumGroup, elements: int, scaled: Sequence[int] = ()) -> MeteredStorage:
    """Count the gradient of an operand of an einsum group, whose factors, of such sizes, are `scaled` to 8 bits."""
    product = _meter_cast(ops, group, None, elements), _meter_scaled_operands(ops, group, scaled)  # noqa: F841
    product += (ops.new(elements),) if group.is_scaled and scaled and len(group.einsums) > 1 else ()  # beside the sum
    return ops.new(elements)


def _meter_products(ops, planned, group: EinsumGroup, joined: bool) -> list[Value]:
    """Count the bytes of an einsum group's matrix products before conversion: one storage if weights are `joined`."""
    products = [ops.inner(planned, e.output) for e in group.einsums]
    if not joined:
        return products
    sizes = [y.elements for y in products]
    del products
    joined_storage = ops.new(sum(sizes))
    return [Value(joined_storage, n) for n in sizes]


def _are_adjacent_in_bucket(ops, operands: Sequence[Value]) -> bool:
    """Return True if all operands of an einsum group are parameters adjacent in one bucket's flat buffer."""
    names = [w.key for w in operands if isinstance(w.key, str) and w.elements]
    return len(names) == len(operands) and ops.plan.bucket_by_parameter[names[0]].range_of_parameters(names) is not None


def _meter_panels(ops, group: EinsumGroup, x: Value, operands: Sequence[Value], outs) -> list[Value]:
    """Count the memory of one group of einsums that SUMMA computes (`platform.runtime.products`):
    current and next panel of both operands, and a product; return the results."""
    einsums, panels, mesh = group.einsums, group.panels, ops.plan.mesh
    assert panels
    local = [ops.relayout_forward(w, e.operand) for w, e in zip(operands, einsums, strict=True)]
    sizes = [w.elements for w in local]
    axes = [panels.x_axes, *(panels.operand_axes for _ in einsums)]
    pairs = [*zip([x.elements, *sizes], axes, strict=True)]
    panel_elements = sum(panels.panel_elements(n, a, mesh) if a else 0 for n, a in pairs)  # no axes: a view
    panel_results = [ops.block(out) for out in outs]
    in_bits = [panels.panel_elements(n, a, mesh) if a else n // panels.count for n, a in pairs]
    passing = ops.new(2 * panel_elements + sum(y.elements for y in panel_results))
    _meter_scaled_operands(ops, group, in_bits)
    del passing
    kept_operands = [w if e.regathered else moved for w, moved, e in zip(operands, local, einsums, strict=True)]
    width, lengths = x.elements, [y.elements for y in panel_results]

    def meter_backward(gs: Gradients, saved: Saved) -> Gradients:
        """Count the memory of the gradients of x and the operands, a panel at a time."""
        dx, *dws = (ops.new(n) for n in (width, *(0 if e.frozen else n for n, e in zip(sizes, einsums, strict=True))))
        passing = ops.new(panel_elements * (panels.count + 1))  # parts of all until reduced, and the last panel
        _meter_scaled_operands(ops, group, [*lengths, *in_bits])
        del passing
        gradients = zip(dws, sizes, einsums, strict=True)
        return [dx, *(None if e.frozen else ops.relayout_backward(w, n, e.operand) for w, n, e in gradients)]

    ops.note_operation(panel_results, [x, *operands], (x.storage, *(w.storage for w in kept_operands)), meter_backward)
    return panel_results
