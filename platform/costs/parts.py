"""The parts of a training step by name, as one predicts them and as clocks measure them."""

from __future__ import annotations

from collections.abc import Mapping

COMPUTING, BUBBLE, HOST, OPTIMIZER = "computing", "bubble", "host", "optimizer"
DATA, SNAPSHOT, REST = "data", "snapshot", "rest"  # measured, and not predicted
STAGE = "stage"


def waiting_for(axes: str) -> str:
    """Return the name of the part of a step in which a rank waits for collectives along `axes`, joined by "+"."""
    return f"waiting for {axes}"


def measurable(parts: Mapping[str, float]) -> dict[str, float]:
    """Return predicted parts of a step as measured ones: computing includes `host`, the bubble waiting for `stage`."""
    found = dict(parts)
    found[COMPUTING] += found.pop(HOST)
    found[BUBBLE] += found.pop(waiting_for(STAGE), 0.0)
    return found
