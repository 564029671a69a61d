"""docs/predictions.md: every published row is on it, predicted as now; all of it is made again in the full run."""

from __future__ import annotations

from random import Random

import pytest

from docs import predictions
from docs.predictions import FOLDER, ROOT, TABLES
from platform.predict.plan_report import PUBLISHED

PAGE = (ROOT / "docs" / "predictions.md").read_text()
DRAWN = 5  # tables, of each a row


def rows_of(table: str) -> tuple[list[str], list[str]]:
    """The head of a table's file, and its rows."""
    lines = [line for line in (FOLDER / f"{table}.csv").read_text().splitlines() if line.strip()]
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return lines[: first + 1], lines[first + 1 :]


def test_every_table_and_every_row_is_on_the_page():
    others = {"jain_figures", "megatron_figures", "megatron_training", "ours_gpu"}  # of docs/papers.md; our own steps
    assert {*TABLES, *others} == {path.stem for path in FOLDER.glob("*.csv")} and others.isdisjoint(TABLES)
    for table, (title, _) in TABLES.items():
        _, section = PAGE.split(f"\n## {title}\n")
        shown = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
        names = [row.split(",")[0] for row in rows_of(table)[1]]
        assert [line.split(" | ")[0].removeprefix("| ") for line in shown] == names
        assert predictions.render_source(table) in section


def test_drawn_rows_are_predicted_as_the_page_has_them(tmp_path):
    rng = Random(11)
    for table in rng.sample(sorted(TABLES), DRAWN):
        head, rows = rows_of(table)
        (path := tmp_path / f"{table}.csv").write_text("\n".join([*head, rng.choice(rows), ""]))
        [(family, run)] = predictions.read_table(table, str(path))
        predicted = predictions.PublishedRun(table, family, run, run.predict_price({}).seconds, None)
        assert predictions.format_row(predicted).removesuffix("- |") in PAGE


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_the_page_and_the_error_bars_are_what_the_tables_give():
    rows = predictions.predict_published_runs()
    assert predictions.render_page(rows) == PAGE, "`python -m docs.predictions > docs/predictions.md` writes it"
    assert predictions.render_error_bars(rows) == PUBLISHED.read_text(), "`python -m docs.predictions errors` prints it"
