"""Every number of docs/schemes.md is what its command prints."""

from __future__ import annotations

import re
import shlex

import pytest

from platform.boundary.refusals import ConfigError
from platform.launch import compose_config
from platform.model import build_model
from platform.predict.make_plan import make_plan
from platform.predict.plan_report import explain_plan
from platform.predict.step_price import read_hardware, step_price
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "schemes.md").read_text()
BASE = shlex.split(re.search(r"^\$ python -m platform\.plan (.*) --json$", PAGE, re.M)[1])
CELL = r"(?:[^|\\]|\\\|)+"
ROWS = re.findall(rf"^\| `((?:tensor|branch)=[^`]+)` \|({CELL})\|({CELL})\|({CELL})\|({CELL})\|", PAGE, re.M)


@pytest.mark.parametrize(("arguments", "asks", "weights", "saved", "moved"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_what_its_command_prints(arguments, asks, weights, saved, moved):
    c = compose_config([*BASE, *shlex.split(arguments)])
    if "refused" in weights:
        with pytest.raises(ConfigError, match="axis all would split both batch and heads"):
            make_plan(c)
        return
    plan = make_plan(c)
    explained = explain_plan(plan, build_model(c.model), moments=2, tiers={"node": 8})
    assert plan.mesh.world_size == (1 if arguments == "tensor=serial" else 8)
    numbers = (
        sum(explained["bytes_per_worker"].values()),
        4 * sum(explained["saved_elements_per_worker"].values()),
        explained["bytes_per_layer"],
    )
    assert [cell.strip() for cell in (weights, saved, moved)] == [f"{n / 1e6:,.1f}" for n in numbers]


@pytest.mark.parametrize("group", ["tensor", "branch"])
def test_every_scheme_has_a_row(group):
    shown = {word for arguments, *_ in ROWS for word in re.findall(rf"\b{group}=(\w+)", arguments)}
    assert shown | {"none"} == {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")} - {"auto"} | {"none"}


def test_the_readme_leads_here():
    assert "](docs/schemes.md)" in (ROOT / "README.md").read_text()
    assert len(ROWS) == PAGE.count("\n| `")


def test_dsp_pays_where_the_page_says_so():
    """The first of its two commands prints a faster step for D&SP, the second a slower one."""
    ratios = []
    for common, *plans in re.findall(r'^\$ python -m platform\.plan (.*) --diff "(.*)" "(.*)"$', PAGE, re.M):
        arguments = common.replace("--hardware v100 ", "").split()
        configs = [compose_config([*arguments, *plan.split()]) for plan in plans]
        data, dsp = (step_price(c, make_plan(c), read_hardware("v100")).seconds for c in configs)
        ratios.append(dsp / data)
    assert len(ratios) == 2 and ratios[0] < 0.9 and ratios[1] > 1.1
