"""Draws docs/architecture.svg: the rooms of the package in four boxes, and arrows for the imports between them.

python -m docs.architecture
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
PACKAGE = ROOT / "platform"
COMMANDS = ("api", "doctor", "evaluate", "generate", "launch", "tune")  # files beside the rooms, drawn as one
EVERYWHERE = ("boundary", "config", "plan")  # rooms that nearly all others import: arrows to them are left out
WIDTH, HEIGHT = 960, 600
HEIGHT_OF_ROOM = 44


class Box(NamedTuple):
    """Part of the picture: a corner and a size in pixels, a title, and what it stands for."""

    x: float
    y: float
    width: float
    height: float
    title: str
    says: str


class Room(NamedTuple):
    """Room of the package in the picture: a corner and a width in pixels, and what it does."""

    x: float
    y: float
    width: float
    says: str


BOXES = [
    Box(20, 20, 400, 306, "The driver plans", "one process"),
    Box(540, 20, 400, 306, "Workers execute", "a process for each GPU"),
    Box(540, 390, 400, 108, "The journal", "files of the run directory"),
    Box(20, 390, 400, 108, "The page", "from outside, at any time"),
]
ROOMS = {
    "jobs": Room(44, 66, 150, "Slurm, Kubernetes"),
    "commands": Room(254, 66, 150, "launch, generate ..."),
    "config": Room(44, 194, 150, "every key, checked"),
    "cluster": Room(254, 130, 150, "starts, leads, re-forms"),
    "predict": Room(254, 258, 150, "time, memory, search"),
    "plan": Room(436, 132, 70, ""),
    "train": Room(684, 66, 120, "steps, recovery"),
    "weights": Room(684, 130, 120, "Hugging Face"),
    "checkpoint": Room(556, 130, 120, "blocks, verified"),
    "model": Room(556, 194, 120, "no rank in it"),
    "optimizer": Room(684, 194, 120, "AdamW, Muon ..."),
    "data": Room(812, 194, 120, "text to samples"),
    "runtime": Room(684, 258, 120, "blocks, collectives"),
    "monitor": Room(664, 438, 160, "metrics, events, verdict"),
    "status": Room(44, 438, 150, "state, culprit"),
    "report": Room(254, 438, 150, "one HTML file"),
    "boundary": Room(20, 514, 920, "storage, typed reading, redaction, refusals: where foreign bytes enter and leave"),
}
# Arrows that would run behind another room, as paths of their own.
ROUTES = {
    ("jobs", "status"): "M44,90 C30,92 30,104 30,120 V430 C30,450 32,460 44,460",
    ("status", "cluster"): "M160,438 C190,380 200,160 254,154",
    ("cluster", "train"): "M404,146 C460,136 540,86 684,84",
    ("train", "predict"): "M684,100 C590,102 546,116 544,160 C540,230 480,268 404,270",
    ("predict", "checkpoint"): "M404,276 C500,276 490,152 556,152",
    ("predict", "model"): "M404,283 C500,283 500,216 556,216",
    ("predict", "optimizer"): "M404,290 C480,290 540,249 620,247 C690,245 706,250 712,238",
    ("predict", "monitor"): "M340,302 C350,372 680,336 690,438",
    ("checkpoint", "runtime"): "M566,174 C548,184 548,200 548,216 C548,262 600,280 684,280",
}
STYLE = """
svg { font: 13px system-ui, sans-serif; }
text { fill: #1f2937; } .card { fill: #ffffff; stroke: #d5dae1; } .box { fill: #f8fafc; stroke: #cbd5e1; }
.title { font-weight: 600; font-size: 16px; } .faint { fill: #64748b; font-size: 12px; }
.room { fill: #ffffff; stroke: #94a3b8; } .name { font: 600 13.5px ui-monospace, monospace; }
.import { fill: none; stroke: #94a3b8; stroke-width: 1.1; } .tip { fill: #94a3b8; }
.flow { fill: none; stroke: #1d4ed8; stroke-width: 5; } .head { fill: #1d4ed8; }
.plan { fill: #1d4ed8; stroke: #1d4ed8; } .on { fill: #ffffff; } .said { fill: #1d4ed8; font-weight: 600; }
@media (prefers-color-scheme: dark) {
text { fill: #e5e7eb; } .card { fill: #0d1117; stroke: #2c3440; } .box { fill: #131a24; stroke: #334155; }
.faint { fill: #9aa4b2; } .room { fill: #1b2430; stroke: #526074; } .import { stroke: #66758a; } .tip { fill: #66758a; }
.flow { stroke: #60a5fa; } .head { fill: #60a5fa; } .plan { fill: #60a5fa; stroke: #60a5fa; }
.on { fill: #0d1117; } .said { fill: #93c5fd; }
}"""
MARKERS = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0,1 L8,4 L0,7 z"/></marker>'
    '<marker id="head" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="3.2" markerHeight="3.2" orient="auto">'
    '<path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
)


def imports(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Return which room imports which: every import in a file of the one, at any depth, `__main__` left out."""
    found = set()
    for path in package.rglob("*.py"):
        room = place(path.relative_to(package).with_suffix("").parts)
        if path.name not in ("__main__.py", "_startup.py"):
            names = imported(ast.parse(path.read_text()))
            found |= {(room, place(name.split(".")[1:])) for name in names if name.startswith("platform.")}
    return {(one, other) for one, other in found if one != other and one and other}


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules that a source imports; of `from A import B`, `A.B` where `A` is the package itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "platform":
            yield from (f"platform.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def place(parts: tuple[str, ...] | list[str]) -> str:
    """Return the room of a module by the parts of its name inside the package, "" for the package itself."""
    first = parts[0] if parts else ""
    return "commands" if first in COMMANDS else "" if first in ("__init__", "__main__") else first


def arrows(found: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the imports to draw: none to rooms that all import, and none that follows from two others."""
    shown = {(one, other) for one, other in found if other not in EVERYWHERE and one not in EVERYWHERE}

    def reaches(start: str, end: str, without: tuple[str, str]) -> bool:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            room = ahead.pop()
            following = {other for edge in shown - {without} if (other := edge[1]) and edge[0] == room} - seen
            seen |= following
            ahead += following
        return end in seen

    return sorted(edge for edge in shown if not reaches(*edge, edge))


def curve(one: Room, other: Room) -> str:
    """Return the path of an arrow between the sides of two rooms that face each other."""
    if abs(other.y - one.y) >= HEIGHT_OF_ROOM:  # top and bottom
        x, end = one.x + one.width / 2, other.x + other.width / 2
        y, end_y = (one.y + HEIGHT_OF_ROOM, other.y) if other.y > one.y else (one.y, other.y + HEIGHT_OF_ROOM)
        return f"M{x:g},{y:g} C{x:g},{(y + end_y) / 2:g} {end:g},{(y + end_y) / 2:g} {end:g},{end_y:g}"
    x, end = (one.x + one.width, other.x) if other.x > one.x else (one.x, other.x + other.width)
    y, end_y = one.y + HEIGHT_OF_ROOM / 2, other.y + HEIGHT_OF_ROOM / 2
    return f"M{x:g},{y:g} C{(x + end) / 2:g},{y:g} {(x + end) / 2:g},{end_y:g} {end:g},{end_y:g}"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, radius: float = 8) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def draw(found: set[tuple[str, str]], rooms: Mapping[str, Room] = ROOMS) -> str:
    """Return the picture as SVG. `found`: which room imports which."""
    named = {room for edge in found for room in edge}
    assert named == set(rooms), f"give these a place: {sorted(named ^ set(rooms))}"
    out = [rect(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "card", 12)]
    for box in BOXES:
        out += [rect(*box[:4], "box", 12), text(box.x + 16, box.y + 26, box.title, "title")]
        out.append(text(box.x + box.width - 16, box.y + 26, box.says, "faint", "end"))
    for one, other in arrows(found):
        path = ROUTES.get((one, other)) or curve(rooms[one], rooms[other])
        out.append(
            f'<path class="import" marker-end="url(#tip)" d="{path}"><title>{one} imports {other}</title></path>'
        )
    out += flows()
    for name, room in rooms.items():
        middle = room.x + room.width / 2
        if name == "boundary":
            out += [rect(room.x, room.y, room.width, 36, "room"), text(room.x + 16, room.y + 23, name, "name")]
            out.append(text(room.x + 106, room.y + 22, room.says, "faint"))
        elif name == "plan":
            out.append(rect(room.x, room.y, room.width, 40, "plan", 10))
            out.append(text(middle, room.y + 25, "Plan", "title on", "middle"))
        else:
            out.append(rect(room.x, room.y, room.width, HEIGHT_OF_ROOM, "room"))
            out.append(text(middle, room.y + 18, name, "name", "middle"))
            out.append(text(middle, room.y + 35, room.says, "faint", "middle"))
    users = ", ".join(f"{sum(other == room for _, other in found)} import {room}" for room in ("plan", *EVERYWHERE[:2]))
    out.append(
        text(
            20,
            HEIGHT - 28,
            "Thin arrows: a room imports another; arrows that follow from two others are left out.",
            "faint",
        )
    )
    out.append(text(20, HEIGHT - 12, f"Without arrows, since nearly every room needs them: {users}.", "faint"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
    return "\n".join([head, f"<style>{STYLE}</style>", MARKERS, *out, "</svg>"]) + "\n"


def flows() -> list[str]:
    """Return the broad arrows, which are no imports: the plan, and what a run leaves behind."""
    broad = ("M420,152 H526", "M744,326 V376", "M540,470 H434")
    out = [f'<path class="flow" marker-end="url(#head)" d="{path}"/>' for path in broad]
    return [*out, text(760, 358, "steps, failures", "said"), text(482, 458, "records", "said", "middle")]


if __name__ == "__main__":
    PICTURE.write_text(draw(imports()))
