"""Workers die, stop, hang and raise at random; the run gives what it would have given."""

from __future__ import annotations

import random

import chaos
import pytest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def survives(tmp_path, record_property):
    """Runs the configuration while its workers are struck, and compares."""

    def survive(config, faults=(), moments=(), signals=(), seed=0):
        config.elastic.faults = list(faults)
        expected = chaos.undisturbed(config, tmp_path / "alone")
        outside = chaos.Outside(config, random.Random(seed), moments, signals)
        with chaos.nothing_left():
            with outside:
                status = chaos.drive(config)
        events = chaos.journal(config)
        assert status == 0, events[-3:]
        assert chaos.differences(chaos.rows(config), expected) == []
        return events

    return survive


def of(events, name):
    return [event for event in events if event["event"] == name]


def test_everything_at_once(tmp_path, survives):
    config = chaos.configured(tmp_path / "run", 24, tensor="1d", axes={"t": 2}, data=2, zero=1,
                              pipeline="interleaved", stages=2, chunks=2)  # fmt: skip
    config.elastic.spares = 1
    faults = chaos.random_faults(random.Random(0), 24, 7, 8)
    print(faults)
    events = survives(config, faults)
    for e in events:
        print({k: v for k, v in e.items() if k not in ("workers", "cause")})
    assert of(events, "goodput")[-1]["steps_lost"] == 0
