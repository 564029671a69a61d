"""Reading of data: which sequences of a microbatch each rank reads, and which of their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from platform.plan.core.plan import Plan
from platform.plan.language.layout import Layout, block

Stretch = tuple[int, int]  # of a microbatch's sequences: the number of the first one, and that behind the last one


def stretches(plan: Plan, coordinates: Mapping[str, int]) -> list[Stretch]:
    """Return the ranges [first, end) of a microbatch's sequences that the rank at `coordinates` has to read from the
    data; `plan`: that of its stage."""
    layouts = dict.fromkeys(layout for readers in plan.readers.values() for layout in readers.values())
    here = (layout for layout in layouts if layout.present(coordinates))
    return list(dict.fromkeys(stretch(plan, layout, coordinates) for layout in here))


def stretch(plan: Plan, layout: Layout, coordinates: Mapping[str, int]) -> Stretch:
    """Return the range [first, end) of a microbatch's sequences in a rank's block of data in this layout."""
    ((start, n),) = block(("batch",), plan.sizes, layout, plan.mesh, coordinates)
    return start, start + n


def lengths(plan: Plan, layout: Layout, length: int, coordinates: Mapping[str, int]) -> Sequence[tuple[int, int]]:
    """Return the tokens of a sequence of `length` tokens in a rank's block of data in this layout, in the rank's order:
    (first, number) of each run of consecutive ones."""
    return plan.planner.stretches("length", length, layout, coordinates)
