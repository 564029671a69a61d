"""The tree can be read: it has two levels of rooms, which say what lives in them, and no function is long."""

from __future__ import annotations

import ast
import re

import pytest

from tests.house.language import parsed
from tests.house.rooms import PACKAGE, ROOT, rooms, says, tree

LEVELS = 2  # of rooms; how many files a room has, and lines a file, is for people to judge (`make house`)
LONGEST = 60  # lines of a function


@pytest.mark.parametrize("room", rooms()[1:], ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_room_says_what_lives_there(room):
    first = says(room).split("\n\n")[0]
    assert 0 < len(first.splitlines()) <= 3
    assert len(room.relative_to(PACKAGE).parts) <= LEVELS
    order = re.split(r"[,.\s]+", says(room).partition("Its files in reading order: ")[2].strip("."))
    assert sorted(order) == sorted(path.stem for path in room.glob("*.py") if not path.stem.startswith("__"))


def test_every_folder_with_code_is_a_room(tmp_path):
    code = {path.parent for path in PACKAGE.rglob("*.py")}
    assert code == set(rooms()) and [room for room in rooms() if not (room / "__init__.py").exists()] == []
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "a.py").touch()  # without an __init__, which import-linter does not see either
    assert rooms(tmp_path) == [tmp_path, tmp_path / "silent"] and says(tmp_path / "silent") == ""


def test_no_function_is_long():
    nodes = [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(parsed(path.read_text()))]
    functions = [(path, node) for path, node in nodes if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 1000
    long = [f"{path.name}:{node.name}" for path, node in functions if (node.end_lineno or 0) - node.lineno >= LONGEST]
    assert long == []


def test_the_design_shows_the_tree():
    shown = (ROOT / "docs" / "design.md").read_text().partition("```\nplatform/")[2].partition("\n```")[0]
    assert f"platform/{shown}" == tree(), "`python -m tests.house.rooms` prints it"
