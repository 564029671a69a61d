"""Each known bug, put into our code, fails the test named for it, and the static check where a plan shows it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import yaml

from platform.plan.plan import Plan
from platform.plan.plan_check import find_unsoundness
from tests.conftest import THINNED
from tests.harness import oracle, suite
from tests.harness.thinned import kept, values_of
from tests.known_bugs import expert_bugs as experts
from tests.known_bugs.bugs import BUGS, HEADS, MASKS, MODELS, PANELS, SURVIVORS, cases_that_kill
from tests.known_bugs.known_bug import KnownBug
from tests.known_bugs.page import divided, table

# what the oracle says of a tensor, a loss or a norm, or of experts
NUMBERS = (
    r"leave a hole|initial of|gradient of|final of|replicas of|rank \d+: |tokens of experts|mlp\.(load|choice_bias): "
)
NO_ORACLE = (MASKS, PANELS, SURVIVORS, experts.PLAIN, experts.PRECISION, experts.LOGITS, experts.STACKS, experts.MEMORY)


# `make test` puts a drawn third of the bugs into our code, `make test-all` every one; the cases that find them run in
# both.
DRAWN = Random(0).sample(BUGS, -(-len(BUGS) // 3))
EVERY = [bug if bug in DRAWN else pytest.param(bug, marks=pytest.mark.full) for bug in BUGS]


def cases_of(test: Callable[..., None], path: str) -> list[Any]:
    """Return the cases of a test that `make test` runs, as dicts of its arguments: not `full`, and not thinned out."""
    cases: list[Any] = [{}]
    counted = False
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0] if isinstance(mark.args[0], tuple) else mark.args[0].split(",")
            values = [v.values if isinstance(v, type(pytest.param())) else v if len(names) > 1 else (v,)
                      for v in mark.args[1] if not getattr(v, "marks", ())]  # fmt: skip
            cases = [{**case, **dict(zip(names, v, strict=True))} for case in cases for v in values]
        assert mark.name != "full", f"{path} is not run"
        counted |= mark.name == "counted"
    every = yaml.safe_load(THINNED.read_text()).get(f"tests/{path}", {}).get(test.__name__, 1)
    assert every, f"`make test` leaves out {path}::{test.__name__}"
    return [cases[i] for i in kept(cases, every, counted, cases_that_kill(f"{path}::{test.__name__}"))]


def killing(bug: KnownBug, tmp_path, monkeypatch) -> Callable[[], None]:
    """Return the test that kills a bug, in the first case that has its values."""
    path, name = bug.killer.split("::")
    test = getattr(importlib.import_module("tests." + path.removesuffix(".py").replace("/", ".")), name)
    matching = [case for case in cases_of(test, path) if bug.case.items() <= values_of(case).items()]
    assert matching, f"`make test` runs no case of {bug.killer} with {bug.case}"
    fixtures = {"tmp_path": tmp_path, "record_count": lambda *arguments: None, "monkeypatch": monkeypatch}
    wanted = inspect.signature(test).parameters
    return lambda: test(**matching[0], **{n: fixtures[n] for n in fixtures if n in wanted})


@pytest.mark.counted("known bugs, put into our code", len(EVERY) if suite.full else len(DRAWN), len(BUGS))
@pytest.mark.parametrize("bug", EVERY, ids=lambda bug: bug.where or bug.what)
def test_is_killed(bug, monkeypatch, tmp_path):
    test, plans = killing(bug, tmp_path, monkeypatch), list[Plan]()
    make = oracle.make_plan

    def make_mutated_plan(c) -> Plan:
        plan = make(c)
        several = plan.mesh.world_size > 1
        mutated = bug.change(plan) if bug.change and several else plan
        if several and (mutated != plan or bug.mutant):
            plans.append(mutated)
        return mutated

    monkeypatch.setattr(oracle, "make_plan", make_mutated_plan)
    monkeypatch.setattr(oracle, "_serial", {})
    if bug.mutant:
        bug.mutant(monkeypatch)
    with pytest.raises(AssertionError, match=None if bug.killer in NO_ORACLE else NUMBERS):
        test()
    if bug.line:
        lines = [line for plan in plans[:1] for line in find_unsoundness(plan)]
        assert any(bug.line in line for line in lines), lines[:3]


def test_negative_control_nothing_is_broken(tmp_path, monkeypatch):
    killing(KnownBug("nobody", "nothing", "nothing", HEADS), tmp_path, monkeypatch)()


def test_negative_control_a_case_that_is_not_run(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=r"runs no case of .* with \{'model': 'mamba'\}"):
        killing(KnownBug("nobody", "nothing", "nothing", MODELS, {"model": "mamba"}), tmp_path, monkeypatch)


def test_the_page_has_the_table():
    assert divided()[1] == table(), "`python -m tests.known_bugs.page` writes it"


def test_each_bug_is_another():
    assert all(bug.line for bug in BUGS if bug.change), "a change of a plan is visible in the plan"
    assert len(BUGS) >= 25 and len({bug.what for bug in BUGS}) == len(BUGS)
