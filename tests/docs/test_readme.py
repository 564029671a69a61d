"""README.md shows a scheme, its plan, a failure with the same loss, the rule's answers, and the quick run."""

import json
import re
from xml.etree import ElementTree

import pytest

from docs import figure
from platform.launch import compose_config
from platform.plan.plan_data import plan_summary
from platform.plan.plan_summary import describe
from platform.predict.make_plan import make_plan
from tests.docs.one_rule import answer
from tests.docs.pages import README, ROOT, blocks

KNOWN = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \| `([^`]+)` \|$", README.read_text(), re.M)


def test_it_begins_with_a_scheme_and_its_plan():
    [scheme] = [text for language, text in blocks(README) if language == "yaml"]
    assert len(scheme.splitlines()) == 6
    assert (ROOT / "conf" / "tensor" / "1d.yaml").read_text().endswith(scheme)
    plan = describe(make_plan(compose_config(["+experiment=elastic_demo"])))
    assert plan == describe(make_plan(compose_config(["+experiment=gpt_quick"])))
    assert README.read_text().index(scheme) < README.read_text().index(plan) < 2000


def test_the_run_that_loses_a_worker_shows_the_same_loss():
    """The one above the other: step 20 of a run with a kill and of one without; `tests/cluster` compares runs."""
    rows = re.findall(r"^ +20 +(\S+) +(\S+) +1\.00e-03 .* ([24]) +\dm", README.read_text(), re.M)
    assert [world for *_, world in rows] == ["2", "4"] and rows[0][:2] == rows[1][:2]


@pytest.mark.parametrize(("name", "equation", "forward", "backward"), KNOWN, ids=[row[0] for row in KNOWN])
def test_a_layout_gives_what_the_rule_moves(name, equation, forward, backward):
    assert answer(equation) == (forward, backward)


def test_seven_layouts_are_shown():
    assert len(KNOWN) == 7
    with pytest.raises(ValueError, match="axis t would split both"):  # negative control
        answer("H[L, B_t, F_t] = X[L, B_t, M] . W[M, F_t]")


def test_the_picture_shows_the_plan_of_the_quick_run():
    picture = (ROOT / "docs" / "gpt_quick.svg").read_text()
    plan = json.loads(json.dumps(plan_summary(make_plan(compose_config(["+experiment=gpt_quick"])))))
    assert "\n".join(figure.mesh(plan)) in picture
    assert "docs/gpt_quick.svg" in README.read_text()


def test_a_picture_is_well_formed_and_shows_every_loss():
    plan = plan_summary(make_plan(compose_config(["+experiment=gpt_quick"])))
    rows = [{"step": k, "loss": 8 - 0.01 * k} | ({"val_loss": 7.5} if k % 50 == 0 else {}) for k in range(1, 101)]
    svg = ElementTree.fromstring(figure.draw(rows, plan))
    [train] = [e for e in svg.iter() if e.get("class") == "train"]
    assert train.get("d").count(",") == 100
    assert len([e for e in svg.iter() if e.get("class") == "val" and e.tag.endswith("circle")]) == 2
