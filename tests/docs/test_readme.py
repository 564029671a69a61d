"""README.md shows the quick run: its plan, and the picture drawn from its files."""

import json
from xml.etree import ElementTree

from docs import figure
from platform.launch import compose_config
from platform.plan.plan_data import plan_summary
from platform.plan.plan_summary import describe
from platform.predict.make_plan import make_plan
from tests.docs.pages import README, ROOT


def test_it_shows_the_plan_of_the_quick_run():
    assert describe(make_plan(compose_config(["+experiment=gpt_quick"]))) in README.read_text()


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
