"""What of a run's journal is an alert, and that each is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from platform.monitor.sinks.alerts import GRACE_SECONDS, AlertFinder
from tests.harness.happenings import happening
from tests.monitor.sinks.a_run import ARun


def list_alerts(*events, goodput_below: float = 0.0) -> list[tuple[str, str, str]]:
    alerts, happened = AlertFinder(goodput_below), [happening(time, word, **fields) for time, word, fields in events]
    return [(a.kind, a.level, a.text) for event in happened for a in alerts.find_alerts(event)]


@pytest.mark.parametrize(
    "word, kind, level, text",
    [
        ("spike", "spike", "WARN", "step 4 has a loss of 9.75: skip"),
        ("failure", "failure", "ERROR", "rank 3 on n died in step(9): by SIGKILL"),
        ("slow", "straggler", "WARN", "rank 1 on n is slow: 2.5 times its stage's median"),
        ("gave_up", "end", "ERROR", ""),
    ],
)
def test_an_event_is_an_alert(word: str, kind: str, level: str, text: str) -> None:
    [alert] = list_alerts((5.0, word, {"loss": 9.75, "grad_norm": 1.0} if word == "spike" else {}))
    assert alert[:2] == (kind, level) and text in alert[2]


def test_a_recovery_counts_from_the_first_failure_and_is_one() -> None:
    failures = (1.0, "failure", {}), (2.0, "failure", {})
    told = list_alerts((0.0, "starting", {}), *failures, (4.5, "first_step", {}), (9.0, "first_step", {}))
    assert [kind for kind, *_ in told] == ["failure", "failure", "recovery"]
    assert told[-1][2] == "step 1 is done, 3.5 s after the failure"


def test_a_driver_that_starts_anew_has_recovered_of_nothing() -> None:
    anew = (2.0, "starting", {}), (3.0, "first_step", {})
    assert [k for k, *_ in list_alerts((0.0, "starting", {}), (1.0, "failure", {}), *anew)] == ["failure"]


def test_goodput_is_told_each_time_that_it_falls_below_its_bound() -> None:
    hour = GRACE_SECONDS

    def saved(time: float, useful: float):
        return time, "checkpoint", {"useful_seconds": useful}

    start = (0.0, "starting", {})
    early = saved(hour / 2, 1.0)
    assert list_alerts(start, early, goodput_below=0.5) == []
    told = list_alerts(start, early, saved(hour, 1.0), saved(hour + 1, 1.0), goodput_below=0.5)
    assert told == [("goodput", "WARN", "0.1% of 1.0 h were useful, less than 50.0%")]
    again = [saved(2 * hour, 2 * hour), saved(9 * hour, 0.0)]
    assert len(list_alerts(start, early, saved(hour, 1.0), *again, goodput_below=0.5)) == 2
    assert list_alerts(start, early, saved(hour, 1.0)) == []


def test_the_command_gets_each_alert_as_json(tmp_path: Path) -> None:
    run = ARun(tmp_path / "run", alert_command="cat >> got; exit 3")
    follower = run.followed("alert_command")
    run.happen("starting")
    run.happen("failure")
    run.happen("first_step", step=9)
    follower.close(0)
    told = [json.loads(line) for line in (run.path / "got").read_text().splitlines()]
    assert [(alert["kind"], alert["level"], alert["step"]) for alert in told] == [
        ("failure", "ERROR", 9),
        ("recovery", "INFO", 9),
    ]
    assert told[0]["run"] == str(run.path) and told[0]["text"].startswith("rank 3 on n died")
