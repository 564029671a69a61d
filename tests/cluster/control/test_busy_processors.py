"""The end of a run names workers whose threads wait for processors, however few steps it had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from platform.cluster.control.evaluations import StepForecaster


@pytest.mark.parametrize(("delayed", "threads", "is_named"), [(0.7, 2.0, True), (0.7, 1.0, False), (0.1, 2.0, False)])
def test_the_end_of_a_run_names_threads_that_wait(delayed, threads, is_named):
    said: list[str] = []
    forecast = StepForecaster(SimpleNamespace(monitor=SimpleNamespace(say=said.append)))
    gauges = {"delayed/median": delayed, "threads/median": threads}
    for workers in (gauges, None):  # a step may have no new readings
        forecast.add_step(SimpleNamespace(workers=workers, predicted_seconds=None, parts=None, skipped=False))
    forecast.report_typical_step()
    assert bool(said) is is_named and all("cluster.threads=1" in line for line in said)
