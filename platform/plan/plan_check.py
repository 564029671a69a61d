"""Static check of a plan: `find_unsoundness` says, without running it, what of it would compute another number or hang.

Every tensor is followed through the steps of every operation, forward and backward (`PlanWalk`), as a spread over the
ranks: whole, split or partial along each mesh axis (`platform.plan.operation_forms`). At the end of a training step
each gradient must have been summed once over each axis that left it partial, and each token's loss counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import prod

from platform.plan.chunks import Bucket
from platform.plan.layout import LENGTHS, Cut, block_offset, format_count
from platform.plan.model_types import Parameter, Spec, Tensor, tensor_dtype
from platform.plan.operation_forms import (
    PACKED,
    STAYS,
    WHOLE,
    Form,
    Operand,
    Sizes,
    Spread,
    Unsound,
    apply_step,
    describe_difference,
    describe_misread_data,
    forms_of_operation,
    join_axis_names,
    sort_axes,
    spread_dims,
)
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.plan import Plan
from platform.plan.quantisation import EXACT, PHASES, ScaledProducts
from platform.plan.rule import COLLECTIVES, LENDING, Conversion, RelayoutStep
from platform.plan.scheme import Scheme

LOSSES = ("cross_entropy", "squared_error")  # kinds of operations that end the forward pass
FORWARD, BACKWARD = "forward", "backward"
Space = dict[str, tuple[str, ...]]  # dim -> the axes that split it for all of an operation


class PlanWalk:
    """Walk through the operations of a plan, which remembers in which spreads tensors lie between them."""

    def __init__(self, plan: Plan):
        """Begin a walk through the operations of `plan`."""
        self._plan, self._extents = plan, plan.mesh.axes
        self._lying: dict[Tensor, tuple[Spread, Sizes]] = {}  # with the sizes of all dims
        # (op, axes, elements at most, share of these on average, phase, only, dtype) of the operation under way
        self._launches: Counter[tuple] = Counter()

    def check_operation(self, planned: PlannedOperation) -> None:
        """Check one planned operation of the plan. Raises Unsound for the first mistake."""
        self._launches.clear()
        merging, split = False, set[str]()
        for form in forms_of_operation(self._plan, planned):
            split |= self._check_form(planned, form)
            merging |= bool(form.statistics)
            self._launches.update(map(_launch_key, form.beside))
        if split != set(planned.compute_axes):
            raise Unsound(f"computes on {join_axis_names(split)}, and says on {join_axis_names(planned.compute_axes)}")
        moved = [c for c in planned.collectives if c.dtype != "accumulate" or not merging]
        listed = Counter(map(_launch_key, moved))
        if listed != self._launches:
            key = next(k for k in (*listed, *self._launches) if listed[k] != self._launches[k])
            op, axes, elements, share, phase, _, dtype = key
            size = f"{elements} elements" + ("" if share == 1 else f" at most, {share * elements} on average,")
            launches = f"{op} of {size} over {join_axis_names(axes)} in its {phase} pass, in the {dtype} type"
            raise Unsound(f"lists {listed[key]} and takes {self._launches[key]} times {launches}")

    def _check_form(self, planned: PlannedOperation, form: Form) -> set[str]:
        """Check one form of a planned operation. Return the axes that split what it computes."""
        entered = [self._convert_operand_spread(operand) for operand in form.operands]
        read = [(o.renamed(s), tensor_title(o.tensor)) for o, s in zip(form.operands, entered, strict=True)]
        partial = [spread.partial if form.linear else frozenset[str]() for spread in entered]
        spreads = [(spread, "what it makes") for spread in form.spreads]
        space, only = _operation_space([*spreads, *_drop_partial_axes(read, partial)])
        axes = {a for dim_axes in space.values() for a in dim_axes}
        summed = axes | {*form.apart}
        _check_form_dims(planned, form, space)
        if planned.operation.reads and (misreading := describe_misread_data(planned, space, only)):
            raise Unsound(f"{', '.join(planned.operation.reads)} {misreading}")
        if form.scaled and form.out is not None:
            self._check_scaled_products(form, form.out, form.scaled, space, only)
        if form.out is not None:
            exchanged = {a for d in form.statistics for a in space[d]}
            result = Spread({d: space[d] for d in spread_dims(form.out)}, frozenset(), only)
            result = sort_axes(result) if "rows" in form.out.dims else result
            summands = frozenset(axes - result.axes - exchanged).union(form.apart, *partial)
            summed = axes | self._check_result(form.out, form.output, result, summands)
        for number, (operand, spread) in enumerate(zip(form.operands, entered, strict=True)):
            if operand.constant or self._plan.planner.is_frozen(operand.tensor):
                continue
            others = summed.union(*partial[:number], *partial[number + 1 :])
            self._check_gradient(operand, spread._replace(partial=frozenset(others - spread.axes)))
        return axes

    def _check_scaled_products(
        self, form: Form, out: Spec, scaled: ScaledProducts, space: Space, only: frozenset[str]
    ) -> None:
        """Check that what has one scale, in the products in 8 bits of an einsum, is whole on each rank or that ranks
        take its maximum together; count the launches of maxima."""
        (x, _), (weight, _) = ((operand.tensor, operand) for operand in form.operands)
        for product in scaled.products:
            tensors = {"forward": (x, weight, out), "input": (out, weight, x), "weight": (x, out, weight)}[product]
            along = [d for d in tensors[0].dims if d in tensors[1].dims and d not in tensors[2].dims]
            if "rows" in along:
                raise Unsound(f"scales rows of several experts together, in the product {product}")
            for number, tensor in enumerate(tensors[:2]):
                sizes = self._spread_of_tensor(tensor)[1]
                split = Spread({d: space.get(d, ()) for d in spread_dims(tensor)}, frozenset(), only)
                if scaled.how.scale in EXACT:
                    self._check_uncut_blocks(tensor, split, [d for d in along if d != "batch"], scaled.how.block)
                    continue
                kept = {d for d in split.split if d not in along} if scaled.how.scale == "row" else {"experts"}
                kept &= {*tensor.dims}
                over = {a for d, axes in split.split.items() if d not in kept for a in axes if self._extents[a] > 1}
                if over != {*scaled.axes_of_maximum(product, number)}:
                    raise Unsound(f"{tensor_title(tensor)} has one scale over {join_axis_names(over)}, in {product}")
                if not over or (tensor is x and form.operands[0].shared):
                    continue
                scales = Spread({d: axes for d, axes in split.split.items() if d in kept}, frozenset(), only)
                share, axes = scales.average_share(scales.split, sizes, self._extents), self._plan.mesh.order_axes(over)
                elements, phase = scales.count_elements(sizes, self._extents), PHASES[product]
                self._launches["all_reduce", axes, elements, share, phase, only, "accumulate"] += 1

    def _check_uncut_blocks(self, tensor: Tensor, spread: Spread, dims: Sequence[str], block: int) -> None:
        """Raise Unsound if axes cut the consecutive elements along `dims` of a tensor inside a `block` in 8 bits."""
        sizes = self._spread_of_tensor(tensor)[1]
        split = [i for i, d in enumerate(dims) if any(self._extents[a] > 1 for a in spread.split[d])]
        if not split:
            return
        dim, inner = dims[split[-1]], prod(sizes[d][0] for d in dims[split[-1] + 1 :])
        blocks, (size, unit) = prod(self._extents[a] for a in spread.split[dim]), sizes[dim]
        if self._plan.scheme.zigzag in spread.split[dim] and dim in LENGTHS:
            blocks *= 2 * self._plan.scheme.rounds
        cuts = [block_offset(i, size, blocks, unit) for i in range(1, blocks)]
        if any(cut * inner % block for cut in (*cuts, *([size] if split[-1] else []))):
            axes = join_axis_names(spread.split[dim])
            raise Unsound(f"{axes} cuts {dim} of {tensor_title(tensor)} inside a block of {block} with one scale")

    def _convert_operand_spread(self, operand: Operand) -> Spread:
        """Return the spread in which an operand is read, converted for the operation."""
        tensor, conversion = operand.tensor, operand.conversion
        _check_dtype(tensor, conversion)
        _check_zigzag_pieces(tensor, conversion, self._plan.scheme)
        phases = () if operand.shared else (FORWARD, BACKWARD) if operand.regathered else (FORWARD,)
        lying, sizes = self._spread_of_tensor(tensor)
        spread = self._follow_steps(tensor, lying, conversion.forward, phases, tensor_title(tensor))
        if operand.panels and operand.axes and not operand.shared:
            gathered = spread.count_elements(sizes, self._extents) * prod(self._extents[a] for a in operand.axes)
            share = spread.average_share(spread.split, sizes, self._extents)
            panel_elements = gathered // operand.panels.count
            launches = [("broadcast", FORWARD), ("broadcast", BACKWARD), ("reduce", BACKWARD)]
            for op, phase in launches[:2] if self._plan.planner.is_frozen(tensor) else launches:
                key = op, operand.axes, panel_elements, share, phase, spread.only, tensor_dtype(tensor)
                self._launches[key] += operand.panels.count
        return self._follow_steps(tensor, spread, _panel_steps("all_gather", operand, spread), (), tensor_title(tensor))

    def _check_result(self, out: Spec, output: Conversion, result: Spread, partial: frozenset[str]) -> frozenset[str]:
        """Check that a result, complete but `partial`, comes to lie as its type says, and its gradient as it was;
        return the axes over which the gradient is partial then."""
        lying, _ = self._spread_of_tensor(out)
        _check_dtype(out, output)
        _check_zigzag_pieces(out, output, self._plan.scheme)
        reached = self._follow_steps(out, result._replace(partial=partial), output.forward, (FORWARD,), f"result {out}")
        if mismatch := describe_difference(reached, lying):
            raise Unsound(f"result {out} {mismatch}")
        name, left = f"gradient of {out}", frozenset(self._plan.layout(out).gradient)
        gradient = self._follow_steps(out, lying._replace(partial=left), output.backward, (BACKWARD,), name)
        if mismatch := describe_difference(gradient, result._replace(partial=gradient.partial & left)):
            raise Unsound(f"{name} {mismatch}")
        return gradient.partial

    def _check_gradient(self, operand: Operand, gradient: Spread) -> None:
        """Check that the gradient of an operand arrives complete or, of a parameter, partial over just the axes over
        which it is summed once a step."""
        tensor, phases = operand.tensor, () if operand.shared else (BACKWARD,)
        name, (expected, _) = f"gradient of {tensor_title(tensor)}", self._spread_of_tensor(tensor)
        gradient = self._follow_steps(tensor, gradient, _panel_steps("reduce_scatter", operand, gradient), (), name)
        gradient = self._follow_steps(tensor, gradient, operand.conversion.backward, phases, name)
        lent = [s.op for s in operand.conversion.forward if s.op in LENDING]
        back = [s.op for s in operand.conversion.backward if s.op in LENDING]
        if (lent, back) not in (([], []), (["lend"], ["give_back"])):
            ways = f"is taken by {join_axis_names(lent)}, and its gradient by {join_axis_names(back)}"
            raise Unsound(f"{tensor_title(tensor)} {ways}")
        if isinstance(tensor, Parameter):
            summed = frozenset(self._plan.reductions.get(tensor.name, ()))
            if left := gradient.partial - summed:
                raise Unsound(f"{name} is partial over {join_axis_names(left)}, and never summed there")
            if summed_twice := summed - gradient.partial:
                axis = min(summed_twice)
                state = f"{gradient.describe_axis(axis)} over {axis}"
                raise Unsound(f"{name} is {state}, and summed there at the end of the step")
            expected = expected._replace(partial=summed)
        else:
            expected = expected._replace(partial=frozenset(self._plan.layout(tensor).gradient))
        if mismatch := describe_difference(gradient, expected):
            raise Unsound(f"{name} {mismatch}")

    def _spread_of_tensor(self, tensor: Tensor) -> tuple[Spread, Sizes]:
        """Return the spread in which a tensor lies between operations, and its global sizes by dim, with units."""
        if (known := self._lying.get(tensor)) is None:
            layout = self._plan.layout(tensor)
            if rows := isinstance(tensor, Spec) and "rows" in tensor.dims:
                region_layout = self._plan.scheme.activation_layout(tensor.region, spread_dims(tensor))
                layout = replace(region_layout, partial=layout.partial)
            spread = Spread.build_from_layout(spread_dims(tensor), layout)
            planner = self._plan.planner
            sizes = {d: (n, planner.cut_units.get(d, 1)) for d, n in planner.tensor_sizes(tensor).items()}
            self._lying[tensor] = known = sort_axes(spread) if rows else spread, sizes
        return known

    def _follow_steps(
        self, tensor: Tensor, spread: Spread, steps: Sequence[RelayoutStep], phases: Sequence[str], name: str
    ) -> Spread:
        """Return the spread of a tensor after `steps`, whose launches are counted in `phases`; `name`: its name
        in messages."""
        rows, (_, sizes) = "rows" in tensor.dims, self._spread_of_tensor(tensor)
        wider = any(step.op == "give_back" for step in steps)  # by lent experts
        for step in steps:
            wider = step.op == "lend" or (wider and step.op != "give_back")
            before, taken = spread, step
            if rows and step.op != "all_to_allv":  # which moves rows between the dims that they stand for
                taken = replace(step, dim=step.dim + len(PACKED) - 1, joined=step.joined + len(PACKED) - 1)
            try:
                spread = sort_axes(apply_step(before, taken)) if rows else apply_step(before, taken)
            except Unsound as error:
                raise Unsound(f"{name}: {error}") from None
            if not rows and (miscut := _describe_miscut(step, before, spread, sizes, self._extents)):
                raise Unsound(f"{name}: {step.op} over {join_axis_names(step.axes)} {miscut}")
            if phases and step.op in COLLECTIVES:
                sides = [before, spread] if step.op == "all_to_allv" else [spread if step.op == "scatter" else before]
                counts = (s.count_elements(sizes, self._extents) for s in sides)
                others = prod(self._extents[a] for a in step.axes) - 1 if step.op == "all_to_allv" else 0
                elements = min((self._count_cut_unit_elements(s, sizes, others) for s in sides) if rows else counts)
                moved = [d for i, d in enumerate(before.split) if taken.moves_dim(i)]
                share = before.average_share((d for d in before.split if d not in moved), sizes, self._extents)
                if step.op in ("reduce_scatter", "all_to_all"):  # each block of what is split has room
                    dim, ranks = list(before.split)[taken.dim], prod(self._extents[a] for a in step.axes)
                    elements = elements // before.longest_extent(dim, sizes, self._extents)
                    elements *= ranks * spread.longest_extent(dim, sizes, self._extents)
                if step.op in LENDING or wider:
                    own_experts, lent = self._count_own_experts(spread, sizes), self._plan.scheme.lent
                    elements = elements // own_experts * (lent if step.op in LENDING else own_experts + lent)
                op = "all_to_allv" if step.op in LENDING else step.op
                for phase in phases:
                    key = op, step.axes, elements, share, phase, frozenset(step.only), tensor_dtype(tensor)
                    self._launches[key] += 1
        return spread

    def _count_own_experts(self, spread: Spread, sizes: Sizes) -> int:
        """Return how many experts the checked plan gives a rank by a `spread` of a tensor of global `sizes`."""
        return spread.longest_extent("experts", sizes, self._extents)

    def _count_cut_unit_elements(self, spread: Spread, sizes: Sizes, others: int) -> int:
        """Return the elements of the most rows that a plan can give a rank, or that go to `others`, each token once."""
        own_experts = self._count_own_experts(spread, sizes) + self._plan.scheme.lent
        of_token = min(self._plan.sizes["rows"], others or own_experts)
        without_experts = spread._replace(split={d: axes for d, axes in spread.split.items() if d != "experts"})
        return of_token * without_experts.count_elements(sizes, self._extents)


def _drop_partial_axes(read: Sequence[tuple[Spread, str]], partial: Sequence[Set[str]]) -> Iterator[tuple[Spread, str]]:
    """Yield an operation's spreads and names of operands, each without what it may be `partial` over, not twice."""
    for number, ((spread, name), axes) in enumerate(zip(read, partial, strict=True)):
        if twice := axes & frozenset().union(*partial[:number]):
            raise Unsound(f"{name} and another operand are partial over {join_axis_names(twice)}")
        yield spread._replace(partial=spread.partial - axes), name


