"""Changes of layout: `convert` executes a plan's steps on a tensor asynchronously, `convert_differentiably` does so
differentiably.

If a tensor exists only on some ranks (`Layout.only`), the others hold an empty tensor in its place. Their autograd
graph is thereby complete, and their backward pass reaches the same collectives in the same order.

`ExpertLending` is the step that exchanges the matrices of experts that ranks compute for others, and their gradients
back. `copy_own_part` and `gather_parts` keep or send a tensor that several ranks of a stage replicate as one equal part
per rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.layout import Parts, block_shape, is_at_index_zero, zigzag_order
from platform.plan.rule import APPEAR, COLLECTIVES, JOIN, LENDING, SPLIT, Conversion, RelayoutStep
from platform.runtime.communicator import ArrivedCollective, CollectiveHandle, Communicator


class ExpertLending(NamedTuple):
    """Step of a conversion under way that lends experts, or gives their gradients back, for the block `x` of experts.
    `handle`: the exchange, None if nothing is exchanged; `sent`: this rank's experts that others compute."""

    step: RelayoutStep
    x: Tensor
    handle: CollectiveHandle | None
    sent: list[int]

    def wait(self) -> Tensor:
        """Return the block with lent experts behind its own, or its gradients with the lent experts' added."""
        x, step = self.x, self.step
        came = self.handle.wait() if self.handle else x[:0]
        if step.op == "lend":
            empty = x.new_zeros((step.shape[0] - x.shape[0] - came.shape[0], *x.shape[1:]))
            return torch.cat([x, came, empty])
        own_experts = x.narrow(0, 0, step.shape[0])
        for i, expert in enumerate(self.sent):  # in one order, so that sums are the same each time
            own_experts[expert] += came[i]
        return own_experts


