"""Einsums of two local tensors with named dims; and of rows of several experts with the matrices of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import zip_longest
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.chunks import ADDS_WIDE
from platform.plan.operation_plan import Einsum, EinsumGroup, Panels
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import convert, is_absent_block

Dims = tuple[str, ...]
Blocks = Sequence[Tensor]
ALIGNED = 16  # bytes by which torch's grouped product wants matrices' rows to begin


@cache
def local_einsum_function(a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor]:
    """Return a function (x, y, bias=None, into=None, fresh=False) that multiplies two local tensors with dims `a` and
    `b` into dims `out`, without communication; the bias has the dims of y that are in `out`. `into`: a contiguous
    tensor to which the product is added in place, or which it overwrites if that is `fresh`, and which is returned;
    there is no bias then. It may be of a wider type than x and y, where the device `ADDS_WIDE`.

    Uses one matrix product of views where the dims form contiguous runs (rows, contracted, columns), else torch.einsum.
    The product of absent (empty) blocks is absent, and is connected to the autograd graphs of both. A dim of `out` that
    neither has is of one element: where a product sums what its operand alone has, so has the operand's gradient.
    """
    lone = tuple(i for i, d in enumerate(out) if d not in a and d not in b)
    product = _product_function(a, b, tuple(d for i, d in enumerate(out) if i not in lone))

    def multiply_blocks(
        x: Tensor, y: Tensor, bias: Tensor | None = None, into: Tensor | None = None, fresh: bool = False
    ) -> Tensor:
        """Return the product of two local tensors; empty if x is absent on this rank."""
        if is_absent_block(x):
            return x + y if into is None else into
        z = product(x, y, bias, into if into is None else into.squeeze(lone), fresh)
        if into is not None:
            return into
        for i in lone:
            z = z.unsqueeze(i)
        return z

    return multiply_blocks


def _product_function(a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor]:
    """Return the product function of `local_einsum_function` for blocks that are present: one matrix product if dims
    `a`, `b` and `out` allow it, else torch.einsum."""
    contracted = tuple(d for d in a if d in b)
    rows, columns = tuple(d for d in a if d not in b), tuple(d for d in b if d not in a)
    a_first, b_first = a == rows + contracted, b == contracted + columns
    are_matrices = (a_first or a == contracted + rows) and (b_first or b == columns + contracted)
    simple = are_matrices and out in (rows + columns, columns + rows) and contracted
    if batched := _build_batch_product(a, b, out):
        return batched
    if not simple:
        names = {d: chr(ord("a") + i) for i, d in enumerate(dict.fromkeys(a + b))}
        equation = "{},{}->{}".format(*("".join(names[d] for d in dims) for dims in (a, b, out)))

        def multiply_by_einsum(x: Tensor, y: Tensor, bias: Tensor | None, into: Tensor | None, fresh: bool) -> Tensor:
            """Return the product by torch.einsum, where no one matrix product gives it."""
            z = torch.einsum(equation, x, y)
            if into is not None:
                return into.copy_(z) if fresh else into.add_(z)
            return z if bias is None else z + bias

        return multiply_by_einsum
    na, nb, nc = len(rows), len(columns), len(contracted)

    def multiply_matrices(x: Tensor, y: Tensor, bias: Tensor | None, into: Tensor | None, fresh: bool) -> Tensor:
        """Return the product as one matrix product of x and y, reshaped to matrices."""
        if a_first:
            row_shape, x = x.shape[:na], x.reshape(prod(x.shape[:na]), -1)
        else:
            row_shape, x = x.shape[nc:], x.reshape(prod(x.shape[:nc]), -1).t()
        if b_first:
            column_shape, y = y.shape[nc:], y.reshape(prod(y.shape[:nc]), -1)
        else:
            column_shape, y = y.shape[:nb], y.reshape(prod(y.shape[:nb]), -1).t()
        straight = out == rows + columns
        if not straight:
            x, y, row_shape, column_shape = y.t(), x.t(), column_shape, row_shape
        if into is not None:
            add_product(into.view(x.shape[0], -1), x, y, fresh)
            return into
        assert straight or bias is None
        z = x @ y if bias is None else torch.addmm(bias.reshape(-1), x, y)
        return z.view(*row_shape, *column_shape)

    return multiply_matrices


def _build_batch_product(a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor] | None:
    """Return the product function of `local_einsum_function` where it is one matrix product for each index of a first
    dim that `a`, `b` and `out` share, as of experts; else None."""
    if not a[0] == b[0] == out[0]:
        return None
    contracted = [d for d in a[1:] if d in b and d not in out]
    rows, columns = ([d for d in dims[1:] if d not in contracted] for dims in (a, b))
    straight = list(out[1:]) == rows + columns
    if not straight and list(out[1:]) != columns + rows:
        return None
    if list(a[1:]) not in (rows + contracted, contracted + rows):
        return None
    if list(b[1:]) not in (columns + contracted, contracted + columns) or not contracted:
        return None

    def reshape_to_matrices(x: Tensor, dims: Dims, first: list[str]) -> Tensor:
        """Return x as matrices [shared, first, others], whose dims each are one or several neighbours of x's."""
        n, shape = len(first), x.shape[1:]
        if list(dims[1 : n + 1]) == first:
            return x.reshape(x.shape[0], prod(shape[:n]), prod(shape[n:]))
        return x.reshape(x.shape[0], prod(shape[:-n]), prod(shape[-n:])).transpose(1, 2)

    def multiply_batches(x: Tensor, y: Tensor, bias: Tensor | None, into: Tensor | None, fresh: bool) -> Tensor:
        """Return the product as one batch of matrix products of x and y."""
        left, right = reshape_to_matrices(x, a, rows), reshape_to_matrices(y, b, contracted)
        shape = [dict(zip((*a, *b), (*x.shape, *y.shape), strict=True))[d] for d in out]
        if not straight:
            left, right = right.transpose(1, 2), left.transpose(1, 2)
        if bias is not None:  # of the columns
            added = bias.reshape(bias.shape[0], 1, -1) if straight else bias.reshape(bias.shape[0], -1, 1)
            return torch.baddbmm(added, left, right).view(shape)
        if into is None:
            return torch.bmm(left, right).view(shape)
        memory = into.view(left.shape[0], left.shape[1], right.shape[2])
        if memory.dtype != x.dtype:
            z = torch.bmm(left, right)
            return into.copy_(z.view(shape)) if fresh else into.add_(z.view(shape))
        torch.bmm(left, right, out=memory) if fresh else memory.baddbmm_(left, right)
        return into

    return multiply_batches