def _describe_miscut(step: RelayoutStep, before: Spread, then: Spread, sizes: Sizes, extents: Mapping[str, int]) -> str:
    """Return in words in which other blocks a step takes a dim that it moves than it lies in, or ""."""
    for i, d in enumerate(before.split):
        axes, (size, unit) = max(before.split[d], then.split[d], key=len), sizes[d]
        blocks = prod(extents[a] for a in axes)
        cut = Cut(size, axes, blocks, unit) if size % (blocks * unit) else None
        if step.moves_dim(i) and step.uneven_cut_of_dim(i) != cut:
            return f"takes the {blocks} blocks of {d}, of size {size}, for {'equal' if cut else 'uneven'} ones"
    return ""


def _launch_key(c: Collective) -> tuple:
    """Return the key under which launches of a planned collective are counted."""
    share = prod((Fraction(cut.size, cut.blocks * cut.longest_extent()) for cut in c.cuts), start=Fraction(1))
    return c.op, c.axes, c.elements, share, c.phase, frozenset(c.only), c.dtype


def tensor_title(tensor: Tensor) -> str:
    """Return the name of a parameter, or the type of an activation, for messages."""
    return tensor.name if isinstance(tensor, Parameter) else str(tensor)


def _check_dtype(tensor: Tensor, conversion: Conversion) -> None:
    """Raise Unsound for a conversion that moves a tensor, or computes it, in another type than it has."""
    if conversion != STAYS and conversion.dtype != (dtype := tensor_dtype(tensor)):
        raise Unsound(f"{tensor_title(tensor)} moves in the {conversion.dtype} type, and it is of the {dtype} type")