def start_lending(communicator: Communicator, step: RelayoutStep, x: Tensor) -> ExpertLending:
    """Start the exchange of a step of experts that are lent, or of their gradients, as `communicator.lent` says."""
    lent, me = communicator.lent.get(step.layer, ()), communicator.group_index(step.axes)
    each = step.shape[0] if step.op == "give_back" else x.shape[0]
    if not x.numel() or not any(lent):
        return ExpertLending(step, x, None, [])
    mine = [[expert - me * each for expert in rank_experts if expert // each == me] for rank_experts in lent]
    lent_experts = [expert for rank_experts in mine for expert in rank_experts]
    out, into = list(map(len, mine)), [sum(expert // each == rank for expert in lent[me]) for rank in range(len(lent))]
    name = f"{step.op} experts of {step.layer}"
    if step.op == "lend":
        rows = torch.stack([x[expert] for expert in lent_experts]) if lent_experts else x[:0]  # no index to upload
        return ExpertLending(
            step, x, communicator.launch_all_to_allv(rows, out, into, step.axes, name=name), lent_experts
        )
    rows = x[each : each + sum(into)]
    return ExpertLending(step, x, communicator.launch_all_to_allv(rows, into, out, step.axes, name=name), lent_experts)


class PendingConversion:
    """Local tensor in conversion to another layout by a plan's steps, one collective in progress at a time; call `wait`
    where its value is used."""

    def __init__(
        self, communicator: Communicator, x: Tensor, steps: Sequence[RelayoutStep], owned: bool, name: str = ""
    ):
        """Begin to convert the local tensor x by the plan's `steps`, and issue the first collective."""
        self._communicator, self._owned, self._name = communicator, owned, name
        self._x, self._steps = x, steps
        self._handle: CollectiveHandle | ArrivedCollective | ExpertLending | None = None
        self._taken: RelayoutStep | None = None  # the step whose collective is in progress
        if steps:
            self._launch_next()

    def _launch_next(self) -> None:
        """Take the conversion's local steps (slice, pad, drop) up to the next collective and issue that, or all steps
        left. A collective among other ranks alone has a turn here too, as nothing to wait for: where several tensors
        are being converted, each group then sees its collectives in one order."""
        self._handle = self._taken = None
        communicator = self._communicator
        for i, step in enumerate(self._steps):
            if not is_at_index_zero(step.only, communicator.coordinates):
                if step.op not in COLLECTIVES:
                    continue
                self._handle, self._steps = ArrivedCollective(self._x), self._steps[i + 1 :]
                return
            if step.op not in COLLECTIVES:
                self._x = self._apply_local_step(step)
            elif step.op in LENDING:
                self._handle = start_lending(communicator, step, self._x)
                self._steps = self._steps[i + 1 :]
                return
            else:
                if step.op in SPLIT and step.zigzag == step.dim:
                    self._x = order_zigzag(self._x, step.dim, communicator.mesh.count_ranks(step.axes), step.rounds)
                if step.op in APPEAR and communicator.group_index(step.axes):
                    shape = block_shape(step.shape, step.cuts, communicator.mesh, communicator.coordinates)
                    self._x = self._x.new_empty(shape)
                self._handle = communicator.launch(
                    step.op,
                    self._x,
                    step.axes,
                    step.dim,
                    step.joined,
                    owned=self._owned,
                    name=self._name,
                    parts=_find_uneven_parts(communicator, step, step.dim),
                    joined_parts=_find_uneven_parts(communicator, step, step.joined),
                )
                self._steps, self._taken = self._steps[i + 1 :], step
                return
        self._steps = ()

    def _apply_local_step(self, step: RelayoutStep) -> Tensor:
        """Return this rank's tensor after a local step of its conversion: a slice, a pad or a drop."""
        communicator, x, dim = self._communicator, self._x, step.dim
        index, ranks = communicator.group_index(step.axes), communicator.mesh.count_ranks(step.axes)
        if step.op == "drop":
            return x.new_empty(0) if index else x
        if step.op == "slice" and step.zigzag == dim:
            pieces, pieces_per_rank = x.chunk(2 * ranks * step.rounds, dim), 2 * step.rounds
            order = zigzag_order(ranks, step.rounds)[index * pieces_per_rank : (index + 1) * pieces_per_rank]
            return torch.cat([pieces[n] for n in order], dim)
        parts = _find_uneven_parts(communicator, step, dim)
        extents = parts.extents if parts else (x.shape[dim] // (ranks if step.op == "slice" else 1),) * ranks
        first = sum(extents[:index])
        if step.op == "slice":
            return x.narrow(dim, first, extents[index])
        padded_block = x.new_zeros((*x.shape[:dim], sum(extents), *x.shape[dim + 1 :]))
        padded_block.narrow(dim, first, extents[index]).copy_(x)
        return undo_zigzag(padded_block, dim, ranks, step.rounds) if step.zigzag == dim else padded_block

    def advance_collective(self) -> None:
        """Wait for the collective in progress of a tensor's conversion, if any, and issue the next one."""
        if self._handle:
            self._x, step = self._handle.wait(), self._taken
            if step and step.op in JOIN and step.zigzag == step.dim_joined:
                self._x = undo_zigzag(self._x, step.zigzag, self._communicator.mesh.count_ranks(step.axes), step.rounds)
            self._launch_next()

    def wait(self) -> Tensor:
        """Wait for all collectives of a tensor's conversion to another layout, and return the converted tensor."""
        while self._handle:
            self.advance_collective()
        return self._x


def _find_uneven_parts(communicator: Communicator, step: RelayoutStep, dim: int) -> Parts | None:
    """Return the blocks, along the dim at position `dim`, of the ranks that take a step together, if they differ."""
    if not step.cuts or not step.moves_dim(dim) or not (cut := step.uneven_cut_of_dim(dim)):
        return None
    return cut.parts_of_group(communicator.mesh, communicator.coordinates, communicator.mesh.count_ranks(step.axes))


def convert(
    communicator: Communicator, x: Tensor, steps: Sequence[RelayoutStep], *, owned: bool = False, name: str = ""
) -> PendingConversion:
    """Start converting the local tensor x to another layout by a plan's `steps`, without autograd: the first collective
    is issued at once. `owned`: reductions may overwrite x; `name`: name of its collectives in a timeline."""
    return PendingConversion(communicator, x, steps, owned, name)


def order_zigzag(x: Tensor, dim: int, ranks: int, rounds: int) -> Tensor:
    """Return x with the pieces of `dim` in the order in which `ranks` ranks hold them in zigzag, dealt in `rounds`."""
    pieces = x.chunk(2 * ranks * rounds, dim)
    return torch.cat([pieces[number] for number in zigzag_order(ranks, rounds)], dim)


def undo_zigzag(x: Tensor, dim: int, ranks: int, rounds: int) -> Tensor:
    """Return x with the pieces of `dim`, as `ranks` ranks hold them in zigzag, dealt in `rounds`, in order."""
    pieces, places = x.chunk(2 * ranks * rounds, dim), zigzag_order(ranks, rounds)
    return torch.cat([pieces[places.index(number)] for number in range(len(places))], dim)


def is_absent_block(x: Tensor) -> bool:
    """Return True if x stands for a block that this rank lacks: a tensor [0]. No block is that; rows may be [0, d]."""
    return x.dim() == 1 and not x.numel()


class _Convert(torch.autograd.Function):
    """Autograd function behind `convert_differentiably`: planned changes of layout, and their adjoints on the
    gradients. All are started before the first is waited for, in both passes."""

    @staticmethod
    def forward(ctx, communicator, conversions, coming, *tensors):
        """Return the tensors converted by the plan's forward steps; `coming`: see `convert_differentiably`."""
        ctx.communicator, ctx.conversions = communicator, conversions
        ctx.set_materialize_grads(False)  # of a tensor that is only read nothing moves back
        triples = zip(tensors, conversions, coming, strict=True)
        started = [c or convert(communicator, x, conversion.forward) for x, conversion, c in triples]
        converted = [c.wait() for c in started]
        return tuple(out.view_as(out) if out is x else out for x, out in zip(tensors, converted, strict=True))

    @staticmethod
    def backward(ctx, *gradients):
        """Return the gradients converted back to the tensors' layouts by the plan's backward steps."""
        triples = zip(gradients, ctx.conversions, ctx.needs_input_grad[3:], strict=True)
        started = [convert(ctx.communicator, g, c.backward) if g is not None and n else None for g, c, n in triples]
        return None, None, None, *(c and c.wait() for c in started)


def convert_differentiably(
    communicator: Communicator,
    tensors: Sequence[Tensor],
    conversions: Sequence[Conversion],
    started_conversions: Sequence[PendingConversion | None] | None = None,
) -> list[Tensor]:
    """Convert local tensors to other layouts differentiably, together: each conversion's `forward` steps act on its
    tensor's value, its `backward` steps on the gradient. `started_conversions`: the values whose conversion has been
    started."""
    converted, started_conversions = list(tensors), started_conversions or [None] * len(tensors)
    moved = [i for i, conversion in enumerate(conversions) if conversion.forward or conversion.backward]
    if moved:
        moved_arguments = [[every[i] for i in moved] for every in (conversions, started_conversions, tensors)]
        for i, out in zip(moved, _Convert.apply(communicator, *moved_arguments[:2], *moved_arguments[2]), strict=True):
            converted[i] = out
    return converted


def copy_own_part(communicator: Communicator, x: Tensor, axes: Sequence[str], elements: int) -> Tensor:
    """Return a copy of this rank's part [elements] of the local tensor x, flattened and padded, where the ranks along
    `axes` hold equal x: kept for recomputation, or sent to another stage, in place of x. `elements`: size of the part,
    as planned.

    Returns x itself if `axes` is empty or x is absent (empty).
    """
    if not axes or is_absent_block(x):
        return x
    parts = communicator.mesh.count_ranks(axes)
    return flatten_padded(x, parts * elements).view(parts, -1)[communicator.group_index(axes)].clone()


def gather_parts(communicator: Communicator, part: Tensor, axes: tuple[str, ...], shape: Sequence[int]) -> Tensor:
    """Gather the parts that `copy_own_part` made of equal tensors into the whole tensor of `shape`, on every rank along
    `axes`. Returns `part` itself if `axes` is empty or the part is absent (empty)."""
    if not axes or is_absent_block(part):
        return part
    return unflatten_padded(convert(communicator, part, [RelayoutStep("all_gather", axes)]).wait(), shape)


def flatten_padded(block: Tensor, elements: int) -> Tensor:
    """Flatten a local block to [elements], padded with zeros, for equal shards."""
    missing = elements - block.numel()
    return F.pad(block.flatten(), (0, missing)) if missing else block.flatten()


def unflatten_padded(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Restore the block of `shape` from `flat`, a gathered `flatten_padded`: a view if `flat` is contiguous."""
    return flat.flatten()[: prod(shape)].view(shape)
