"""Draws curves and bars of published and predicted numbers as SVG: published ones solid, predicted ones dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log2
from typing import NamedTuple

from docs.figure import text

WIDTH, HEIGHT = 900, 330
TOP, BOTTOM, LEFT, GAP = 76, 280, 60, 80  # of the plots
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: #1f2937; } .card { fill: #ffffff; stroke: #d5dae1; } .title { font-weight: 600; font-size: 14px; }
.faint { fill: #6b7280; } .grid { stroke: #e5e7eb; } path { fill: none; stroke-width: 2; }
.dash { stroke-dasharray: 5 4; }
.a { stroke: #1d4ed8; } .b { stroke: #c2410c; } .c { stroke: #0f766e; } .d { stroke: #7e22ce; }
circle { fill: #ffffff; stroke-width: 2; } text.a, rect.a { fill: #1d4ed8; stroke: none; }
text.b, rect.b { fill: #c2410c; stroke: none; } text.c, rect.c { fill: #0f766e; stroke: none; }
text.d, rect.d { fill: #7e22ce; stroke: none; }
@media (prefers-color-scheme: dark) {
text { fill: #e5e7eb; } .card { fill: #10151d; stroke: #2c3440; } .faint { fill: #9aa4b2; } .grid { stroke: #242c37; }
circle { fill: #10151d; } .a { stroke: #93c5fd; } .b { stroke: #fdba74; } .c { stroke: #2dd4bf; }
.d { stroke: #d8b4fe; } text.a, rect.a { fill: #93c5fd; } text.b, rect.b { fill: #fdba74; }
text.c, rect.c { fill: #2dd4bf; } text.d, rect.d { fill: #d8b4fe; }
}"""
COLOURS = "abcd"
Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """Curve of a plot: its name, and its points as published and as predicted."""

    name: str
    published: Points
    predicted: Points


def draw_card(title: str, says: str, parts: Sequence[str]) -> str:
    """Return a picture as SVG: a card with a title, what it says, and its parts."""
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    titles = [text(24, 30, escape(title), "title"), text(WIDTH - 24, 30, says, "faint", "end")]
    return "\n".join([head, f"<style>{STYLE}</style>", card, *titles, *parts, "</svg>"]) + "\n"


def draw_grid(left: float, right: float, most: float, step: float) -> list[str]:
    """Return the horizontal lines of a plot from 0 to `most`, and their numbers."""
    parts = []
    for i in range(round(most / step) + 1):
        y = round(BOTTOM - (BOTTOM - TOP) * i * step / most, 1)
        parts.append(f'<path class="grid" d="M{left:g},{y:g} H{right:g}" style="stroke-width:1"/>')
        parts.append(text(left - 8, y + 4, f"{i * step:g}", "faint", "end"))
    return parts


def draw_plot(left: float, right: float, title: str, curves: Sequence[Curve], most: float, step: float) -> list[str]:
    """Return the parts of a plot over the number of GPUs, on a scale of powers of two."""
    counts = sorted({x for curve in curves for x, _ in (*curve.published, *curve.predicted)})
    low, high = log2(counts[0]), log2(counts[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        """Return where a point is in the picture."""
        across = left + 16 + (right - left - 32) * (log2(x) - low) / (high - low)
        return round(across, 1), round(BOTTOM - (BOTTOM - TOP) * min(y, most) / most, 1)

    parts = [text(left, 56, title), *draw_grid(left, right, most, step)]
    parts += [text(place(x, 0)[0], BOTTOM + 20, f"{x:g}", "faint", "middle") for x in counts]
    for colour, curve in zip(COLOURS, curves, strict=False):
        for points, dash in ((curve.published, ""), (curve.predicted, " dash")):
            places = [place(*point) for point in points]
            parts.append(f'<path class="{colour}{dash}" d="M' + " L".join(f"{x:g},{y:g}" for x, y in places) + '"/>')
            parts += [f'<circle class="{colour}" cx="{x:g}" cy="{y:g}" r="{4 - len(dash) / 5:g}"/>' for x, y in places]
    return parts


def draw_curves(title: str, plots: Mapping[str, Sequence[Curve]], most: float, step: float) -> str:
    """Return a picture of plots side by side as SVG, each with its title and curves, and one legend of colours."""
    width = (WIDTH - LEFT - 24 - GAP * (len(plots) - 1)) / len(plots)
    parts = []
    for i, (name, curves) in enumerate(plots.items()):
        left = LEFT + i * (width + GAP)
        parts += draw_plot(left, left + width, name, curves, most, step)
    names = list(dict.fromkeys(curve.name for curves in plots.values() for curve in curves))
    legend = [text(LEFT + i * 200, HEIGHT - 10, name, COLOURS[i]) for i, name in enumerate(names)]
    return draw_card(title, "published solid, predicted dashed; over GPUs", [*parts, *legend])


def draw_bars(title: str, groups: Mapping[str, Sequence[float]], names: Sequence[str], most: float) -> str:
    """Return a picture as SVG with a group of bars for each title, in the order of the `names` of bars."""
    width = (WIDTH - LEFT - 24) / len(groups)
    parts = draw_grid(LEFT, WIDTH - 24, most, 1)
    for i, (name, values) in enumerate(groups.items()):
        left = LEFT + i * width
        for j, value in enumerate(values):
            height, x = (BOTTOM - TOP) * min(value, most) / most, left + 12 + j * (width - 24) / len(values)
            bar = f'x="{x:.1f}" y="{BOTTOM - height:.1f}" width="{(width - 24) / len(values) - 3:.1f}"'
            parts.append(f'<rect class="{COLOURS[j]}" {bar} height="{height:.1f}"/>')
        parts.append(text(left + width / 2, BOTTOM + 20, name, "faint", "middle"))
    legend = [text(LEFT + j * 260, HEIGHT - 10, name, COLOURS[j]) for j, name in enumerate(names)]
    return draw_card(title, "times the speed of data parallelism", [*parts, *legend])
