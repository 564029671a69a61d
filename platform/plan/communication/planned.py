"""Data types of an operation's plan: collectives, groups of einsums, conversions; and the shapes along their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from platform.plan.communication.rule import APPEAR, COLLECTIVES, Conversion, Step
from platform.plan.language.layout import Layout, padded
from platform.plan.language.mesh import Mesh
from platform.plan.language.ops import Operation


@dataclass(frozen=True)
class Collective:
    """Planned launch of a collective by every rank at index 0 of the axes `only`. `elements`: size of one rank's input;
    for a scatter, of one rank's output.

    `dtype` is `compute` (activations, weights), `accumulate` (statistics, summed gradients) or `metrics` (fp64 sums of
    a step). `phase` is forward or backward inside an operation, `reduce` or `update` at the end of a step. `issue` and
    `wait` name the earliest point of issue and the latest wait.
    """

    op: str
    axes: tuple[str, ...]
    elements: int
    dtype: str
    phase: str
    issue: str
    wait: str
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupMember:
    """Einsum of a group: an operand [dims], converted by `operand`, times the shared x gives output number `index`.

    `again`: the converted operand is not kept but converted again for the backward pass.
    """

    index: int
    x_dims: tuple[str, ...]
    dims: tuple[str, ...]
    out_dims: tuple[str, ...]
    operand: Conversion
    output: Conversion
    again: bool = False


@dataclass(frozen=True)
class Panels:
    """SUMMA in place of two gathers: `dim`, which every member contracts, is split over `x_axes` in x and over
    `operand_axes` in the operands (either may be empty), and comes in `count` panels, each broadcast by its owners."""

    dim: str
    x_axes: tuple[str, ...]
    operand_axes: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Group:
    """Einsums that read x in one compute layout, so that they share one gather of x and one reduction of its gradient.

    With `panels`, the conversions leave out the gathers of the contracted dim and their adjoints. `again`: x is
    converted again for the backward pass, as in `GroupMember`.
    """

    x: Conversion
    members: tuple[GroupMember, ...]
    panels: Panels | None = None
    again: bool = False

    @property
    def x_dims(self) -> tuple[str, ...]:
        return self.members[0].x_dims


@dataclass(frozen=True)
class PlannedOperation:
    """Communication that a rank executes for one operation.

    project and einsum have `groups`; other operations have `conversions`, one per parameter or moved operand. `over`:
    the axes that split the dim of a norm, softmax or cross-entropy, over which its statistics are merged. `tokens`: the
    layout over batch and length in which the operation reads a data tensor. Only ranks at index 0 of the axes `only`
    compute the operation.
    """

    operation: Operation
    collectives: tuple[Collective, ...] = ()
    groups: tuple[Group, ...] = ()
    conversions: tuple[Conversion, ...] = ()
    over: tuple[str, ...] = ()
    tokens: Layout = Layout()
    compute_axes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


def walk(steps: Sequence[Step], shape: Sequence[int], mesh: Mesh) -> list[tuple[Step, int]]:
    """Return the collectives among `steps`, each with its `Collective.elements`, for a local tensor of `shape`."""
    out = []
    for step, before, after in shapes(steps, shape, mesh):
        if step.op in COLLECTIVES:
            out.append((step, prod(after if step.op == "scatter" else before)))
    return out


def shapes(
    steps: Sequence[Step], shape: Sequence[int], mesh: Mesh
) -> Iterator[tuple[Step, tuple[int, ...], tuple[int, ...]]]:
    """Yield every step with the local shapes before and after it."""
    now = list(shape)
    for step in steps:
        before, n = tuple(now), mesh.extent(step.axes)
        if step.op in ("all_gather", "gather", "pad"):
            now[step.dim] *= n
        elif step.op in ("reduce_scatter", "scatter", "slice", "all_to_all"):
            now[step.dim] //= n
        if step.op == "all_to_all":
            now[step.joined] *= n
        elif step.op == "flatten":
            now = [padded(prod(now), n)]
        elif step.op == "unflatten":
            now = list(step.shape)
        yield step, before, tuple(now)


def shaped(steps: Sequence[Step], shape: Sequence[int], mesh: Mesh) -> tuple[Step, ...]:
    """Return the steps with `Step.shape` filled in for those that give a block to ranks that had nothing."""
    found = shapes(steps, shape, mesh)
    return tuple(replace(step, shape=after) if step.op in APPEAR else step for step, _, after in found)