def view_as_matrix(e: Einsum, operand: Tensor) -> Tensor:
    """Return the operand of an einsum that is one matrix product, as a matrix [contracted, columns]."""
    split = sum(d in e.x_dims for d in e.dims)
    if e.dims[0] in e.x_dims:
        return operand.flatten(0, split - 1).flatten(1)
    return operand.flatten(0, -split - 1).flatten(1).t()


def add_product(total: Tensor, x: Tensor, y: Tensor, fresh: bool) -> None:
    """Add the product of matrices x and y to `total`, of any floating-point type; overwrite it if `fresh`."""
    if total.dtype == x.dtype:
        torch.mm(x, y, out=total) if fresh else total.addmm_(x, y)
    elif total.itemsize < x.itemsize or not ADDS_WIDE.get(total.device.type, True):
        # of a product that is computed in the type of statistics, or on a device whose kernels write one type
        total.copy_(x @ y) if fresh else total.add_(x @ y)
    elif fresh:  # the kernel writes what it has added up in fp32, as Megatron's fused weight gradients do
        torch.mm(x, y, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)


class RowGroups(Protocol):
    """Groups of rows, one for each expert: how many rows each has, in host memory, and where each ends, int32 [experts]
    on the device."""

    @property
    def each(self) -> Sequence[int]:
        """Return the number of rows of each expert."""

    @property
    def ends(self) -> Tensor:
        """Return the first row that is not of each expert or one before."""


Turns = Iterator[None]  # products of groups of rows, of which each step computes one


