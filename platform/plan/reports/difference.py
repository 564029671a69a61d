"""Two plans side by side: what of their memory, their bytes, their seconds and their failures differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from platform.plan.reports.describe import human, shown_seconds
from platform.plan.reports.explain import aligned

Lines = Callable[[Mapping[str, Any]], Iterator[tuple[str, Any]]]  # explanation -> name and value of each line
Sides = dict[str, tuple[float, float]]  # name of a line -> its value in one plan and in the other
KINDS = ("parameters", "optimizer", "gradients", "activations", "working", "reserved", "host", "total")
SECONDS = ("a step", "failures")  # parts whose values are seconds


class NoExplanation(ValueError):
    """Data that `python -m platform.plan --json` has not written."""


def plan_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Sides]:
    """Return by part the lines that differ in two explanations, or raise NoExplanation if one of them is none."""
    found = {}
    for name, values in PARTS.items():
        here, there = _lines_of(values, one), _lines_of(values, other)
        both = {key: (here.get(key, 0.0), there.get(key, 0.0)) for key in dict.fromkeys((*here, *there))}
        found[name] = {key: sides for key, sides in both.items() if sides[0] != sides[1]}
    return found


def difference_lines(found: Mapping[str, Sides]) -> list[str]:
    """Format the lines that differ between plans A and B as one table, with their ratio."""
    rows: list[Sequence[str]] = [["", "A", "B", "B / A"]]
    for part, sides in found.items():
        shown = shown_seconds if part in SECONDS else lambda n: f"{human(n)}B"
        rows.append([part if sides else f"{part}: alike", "", "", ""])
        rows += [[f"  {name}", shown(a), shown(b), f"{b / a:.3g}" if a else "-"] for name, (a, b) in sides.items()]
    return aligned(rows)


def _lines_of(values: Lines, found: Mapping[str, Any]) -> dict[str, float]:
    """Return the lines of one part of an explanation. Raises NoExplanation for one that is not of this kind."""
    try:
        return {name: float(value) for name, value in values(found)}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoExplanation(f"lacks {error}" if isinstance(error, KeyError) else f"{error}") from None


def _memory_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of the worker that needs most, by kind."""
    yield from ((kind, found["memory"][kind]) for kind in KINDS)


def _tier_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by tier."""
    yield from ((row["tier"], row["bytes"]) for row in found["tiers"]["rows"])


def _collective_bytes(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the bytes of a step by collective and axes."""
    yield from found["communication"].items()


def _step_seconds(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds of a step by part."""
    yield from found["time"]["parts"].items()
    yield "altogether", found["time"]["seconds"]


def _failure_seconds(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the seconds that a failure costs."""
    yield from ((name, found["failures"][name]) for name in ("formation", "recovery"))


PARTS: Mapping[str, Lines] = {
    "memory of the worker that needs most": _memory_bytes,
    "moved in a step, by tier": _tier_bytes,
    "moved in a step, by collective": _collective_bytes,
    "a step": _step_seconds,
    "failures": _failure_seconds,
}
