"""The rooms of the package: every folder with what its `__init__` says of it and the files in it.

`python -m tests.house.rooms` prints the tree that docs/design.md shows.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "platform"
WIDTH = 118


def rooms(folder: Path = PACKAGE) -> list[Path]:
    """Return the package's folder, and every folder in it, each before those inside it."""
    return [folder, *(room for child in inside(folder) for room in rooms(child))]


def inside(room: Path) -> list[Path]:
    """Return the rooms directly inside a room: folders that hold Python anywhere, with or without an `__init__`."""
    return sorted(path for path in room.iterdir() if any(path.rglob("*.py")))


def says(room: Path) -> str:
    """Return the docstring of a room's `__init__`; "" if it has none."""
    path = room / "__init__.py"
    return ast.get_docstring(ast.parse(path.read_text())) or "" if path.exists() else ""


def files(room: Path) -> list[str]:
    """Return the names of the files in a room, without `__init__.py`."""
    return sorted(path.name for path in room.glob("*.py") if path.name != "__init__.py")


def tree() -> str:
    """Return the rooms as lines: name and first sentence, then the files."""
    lines = []
    for room in rooms():
        depth = len(room.relative_to(PACKAGE).parts)
        first = says(room).split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
        lines += wrapped(f"{room.name}/".ljust(16 - 2 * depth) + " " + first, depth)
        lines += wrapped(" ".join(files(room)), depth + 1)
    return "\n".join(lines)


def wrapped(text: str, depth: int) -> list[str]:
    """Return a text in lines that fit, each indented."""
    pad = "  " * depth
    return textwrap.wrap(text, WIDTH, initial_indent=pad, subsequent_indent=pad + "  ", drop_whitespace=True)


if __name__ == "__main__":
    print(tree())
