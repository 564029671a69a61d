"""Gantt chart of a step as one SVG: what every stage does when, with panels such as planned and measured, and rows of
what else there is to see of a stage, such as its collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from platform.plan.schedule import COMPUTE, Kind
from platform.plan.simulate import TimedAction

COLOURS: dict[Kind, tuple[str, str]] = {  # kind -> (fill, text in the legend)
    Kind.FORWARD: ("#6ba3d6", "forward"),
    Kind.BACKWARD: ("#7cbf7a", "backward"),
    Kind.INPUT: ("#7cc7c0", "input gradient"),
    Kind.WEIGHT: ("#e3c567", "weight gradient"),
    Kind.SEND_F: ("#3f5f8a", "send"),
    Kind.SEND_B: ("#3f5f8a", "send"),
    Kind.RECV_F: ("#c9745b", "receive"),
    Kind.RECV_B: ("#c9745b", "receive"),
}
BARS: dict[str, tuple[str, str]] = {  # kind of bar -> (fill, text in the legend)
    "forward": ("#a9cbe9", "computes forward"),
    "backward": ("#b4ddb2", "computes backward"),
    "update": ("#cccccc", "ends the step"),
    "gather": ("#c3a6e0", "gather"),
    "reduce": ("#f0b27a", "reduce"),
    "other": ("#d5c4a1", "other collective"),
    "wait": ("#8c2d2d", "waits for it"),
}
WIDTH, LEFT, RIGHT, LANE, ROW, STRIP, TITLE, AXIS, LEGEND = 1200, 110, 20, 26, 18, 5, 34, 30, 34  # pixels
LETTER, SMALL = 6.5, 5.2  # width of one character of a label, and of one of a bar's


class Bar(NamedTuple):
    """Box in a row beneath a stage's lane, of a `kind` in BARS: from `start` to `end`, with a label that is shown where
    there is room and a text that a mouse finds."""

    kind: str
    start: float
    end: float
    label: str
    text: str


Rows = Mapping[int, Sequence[tuple[str, Sequence[Bar]]]]  # stage -> rows beneath its lane: (label, bars by start)


def draw_gantt_svg(
    panels: Mapping[str, Sequence[TimedAction]], beneath: Mapping[str, Rows] | None = None, unit: str = "s"
) -> str:
    """Draw timelines of a pipeline step as the text of one SVG image: one panel per entry {title: events} of `panels`,
    one above the other on a common time scale, with one lane per stage. `beneath`: title -> what else a panel shows.
    `unit`: unit of the times, "" for none.

    Boxes carry the microbatch's number; the later the chunk on its stage, the paler its box. Sends and receives, if the
    events have them, are strips under the boxes.
    """
    rows = beneath or {}
    bars = [bar for panel_rows in rows.values() for lanes in panel_rows.values() for _, lane in lanes for bar in lane]
    ends = [*(e.end for events in panels.values() for e in events), *(bar.end for bar in bars)]
    span = max(ends, default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / span
    parts: list[str] = []
    top = 0
    for title, events in panels.items():
        panel, height = _draw_panel(title, events, rows.get(title, {}), top, scale)
        parts += panel
        top += height
        parts += _draw_time_axis(span, top, scale, unit)
        top += AXIS
    kinds = {e.action.kind for events in panels.values() for e in events}
    shown = {bar.kind for bar in bars}
    entries = [COLOURS[kind] for kind in COLOURS if kind in kinds] + [BARS[kind] for kind in BARS if kind in shown]
    parts += _draw_legend(entries, top)
    height = top + LEGEND
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def _draw_panel(title: str, events: Sequence[TimedAction], rows: Rows, top: int, scale: float) -> tuple[list[str], int]:
    """Return the SVG elements of one panel of the Gantt chart (title, stage labels, lanes and boxes, and the `rows`
    beneath each lane) and its height in pixels. `top`: its upper edge in pixels; `scale`: pixels per unit of time."""
    parts = [f'<text x="{LEFT}" y="{top + TITLE - 12}" font-size="14">{escape(title)}</text>']
    y = top + TITLE
    for stage in range(1 + max((e.stage for e in events), default=0)):
        lane = [e for e in events if e.stage == stage]
        chunks = sorted({e.action.chunk for e in lane})
        parts += _draw_lane(f"stage {stage}", y, LANE)
        parts += [_draw_action(e, y, scale, opacity=1 - 0.6 * chunks.index(e.action.chunk) / len(chunks)) for e in lane]
        y += LANE
        for label, bars in rows.get(stage, ()):
            parts += _draw_lane(label, y, ROW)
            parts += [_draw_bar(bar, y, scale) for bar in join_bars(bars, 1 / scale)]
            y += ROW
    return parts, y - top


def _draw_lane(label: str, y: int, height: int) -> Iterator[str]:
    """Yield the SVG elements of an empty lane of the Gantt chart, whose upper edge is at `y` pixels."""
    yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{height - 2}" fill="#f0f0f0"/>'
    yield f'<text x="{LEFT - 8}" y="{y + height / 2 + 3:g}" text-anchor="end">{escape(label)}</text>'


def join_bars(bars: Sequence[Bar], min_seconds: float) -> Iterator[Bar]:
    """Yield the bars of a row of the Gantt chart, given by start, one kind after the other; bars of a kind within a
    time of `min_seconds` are joined into one: a picture has no room for them, and a long step has very many."""
    for kind in BARS:
        group: list[Bar] = []
        for bar in [bar for bar in bars if bar.kind == kind] + [None]:
            if group and (bar is None or bar.end - group[0].start >= min_seconds):
                end, text = max(b.end for b in group), f"{len(group)} x {group[0].text}"
                yield group[0] if len(group) == 1 else Bar(kind, group[0].start, end, "", text)
                group = []
            if bar:
                group.append(bar)


def _draw_bar(bar: Bar, y: int, scale: float) -> str:
    """Return the SVG rectangle of one bar in a row of the Gantt chart whose upper edge is at `y` pixels; a wait is a
    strip at the bottom of the bar that it waits for."""
    x, width, waits = LEFT + bar.start * scale, (bar.end - bar.start) * scale, bar.kind == "wait"
    top, height = (y + ROW - 2 - STRIP, STRIP) if waits else (y, ROW - 2)
    box = (
        f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{BARS[bar.kind][0]}"'
        f' stroke="#ffffff" stroke-width="{0 if waits else 0.5}"><title>{escape(bar.text)} {bar.start:.6g} -'
        f" {bar.end:.6g}</title></rect>"
    )
    if not bar.label or width < SMALL * len(bar.label):
        return box
    label_position = f'x="{x + width / 2:.2f}" y="{y + ROW / 2:g}" text-anchor="middle" font-size="9"'
    return f"{box}<text {label_position}>{escape(bar.label)}</text>"


def _draw_action(event: TimedAction, lane: int, scale: float, opacity: float) -> str:
    """Return the SVG rectangle of one action in the Gantt chart, labelled with its microbatch if there is room. `lane`:
    upper edge of its stage's lane in pixels; `scale`: pixels per unit of time."""
    action = event.action
    x, width = LEFT + event.start * scale, (event.end - event.start) * scale
    computes = action.kind in COMPUTE
    y, height = (lane, LANE - 2 - STRIP) if computes else (lane + LANE - 2 - STRIP, STRIP)
    fill = COLOURS[action.kind][0]
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{fill}" fill-opacity="{opacity:.2f}"'
        f' stroke="#ffffff" stroke-width="0.5"><title>{action} {event.start:.6g} - {event.end:.6g}</title></rect>'
    )
    label = str(action.microbatch)
    if not computes or width < LETTER * len(label):
        return box
    return f'{box}<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" text-anchor="middle">{label}</text>'


