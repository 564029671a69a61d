"""Each step, event and alert reaches a service once, in order, whatever dies in between."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from platform.monitor.sinks.alerts import MonitorSink, SinkRun
from platform.monitor.sinks.follower import MOST_HELD, RunFollower
from tests.monitor.sinks.a_run import ONCE, ARun, rewound_twice, rounded


class Seen(MonitorSink):
    """A service that keeps what it is sent in `got`, as a store outside would, over all its processes."""

    got: list[Any] = []
    broken = False

    def __init__(self, run: SinkRun):
        self.of = run

    def send_event(self, event):
        self.got.append(event.word)

    def send_alert(self, alert):
        self.got.append((alert.kind, alert.title))

    def send_steps(self, rows):
        if self.broken:
            raise OSError("no network")
        self.got += [(int(row["step"]), row["train/loss"]) for row in rows]

    def close(self, status):
        self.got.append(f"closed with {status}")


class Final(Seen):
    replaces = False


@pytest.fixture(params=[Seen, Final], ids=["replaces", "cannot replace"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Seen]:
    use(request.param, monkeypatch)
    return request.param


def use(kind: type[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    from platform.monitor.sinks import sink_process

    monkeypatch.setattr(Seen, "got", [])
    monkeypatch.setitem(sink_process.SINKS, "seen", sink_process.SinkKind("Seen", "", lambda m: True, kind))


def steps() -> list[tuple[int, float]]:
    return rounded([got for got in Seen.got if isinstance(got, tuple) and isinstance(got[0], int)])


def test_a_step_that_is_trained_again_replaces(tmp_path: Path, kind: type[Seen]) -> None:
    rewound_twice(ARun(tmp_path / "run"), "seen")
    last = dict(steps()) if kind is Seen else steps()
    assert last == (dict(ONCE) if kind is Seen else ONCE)
    assert Seen.got[-1] == "closed with 0"
    assert Seen.got.count("checkpoint") == 2 and Seen.got.count(("failure", "Worker lost")) == 1


def test_a_new_process_sends_what_the_last_one_had_not_noted(tmp_path: Path, kind: type[Seen]) -> None:
    run = ARun(tmp_path / "run")
    run.train(*range(1, 6))
    run.happen("slow")
    run.saved(5)
    run.followed("seen").catch_up()
    run.train(6, 7)
    run.saved(7)
    run.followed("seen").catch_up()
    run.followed("seen").catch_up()
    assert [step for step, _ in steps()] == [1, 2, 3, 4, 5, 6, 7]
    assert [got for got in Seen.got if got not in steps()] == [
        "slow",
        ("straggler", "Slow worker"),
        *["checkpoint"] * 2,
    ]


def test_what_a_failing_service_did_not_get_it_gets_later(tmp_path: Path, kind: type[Seen], monkeypatch) -> None:
    run = ARun(tmp_path / "run")
    run.train(1, 2)
    run.saved(2)
    monkeypatch.setattr(kind, "broken", True)
    with pytest.raises(OSError):
        run.followed("seen").catch_up()
    monkeypatch.setattr(kind, "broken", False)
    run.followed("seen").catch_up()
    assert [step for step, _ in steps()] == [1, 2]


def test_a_service_that_cannot_replace_gets_a_step_once_it_is_saved(tmp_path: Path, monkeypatch) -> None:
    use(Final, monkeypatch)
    run = ARun(tmp_path / "run")
    follower = run.followed("seen")

    def sent() -> int:
        follower.catch_up()
        return len(steps())

    run.train(1, 2, 3)
    assert sent() == 0
    run.saved(2)
    assert sent() == 2
    run.happen("drained", step=3, saved=2)  # it will go on: step 3 is trained again
    assert sent() == 2
    run.happen("starting")
    run.train(3, attempt=2)
    assert sent() == 2
    run.happen("gave_up", step=3, saved=2)
    assert sent() == 3 and steps()[-1] == (3, 7.02)
    run.happen("starting")  # it goes on after all; of step 3 the first is kept
    run.train(3, 4, attempt=3)
    run.saved(4)
    assert sent() == 4 and steps()[-2:] == [(3, 7.02), (4, 7.03)]


def test_without_checkpoints_it_is_some_steps_late(tmp_path: Path, monkeypatch) -> None:
    use(Final, monkeypatch)
    run = ARun(tmp_path / "run")
    run.train(*range(1, MOST_HELD + 11))
    run.followed("seen").catch_up()
    assert [step for step, _ in steps()] == list(range(1, 11))


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path, kind: type[Seen]) -> None:
    run = ARun(tmp_path / "run")
    run.saved(9)
    run.train(1)
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'[1]\n{"step": "x"}\n\xff\xfe\n{"step": 2}\n' + b"[" * 9999 + b'\n{"st')
    with open(run.path / "journal.jsonl", "ab") as file:
        file.write(b'{"event": "of_a_later_version", "time": 1.0, "generation": 1}\n{"event": 3}\n{')
    follower: RunFollower = run.followed("seen")
    monkey = Seen.got
    follower.sink.send_steps = lambda rows: monkey.extend(row["step"] for row in rows)  # type: ignore[method-assign]
    follower.catch_up()
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'ep": 3}\n')
    follower.catch_up()
    assert [got for got in Seen.got if isinstance(got, int)] == [1, 2, 3]


def test_an_old_alert_is_sent_no_more(tmp_path: Path, kind: type[Seen]) -> None:
    run = ARun(tmp_path / "run")
    run.happen("failure", time=time.time() - 86400)
    run.followed("seen").catch_up()
    assert Seen.got == ["failure"]


def test_places_that_cannot_be_read_begin_anew(tmp_path: Path, kind: type[Seen]) -> None:
    run = ARun(tmp_path / "run")
    run.train(1)
    run.saved(1)
    for text in ("", "[]", json.dumps({"metrics.jsonl": "x"})):
        (run.path / "sinks" / "seen.json").write_text(text)
        Seen.got.clear()
        run.followed("seen").catch_up()
        assert [step for step, _ in steps()] == [1]


@pytest.mark.parametrize("event, status", [("done", 0), ("drained", 75), ("gave_up", 1), ("starting", None)])
def test_the_status_is_that_of_the_last_end(tmp_path: Path, kind: type[Seen], event: str, status: int | None) -> None:
    run = ARun(tmp_path / "run")
    run.happen("done")
    run.happen("starting")
    run.happen(event)
    follower = run.followed("seen")
    follower.catch_up()
    assert follower.status == status


def test_steps_after_the_newest_checkpoint_are_sent_on_demand(tmp_path: Path, monkeypatch) -> None:
    """Of a run whose driver was killed: it may go on, unless its user says otherwise."""
    use(Final, monkeypatch)
    run = ARun(tmp_path / "run")
    run.train(1, 2, 3)
    run.saved(2)
    follower = run.followed("seen")
    follower.catch_up()
    assert [step for step, _ in steps()] == [1, 2] and follower.num_held_steps == 1
    again = run.followed("seen")
    again.finalize_all_steps()
    again.close(None)
    assert [step for step, _ in steps()] == [1, 2, 3] and not again.num_held_steps