def _check_zigzag_pieces(tensor: Tensor, conversion: Conversion, scheme: Scheme) -> None:
    """Raise Unsound for a step of a conversion that takes pieces of a length in another order than ranks have them."""
    for step in (*conversion.forward, *conversion.backward):
        at = [i for i, d in enumerate(tensor.dims) if d in LENGTHS and step.moves_dim(i) and scheme.zigzag in step.axes]
        expected_dealing = (at[0], scheme.rounds) if at else (-1, 1)
        if (step.zigzag, step.rounds) != expected_dealing:
            dealings = (step.zigzag, step.rounds), expected_dealing
            taken, expected = (f"dealt in {format_count(n, 'round')}" if d >= 0 else "straight" for d, n in dealings)
            mistake = f"{step.op} over {join_axis_names(step.axes)} takes pieces as {taken}, and they are {expected}"
            raise Unsound(f"{tensor_title(tensor)}: {mistake}")


def _panel_steps(op: str, operand: Operand, spread: Spread) -> list[RelayoutStep]:
    """Return the steps in whose place an operand is passed on in panels, none without: each axis by itself."""
    if not operand.panels and not operand.around:
        return []
    dim = operand.tensor.dims.index(operand.panels.dim if operand.panels else "length")
    axes = operand.around or operand.axes
    axes = axes if op == "reduce_scatter" else axes[::-1]
    return [RelayoutStep(op, (axis,), dim, only=tuple(spread.only)) for axis in axes]


