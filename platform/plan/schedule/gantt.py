"""Gantt chart of a step as one SVG: what every stage does when, with panels such as planned and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import floor, log10

from platform.plan.schedule.simulate import TimedAction
from platform.plan.schedule.table import COMPUTE, Kind

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
WIDTH, LEFT, RIGHT, LANE, STRIP, TITLE, AXIS, LEGEND = 1200, 70, 20, 26, 5, 34, 30, 34  # pixels
LETTER = 6.5  # width of one character of a label


def gantt_svg(panels: Mapping[str, Sequence[TimedAction]], unit: str = "s") -> str:
    """Draw timelines of a pipeline step as the text of one SVG image: one panel per entry {title: events} of `panels`,
    one above the other on a common time scale, with one lane per stage.

    Boxes carry the microbatch's number; the later the chunk on its stage, the paler its box. Sends and receives, if the
    events have them, are strips under the boxes. `unit`: the unit of the events' times.
    """
    span = max((e.end for events in panels.values() for e in events), default=0.0) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / span
    parts: list[str] = []
    top = 0
    for title, events in panels.items():
        stages = 1 + max((e.stage for e in events), default=0)
        parts += _panel(title, events, stages, top, scale)
        top += TITLE + stages * LANE
        parts += _axis(span, top, scale, unit)
        top += AXIS
    kinds = {e.action.kind for events in panels.values() for e in events}
    parts += _legend([kind for kind in COLOURS if kind in kinds], top)
    height = top + LEGEND
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def _panel(title: str, events: Sequence[TimedAction], stages: int, top: int, scale: float) -> Iterator[str]:
    """Yield the SVG elements of one panel of the Gantt chart: title, stage labels, lanes and boxes. `top`: its upper
    edge in pixels; `scale`: pixels per unit of time."""
    yield f'<text x="{LEFT}" y="{top + TITLE - 12}" font-size="14">{escape(title)}</text>'
    chunks = [sorted({e.action.chunk for e in events if e.stage == stage}) for stage in range(stages)]
    for stage in range(stages):
        y = top + TITLE + stage * LANE
        yield f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE - 2}" fill="#f0f0f0"/>'
        yield f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 3:g}" text-anchor="end">stage {stage}</text>'
    for event in events:
        own = chunks[event.stage]
        paleness = own.index(event.action.chunk) / len(own)
        yield _box(event, top + TITLE + event.stage * LANE, scale, opacity=1 - 0.6 * paleness)


def _box(event: TimedAction, lane: int, scale: float, opacity: float) -> str:
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


def _axis(span: float, y: int, scale: float, unit: str) -> Iterator[str]:
    """Yield the SVG elements of the time axis under a panel of the Gantt chart, from 0 to `span`, at height `y` in
    pixels with `scale` pixels per unit of time."""
    step = _round_step(span / 10)
    digits = max(0, -floor(log10(step)))
    for tick in range(floor(span / step) + 1):
        x = LEFT + tick * step * scale
        yield f'<path d="M{x:.2f} {y} v4" stroke="#555555"/>'
        text = f"{tick * step:.{digits}f}" + (f" {unit}" if tick == 0 else "")
        yield f'<text x="{x:.2f}" y="{y + 16}" text-anchor="middle" fill="#555555">{escape(text)}</text>'


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `least`: the distance of ticks on the time
    axis of the Gantt chart."""
    power = 10.0 ** floor(log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _legend(kinds: Sequence[Kind], top: int) -> Iterator[str]:
    """Yield the SVG elements of the Gantt chart's legend: a coloured square and a text per distinct colour of `kinds`,
    at height `top` in pixels."""
    x = float(LEFT)
    for fill, text in dict.fromkeys(COLOURS[kind] for kind in kinds):
        yield f'<rect x="{x:g}" y="{top + 8}" width="12" height="12" fill="{fill}"/>'
        yield f'<text x="{x + 18:g}" y="{top + 18}">{text}</text>'
        x += 34 + LETTER * len(text)
