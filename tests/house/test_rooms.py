"""The tree can be held in the head: rooms are small, say what lives in them, and no name stands for two things."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.house.rooms import PACKAGE, ROOT, files, inside, rooms, says, tree

MOST = 11  # files of a room, and files and rooms of it together
LARGE = {"data": 15, "config": 13, "jobs": 12}  # rooms that hold more; these may only shrink
ROOMS = 18  # at the root, with at most ROOT_FILES beside them
ROOT_FILES = 7
LONGEST = 60  # lines of a function
TWICE = {"__main__.py"}  # names that say the same thing in every room


@pytest.mark.parametrize("room", rooms()[1:], ids=lambda room: str(room.relative_to(PACKAGE)))
def test_a_room_is_small_and_says_what_lives_there(room):
    assert len(files(room)) <= MOST
    first = says(room).split("\n\n")[0]
    assert 0 < len(first.splitlines()) <= 3
    assert len(files(room)) + len(inside(room)) <= LARGE.get(str(room.relative_to(PACKAGE)), MOST)


def test_the_root_is_small():
    assert len(inside(PACKAGE)) <= ROOMS and len(files(PACKAGE)) <= ROOT_FILES


def test_every_folder_with_code_is_a_room(tmp_path):
    code = {path.parent for path in PACKAGE.rglob("*.py")}
    assert code == set(rooms()) and [room for room in rooms() if not (room / "__init__.py").exists()] == []
    (tmp_path / "silent").mkdir()
    (tmp_path / "silent" / "a.py").touch()  # without an __init__, which import-linter does not see either
    assert rooms(tmp_path) == [tmp_path, tmp_path / "silent"] and says(tmp_path / "silent") == ""


def test_no_name_stands_for_two_files():
    names = Counter(name for room in rooms() for name in files(room) if name not in TWICE)
    assert [name for name, count in names.items() if count > 1] == []


def test_no_file_is_long():
    long = {f"{room.name}/{name}" for room in rooms() for name in files(room)
            if len((room / name).read_text().splitlines()) > 400}  # fmt: skip
    assert long == set()


def test_no_function_is_long():
    found = [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    functions = [(path, node) for path, node in found if isinstance(node, ast.FunctionDef)]
    assert len(functions) > 1000
    long = [f"{path.name}:{node.name}" for path, node in functions if (node.end_lineno or 0) - node.lineno >= LONGEST]
    assert long == []


def test_the_design_shows_the_tree():
    shown = (ROOT / "docs" / "design.md").read_text().partition("```\nplatform/")[2].partition("\n```")[0]
    assert f"platform/{shown}" == tree(), "`python -m tests.house.rooms` prints it"
