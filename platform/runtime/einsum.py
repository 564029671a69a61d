"""The planned einsum: one group's conversions and local products as a single differentiable function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.plan.operation_plan import JOINS_GRADIENTS, Einsum, EinsumGroup
from platform.runtime.communicator import ArrivedCollective, Communicator
from platform.runtime.conversion import PendingConversion, convert, convert_differentiably, is_absent_block
from platform.runtime.flat_buffers import AdjacentParameters
from platform.runtime.products import (
    RowGroups,
    build_grouped_einsum,
    build_grouped_einsum_starter,
    compute_by_summa,
    compute_in_turn,
    local_einsum_function,
    sum_rows_by_expert,
    view_as_matrix,
)
from platform.runtime.recompute import Rebuild
from platform.runtime.residency import Operands
from platform.runtime.scaled_einsums import ScaledEinsums
from platform.runtime.statistics import (
    add_gradient,
    add_local_gradient_sum,
    can_accumulate,
    compute_and_add_gradient,
    widen_dtype,
)
from platform.runtime.traced_collectives import read_again

Deferred = list[Callable[[], None]]  # each computes and accumulates gradients of parameters when called
Tensors = Sequence[Any]  # or None, for one that is no leaf


class _Einsums(torch.autograd.Function):
    """Autograd function of one planned group of einsums that share x. Forward: issues the gathers of x and all
    operands, multiplies, adds the biases (one per operand, or none at all), converts the outputs.

    The products of a `wide` group are computed in the type of statistics, of operands that come, and are kept, in the
    compute type. Gradients of operands leave in the compute type too, unless they are added in place. Of x, a frozen
    group keeps but the shape.

    Weights that lie one after another and are not converted (Q, K and V; gate and up) are one matrix.

    A group that `fuses` x or its result has the communicator multiply as parts come or leave, in both passes.

    Backward: the gradient of x is computed first, and its reduction overlaps the computation of the operands'
    gradients. Tensors marked `regathered` in the plan are saved only as stored and gathered again while the output
    gradients are converted. Gradients of leaves are added to their sums here, and autograd gets None for them.
    `deferred`: a list that receives the function computing the gradients of operands and biases (zero bubble); they are
    then leaves. `coming`: brings the operands. `left_out`: shapes of the results, if no gradient needs these: then they
    are memory that nothing is written to. `rebuild`: makes x again, which is then not kept.
    """

    @staticmethod
    def forward(
        ctx,
        coming: Operands,
        group: EinsumGroup,
        deferred: Deferred | None,
        counts,
        left_out: Sequence[Sequence[int]],
        rebuild: Rebuild | None,
        x: Tensor,
        *tensors: Tensor,
    ):
        """Return the products of x with each operand of an einsum group, converting x, operands and results as
        planned."""
        operands, biases = tensors[: len(group.einsums)], tensors[len(group.einsums) :]
        communicator = coming.communicator
        ctx.coming, ctx.group, ctx.deferred, ctx.counts = coming, group, deferred, counts
        ctx.leaves = [t if can_accumulate(t) else None for t in tensors]
        ctx.compute_again, sources = (rebuild.compute, rebuild.tensors) if rebuild else (None, ())
        ctx.joined = joined = _join_adjacent_weights(group, x, tensors if group.is_frozen else ctx.leaves)
        fuses = "" if left_out else group.fuses
        if joined:
            product = None
            if fuses:
                converted_x, (product,) = _multiply_gathered(communicator, group, x, [joined.weight_matrix.t()])
            else:
                converted_x = convert(communicator, x, group.x.forward).wait()
            ctx.of_x = converted_x.shape, x.dtype
            kept = None if rebuild or group.is_frozen else x if group.regathered else converted_x
            ctx.save_for_backward(kept, *operands, *sources)
            if left_out:
                return tuple(map(x.new_empty, left_out))
            return joined.compute_outputs(converted_x, operands, product)
        regathered = [group.regathered, *(e.regathered for e in group.einsums)]
        stored = (x, *operands)
        products: Iterable[Tensor] | None = None
        local: Sequence[Tensor] = operands
        if not group.is_local:
            arriving = coming.start_conversions(operands)
            x = x if fuses == "x" else convert(communicator, x, group.x.forward).wait()
            local = [c.wait() for c in arriving]
        coming.start_next_conversions()
        if fuses == "x":
            x, products = _compute_gathered_products(communicator, group, x, local, biases)
        ctx.of_x = x.shape, x.dtype
        kept, *others = [s if again else t for s, t, again in zip(stored, (x, *local), regathered, strict=True)]
        ctx.save_for_backward(None if rebuild or group.is_frozen else kept, *others, *sources)
        if left_out:
            return tuple(map(x.new_empty, left_out))
        if fuses == "result":
            return (_compute_scattered_product(communicator, group, x, *local),)
        if products is None:
            read, *factors = map(widen_dtype, (x, *local)) if group.has_wide_dtype else (x, *local)
            multiply = ScaledEinsums(communicator)
            products = _compute_products(multiply, counts, group, read, factors, biases or [None] * len(local))
        if group.is_local:
            return tuple(products)
        pairs = zip(products, group.einsums, strict=True)
        leaving = [convert(communicator, y, e.output.forward, owned=True) for y, e in pairs]
        return tuple(c.wait() for c in leaving)

    @staticmethod
    def backward(ctx, *gradients):
        """Return the gradients of x, operands and biases of an einsum group, or leave the operands' and biases' to be
        computed later (zero bubble); operands that were not saved whole are gathered again first."""
        x, *tensors = ctx.saved_tensors
        communicator, group = ctx.coming.communicator, ctx.group
        operands, sources = tensors[: len(group.einsums)], tensors[len(group.einsums) :]
        fuses = group.fuses if ctx.needs_input_grad[6] else ""
        back = [() if fuses == "result" else e.output.backward for e in group.einsums]
        coming = [convert(communicator, g, steps) for g, steps in zip(gradients, back, strict=True)]
        regathered = ctx.coming.start_conversions(operands, in_backward=True)
        shape, dtype = ctx.of_x
        if group.is_frozen:
            x = gradients[0].new_empty((), dtype=dtype).expand(shape)
        if ctx.compute_again:
            x = ctx.compute_again(*sources)
        x = x.detach()  # what is deferred would keep the graph behind it, and the leaves there with their gradients
        again = convert(communicator, x, group.x.forward) if group.regathered else ArrivedCollective(x)
        operands = [c.wait() for c in regathered]
        local = [c.wait().contiguous() for c in coming]  # read twice; that of a query is not in attention's order
        ctx.coming.start_next_conversions(in_backward=True)
        if fuses == "result":
            local, total = _gather_gradient_of_result(communicator, group, *local, *operands)
        together = None
        if ctx.joined and (fuses or JOINS_GRADIENTS.get(x.device.type, True)):
            together = torch.cat([g.flatten(len(shape) - 1).flatten(0, -2) for g in local], 1)
        dx: ArrivedCollective | PendingConversion | None = None
        if fuses == "x" and (together is not None or len(local) == 1):
            dx = _scatter_gradient_of_x(communicator, group, local, operands, ctx.joined, together)
        elif ctx.needs_input_grad[6]:
            if together is not None:
                total = ctx.joined.compute_input_gradient(together, shape)
            elif fuses != "result":
                factors = [*map(widen_dtype, operands)] if group.has_wide_dtype else operands
                total = _compute_gradient_of_x(ScaledEinsums(communicator), ctx.counts, group, local, factors)
            dx = convert(communicator, total.to(dtype), group.x.backward, owned=True)
        x = again.wait()  # for the gradients of the operands alone: it comes while that of x is computed
        leaves = ctx.leaves, ctx.needs_input_grad[7:]
        compute_leaf_gradients = partial(_compute_operand_gradients, communicator, group, *leaves, x, local, ctx.counts)
        if together is not None:
            compute_leaf_gradients = partial(ctx.joined.accumulate_gradients, x, together)
        if ctx.deferred is None:
            leaf_gradients = compute_leaf_gradients()
            return *[None] * 6, dx if dx is None else dx.wait(), *leaf_gradients
        if any(ctx.needs_input_grad[7:]):
            ctx.deferred.append(torch.no_grad()(compute_leaf_gradients))
        return *[None] * 6, dx if dx is None else dx.wait(), *(None for _ in ctx.leaves)


class _JoinedWeights(NamedTuple):
    """Weights of a group that are one matrix [columns of all, contracted], and their biases, if there are any."""

    weights: AdjacentParameters
    biases: AdjacentParameters | None
    contracted: int

    @property
    def weight_matrix(self) -> Tensor:
        """Return the weights of an einsum group, adjacent in memory, as one local matrix [columns, contracted]."""
        return self.weights.flat_compute_copies.view(-1, self.contracted)

    def compute_outputs(self, x: Tensor, operands: Tensors, product: Tensor | None = None) -> Tensors:
        """Multiply the local x [..., contracted] by all of an einsum group's weights, unless their `product` is there;
        return a view per operand, with its bias."""
        if product is not None:
            z = product.flatten(0, -2)
            z = z.add_(self.biases.flat_compute_copies) if self.biases else z
        else:
            rows, w = x.flatten(0, -2), self.weight_matrix.t()
            z = torch.addmm(self.biases.flat_compute_copies, rows, w) if self.biases else rows @ w
        shapes = [w.shape[:-1] for w in operands if w is not None]
        parts = z.split([shape.numel() for shape in shapes], 1)
        return tuple(part.view(*x.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True))

    def compute_input_gradient(self, gradient: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the gradient of an einsum group's x, of `shape`, from the joined product's [rows, columns]."""
        return (gradient @ self.weight_matrix).view(shape)

    def accumulate_gradients(self, x: Tensor, gradient: Tensor) -> list[None]:
        """Add the gradients of an einsum group's weights and biases to their sums; return a None for each."""
        product = local_einsum_function(("rows", "contracted"), ("rows", "columns"), ("columns", "contracted"))
        rows, shape = x.flatten(0, -2), (gradient.shape[1], self.contracted)
        if not self.weights.bucket.bucket.frozen:
            self.weights.add_gradients(lambda into, fresh: product(rows, gradient, into=into.view(shape), fresh=fresh))
        if self.biases and not self.biases.bucket.bucket.frozen:
            self.biases.add_small_gradients(partial(torch.sum, gradient, 0))
        return [None] * (len(self.weights.names) * (2 if self.biases else 1))