def _draw_time_axis(span: float, y: int, scale: float, unit: str) -> Iterator[str]:
    """Yield the SVG elements of the time axis under a panel of the Gantt chart, from 0 to `span` in a unit, at height
    `y` in pixels with `scale` pixels per unit."""
    step = _tick_distance(span / 10)
    digits = max(0, -floor(log10(step)))
    for tick in range(floor(span / step) + 1):
        x = LEFT + tick * step * scale
        yield f'<path d="M{x:.2f} {y} v4" stroke="#555555"/>'
        text = f"{tick * step:.{digits}f}" + (f" {unit}" if unit and not tick else "")
        yield f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle" fill="#555555">{escape(text)}</text>'


def _tick_distance(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten >= `least`: the distance of ticks on the time axis."""
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _draw_legend(entries: Iterable[tuple[str, str]], top: int) -> Iterator[str]:
    """Yield the legend's SVG: a coloured square and a text per distinct (fill, text), at height `top` in pixels."""
    x = float(LEFT)
    for fill, text in dict.fromkeys(entries):
        yield f'<rect x="{x:g}" y="{top + 8}" width="12" height="12" fill="{fill}"/>'
        yield f'<text x="{x + 18:g}" y="{top + 18}">{text}</text>'
        x += 34 + LETTER * len(text)
