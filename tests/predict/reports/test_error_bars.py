"""How far published steps were from their predictions stands above a predicted step of such a plan."""

from __future__ import annotations

from platform.launch import compose_config
from platform.plan.__main__ import main
from platform.predict.make_plan import make_plan
from platform.predict.plan_report import find_error_bar, format_time_title
from platform.predict.step_price import read_hardware

SMALL = "+experiment=gpt_quick model.layers=2 model.d_model=64 model.length=64".split()


def test_a_bar_is_of_the_hardware_and_the_kind_of_model():
    dense, experts = (make_plan(compose_config([f"+experiment={name}"])) for name in ("gpt_quick", "moe_quick"))
    h100 = read_hardware("h100")
    bars = [bar for plan in (dense, experts) if (bar := find_error_bar(plan, h100))]
    assert len(bars) == 2 and bars[0]["rows"] > bars[1]["rows"] > 0 and 0 < bars[0]["error"] < 0.1
    assert find_error_bar(dense, read_hardware("cpu")) is None
    assert format_time_title({"hardware": "cpu", "published": None}) == "a step on cpu, predicted"


def test_the_screen_says_it(capsys):
    bar = find_error_bar(make_plan(compose_config(SMALL)), read_hardware("h100"))
    assert bar and main([*SMALL, "--hardware", "h100"]) == 0
    line = f"a step on h100, predicted: +-{bar['error']:.1%} ({bar['rows']} published rows of such plans)"
    assert line in capsys.readouterr().out.splitlines()