def _join_adjacent_weights(group: EinsumGroup, x: Tensor, leaves: Tensors) -> _JoinedWeights | None:
    """Return an einsum group's weights as one local matrix and its biases as one vector, if its `leaves` lie one after
    another in memory; else None."""
    count = len(group.einsums)
    if is_absent_block(x) or not group.can_join_operands:
        return None
    weights, biases = (
        AdjacentParameters.find_if_adjacent(leaves[:count]),
        AdjacentParameters.find_if_adjacent(leaves[count:]),
    )
    last = leaves[0]
    if weights is None or last is None or (biases is None and len(leaves) > count):
        return None
    return _JoinedWeights(weights, biases, last.shape[-1])


def _multiply_gathered(
    communicator: Communicator, group: EinsumGroup, x: Tensor, matrices: Tensors, of_gradient: bool = False
) -> tuple[Tensor, Tensors]:
    """Gather x of a group that fuses its gather, or the gradient of its result, multiplied by matrices [contracted,
    columns] as its parts come; return it whole, and the products."""
    conversion, rows = group.fused_conversion, group.einsums[0].num_row_dims
    assert conversion
    (step,) = conversion.backward if of_gradient else conversion.forward
    gathered, products = communicator.gather_and_multiply(x.flatten(rows), matrices, step.axes, step.dim)
    return gathered.unflatten(-1, x.shape[rows:]).contiguous(), products