def _operation_space(spreads: Sequence[tuple[Spread, str]]) -> tuple[Space, frozenset[str]]:
    """Return by dim the axes that split an operation's space, and the axes at whose index 0 alone ranks compute it.
    Raises Unsound for tensors, given as spreads with their names, whose blocks do not belong together."""
    space: Space = {}
    (first, one), only = spreads[0], spreads[0][0].only
    for spread, name in spreads:
        if spread.partial:
            raise Unsound(f"{name} is partial over {join_axis_names(spread.partial)} where it is read")
        if spread.only != only:
            axis = min(spread.only ^ only)
            raise Unsound(f"{name} is {spread.describe_axis(axis)} over {axis}, {one} is {first.describe_axis(axis)}")
        for dim, axes in spread.split.items():
            if space.setdefault(dim, axes) != axes:
                first_axes = join_axis_names(space[dim])
                raise Unsound(f"{name} has {dim} split over {join_axis_names(axes)}, {one} over {first_axes}")
    for axis, times in Counter(a for axes in space.values() for a in axes).items():
        if times > 1 or axis in only:
            names = [f"{n}, which is {s.describe_axis(axis)}" for s, n in spreads if s.state_along_axis(axis) != WHOLE]
            raise Unsound(f"reads {' beside '.join(names)} over {axis}")
    return space, only


