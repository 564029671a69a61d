"""Refit of a hardware to the measured parts of a run's steps."""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt

from platform.costs.fit import fit
from platform.costs.machine import Hardware
from platform.costs.parts import measurable
from platform.costs.price import price_of
from platform.costs.step_work import StepWork

LEAST = 0.01  # of a step: parts and differences below it are noise


def times_longer(work: StepWork, hardware: Hardware, measured: Mapping[str, float]) -> dict[str, float]:
    """Return the factors by which a `device`, links inside a `node` and links of the `network` take longer than
    described, with which the predicted parts of a step are nearest to `measured` ones, each counted by its share. Parts
    of one plan settle no more numbers; a factor on which none of them depends stays 1."""
    least = LEAST * sum(measured.values())

    def errors(times: Mapping[str, float]) -> list[float]:
        """Return the logarithms of predicted over measured parts, weighted."""
        predicted = measurable(price_of(work, hardware.taking(times)).parts)
        pairs = [(predicted.get(name, 0.0), seconds) for name, seconds in measured.items()]
        return [sqrt(after * LEAST / least) * log((before + least) / (after + least)) for before, after in pairs]

    return fit(errors, dict.fromkeys(("device", "node", "network"), 1.0))
