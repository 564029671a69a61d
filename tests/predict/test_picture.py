"""The picture of a predicted step: every pass, and no more than a picture holds; and hardware that cannot price it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from platform.config.composition import CONF
from platform.plan.__main__ import main
from platform.predict.step_price import MOST_DRAWN, draw_step
from tests.predict.test_price import A100, planned

STAGES = ["pipeline=interleaved", "pipeline.stages=2", "pipeline.chunks=2", "train.microbatch=4"]


def boxes(image: str) -> int:
    """Count the passes that a picture draws."""
    ElementTree.fromstring(image)
    return len(re.findall(r"<title>\d+[FB]\d+ ", image))


@pytest.mark.parametrize("hardware", [None, A100])
def test_it_has_every_pass(hardware):
    config, plan = planned(*STAGES)
    image = draw_step(config, plan, hardware)
    assert boxes(image) == 8 * 4 * 2
    assert ("predicted on a100_80g" in image) == bool(hardware)
    assert bool(re.search(r">0[.0]* s<", image)) == bool(hardware)  # nominal times are no seconds


def test_a_long_step_is_drawn_in_part():
    config, plan = planned(*STAGES, "train.global_batch=16384")
    image = draw_step(config, plan, A100)
    assert MOST_DRAWN / 2 <= boxes(image) <= MOST_DRAWN
    assert "500 of 4096 microbatches" in image


def test_the_command_writes_it(tmp_path, capsys):
    arguments = ["+experiment=gpt_quick", "tensor=serial", "pipeline=1f1b", "pipeline.stages=2"]
    assert main([*arguments, "--svg", str(tmp_path / "step.svg")]) == 0
    assert boxes((tmp_path / "step.svg").read_text())
    capsys.readouterr()
    assert main([*arguments, "--svg", str(tmp_path / "none" / "step.svg")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_hardware_without_the_runs_precision_is_refused(tmp_path, capsys):
    text = (CONF / "hardware" / "h100.yaml").read_text().replace("fp32: 67e12, ", "")
    (tmp_path / "narrow.yaml").write_text(text)
    assert main(["+experiment=gpt_quick", "--hardware", str(tmp_path / "narrow.yaml")]) == 2
    assert "its peaks lack fp32, in which the run computes" in capsys.readouterr().err