def _check_form_dims(planned: PlannedOperation, form: Form, space: Space) -> None:
    """Raise Unsound where an axis splits a dim that an operation needs whole, or ranks that split a dim do not merge
    its statistics."""
    for dim in form.whole:
        if space.get(dim):
            raise Unsound(f"needs {dim} whole, which is split over {join_axis_names(space[dim])}")
    over = tuple(a for dim in form.merged for a in space[dim])
    if planned.over != over:
        planned_merge = f"{'+'.join(form.merged) or 'nothing'} over {join_axis_names(planned.over)}"
        raise Unsound(f"merges {planned_merge}, and it is split over {join_axis_names(over)}")
    merges = [c for c in planned.collectives if c.dtype == "accumulate"] if form.statistics else []
    expected_axes = over if form.statistics else ()
    if bool(merges) != bool(expected_axes) or any(c.axes != expected_axes for c in merges):
        dims = "+".join(form.statistics) or "no dim"
        raise Unsound(f"merges statistics of {dims} over {join_axis_names(expected_axes)}, and lists other collectives")


def find_unsoundness(plan: Plan) -> list[str]:
    """List what of a plan would compute another number than one process, or hang: a line each, which names the
    operation, the tensor and the axis; [] for a sound plan, which has all stages."""
    lines = [f"at {n} tokens: {line}" for n, shorter in plan.shorter.items() for line in find_unsoundness(shorter)]
    checks = _violations_of_tensors, _violations_of_losses, _violations_of_parameters, _violations_of_buckets
    lines += [line for check in (*checks, _violations_of_chunk_flows) for line in check(plan)]
    walk = PlanWalk(plan)
    for chunk in plan.chunks:
        for (kind, name), planned in chunk.operations.items():
            try:
                walk.check_operation(planned)
            except Unsound as error:
                lines.append(f"{kind} {name}: {error}")
    return lines


