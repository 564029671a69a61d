"""Columns of metrics say what MetricsLog's own reading says, of files that are written, torn or anybody's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from math import inf, isnan
from pathlib import Path

import pytest

from platform.monitor.metrics import MetricColumns, MetricsLog, valid_rows


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_rows_are_those_that_the_log_reads(path: Path) -> None:
    """After two rollbacks, with maps, lists, a number that a row lacks, and text where a number is not finite."""
    steps = [1, 2, 3, 2, 3, 4, 1, 2, 3]
    rows = [{"step": s, "loss": i / 4, "seconds": {"data": i}, "expert_load": [i, s]} for i, s in enumerate(steps)]
    rows[7]["loss"] = "NaN"
    rows[8]["val_loss"] = "Infinity"
    path.write_text(lines(*rows))
    columns, wanted = MetricColumns(path), MetricsLog.read_rows(path)
    columns.read_rows_and_count_kept()
    assert list(columns.steps) == [row["step"] for row in wanted] == [1, 2, 3]
    assert columns.column_names == ["step", "train/loss", "time/data", "experts/load/0", "experts/load/1", "val/loss"]
    assert columns.column("train/loss")[0] == 1.5 and isnan(columns.column("train/loss")[1])
    assert list(columns.column("time/data")) == [row["seconds"]["data"] for row in wanted]
    assert list(columns.column("experts/load/1")) == [row["expert_load"][1] for row in wanted]
    assert isnan(columns.column("val/loss")[0]) and columns.column("val/loss")[2] == inf
    assert all(map(isnan, columns.column("perf/mfu")))


def test_a_growing_file_is_read_on(path: Path) -> None:
    columns = MetricColumns(path)
    assert columns.read_rows_and_count_kept() == 0 and not columns.steps  # not there yet
    path.write_text(lines({"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}) + '{"step": 3, "lo')
    assert columns.read_rows_and_count_kept() == 0 and list(columns.steps) == [1, 2]
    path.write_text(lines({"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}))  # the next driver cuts the torn line
    assert columns.read_rows_and_count_kept() == 2
    with path.open("a") as file:
        file.write(lines({"step": 2, "loss": 5.0}, {"step": 3, "loss": 6.0}))
    assert columns.read_rows_and_count_kept() == 1 and list(columns.column("train/loss")) == [1.0, 5.0, 6.0]
    assert columns.read_rows_and_count_kept() == 3 and columns.unread == 0
    path.write_text(lines({"step": 1, "loss": 9.0}))  # another file
    assert columns.read_rows_and_count_kept() == 0 and list(columns.column("train/loss")) == [9.0]


@pytest.mark.parametrize(
    "line",
    ["", "[1]", "null", "{", '{"step": 1.5}', '{"step": -1}', '{"step": true}', '{"loss": 1}', "\x00", '{"step": 1} x']
    + ["[" * 100_000, '{"step": 1' + "0" * 5000 + "}"],
    ids=repr,
)
def test_a_line_that_is_no_row_is_passed_over(path: Path, line: str) -> None:
    path.write_text(lines({"step": 1, "loss": 1.0}) + line + "\n" + lines({"step": 2, "loss": 2.0}))
    columns = MetricColumns(path)
    columns.read_rows_and_count_kept()
    assert list(columns.column("train/loss")) == [1.0, 2.0] and columns.unread == 1


def test_foreign_values_are_no_numbers(path: Path) -> None:
    row = {"step": 1, "loss": "<b>", "lr": None, "tokens": 10**400, "seconds": [{}, "x"], "experts": {"load/0": 5}}
    path.write_text(lines(row | {"expert_load": [1, 2], "unknown": 3}))
    columns = MetricColumns(path)
    columns.read_rows_and_count_kept()
    assert columns.column_names == ["step", "tokens", "experts/load/0", "experts/load/1"]
    assert columns.column("tokens")[0] == inf and list(columns.column("experts/load/0")) == [5.0]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_any_shapes_are_taken_as_one_by_one(path: Path, seed: int) -> None:
    """The columns have rows of one shape together; each row read by a file of its own is the oracle."""
    chance, step, rows = random.Random(seed), 0, []
    parts = [1.5, 2, True, None, "NaN", "-Infinity", "a text", 10**400, {"a": 1}, [3]]
    kinds: list[Callable[[], object]] = [
        lambda: chance.choice(parts),
        lambda: {name: chance.choice(parts) for name in chance.sample("abc", 2)},
        lambda: [chance.choice(parts) for _ in range(chance.randrange(3))],
    ]
    keys = ["loss", "seconds", "expert_load", "comm_bytes", "unknown"]
    while len(rows) < 60:
        step = step + 1 if chance.random() < 0.9 else chance.randrange(max(0, step - 5), step + 1)
        if not rows or chance.random() < 0.5:
            drawn = {key: chance.choice(kinds) for key in chance.sample(keys, 3)}
        rows.append({"step": step} | {key: draw() for key, draw in drawn.items()})
    path.write_text(lines(*rows))
    columns = MetricColumns(path)
    columns.read_rows_and_count_kept()
    kept = valid_rows(rows)
    assert list(columns.steps) == [row["step"] for row in kept]
    seen: set[str] = set()
    for place, row in enumerate(kept):
        (alone := path.with_name("one.jsonl")).write_text(lines(row))
        one = MetricColumns(alone)
        one.read_rows_and_count_kept()
        seen |= set(one.column_names)
        for name in columns.column_names:
            assert repr(columns.column(name)[place]) == repr(one.column(name)[0])
    assert seen <= set(columns.column_names) and len(seen) > 5