def build_grouped_einsum(groups: RowGroups, a: Dims, b: Dims, out: Dims) -> Callable[..., Tensor]:
    """Return the function of a product of rows, as `build_grouped_einsum_starter` starts it, that computes all."""
    start = build_grouped_einsum_starter(groups, a, b, out)
    return lambda *operands, **how: compute_in_turn([start(*operands, **how)])[0]


def compute_in_turn(products: Sequence[tuple[Tensor, Turns]]) -> list[Tensor]:
    """Compute started products group by group, so that rows that several read are still in the cache; return them."""
    for _ in zip_longest(*(turns for _, turns in products)):
        pass
    return [memory for memory, _ in products]


def build_grouped_einsum_starter(groups: RowGroups, a: Dims, b: Dims, out: Dims) -> Callable[..., tuple[Tensor, Turns]]:
    """Return a function that starts `local_einsum_function` of rows [rows, d] of dims `a` with matrices of their
    experts [experts, ..] of dims `b`, or of two activations of the same rows: `out` then has a matrix for each expert,
    0 where it has no rows. It returns the result's memory, and what fills it `compute_in_turn`."""
    matrices = "rows" in b
    turned = (out[1] == a[1]) if matrices else (b[2] == a[1])

    def start_product(
        x: Tensor, y: Tensor, bias: Tensor | None = None, into: Tensor | None = None, fresh: bool = False
    ) -> tuple[Tensor, Turns]:
        """Start the product, or its addition to `into`, which it overwrites if `fresh`."""
        if matrices:
            x, y = (x, y) if turned else (y, x)
            shape: tuple[int, ...] = (len(groups.each), x.shape[1], y.shape[1])
            x = x.t()
        else:
            y = y.transpose(1, 2) if turned else y
            shape = (x.shape[0], y.shape[2])
        if has_kernel(x, y):
            product = F.grouped_mm(x, y, offs=groups.ends)
            product = product if bias is None else product.add_(repeat_expert_vectors(groups, bias))
            return product if into is None else into.copy_(product) if fresh else into.add_(product), iter(())
        fresh, memory = fresh or into is None, x.new_empty(shape) if into is None else into
        each = list(groups.each)
        left, right = x.split(each, int(matrices)), y.split(each) if matrices else y.unbind()
        memories = memory.unbind() if matrices else memory.split(each)
        return memory, _iterate_matrix_products(memories, left, right, bias, fresh)

    return start_product


def _iterate_matrix_products(memories: Blocks, left: Blocks, right: Blocks, bias: Tensor | None, fresh: bool) -> Turns:
    """Compute the products of matrices `left` and `right`, and the expert's `bias` added, one in each step."""
    if bias is not None:
        for out, x, y, b in zip(memories, left, right, bias.unbind(), strict=True):
            torch.addmm(b, x, y, out=out)
            yield
    else:
        for out, x, y in zip(memories, left, right, strict=True):
            add_product(out, x, y, fresh)
            yield


def has_kernel(x: Tensor, y: Tensor) -> bool:
    """Return True if one kernel of torch multiplies all groups of matrices x and y: on GPUs, in bf16."""
    # elsewhere torch's own is a loop as well, which takes fewer types
    wide = [max(t.stride()) * t.element_size() for t in (x, y)]
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(n % ALIGNED for n in wide)


def repeat_expert_vectors(groups: RowGroups, vectors: Tensor) -> Tensor:
    """Return for each row the one of `vectors` [experts, d] that is its expert's, [rows, d]."""
    lengths = groups.ends.diff(prepend=groups.ends.new_zeros(1))
    return vectors.repeat_interleave(lengths, 0, output_size=sum(groups.each))