def _violations_of_tensors(plan: Plan) -> Iterator[str]:
    """Yield a line per tensor with a dim that its axes do not divide, or an axis that splits two dims."""
    operations = (o.operation for chunk in plan.chunks for o in chunk.operations.values())
    tensors: dict[Tensor, None] = dict.fromkeys(t for o in operations for t in (*o.inputs, *o.outputs))
    for tensor in tensors:
        layout, sizes = plan.layout(tensor), plan.planner.tensor_sizes(tensor)
        for axis, times in Counter((*layout.axes, *layout.only)).items():
            if times > 1:
                yield f"{tensor_title(tensor)}: {axis} splits more than one dim"
        for dim, axes in layout.items():
            blocks = plan.mesh.count_ranks(axes)
            if sizes[dim] < blocks or (sizes[dim] % blocks and not plan.planner.can_cut_unevenly(dim)):
                yield f"{tensor_title(tensor)}: {dim} of size {sizes[dim]} is split over {blocks} ranks"


def _violations_of_losses(plan: Plan) -> Iterator[str]:
    """Yield a line per loss that is computed several times, or not summed over the ranks that have parts of it."""
    losses = [(f"{kind} {name}", o) for c in plan.chunks for (kind, name), o in c.operations.items() if kind in LOSSES]
    for name, times in Counter(name for name, _ in losses).items():
        if times > 1:
            yield f"{name}: the loss is computed in {times} chunks, so that it counts {times} times"
    counted = set(plan.loss_layout.axes)
    for name, o in losses:
        for axis in sorted(set(o.tokens.axes) ^ counted):
            parts = "has parts" if axis in o.tokens.axes else "is whole"
            yield f"{name}: the loss {parts} along {axis}, unlike the loss that is summed over the ranks"
    total = plan.microbatches * plan.sizes["batch"]
    if total < plan.sequences:
        yield f"{plan.microbatches} microbatches have {total} sequences, and the loss is a mean over {plan.sequences}"


def _violations_of_parameters(plan: Plan) -> Iterator[str]:
    """Yield a line per parameter that is held, gathered or summed elsewhere than the operations use it."""
    using: dict[str, set[int]] = defaultdict(set)
    for chunk in plan.chunks:
        for name in chunk.parameter_names:
            using[name].add(chunk.stage)
        for name in sorted(chunk.parameter_names.difference(*chunk.spans)):
            yield f"{name}: no span of chunk {chunk.number} has it, so that nothing gathers it there"
    for p in plan.parameters:
        if sorted(using[p.name]) != sorted(stages := plan.stages_of[p.name]):
            yield f"{p.name}: used in stages {sorted(using[p.name])}, its gradient is summed over {sorted(stages)}"
        for axis, times in Counter(plan.reductions[p.name]).items():
            if times > 1:
                yield f"{p.name}: its gradient is summed {times} times over {axis}"


