"""A further key that a search may choose: its declaration says that it may be left open, one row what may be chosen,
and the key is used as before. With these alone it is left to the search, proposed, priced, planned and run."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.layout_rules import OPEN_KEYS
from platform.launch import compose_config
from platform.predict import contenders, remedies, search
from platform.predict.contender_grid import ContenderGrid
from platform.predict.contenders import CHOOSABLE, MODE, SKETCH, SearchSpace, choosable
from platform.predict.make_plan import make_plan
from platform.predict.search import choose_plan, search_plans
from platform.predict.step_price import read_hardware, step_price
from tests.harness.oracle import configure, prove

ROOMY = 1e12  # bytes
SMALL = (
    "+experiment=gpt_quick", "model.layers=2", "model.d_model=64", "model.length=32", "model.vocab=256",
    "data=synthetic", "tensor=1d_sp", "tensor.axes.t=2", "parallel.data=2", "train.microbatch=4",
)  # fmt: skip
# part of a contender -> its row: it may gather operands again, by another sketch, or leave all collectives exposed,
# which the closed form does not know and the price does
GATHERED = "keep", "tensor.gathered", SKETCH, lambda *_: ["keep", "again"]
EXPOSED = True, "parallel.overlap", MODE, lambda *_: [True, False]
ROWS: dict[str, tuple[Any, ...]] = {"gathered": GATHERED, "overlap": EXPOSED}


@pytest.fixture(autouse=True)
def forget_shipped_row():
    """As if tensor.gathered were no key that a search may choose yet."""
    shipped = dict(CHOOSABLE)
    del CHOOSABLE["gathered"]
    place = OPEN_KEYS.index("tensor.gathered")
    del OPEN_KEYS[place]
    yield
    OPEN_KEYS.insert(place, "tensor.gathered")
    CHOOSABLE.clear()
    CHOOSABLE.update(shipped)


@pytest.fixture
def add_key(monkeypatch):
    """A function that declares a key to be one that may be left open, and unless it is `forgotten`, adds its row."""
    declared = []

    def add(part: str, forgotten: bool = False) -> None:
        declared.append(ROWS[part][1])
        OPEN_KEYS.append(ROWS[part][1])
        if not forgotten:
            row = (part, type(ROWS[part][0]), choosable(*ROWS[part]))
            wider = make_dataclass("Wider", [row], bases=(contenders.Contender,), frozen=True, order=True)
            monkeypatch.setitem(CHOOSABLE, part, wider.__dataclass_fields__[part].metadata["row"])
            for module in (contenders, search):
                monkeypatch.setattr(module, "Contender", wider)

    yield add
    for key in declared:
        OPEN_KEYS.remove(key)


def searched(*arguments: str, memory: float = ROOMY) -> search.SearchOutcome:
    return search_plans(compose_config([*SMALL, *arguments]), 4, memory, read_hardware("cpu"))


def test_each_value_is_proposed_and_priced_exactly(add_key):
    """The finalists differ in nothing else, and each price is that of the plan of its configuration."""
    add_key("gathered")
    tried = searched("tensor.gathered=auto").tried
    assert [f.choice.gathered for f in tried] == ["keep", "again"]
    assert tried[0].price.seconds < tried[1].price.seconds and tried[0].peak_memory > tried[1].peak_memory
    for f in tried:
        config = compose_config([*SMALL, f"tensor.gathered={f.choice.gathered}"])
        plan = make_plan(config)
        assert plan == f.plan and step_price(config, plan, read_hardware("cpu")) == f.price


def test_the_sketch_knows_what_enters_by_it(add_key):
    add_key("gathered")
    space = SearchSpace(compose_config([*SMALL, "tensor.gathered=auto"]))
    rated, judged = ContenderGrid(space, 4, ROOMY, read_hardware("cpu")).rate_contenders()
    assert judged == len(rated) == 2 and rated[0].seconds < rated[1].seconds


def test_what_the_closed_form_does_not_know_is_decided_by_the_price(add_key):
    add_key("overlap")
    config = compose_config([*SMALL, "plan.search=[parallel.overlap]"])
    rated, _ = ContenderGrid(SearchSpace(config), 4, ROOMY, read_hardware("cpu")).rate_contenders()
    assert len(rated) == 2 and rated[0].seconds == rated[1].seconds
    tried = searched("plan.search=[parallel.overlap]").tried
    assert [f.choice.overlap for f in tried] == [True, False]
    assert tried[0].price.seconds < tried[1].price.seconds


def test_the_one_that_fits_is_chosen_and_a_user_types_it(add_key):
    add_key("gathered")
    keep, again = searched("tensor.gathered=auto").tried
    tight = searched("tensor.gathered=auto", memory=again.peak_memory)
    assert tight.quickest_fitting_finalist and tight.quickest_fitting_finalist.choice.gathered == "again"
    assert tight.space.format_overrides(tight.quickest_fitting_finalist.choice) == ["tensor.gathered=again"]


def test_it_is_chosen_beside_other_keys(add_key):
    """Of every row at once: all of them are columns, modes or sketches of one grid."""
    add_key("gathered")
    add_key("overlap")
    outcome = searched("plan.search=[all]", "tensor.gathered=keep")
    assert {f.choice.gathered for f in outcome.tried} == {"keep", "again"}
    assert {f.choice.overlap for f in outcome.tried} == {True, False}
    assert outcome.quickest_fitting_finalist and outcome.quickest_fitting_finalist.choice.overlap


def test_it_is_a_neighbour_of_a_plan(add_key, monkeypatch):
    add_key("gathered")
    monkeypatch.setattr(remedies, "SHOWN", 30)
    typed = [*SMALL, "tensor.gathered=again"]
    config, hardware = compose_config(typed), read_hardware("cpu")
    seconds = step_price(config, make_plan(config), hardware).seconds
    changes = remedies.find_best_changes(config, seconds, 1.0, ROOMY, hardware)
    assert ("tensor.gathered=keep",) in [change.typed for change in changes]


@pytest.mark.parametrize("share", [1.0, 0.999])
def test_the_chosen_plan_runs_as_one_process_does(add_key, share):
    """Four ranks as threads; with a little less memory than the quickest plan takes, they gather again."""
    add_key("gathered")
    config = configure("1d_sp", {"t": 2}, data=2)
    config.plan.search = ["tensor.gathered"]
    hardware = read_hardware("cpu")
    keep = search_plans(config, 4, ROOMY, hardware).tried[0]
    assert choose_plan(config, 4, share * keep.peak_memory, hardware)
    assert config.tensor.gathered == ("keep" if share == 1.0 else "again")
    plan, results = prove(config)
    assert plan.mesh.world_size == len(results) == 4 and plan.scheme.gathered == config.tensor.gathered


def test_negative_control_without_the_row_nothing_is_chosen(add_key):
    add_key("gathered", forgotten=True)
    assert [f.config.tensor.gathered for f in searched("tensor.gathered=auto").tried] == ["keep"]


def test_negative_control_without_the_declaration_it_is_refused(add_key):
    with pytest.raises(ConfigError, match="tensor.gathered=auto"):
        compose_config([*SMALL, "tensor.gathered=auto"])


def test_negative_control_a_row_that_allows_no_other_value(add_key, monkeypatch):
    add_key("gathered")
    monkeypatch.setitem(CHOOSABLE, "gathered", CHOOSABLE["gathered"]._replace(allows=lambda *_: False))
    assert [f.choice.gathered for f in searched("tensor.gathered=auto").tried] == ["keep"]
