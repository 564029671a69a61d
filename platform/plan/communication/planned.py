"""What the plan of an operation consists of: collectives, groups of einsums, conversions."""

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
    """One launch on every rank at index 0 of the axes `only`. `elements`: of one member's input, before the collective;
    of a scatter, of what one member gets.

    `dtype` is `compute` (activations, weights) or `accumulate` (statistics, gradients that are summed up). `phase` is
    forward or backward in an operation; beside them, a step has `reduce` and `update`.
    `issue` and `wait` say the earliest point of issue and the latest wait inside the operation.
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
class Member:
    """One einsum of a group: `operand` [dims] with the shared x into output number `index`.

    `again`: the operand is not kept as it was brought in, but brought in again for the backward pass.
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
    """SUMMA instead of two gathers: `dim`, which every member contracts, is split over `x_axes` in x and over
    `operand_axes` in the operands (either may be none), and comes in `count` panels, each broadcast by its owners."""

    dim: str
    x_axes: tuple[str, ...]
    operand_axes: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Group:
    """Einsums that read x in one compute layout: one gather of x, one reduction of its gradient.

    With `panels`, the conversions leave out the gathers of the contracted dim and their adjoints. `again`: of x, as in
    `Member`.
    """

    x: Conversion
    members: tuple[Member, ...]
    panels: Panels | None = None
    again: bool = False

    @property
    def x_dims(self) -> tuple[str, ...]:
        return self.members[0].x_dims


@dataclass(frozen=True)
class PlannedOperation:
    """What a rank executes for one operation.

    `groups` for project and einsum; `conversions`, one per parameter or moved operand, for the others; `over` are the
    axes that split the dim of a norm, softmax or cross-entropy, whose statistics are merged over them; `tokens` is the
    layout over batch and length in which the operation reads a data tensor. It is computed at index 0 of the axes
    `only` alone.
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
    """The collectives among `steps` with their `Collective.elements`, from a local tensor of `shape`."""
    out = []
    for step, before, after in shapes(steps, shape, mesh):
        if step.op in COLLECTIVES:
            out.append((step, prod(after if step.op == "scatter" else before)))
    return out


def shapes(
    steps: Sequence[Step], shape: Sequence[int], mesh: Mesh
) -> Iterator[tuple[Step, tuple[int, ...], tuple[int, ...]]]:
    """Every step with the local shapes before and after it."""
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
    """The steps, told the shapes of what appears on ranks that had nothing."""
    found = shapes(steps, shape, mesh)
    return tuple(replace(step, shape=after) if step.op in APPEAR else step for step, _, after in found)