def _violations_of_buckets(plan: Plan) -> Iterator[str]:
    """Yield a line per parameter whose bucket sums its gradient otherwise than planned, or shards it otherwise."""
    times = Counter(p.name for bucket in plan.buckets for p in bucket.parameters)
    for p in plan.parameters:
        if times[p.name] != 1:
            yield f"{p.name}: its gradient lies in {times[p.name]} buckets"
    for bucket in plan.buckets:
        try:
            split = _axes_after_reduction(plan, bucket)
        except Unsound as error:
            yield f"bucket of {bucket.name}: {error}"
            continue
        for p, size in zip(bucket.parameters, bucket.sizes, strict=True):
            layout = plan.layout(p)
            if set(bucket.axes) != set(plan.reductions[p.name]) or set(bucket.only) != set(layout.only):
                partial = join_axis_names(plan.reductions[p.name])
                yield f"{p.name}: its bucket sums over {join_axis_names(bucket.axes)}, and it is partial over {partial}"
            if size != prod(plan.local_shape(p)):
                yield f"{p.name}: its block has {prod(plan.local_shape(p))} elements, its place in the bucket {size}"
            split_axes = (*layout.axes, *layout.shifted_axes, *split)
            if sorted(plan.master_split_axes(p)) != sorted(split_axes):
                counted_axes = join_axis_names(plan.master_split_axes(p))
                actual_axes = join_axis_names(split_axes)
                yield f"{p.name}: the norm counts it as split over {counted_axes}, and it is over {actual_axes}"


def _axes_after_reduction(plan: Plan, bucket: Bucket) -> tuple[str, ...]:
    """Return the axes that split a bucket's gradients after all their sums. Raises Unsound unless these are complete
    then, and the gathers of ZeRO join them again."""
    partial = frozenset[str]() if bucket.frozen else frozenset(bucket.axes)
    gradient = Spread({"elements": bucket.sharded if bucket.frozen else ()}, partial, frozenset(bucket.only))
    microbatch_steps, final_steps = plan.reduction_steps(bucket)
    for step in (*microbatch_steps, *final_steps):
        gradient = apply_step(gradient, step)
    sharded = Spread({"elements": bucket.sharded}, frozenset(), gradient.only)
    if mismatch := describe_difference(gradient, sharded):
        raise Unsound(f"the gradient {mismatch}")
    for step in plan.gather_steps(bucket):
        gradient = apply_step(gradient, step)
    if mismatch := describe_difference(gradient, sharded._replace(split={"elements": ()})):
        raise Unsound(f"the gathered parameters: {mismatch}")
    ranks = plan.mesh.count_ranks(bucket.sharded)
    if bucket.shards != ranks or bucket.elements % ranks or bucket.elements < sum(bucket.sizes):
        raise Unsound(f"{bucket.elements} elements do not hold {sum(bucket.sizes)} in {ranks} equal shards")
    return sharded.split["elements"]


def _violations_of_chunk_flows(plan: Plan) -> Iterator[str]:
    """Yield a line per activation that a chunk does not get as the one before sends it, or that ranks take for equal
    and it is not; and per matrix that is not whole for its update."""
    for before, chunk in pairwise(plan.chunks):
        if before.sends != chunk.receives:
            yield f"chunk {chunk.number} receives {chunk.receives}, and {before.sends} is sent"
    shared = [(spec, plan.scatter_axes(spec)) for c in plan.chunks for _, spec in c.sends]
    shared += [(spec, plan.recompute_axes(spec)) for c in plan.chunks for spec in c.kept]
    for spec, axes in dict.fromkeys(shared):
        spread = Spread.build_from_layout(spec.dims, plan.layout(spec))
        for axis in axes:
            if spread.state_along_axis(axis) != WHOLE:
                state = spread.describe_axis(axis)
                yield f"{spec}: each rank along {axis} has a part of it for all, and it is {state} there"
    for p in plan.parameters if plan.matrices else ():
        if p.name in plan.matrices:
            yield from _violations_of_matrix_gather(plan, p)


def _violations_of_matrix_gather(plan: Plan, p: Parameter) -> Iterator[str]:
    """Yield a line if a parameter that is updated as a whole matrix is not whole then."""
    spread = Spread.build_from_layout(p.dims, plan.layout(p))
    try:
        for step in plan.matrix_gather_steps(p):
            spread = apply_step(spread, step)
    except Unsound as error:
        yield f"{p.name}: {error}"
        return
    if mismatch := describe_difference(spread, Spread.build_from_layout(p.dims, plan.matrix_layout(p))):
        yield f"{p.name}: the matrix that is updated {mismatch}"
