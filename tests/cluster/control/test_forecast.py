"""A run whose steps leave their prediction re-forms by a better plan, and stays on the curve of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from platform.cluster import driver
from platform.cluster.control import evaluations
from platform.monitor import JsonLines, MetricsLog
from platform.predict.make_plan import make_plan
from tests.harness.chaos import differences
from tests.harness.oracle import configure

pytestmark = pytest.mark.usefixtures("warm_server")

SLOW_LINKS = {"device": 1.0, "node": 300.0, "network": 1.0}


def launched(folder: Path, steps: int = 14, seed: int = 0, **keys):
    """Run 4 layers for some steps; return its rows of metrics and its events of replanning."""
    c = configure(layers=2, d_model=16, vocab=300, microbatch=2, global_batch=4, **keys)
    c.run.dir, c.data.kind, c.train.steps = str(folder), "synthetic", steps
    c.seed = seed
    c.cluster.kind, c.elastic.replan = ("processes" if keys else "inline"), bool(keys)
    assert driver.drive_run(c, make_plan(c), experiment="quick") == 0
    events = JsonLines.read_objects(folder / "journal.jsonl")
    return MetricsLog.read_rows(folder / "metrics.jsonl"), [e for e in events if e["event"] == "replanning"], events


@pytest.fixture
def links(monkeypatch):
    """What the fit finds, of few steps."""

    def set_links(times):
        monkeypatch.setattr(evaluations, "fit_slowdowns", lambda work, hardware, measured: times)
        monkeypatch.setattr(evaluations, "WINDOW", 5)

    return set_links


def test_a_better_plan_is_taken_and_the_curve_stays(tmp_path, links):
    links(SLOW_LINKS)
    rows, replannings, events = launched(tmp_path / "two", tensor="1d", axes={"t": 2})
    expected, *_ = launched(tmp_path / "one")
    assert differences(rows, expected) == []
    [event] = replannings
    assert event["reforms"] and event["times"] == SLOW_LINKS and event["chosen"] == "2 workers: data 1 -> 2, t 2 -> 1"
    assert event["gain"] == pytest.approx((event["now"] - event["then"]) * (14 - event["step"]))
    assert event["gain"] > event["cost"] > 0
    meshes = [e["mesh"] for e in events if e["event"] == "forming"]
    assert [(m.get("t", 1), m["data"]) for m in meshes] == [(2, 1), (1, 2)]
    assert rows[event["step"] - 1]["generation"] == 1 and rows[event["step"]]["generation"] == 2
    assert len(rows) == 14, "no step was lost"
    assert [e["hardware"] for e in events if e["event"] == "predicted_step"] == ["cpu", "cpu, fitted"]
    wrong, *_ = launched(tmp_path / "other", steps=3, seed=1)
    assert differences(wrong, expected[:3]), "another seed is another curve"


def test_a_plan_that_does_not_pay_is_left(tmp_path, links):
    links({"device": 3.0, "node": 1e-3, "network": 1.0})
    rows, replannings, events = launched(tmp_path / "two", steps=9, tensor="1d", axes={"t": 2})
    assert [event["reforms"] for event in replannings] == [False]
    assert {row["generation"] for row in rows} == {1} and len(rows) == 9
