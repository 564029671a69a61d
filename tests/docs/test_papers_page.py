"""Every predicted number of docs/papers.md is what the planner predicts, to the digit; so are its pictures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs import papers
from platform.launch import compose_config
from platform.predict.measured_runs import read_measured_runs
from tests.conftest import ROOT

PAGE = papers.PAGE.read_text()
LINES = set(PAGE.splitlines())
RATIOS = {"jain_figures": papers.read_cells("jain_figures"), "megatron_figures": papers.read_cells("megatron_figures")}
CLAIMS = [(name, i) for name, rows in RATIOS.items() for i in range(len(rows))]
# tables whose rows are predicted by the constants of files, each row by itself
ALONE = {
    "bian_tables_1_and_2": papers.render_sequences,
    "megatron_table_2": papers.render_speeds,
    "megatron_table_2_zero3": papers.render_speeds,
}
ROWS = [(name, i) for name in ALONE for i in range(len(papers.read_cells(name)))]


def last_line(table: str) -> str:
    return table.splitlines()[-1]


@pytest.mark.parametrize(("name", "number"), CLAIMS)
def test_a_ratio_is_as_predicted(name: str, number: int):
    claim = papers.predict_claim(RATIOS[name][number])
    line = last_line(papers.render_claims([claim]))
    assert line in LINES, "`python -m docs.papers` writes the page"
    other = claim._replace(theirs=claim.theirs + 0.01)  # negative control: another digit
    assert last_line(papers.render_claims([other])) not in LINES


@pytest.mark.parametrize(("name", "number"), ROWS)
def test_a_row_is_as_predicted(name: str, number: int, tmp_path):
    """Of a table with that row alone."""
    lines = (papers.TABLES / f"{name}.csv").read_text().splitlines()
    head, *rows = [line for line in lines if line and not line.startswith("#")]
    (tmp_path / "row.csv").write_text(f"{head}\n{rows[number]}\n")
    [run] = read_measured_runs(str(tmp_path / "row.csv"), compose_config)
    row = papers.Row(run, run.predict_price({}).seconds, False)
    assert last_line(ALONE[name]([row])) in LINES, "`python -m docs.papers` writes the page"
    other = row._replace(predicted=1.05 * row.predicted)
    assert last_line(ALONE[name]([other])) not in LINES


def test_mesh_tensorflows_formulas_are_the_plans():
    """All four columns of table 1."""
    assert papers.render_costs() in PAGE
    for scheme in papers.LAYOUTS:
        assert papers.print_costs(scheme) == papers.plan_costs(scheme) and all(papers.plan_costs(scheme)[::3])


def test_a_cube_computes_more_for_each_element():
    """Appendix B of Shazeer et al.: 0.17u beside 0.12u."""
    table = papers.render_ratios()
    assert table in PAGE
    published, planned = zip(*(line.split(" | ")[3:5] for line in table.splitlines()[2:]), strict=True)
    assert [p.rstrip(" |") for p in planned] == list(published)


def test_the_pictures_are_well_formed_and_shown():
    for name, _, says in papers.PICTURES.values():
        assert f"![{says}.]({name})" in PAGE
        words = [e.text for e in ElementTree.parse(papers.DOCS / name).iter() if e.tag.endswith("text")]
        assert any("published" in word for word in words)


@pytest.mark.full
def test_the_page_and_its_pictures_are_what_is_written():
    assert papers.render_page() == PAGE, "`python -m docs.papers` writes it"
    for name, draw, _ in papers.PICTURES.values():
        assert draw() == (papers.DOCS / name).read_text()


def test_every_table_can_be_printed(capsys):
    assert papers.main(["shazeer_table_1"]) == 0
    assert capsys.readouterr().out in PAGE
    assert papers.main(["shazeer_table_9"]) == 2 and "legal: bian_tables_1_and_2" in capsys.readouterr().err
    commands = re.findall(r"`python -m docs\.papers ([a-z]\w+)`", PAGE)
    assert commands == [*papers.NAMES]


def test_readers_are_led_to_the_page():
    assert "](docs/papers.md)" in (ROOT / "README.md").read_text()[:2000]
