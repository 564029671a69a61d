"""Parameters as matrices, of which each rank has parts, for optimizers whose updates need whole rows, columns or
matrices.

`AdafactorSums` are sums of squares by row and by column, for factored second moments. `MuonMatrices` gathers whole
matrices from the blocks and shards of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from platform.plan.model_types import Parameter
from platform.plan.plan import Plan
from platform.plan.step_collectives import counts_at, factor_sum_sizes, summing_axes
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import convert
from platform.runtime.flat_buffers import FlatBucket

Transform = Callable[[Tensor], Tensor]  # of a whole matrix


class _Part(NamedTuple):
    """Place of this rank's part in the matrices of a parameter: the rows of all matrices that the rows of the part are,
    how many of these follow each other in one matrix (`counts`) and in which (`of`), the columns of a matrix that its
    columns are, and how many elements of the first row come before the part. A row or column of padding stands for some
    other: its gradients are zeros."""

    rows: Tensor
    counts: list[int]
    of: Tensor
    columns: Tensor
    before: int


class AdafactorSums:
    """Sums over the ranks of a stage, of which each counts its parts, laid out as the master copies. `plan`: the plan
    of this rank's stage."""

    def __init__(self, plan: Plan, communicator: Communicator):
        """Find where this rank's part of each parameter matrix lies, for Adafactor's sums by row and by column."""
        self._plan, self._communicator = plan, communicator
        self._sizes, self._axes = factor_sum_sizes(plan), summing_axes(plan)
        by_name = {p.name: p for p in plan.parameters}
        self._shapes = {name: by_name[name].shape_as_matrices(plan.global_shape(by_name[name])) for name in self._sizes}
        self.parameter_sizes = {name: prod(plan.global_shape(by_name[name])) for name in self._sizes}
        at = communicator.coordinates
        self._counted = {n for n in self._sizes if counts_at(at, plan.master_split_axes(by_name[n]))}
        own_parameters = (by_name[name] for name in plan.factored if name in by_name)
        self._parts = {p.name: part for p in own_parameters if (part := self._find_own_part(p))}

    def _find_own_part(self, p: Parameter) -> _Part | None:
        """Find where this rank's block of a parameter or, under ZeRO, its shard of the block lies in the parameter's
        matrices: in which rows and columns; None if it has none."""
        plan, at, device = self._plan, self._communicator.coordinates, self._communicator.device
        start, stop = plan.shard_range(p, at)
        if not plan.has_block(p, at) or start >= stop:
            return None
        block, shape, cut = plan.locate_block(p, at), plan.global_shape(p), p.num_row_dims
        rows = _element_numbers(block[:cut], shape[:cut], device)
        columns = _element_numbers(block[cut:], shape[cut:], device)
        first, last = start // len(columns), -(-stop // len(columns))
        each = prod(extent for _, extent in block[p.num_stack_dims : cut])  # rows of the block in one matrix
        within = range(first // each, -(-last // each))
        counts = [min(last, (n + 1) * each) - max(first, n * each) for n in within]
        of = torch.tensor(within, device=device) + sum(offset for offset, _ in block[: p.num_stack_dims])
        return _Part(rows[first:last], counts, of, columns, start - first * len(columns))

    def matrix_shape(self, name: str) -> tuple[int, int, int] | None:
        """Return (number, rows, columns) of matrices of which this rank has a part, None unless they are factored."""
        return self._shapes[name] if name in self._plan.factored else None

    def squares_by_side(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for Adafactor, the sums of squares of x, this rank's part of a parameter's gradient, by row [rows]
        and by column [columns] of all whole matrices; the parts of other ranks count as zeros."""
        part, (number, rows, columns) = self._parts[name], self._shapes[name]
        squares = x.new_zeros(len(part.rows) * len(part.columns))
        torch.mul(x.view(-1), x.view(-1), out=squares[part.before : part.before + x.numel()])
        squares = squares.view(len(part.rows), len(part.columns))
        sums = torch.stack([of_matrix.sum(0) for of_matrix in squares.split(part.counts)])
        by_column = x.new_zeros(number, columns).index_put_((part.of[:, None], part.columns), sums, accumulate=True)
        return x.new_zeros(number * rows).index_add_(0, part.rows, squares.sum(1)), by_column.view(-1)

    def outer_product_part(self, name: str, rows: Tensor, columns: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of the outer products of Adafactor's `rows` and `columns`, shaped as `like`."""
        part, (number, _, width) = self._parts[name], self._shapes[name]
        products = rows.new_empty(len(part.rows), len(part.columns))
        of_parts = columns.view(number, width)[part.of[:, None], part.columns]
        for out, r, c in zip(products.split(part.counts), rows[part.rows].split(part.counts), of_parts, strict=True):
            torch.outer(r, c, out=out)
        return products.view(-1)[part.before : part.before + like.numel()].view(like.shape)

    def sum_over_ranks(self, squares: Mapping[str, Sequence[Tensor]], totals: bool = False) -> dict[str, list[Tensor]]:
        """Sum over ranks, by one all-reduce, the squares that Adafactor needs of each parameter's gradient: by row and
        by column of a factored matrix, else one number; with `totals` one number of every parameter. `squares`:
        parameter name -> the sums of this rank's part. All ranks call it together."""
        sizes = {name: (1,) if totals else each for name, each in self._sizes.items()}
        flat = torch.zeros(sum(map(sum, sizes.values())), dtype=self._sum_dtype, device=self._communicator.device)
        pieces = zip(flat.split([sum(s) for s in sizes.values()]), sizes.items(), strict=True)
        views = {name: list(piece.split(list(each))) for piece, (name, each) in pieces}
        for name in self._counted & squares.keys():
            for sum_view, x in zip(views[name], squares[name], strict=True):
                sum_view.copy_(x)
        if self._axes and len(flat):
            flat.copy_(self._communicator.launch("all_reduce", flat.clone(), self._axes, name="factors").wait())
        return views

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Return the dtype in which ranks sum squares for Adafactor here: fp64 if the plan says so, or fp32."""
        return torch.float64 if self._plan.itemsize["accumulate"] == 8 else torch.float32


def _element_numbers(block: Sequence[tuple[int, int]], shape: Sequence[int], device: torch.device) -> Tensor:
    """Return the row-major numbers, in a tensor of `shape`, of a block's elements, int64 [elements]. `block`: (offset,
    extent) by dim; padding beyond a dim's size gets the number of its last element."""
    element_numbers = torch.zeros(1, dtype=torch.long, device=device)
    for (offset, extent), size in zip(block, shape, strict=True):
        dim_numbers = torch.arange(offset, offset + extent, device=device).clamp(max=size - 1)
        element_numbers = (element_numbers[:, None] * size + dim_numbers).view(-1)
    return element_numbers


class MuonMatrices:
    """Gathers the plan's `matrices` on the rank of `communicator`, as the plan says, bucket by bucket. `plan`: the plan
    of this rank's stage; `flats`: its buckets. `half`: the model is computed in half precision."""

    def __init__(self, plan: Plan, communicator: Communicator, flats: Sequence[FlatBucket]):
        """Find the flat buckets that hold parts of the weight matrices which Muon updates as wholes."""
        self._plan, self._communicator = plan, communicator
        self.half = plan.itemsize["compute"] == 2
        pairs = [(flat, [p for p in flat.bucket.parameters if p.name in plan.matrices]) for flat in flats if flat.here]
        self._flats = [(flat, parameters) for flat, parameters in pairs if parameters]

    def map_matrices(self, function: Transform, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Apply `function` (Muon's) to each whole weight matrix, gathered from the ranks with the layer's outputs as
        rows; yield the parameter's name and this rank's part of the result. `parts`: parameter name -> this rank's part
        of the matrix, laid out as the master copy. All ranks go through it together."""
        for flat, parameters in self._flats:
            blocks = flat.gather_whole_blocks({p.name: parts[p.name] for p in parameters if p.name in parts})
            for p in parameters:
                computed_parts = [self._apply_to_gathered_matrix(flat, p, blocks[p.name], function)]
                if p.name in parts:
                    yield p.name, computed_parts.pop()  # so that none is held while the next is made
            del blocks

    @torch.no_grad()
    def _apply_to_gathered_matrix(self, flat: FlatBucket, p: Parameter, block: Tensor, function: Transform) -> Tensor:
        """Return this rank's part of function(whole matrix), of weight matrices gathered from the ranks' blocks."""
        matrix = convert(self._communicator, block, self._plan.matrix_gather_steps(p), name=f"join {p.name}").wait()
        transformed = function(matrix.reshape(p.shape_as_matrices(matrix.shape)[not p.num_stack_dims :])).view(
            matrix.shape
        )
        return flat.cut_own_master_part(p.name, self._cut_own_block(p, transformed))

    def _cut_own_block(self, p: Parameter, whole_matrix: Tensor) -> Tensor:
        """Return this rank's block of `whole_matrix`, a parameter's whole matrices with their vocab padding."""
        block = self._plan.locate_block(p, self._communicator.coordinates)
        for dim, (offset, extent) in [*enumerate(block)][p.num_stack_dims :]:
            whole_matrix = whole_matrix.narrow(dim, offset, extent)
        return whole_matrix

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the (rows, columns), without padding, of each matrix of `name` that this rank gathers with others."""
        p = next(p for p in self._plan.parameters if p.name == name)
        return p.shape_as_matrices(self._plan.global_shape(p))[1:]
