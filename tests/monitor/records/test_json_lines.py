import json
import math
import os
import resource
from pathlib import Path

import pytest

from platform.monitor import Journal, MetricsLog, events
from platform.monitor.json_records import JsonLines, _end_of_last_line
from tests.harness.metrics_rows import line, row


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_rows_come_back_exactly_and_every_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    rows = [
        {"step": 1},
        {"step": 2, "loss": 0.1 + 0.2, "grad_norm": math.inf, "lr": -math.inf},
        {"step": 3, "val_loss": 5.0},
    ]
    for changes in rows:
        log.write_row(row(**changes))
    assert MetricsLog.read_rows(path) == [line(**changes) for changes in rows]
    log.write_row(row(4, loss=math.nan))
    assert math.isnan(MetricsLog.read_rows(path)[-1]["loss"])
    for text in path.read_text().splitlines():
        json.loads(text, parse_constant=refuse_constant)


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []
    log = MetricsLog(tmp_path / "metrics.jsonl")
    monkeypatch.setattr(os, "write", lambda file, data: writes.append(bytes(data)) or len(data))
    log.write_row(row(1))
    assert len(writes) == 1 and writes[0].endswith(b"}\n") and writes[0].count(b"\n") == 1


def test_opening_cuts_a_torn_last_line_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = b'{"time": 1.5, "generation": 1, "event": "starts"}\n{"time": 2, "generation": 1, "event": "runs"}\n'
    for torn in (b"", b'{"generation": 2, "ev', b"\0" * 100, b"x" * 200_000):
        path.write_bytes(whole + torn)
        assert len(JsonLines.read_objects(path)) == 2  # a reader does not stumble either
        Journal(path).close()
        assert path.read_bytes() == whole
    path.write_bytes(b'{"gener')
    Journal(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_the_last_line_is_found_whatever_the_block(tmp_path: Path, block: int) -> None:
    for text in (b"", b"\n", b"torn", b"a\nbc\n", b"a\nbc\ntorn", b"\n\n\n"):
        path = tmp_path / "file"
        path.write_bytes(text)
        with path.open("rb") as file:
            assert _end_of_last_line(file.fileno(), block) == text.rfind(b"\n") + 1


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write_row(row(1))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        log.write_row(row(2))
        assert log.unwritten_records == [line(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    log.write_row(row(3))
    assert [r["step"] for r in MetricsLog.read_rows(path)] == [1, 2, 3]


def test_damage_in_the_middle_is_not_read_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError):
        JsonLines.read_objects(path)


def test_after_a_rollback_the_last_row_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step, generation in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]:
        log.write_row(row(step, generation=generation))
    assert len(JsonLines.read_objects(path)) == 6  # the file keeps what was
    assert [(r["step"], r["generation"]) for r in MetricsLog.read_rows(path)] == [(1, 1), (2, 2), (3, 2)]


def test_generations_go_on_when_a_journal_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write(events.Hiring(count=1))
    assert [journal.begin_generation(), journal.begin_generation()] == [1, 2]
    journal.write(events.Formed(workers=[{"rank": 0, "pid": 7}]))
    assert journal.generation == 2
    journal.close()

    journal = Journal(path)
    assert journal.generation == 2
    assert journal.begin_generation() == 3
    journal.write(events.FirstStep(step=4))
    formed = JsonLines.read_objects(path)[1]
    assert (formed["event"], formed["generation"], formed["workers"]) == ("formed", 2, [{"rank": 0, "pid": 7}])
    assert [e["generation"] for e in JsonLines.read_objects(path)] == [0, 2, 3]
    times = [e["time"] for e in JsonLines.read_objects(path)]
    assert times == sorted(times) and all(isinstance(t, float) for t in times)
