"""The picture of a step: well-formed, and every action in its place."""

import xml.etree.ElementTree as xml

import pytest

from platform.plan.schedule.gantt import COLOURS, LEFT, RIGHT, WIDTH, gantt_svg
from platform.plan.schedule.generators import generate
from platform.plan.schedule.simulate import TimedAction, simulate
from platform.plan.schedule.table import Action, Kind

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture):
    """{label of an action: its rectangle}; the label is the box's tooltip."""
    found = [(r, r.find(f"{SVG}title")) for r in xml.fromstring(picture).iter(f"{SVG}rect")]
    return [(title.text.split()[0], r) for r, title in found if title is not None]


def test_planned_beside_measured_on_one_scale():
    schedule = generate("zb_h1", 2, 2, 4)
    planned, measured = simulate(schedule), simulate(schedule, transfer=0.5)
    found = boxes(gantt_svg({"planned": planned.timeline, "measured": measured.timeline}))
    assert [name for name, _ in found] == [str(e.action) for run in (planned, measured) for e in run.timeline]
    scale = (WIDTH - LEFT - RIGHT) / measured.makespan
    for (_, box), event in zip(found, (*planned.timeline, *measured.timeline), strict=True):
        assert float(box.get("x")) == pytest.approx(LEFT + event.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((event.end - event.start) * scale, abs=0.01)
        assert box.get("fill") == COLOURS[event.action.kind][0]
    events = [*((0, e) for e in planned.timeline), *((1, e) for e in measured.timeline)]
    lanes = {(run, e.stage): int(box.get("y")) for (run, e), (_, box) in zip(events, found, strict=True)}
    assert lanes[0, 0] < lanes[0, 1] < lanes[1, 0] < lanes[1, 1]


def test_titles_are_escaped_and_every_panel_and_kind_is_named():
    message = TimedAction(0, Action(Kind.SEND_F, 0, 0, 1), 1.0, 1.2)
    picture = gantt_svg(
        {"a < b & c": [TimedAction(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0), message], "none": []}, "ms"
    )
    texts = [t.text for t in xml.fromstring(picture).iter(f"{SVG}text")]
    assert {"a < b & c", "none", "forward", "send", "stage 0", "0.0 ms"} <= set(texts)
    assert "backward" not in texts


def test_nothing_to_draw():
    xml.fromstring(gantt_svg({"planned": []}))
