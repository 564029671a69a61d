"""Spreads of a tensor along mesh axes, and the one way in which each step of a conversion changes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction
from math import prod
from typing import NamedTuple

from platform.plan.communication.rule import LENDING, Step
from platform.plan.language.layout import Layout
from platform.plan.language.ops import Parameter, Spec

SPLIT, PARTIAL, ALONE, WHOLE = "split", "partial", "at index 0 alone", "whole"

# step -> (what its axes are for the tensor before, what they are after)
BECOMES = {
    "all_gather": (SPLIT, WHOLE),
    "reduce_scatter": (PARTIAL, SPLIT),
    "all_reduce": (PARTIAL, WHOLE),
    "all_to_all": (SPLIT, SPLIT),
    "all_to_allv": (SPLIT, SPLIT),
    "slice": (WHOLE, SPLIT),
    "pad": (SPLIT, PARTIAL),
    "broadcast": (ALONE, WHOLE),
    "reduce": (PARTIAL, ALONE),
    "scatter": (ALONE, SPLIT),
    "gather": (SPLIT, ALONE),
    "drop": (WHOLE, ALONE),
}


Sizes = Mapping[str, tuple[int, int]]  # dim -> its global size, and the unit in which it is cut


class Unsound(Exception):
    """Error of a plan by which ranks would compute another number than one process, or hang, as a line of text."""


class Spread(NamedTuple):
    """Spread of a tensor over the ranks along every mesh axis: an axis in `split` splits one of its dims, each dim over
    its axes major to minor; along one in `partial` ranks hold summands of it; along one in `only` index 0 alone has it;
    along any other it is whole, the same on every rank."""

    split: Mapping[str, tuple[str, ...]]
    partial: frozenset[str] = frozenset()
    only: frozenset[str] = frozenset()

    @classmethod
    def lying(cls, dims: Iterable[str], layout: Layout) -> Spread:
        """Return the spread of a tensor with dims `dims` in `layout`."""
        return cls({d: layout[d] for d in dims}, frozenset(layout.partial), frozenset(layout.only))

    @property
    def axes(self) -> set[str]:
        """Return the mesh axes that split some dim of the tensor."""
        return {a for axes in self.split.values() for a in axes}

    def along(self, axis: str) -> str:
        """Return what the tensor is along a mesh axis: split, partial, at index 0 alone, or whole."""
        if axis in self.partial:
            return PARTIAL
        if axis in self.only:
            return ALONE
        return SPLIT if axis in self.axes else WHOLE

    def said(self, axis: str) -> str:
        """Return in words what the tensor is along a mesh axis, with the dim that the axis splits."""
        return next((f"split along {d}" for d, axes in self.split.items() if axis in axes), self.along(axis))

    def longest(self, dim: str, sizes: Sizes, extents: Mapping[str, int]) -> int:
        """Return the extent of the longest block of `dim`, of global `sizes`, where mesh axes have these `extents`."""
        size, unit = sizes[dim]
        return -(-size // unit // prod(extents[a] for a in self.split[dim])) * unit

    def elements(self, sizes: Sizes, extents: Mapping[str, int]) -> int:
        """Return the elements of a rank's longest block; arguments as of `longest`."""
        return prod(self.longest(d, sizes, extents) for d in self.split)

    def share(self, dims: Iterable[str], sizes: Sizes, extents: Mapping[str, int]) -> Fraction:
        """Return how much of the longest block along `dims` ranks have on average; arguments as of `longest`."""
        blocks = {d: prod(extents[a] for a in self.split[d]) for d in dims}
        whole = prod(n * self.longest(d, sizes, extents) for d, n in blocks.items())
        return Fraction(prod(sizes[d][0] for d in blocks), whole)


PACKED = "experts", "batch", "length"  # what the dim rows stands for: pairs of an expert and a token


def dims_of(tensor: Spec | Parameter) -> tuple[str, ...]:
    """Return the dims of a tensor whose spread is followed: of rows, experts and batch in their place."""
    return (*PACKED, *tensor.dims[1:]) if tensor.dims[0] == "rows" else tensor.dims


def unordered(spread: Spread, dims: Sequence[str] = PACKED) -> Spread:
    """Return the spread with the axes of `dims` in one order: which rank has which rows, their exchange says."""
    return spread._replace(split={d: tuple(sorted(a)) if d in dims else a for d, a in spread.split.items()})


def after(spread: Spread, step: Step) -> Spread:
    """Return the spread of a tensor after a step of a conversion. Raises Unsound for a step that takes something else
    than there is, such as a gather of a whole tensor, or that some ranks would take without the others."""
    if step.op in LENDING:
        if spread.split.get("experts", ()) != step.axes:
            raise Unsound(f"{step.op} over {plus(step.axes)} takes experts that {plus(spread.axes)} splits")
        _check_only(step, spread.only)
        return spread
    axes, (before, then) = step.axes, BECOMES[step.op]
    split, partial, only, dims = dict(spread.split), set(spread.partial), set(spread.only), list(spread.split)
    if max(step.dim, step.joined) >= max(1, len(dims)):
        raise Unsound(f"{step.op} over {plus(axes)} is of dim {max(step.dim, step.joined)}, of {len(dims)}")
    for axis in axes:
        if spread.along(axis) != before:
            raise Unsound(f"{step.op} takes what is {before}, and it is {spread.said(axis)} over {axis}")
    if before == SPLIT:
        dim = dims[step.joined if step.op in ("all_to_all", "all_to_allv") else step.dim]
        over, rest = ", ".join(split[dim]) or "no axis", tuple(a for a in split[dim] if a not in axes)
        if not axes or not set(axes) <= set(split[dim]):
            raise Unsound(f"{step.op} over {plus(axes)} joins {dim}, which is split over {over}")
        if step.op != "all_to_allv" and split[dim] != (*rest, *axes):
            raise Unsound(f"{step.op} over {plus(axes)} joins {dim}, which is split over {over}, the last one first")
        split[dim] = rest
    partial.difference_update(axes)
    only.difference_update(axes)
    _check_only(step, only)
    if then == SPLIT:
        split[dims[step.dim]] = (*split[dims[step.dim]], *axes)
    elif then == PARTIAL:
        partial.update(axes)
    elif then == ALONE:
        only.update(axes)
    return Spread(split, frozenset(partial), frozenset(only))


def _check_only(step: Step, only: Set[str]) -> None:
    """Raise Unsound for a step that ranks take elsewhere than at index 0 of the axes `only`, where the tensor is."""
    if set(step.only) != only:
        raise Unsound(f"{step.op} over {plus(step.axes)} is taken at index 0 of {plus(step.only)}, not of {plus(only)}")


def difference(found: Spread, wanted: Spread) -> str:
    """Return in words the first difference between the spreads of a tensor that is found and that is wanted, or ""."""
    if found == wanted:
        return ""
    for axis in sorted({*found.axes, *wanted.axes, *found.partial, *wanted.partial, *found.only, *wanted.only}):
        if (here := found.said(axis)) != (there := wanted.said(axis)):
            return f"is {here} over {axis}, and has to be {there}"
    dim = next(d for d, axes in wanted.split.items() if found.split[d] != axes)
    return f"has {dim} split over {', '.join(found.split[dim])}, and has to over {', '.join(wanted.split[dim])}"


def plus(axes: Sequence[str] | Set[str]) -> str:
    """Return the names of mesh axes as text, such as r+c."""
    return "+".join(axes if isinstance(axes, tuple) else sorted(axes)) or "no axis"
