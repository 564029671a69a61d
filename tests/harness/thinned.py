"""Choice of the cases that `make test` runs of a test that tests/thinned.yaml names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def kept(cases: Sequence[Mapping[str, Any]], every: int, counted: bool, needed: Iterable[Mapping]) -> list[int]:
    """Return the indices of the `cases` (arguments by name) that `make test` runs: one of `every` so many, none if 0,
    and the first that has the values of each of `needed`, which a known bug is found by. Of a pairwise cover, which is
    `counted`, the first ones have the most new pairs."""
    if not every:
        return []
    chosen = {*(range(-(-len(cases) // every)) if counted else range(0, len(cases), every))}
    for values in needed:
        chosen.update([i for i, case in enumerate(cases) if values.items() <= values_of(case).items()][:1])
    return sorted(chosen)


def values_of(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a known bug names of a case: the values of its argument `case` if it has such a dict, else all."""
    case = arguments.get("case")
    return case if isinstance(case, dict) else arguments