def _compute_gathered_products(
    communicator: Communicator, group: EinsumGroup, x: Tensor, operands: Tensors, biases: Tensors
) -> tuple[Tensor, Tensors]:
    """Return x of a group of einsums, gathered, and its products with the operands, computed as its parts come."""
    matrices = [view_as_matrix(e, w) for e, w in zip(group.einsums, operands, strict=True)]
    x, products = _multiply_gathered(communicator, group, x, matrices)
    products = [y.add_(b.flatten()) for y, b in zip(products, biases, strict=True)] if biases else products
    triples = zip(products, group.einsums, operands, strict=True)
    return x, [y.unflatten(-1, [n for d, n in zip(e.dims, w.shape, strict=True) if d in e.out_dims])
               for y, e, w in triples]  # fmt: skip


def _compute_scattered_product(communicator: Communicator, group: EinsumGroup, x: Tensor, operand: Tensor) -> Tensor:
    """Return this rank's part of the result of a group of one einsum, whose parts leave as they are computed."""
    (e,) = group.einsums
    (step,), rows = e.output.forward, e.num_row_dims
    y = communicator.multiply_and_scatter(x.flatten(rows), view_as_matrix(e, operand), step.axes, step.dim)
    return y.unflatten(-1, [n for d, n in zip(e.dims, operand.shape, strict=True) if d in e.out_dims])


