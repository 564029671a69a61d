"""The picture of a step: well-formed, and every action in its place."""

import xml.etree.ElementTree as xml

import pytest

from platform.plan.gantt import BARS, COLOURS, LEFT, RIGHT, WIDTH, Bar, draw_gantt_svg, join_bars
from platform.plan.generators import generate
from platform.plan.schedule import Action, Kind
from platform.plan.simulate import TimedAction, simulate

SVG = "{http://www.w3.org/2000/svg}"


def boxes(picture):
    """{label of an action: its rectangle}; the label is the box's tooltip."""
    rectangles = [(r, r.find(f"{SVG}title")) for r in xml.fromstring(picture).iter(f"{SVG}rect")]
    return [(title.text.split()[0], r) for r, title in rectangles if title is not None]


def test_planned_beside_measured_on_one_scale():
    schedule = generate("zb_h1", 2, 2, 4)
    planned, measured = simulate(schedule), simulate(schedule, transfer=0.5)
    drawn_boxes = boxes(draw_gantt_svg({"planned": planned.timeline, "measured": measured.timeline}))
    drawn = [(i, e) for i, run in enumerate((planned, measured)) for e in sorted(run.timeline, key=lambda e: e.stage)]
    assert [name for name, _ in drawn_boxes] == [str(e.action) for _, e in drawn]
    scale = (WIDTH - LEFT - RIGHT) / measured.makespan
    for (_, box), (_, event) in zip(drawn_boxes, drawn, strict=True):
        assert float(box.get("x")) == pytest.approx(LEFT + event.start * scale, abs=0.01)
        assert float(box.get("width")) == pytest.approx((event.end - event.start) * scale, abs=0.01)
        assert box.get("fill") == COLOURS[event.action.kind][0]
    lanes = {(run, e.stage): int(box.get("y")) for (run, e), (_, box) in zip(drawn, drawn_boxes, strict=True)}
    assert lanes[0, 0] < lanes[0, 1] < lanes[1, 0] < lanes[1, 1]


def test_titles_are_escaped_and_every_panel_and_kind_is_named():
    message = TimedAction(0, Action(Kind.SEND_F, 0, 0, 1), 1.0, 1.2)
    picture = draw_gantt_svg({"a < b & c": [TimedAction(0, Action(Kind.FORWARD, 0, 0), 0.0, 1.0), message], "none": []})
    texts = [t.text for t in xml.fromstring(picture).iter(f"{SVG}text")]
    assert {"a < b & c", "none", "forward", "send", "stage 0", "0.0 s"} <= set(texts)
    assert "backward" not in texts


def test_nothing_to_draw():
    xml.fromstring(draw_gantt_svg({"planned": []}))


def test_rows_beneath_a_stage_and_what_a_picture_has_no_room_for():
    events = [TimedAction(stage, Action(Kind.FORWARD, stage, 0), 0.0, 1.0) for stage in (0, 1)]
    short = [Bar("gather", 0.1 + i * 1e-4, 0.1 + (i + 1) * 1e-4, "x", f"gather {i}") for i in range(2000)]
    rows = {0: [("communication", [Bar("reduce", 0.0, 2.0, "layers.0", "reduce layers.0"), *short])]}
    drawn = boxes(draw_gantt_svg({"a": events, "b": events}, beneath={"b": rows}))
    by_name = {name: [box for other, box in drawn if other == name] for name, _ in drawn}
    assert len(by_name["0F0"]) == len(by_name["0F1"]) == 2
    [long] = by_name["reduce"]
    assert long.get("fill") == BARS["reduce"][0]
    assert float(long.get("width")) == pytest.approx(WIDTH - LEFT - RIGHT), "the scale includes what ends last"
    first, second = (int(by_name[name][1].get("y")) for name in ("0F0", "0F1"))
    assert first < int(long.get("y")) < second
    pixel = 2.0 / (WIDTH - LEFT - RIGHT)
    few = list(join_bars(short, pixel))
    assert 0.2 / pixel <= len(few) <= 2 * 0.2 / pixel + 1 and (few[0].start, few[-1].end) == (0.1, short[-1].end)
    assert all(a.end <= b.start + 1e-12 for a, b in zip(few, few[1:], strict=False))