def sum_rows_by_expert(groups: RowGroups, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum [experts, d] of each expert's rows [rows, d], the adjoint of `repeat_expert_vectors`."""
    return torch.stack([part.sum(0, dtype=dtype) for part in rows.split(list(groups.each))])


class _OfRows(torch.autograd.Function):
    """Autograd function of `vectors_of_rows`, none of whose sums depend on the order in which threads add."""

    @staticmethod
    def forward(ctx, vectors, groups):
        """Return the vector of each row's expert."""
        ctx.groups = groups
        return repeat_expert_vectors(groups, vectors)

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of the gradients of each expert's rows."""
        return sum_rows_by_expert(ctx.groups, gradient), None


def vectors_of_rows(groups: RowGroups, vectors: Tensor) -> Tensor:
    """Compute `repeat_expert_vectors` differentiably: for each row of experts, its expert's of `vectors`."""
    return _OfRows.apply(vectors, groups)


# SUMMA (van de Geijn and Watts 1997; the 2-D baseline of 3-D tensor parallelism, Bian et al. 2021): products of split
# matrices panel by panel.
#
# With x [rows, k] and w [k, columns], k split over one axis in x and over another in w, and neither operand ever whole:
#
#     AB    y    = sum over panels t of  broadcast(x_t) broadcast(w_t)
#     AB^T  dx_t = reduce to its owner of  dy broadcast(w_t)^T
#     A^TB  dw_t = reduce to its owner of  broadcast(x_t)^T dy


class FindsFunctions(Protocol):
    """Functions that multiply panels of SUMMA, in 8 bits or not."""

    def find_function(self, e: Einsum, product: str) -> Callable[..., Tensor]:
        """Return the function of a product of the einsum: forward, input (gradient of x), weight (of the operand)."""


class _SummaOperand:
    """Operand of a SUMMA product: the `local` block, cut into panels along the contracted dim (at position `dim`),
    which is split over `axes`."""

    def __init__(self, communicator: Communicator, panels: Panels, axes: Sequence[str], local: Tensor, dim: int):
        """Cut `local`, a rank's block of an operand of SUMMA, along `dim` into the panels that it owns on `axes`."""
        self.communicator, self.axes, self.local, self.dim = communicator, axes, local, dim
        self.per_owner = panels.count // communicator.mesh.count_ranks(axes)
        self.extent = local.shape[dim] // self.per_owner
        self.index = communicator.group_index(axes)

    def own_panel(self, t: int, operand: Tensor) -> Tensor | None:
        """Return the view of SUMMA panel `t` in `operand`, in its layout; None if another rank owns it."""
        owner, panel_position = divmod(t, self.per_owner)
        return operand.narrow(self.dim, panel_position * self.extent, self.extent) if owner == self.index else None

    def start_panel_broadcast(self, t: int) -> Callable[[], Tensor]:
        """Start the broadcast of this operand's SUMMA panel number t from the rank that owns it along the split's axes;
        the returned function waits for it and returns the panel."""
        mine = self.own_panel(t, self.local)
        if not self.axes:
            assert mine is not None
            return lambda: mine
        shape = list(self.local.shape)
        shape[self.dim] = self.extent
        panel = self.local.new_empty(shape) if mine is None else mine
        return self.communicator.launch("broadcast", panel, self.axes, root=t // self.per_owner).wait

    def reduce_panel(self, t: int, part: Tensor, into: Tensor) -> Callable[[], None]:
        """Start summing `part`, every rank's contribution to panel number t of this operand's gradient, to the rank
        that owns the panel; the returned function waits, and on the owner writes the sum into its gradient block
        `into`."""
        handle = None
        if self.axes:
            handle = self.communicator.launch("reduce", part, self.axes, root=t // self.per_owner, owned=True)
        mine = self.own_panel(t, into)

        def finish_reduction() -> None:
            """Wait for the panel's sum; write it into this rank's gradient if it owns the panel."""
            total = handle.wait() if handle else part
            if mine is not None:
                mine.copy_(total)

        return finish_reduction


def _cut_operands_into_panels(
    communicator: Communicator, group: EinsumGroup, x: Tensor, operands: Blocks
) -> list[_SummaOperand]:
    """Return x and the operands of a SUMMA group, in this order, as `_SummaOperand`s along the contracted dim."""
    panels = group.panels
    assert panels is not None
    split = [_SummaOperand(communicator, panels, panels.x_axes, x, group.x_dims.index(panels.dim))]
    for e, w in zip(group.einsums, operands, strict=True):
        split.append(_SummaOperand(communicator, panels, panels.operand_axes, w, e.dims.index(panels.dim)))
    return split


def _iterate_panels(splits: Sequence[_SummaOperand], count: int):
    """Yield (t, panel t of every SUMMA operand) for t < `count`; broadcasts of panel t + 1 overlap the use of t."""
    coming = [s.start_panel_broadcast(0) for s in splits]
    for t in range(count):
        arrived_panels = [wait() for wait in coming]
        coming = [s.start_panel_broadcast(t + 1) for s in splits] if t + 1 < count else []
        yield t, arrived_panels


class _Summa(torch.autograd.Function):
    """Autograd function of a planned group's products with panels: AB forward, AB^T (gradient of x) and A^TB (gradients
    of the operands) backward."""

    @staticmethod
    def forward(
        ctx, communicator, group: EinsumGroup, start: Callable[[], FindsFunctions], x: Tensor, *operands: Tensor
    ):
        """Return the products of x with the operands, summed over panels that their owners broadcast in turn."""
        ctx.communicator, ctx.group, ctx.start = communicator, group, start
        local = _convert_summa_operands(communicator, group.einsums, operands)
        kept = (w if e.regathered else moved for w, moved, e in zip(operands, local, group.einsums, strict=True))
        ctx.save_for_backward(x, *kept)
        assert group.panels is not None
        out: list[Tensor] = []
        for _, (xt, *ws) in _iterate_panels(
            _cut_operands_into_panels(communicator, group, x, local), group.panels.count
        ):
            multiply, pairs = start(), zip(group.einsums, ws, strict=True)
            products = [multiply.find_function(e, "forward")(xt, w) for e, w in pairs]
            out = [y.add_(p) for y, p in zip(out, products, strict=True)] if out else products
        return tuple(out)

    @staticmethod
    def backward(ctx, *gradients):
        """Return the gradients of x and operands, panel by panel, each summed to the rank that owns the panel."""
        x, *operands = ctx.saved_tensors
        group = ctx.group
        if any(e.regathered for e in group.einsums):  # then all einsums: their operands are parameters
            operands = _convert_summa_operands(ctx.communicator, group.einsums, operands)
        splits = _cut_operands_into_panels(ctx.communicator, group, x, operands)
        trained = [i for i, e in enumerate(group.einsums) if not e.frozen]
        allocate = partial(torch.empty_like, memory_format=torch.contiguous_format)
        dx, dws = allocate(x), {i: allocate(operands[i]) for i in trained}
        finish = []
        for t, (xt, *ws) in _iterate_panels(splits, group.panels.count):
            multiply, triples = ctx.start(), list(zip(group.einsums, gradients, ws, strict=True))
            parts = [multiply.find_function(e, "input")(g, w) for e, g, w in triples]
            finish.append(splits[0].reduce_panel(t, torch.stack(parts).sum(0) if len(parts) > 1 else parts[0], dx))
            for i, dw in dws.items():
                e, g, _ = triples[i]
                product = multiply.find_function(e, "weight")(xt, g)
                finish.append(splits[1 + i].reduce_panel(t, product, dw))
        for done in finish:
            done()
        leaving = {i: convert(ctx.communicator, w, group.einsums[i].operand.backward) for i, w in dws.items()}
        return None, None, None, dx, *(leaving[i].wait() if i in leaving else None for i in range(len(operands)))


def _convert_summa_operands(communicator: Communicator, einsums: Sequence[Einsum], operands: Blocks) -> Blocks:
    """Convert a SUMMA group's operands to the operation's layout, except along the contracted dim, cut into panels."""
    coming = [convert(communicator, w, e.operand.forward) for w, e in zip(operands, einsums, strict=True)]
    return [c.wait() for c in coming]


def compute_by_summa(
    communicator: Communicator, group: EinsumGroup, x: Tensor, operands: Blocks, start: Callable[[], FindsFunctions]
) -> Blocks:
    """Compute the outputs of a planned group of einsums by SUMMA, panel by panel of the contracted dim, from the local
    block of x (already converted) and the operands as stored. Outputs of an absent (empty) x are absent. `start`: makes
    the functions of one turn."""
    if is_absent_block(x):
        return [x + w for w in operands]
    return _Summa.apply(communicator, group, start, x, *operands)