def _gather_gradient_of_result(
    communicator: Communicator, group: EinsumGroup, gradient: Tensor, operand: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the gathered gradient of a group's one result, in a list, and x's gradient, computed as its parts come."""
    (e,) = group.einsums
    gathered, (dx,) = _multiply_gathered(communicator, group, gradient, [view_as_matrix(e, operand).t()], True)
    return [gathered], dx.unflatten(-1, [n for d, n in zip(e.dims, operand.shape, strict=True) if d in e.x_dims])


def _scatter_gradient_of_x(
    communicator: Communicator,
    group: EinsumGroup,
    gradients: Tensors,
    operands: Tensors,
    joined: _JoinedWeights | None,
    together: Tensor | None,
) -> ArrivedCollective:
    """Return this rank's part of the gradient of x, whose parts leave as they are computed. `together`: the results'
    gradients side by side, if their weights are `joined`."""
    e, (step,), rows = group.einsums[0], group.x.backward, group.einsums[0].num_row_dims
    if joined and together is not None:
        gradient, matrix = together.view(*gradients[0].shape[:rows], -1), joined.weight_matrix
    else:
        gradient, matrix = gradients[0].flatten(rows), view_as_matrix(e, operands[0]).t()
    dx = communicator.multiply_and_scatter(gradient, matrix, step.axes, step.dim)
    contracted = [n for d, n in zip(e.dims, operands[0].shape, strict=True) if d in e.x_dims]
    return ArrivedCollective(dx.unflatten(-1, contracted))


def _compute_operand_gradients(
    communicator: Communicator,
    group: EinsumGroup,
    leaves: Tensors,
    needs_gradient: Sequence[bool],
    x: Tensor,
    gradients: Sequence[Tensor],
    expert_groups: RowGroups | None,
) -> Tensors:
    """Compute the gradients of a group's operands, then of its biases if there are any, from the local x and the local
    `gradients` of the outputs, and reduce them as planned. Gradients of `leaves` are added to their sums (then None in
    the result); of the others, the `needs_gradient` ones are returned."""
    count, multiply = len(group.einsums), ScaledEinsums(communicator)
    pending: list[PendingConversion | None] = []
    read = widen_dtype(read_again(x, gradients[0])) if group.has_wide_dtype else x
    straight = not any(e.operand.backward for e in group.einsums)
    together = AdjacentParameters.find_if_adjacent(leaves[:count]) if expert_groups and straight else None
    if expert_groups and together:
        together.add_gradients(partial(_add_expert_weight_gradients, expert_groups, group, leaves, read, gradients))
        pending += [None] * count
    for e, g, w, n in zip(group.einsums[len(pending) :], gradients, leaves, needs_gradient, strict=False):
        product = partial(_find_gradient_function(multiply, expert_groups, e), read, g, None)
        if w is not None and not e.operand.backward:
            compute_and_add_gradient(w, product)
            pending.append(None)
        else:
            steps = e.operand.backward
            pending.append(convert(communicator, product().to(x.dtype), steps, owned=True) if n else None)
    computed_gradients: list[Tensor | None] = []
    for t, coming in zip(leaves, pending, strict=False):
        computed = coming.wait() if coming else None
        if t is not None and computed is not None:
            add_gradient(t, computed)
        computed_gradients.append(computed if t is None else None)
    for e, g, t, n in zip(group.einsums, gradients, leaves[count:], needs_gradient[count:], strict=False):
        total = partial(torch.sum, g, [i for i, d in enumerate(e.out_dims) if d not in e.dims])  # what a bias lacks
        total = partial(sum_rows_by_expert, expert_groups, g) if expert_groups else total
        if n and t is not None and not is_absent_block(g):
            add_local_gradient_sum(t, total)
        computed_gradients.append(total() if n and t is None and not is_absent_block(g) else None)
    return computed_gradients


def compute_einsums(
    operand_conversions: Operands,
    x: Tensor,
    operands: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *,
    deferred: Deferred | None = None,
    expert_groups: RowGroups | None = None,
    unneeded_shapes: Sequence[Sequence[int]] = (),
    rebuild: Rebuild | None = None,
) -> Sequence[Tensor]:
    """Compute the outputs (local blocks) of a planned group of einsums of x with several operands, which
    `operand_conversions` brings, in the group's order, with the conversions that the plan lists. A group whose outputs
    are not converted may add `biases`, one per operand, in the product. `deferred`: a list to which the backward pass
    appends the computation of weight gradients instead of running it (zero bubble; None: it runs); groups with panels
    (SUMMA) ignore it. `expert_groups`: the number of rows of each expert in x, which the operands have a matrix for
    each of. `unneeded_shapes`: local shapes of the outputs, if no gradient needs their values: they are not
    computed. `rebuild`: makes x again for the gradients of the operands, so that it is not kept."""
    communicator, group = operand_conversions.communicator, operand_conversions.group
    if group.panels:
        assert not biases
        start = partial(ScaledEinsums, communicator)
        x = convert_differentiably(communicator, [x], [group.x])[0]
        return compute_by_summa(communicator, group, x, operands, start)
    plain = group.is_local and not (group.has_wide_dtype or group.is_scaled)
    if plain and not any(w.is_leaf for w in operands):  # activations
        triples = zip(operands, group.einsums, biases or [None] * len(operands), strict=True)  # type: ignore[list-item]
        return [local_einsum_function(e.x_dims, e.dims, e.out_dims)(x, w, bias) for w, e, bias in triples]
    how = group, deferred, expert_groups, unneeded_shapes, rebuild
    return _Einsums.apply(operand_conversions, *how, x, *operands, *biases)


def _compute_products(
    multiply: ScaledEinsums,
    expert_groups: RowGroups | None,
    group: EinsumGroup,
    x: Tensor,
    operands: Tensors,
    biases: Tensors,
) -> Iterable[Tensor]:
    """Return the products of a group of einsums of x: each computed when it is asked for, of experts' rows in turn."""
    triples = zip(operands, biases, group.einsums, strict=True)
    if expert_groups is None:
        return (multiply.find_function(e, "forward")(x, w, b) for w, b, e in triples)
    started = [
        build_grouped_einsum_starter(expert_groups, e.x_dims, e.dims, e.out_dims)(
            *multiply.round_rows(e, "forward", x, w), b
        )
        for w, b, e in triples
    ]
    return compute_in_turn(started)


def _compute_gradient_of_x(
    multiply: ScaledEinsums, expert_groups: RowGroups | None, group: EinsumGroup, gradients: Tensors, operands: Tensors
) -> Tensor:
    """Return the gradient of a group's x, the sum of the products of the outputs' `gradients` with the operands."""
    total: Any = None
    started = []
    for g, w, e in zip(gradients, operands, group.einsums, strict=True):
        if expert_groups is None:
            total = multiply.find_function(e, "input")(g, w, into=total)
        else:
            g, w = multiply.round_rows(e, "input", g, w)
            started.append(build_grouped_einsum_starter(expert_groups, e.out_dims, e.dims, e.x_dims)(g, w, into=total))
            total = started[-1][0]
    compute_in_turn(started)
    return total


def _add_expert_weight_gradients(
    expert_groups: RowGroups, group: EinsumGroup, leaves: Tensors, x: Tensor, gradients: Tensors, into: Tensor,
    fresh: bool,
) -> Tensor:  # fmt: skip
    """Add the gradients of a group's `leaves`, matrices of experts, to the flat memory `into`, where they lie one after
    another, or overwrite it if `fresh`; return it."""
    shapes = [w.shape for w, _ in zip(leaves, group.einsums, strict=False) if w is not None]
    parts = zip(into.split([shape.numel() for shape in shapes]), shapes, group.einsums, gradients, strict=True)
    started = [
        build_grouped_einsum_starter(expert_groups, e.x_dims, e.out_dims, e.dims)(x, g, None, part.view(shape), fresh)
        for part, shape, e, g in parts
    ]
    compute_in_turn(started)
    return into


def _find_gradient_function(
    multiply: ScaledEinsums, expert_groups: RowGroups | None, e: Einsum
) -> Callable[..., Tensor]:
    """Return the function of an einsum's x and the gradient of its result that gives the gradient of its operand."""
    if expert_groups is None:
        return multiply.find_function(e, "weight")
    return build_grouped_einsum(expert_groups, e.x_dims, e.out_dims, e.dims)
