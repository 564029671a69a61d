"""Metrics for Prometheus, by way of Ray: all that W&B gets of a step, as gauges of the cluster that a run is in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PREFIX = "platform_"  # Ray puts ray_ before it
TAG = "run"  # label of every gauge: the name of the run directory, by which runs in one cluster are told apart


class RayGauges:
    """Gauges of one run. Each node of a Ray cluster offers the metrics of its processes to Prometheus, where
    ray[default] is installed; the driver sets them. A gauge lasts as long as the driver."""

    def __init__(self, run: str):
        """Prepare the Prometheus gauges of a run, labelled with `run`, the name of its directory."""
        self._tags, self._gauges = {TAG: run}, dict[str, Any]()

    def step(self, values: Mapping[str, Any]) -> None:
        """Set a run's Prometheus gauges to a step's numbers by name, no histograms; do nothing once Ray is gone."""
        import ray
        from ray.util.metrics import Gauge

        if not ray.is_initialized():
            return
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(gauge_name(name), name, (TAG,))
            self._gauges[name].set(float(value), self._tags)

    def summary(self, values: dict[str, Any]) -> None:
        """Set the Prometheus gauges of numbers of the whole run by name, which W&B gets too."""
        self.step(values)

    def close(self, status: int) -> None:
        """End the Prometheus gauges with the driver: Ray forgets the metrics of an ended process."""


def gauge_name(name: str) -> str:
    """Return the name of the Prometheus gauge for a metric of that name on W&B.

    >>> gauge_name("comm/all_gather/data+t")
    'platform_comm_all_gather_data_t'
    """
    return PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
