"""Draws the picture of README.md: the loss of a run beside its mesh and layouts, from the files of its run directory.

python docs/figure.py runs/gpt_quick > docs/gpt_quick.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import product
from math import ceil, floor
from pathlib import Path
from typing import Any

from platform.api import MetricsLog

WIDTH, HEIGHT = 900, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 440, 64, 286  # of the plot
X, ROW = 536, 26  # left edge of the mesh and table; height of a row
COLUMNS = 68  # width of a column

# A card of its own: readable on any page, whatever its colour. Classes 0, 1, ... colour the mesh axes in their order.
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: #1f2937; } .card { fill: #ffffff; stroke: #d5dae1; } .title { font-weight: 600; font-size: 14px; }
.faint { fill: #6b7280; } .grid { stroke: #e5e7eb; } .code { font-family: ui-monospace, monospace; font-size: 12px; }
path { fill: none; } .train { stroke: #64748b; } .val { stroke: #0f766e; stroke-width: 2; }
text.val { fill: #0f766e; stroke: none; } circle.val { fill: #0f766e; stroke: none; }
rect.axis0 { fill: #dbeafe; } text.axis0 { fill: #1d4ed8; } rect.axis1 { fill: #ffedd5; } text.axis1 { fill: #c2410c; }
rect.axis2 { fill: #f3e8ff; } text.axis2 { fill: #7e22ce; } .tile { fill: #f8fafc; stroke: #d5dae1; }
@media (prefers-color-scheme: dark) {
text { fill: #e5e7eb; } .card { fill: #10151d; stroke: #2c3440; } .faint { fill: #9aa4b2; } .grid { stroke: #242c37; }
.train { stroke: #8b98a9; } .val { stroke: #2dd4bf; } text.val, circle.val { fill: #2dd4bf; }
rect.axis0 { fill: #1e3358; } text.axis0 { fill: #93c5fd; } rect.axis1 { fill: #4a2c14; } text.axis1 { fill: #fdba74; }
rect.axis2 { fill: #3b1f57; } text.axis2 { fill: #d8b4fe; } .tile { fill: #18202b; stroke: #2c3440; }
}"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def curve(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Training and validation loss over the steps."""
    validation = [(r["step"], r["val_loss"]) for r in rows if "val_loss" in r]
    losses = [r["loss"] for r in rows] + [loss for _, loss in validation]
    low, high, steps = floor(min(losses)), ceil(max(losses)), rows[-1]["step"]

    def at(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * step / steps
        return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low), 1)

    def line(points: Sequence[tuple[float, float]], kind: str) -> str:
        return f'<path class="{kind}" d="M' + " L".join(f"{x:g},{y:g}" for x, y in points) + '"/>'

    out = [text(LEFT, 36, "Loss per token", "title"), text(RIGHT, 36, f"{steps} steps", "faint", "end")]
    for loss in range(low, high + 1):
        _, y = at(0, loss)
        out += [f'<path class="grid" d="M{LEFT},{y} H{RIGHT}"/>', text(LEFT - 10, y + 4, str(loss), "faint", "end")]
    out += [
        text(at(s, low)[0], BOTTOM + 22, str(s), "faint", "middle") for s in (0, *(steps * k // 3 for k in (1, 2, 3)))
    ]
    out.append(line([at(r["step"], r["loss"]) for r in rows], "train"))
    if validation:
        points = [at(*v) for v in validation]
        out.append(line(points, "val"))
        out += [f'<circle class="val" cx="{x}" cy="{y}" r="4"/>' for x, y in points]
        x, y = points[-1]
        out.append(text(x, y - 28, f"validation {validation[-1][1]:.2f}", "val", "end"))
    x, y = at(rows[0]["step"], rows[0]["loss"])
    return [*out, text(x + 12, y + 5, f"training {rows[0]['loss']:.2f}", "faint")]


def mesh(plan: dict[str, Any]) -> list[str]:
    """The workers by the mesh's two axes, and which axes split which dim of the activations."""
    axes = [axis for axis, n in plan["mesh"].items() if n > 1]
    (first, rows), (second, columns) = ((axis, plan["mesh"][axis]) for axis in axes)
    out = [text(X, 36, f"{rows * columns} workers = {first} {rows} × {second} {columns}", "title")]
    for i, j in product(range(rows), range(columns)):
        x, y = X + 64 + j * 130, TOP + 18 + i * 34
        out.append(f'<rect class="tile" x="{x}" y="{y}" width="122" height="28" rx="6"/>')
        out.append(text(x + 61, y + 18, f"rank {i * columns + j}", "code", "middle"))
    out += [text(X, TOP + 36 + i * 34, f"{first} {i}", "code axis0") for i in range(rows)]
    out += [text(X + 125 + j * 130, TOP + 8, f"{second} {j}", "code axis1", "middle") for j in range(columns)]

    regions = {name: layout for name, layout in plan["regions"].items() if name != "core"}
    dims = list(dict.fromkeys(dim for layout in regions.values() for dim in layout))
    y = TOP + 18 + rows * 34 + 34
    out.append(text(X, y, "split by", "faint code"))
    out += [text(X + 90 + i * COLUMNS, y, dim, "faint code") for i, dim in enumerate(dims)]
    for name, layout in regions.items():
        y += ROW
        out += [f'<path class="grid" d="M{X},{y - 17} H{WIDTH - 28}"/>', text(X, y, name, "code")]
        for i, dim in enumerate(dims):
            x = X + 90 + i * COLUMNS
            for axis in layout.get(dim, []):
                kind, width = f"axis{axes.index(axis)}", 12 + 8 * len(axis)
                out.append(f'<rect class="{kind}" x="{x - 6}" y="{y - 13}" width="{width}" height="18" rx="5"/>')
                out.append(text(x, y, axis, f"code {kind}"))
                x += width + 4
    return out


def draw(rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> str:
    """The picture as SVG. `rows`: of metrics.jsonl; `plan`: plan.json, of a mesh with two axes larger than 1."""
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{STYLE}</style>", card, *curve(rows), *mesh(plan), "</svg>"]) + "\n"


if __name__ == "__main__":
    run = Path(sys.argv[1])
    print(draw(MetricsLog.read_rows(run / "metrics.jsonl"), json.loads((run / "plan.json").read_text())), end="")
