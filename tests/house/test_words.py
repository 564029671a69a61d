"""One language: a docstring starts with a verb, or names what it is about; papers are named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house.language import parsed
from tests.house.rooms import PACKAGE, ROOT
from tests.house.verbs import VERBS

RIDDLES = frozenset(
    "Of By Than Those What Whether Who That It Without From Which Where When How As For To Some One With Until Between "
    "Before After This Each Whatever".split()
)
FILES = sorted(PACKAGE.rglob("*.py"))


def opening(docstring: str) -> str:
    """Return the first word of a docstring."""
    return docstring.split()[0].strip(".,:;`\"'")


def strange(source: str) -> list[str]:
    """Return a line per docstring that breaks the rules: `NAME: opens with WORD`."""
    breaches = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if not (docstring := ast.get_docstring(node)):
                continue
            word, name = opening(docstring), getattr(node, "name", "the module")
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if word in RIDDLES or (function and word not in VERBS):
                breaches.append(f"{name}: opens with {word}")
    return breaches


def test_docstrings_are_plain():
    breaches = {str(path.relative_to(ROOT)): strange(path.read_text()) for path in FILES}
    assert {path: lines for path, lines in breaches.items() if lines} == {}


def test_every_class_and_file_says_what_it_is_for():
    undescribed = {str(path.relative_to(ROOT)): silent(path.read_text()) for path in FILES}
    assert {path: names for path, names in undescribed.items() if names} == {}


def silent(source: str) -> list[str]:
    """Return the classes, wherever they are defined, and the module that have no docstring."""
    named = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef | ast.Module)]
    return [getattr(node, "name", "the module") for node in named if not ast.get_docstring(node)]


def test_a_silent_class_is_seen():
    assert silent('"""Doors."""\ndef f():\n  class A:\n    x = 1\nclass B:\n  """A door."""') == ["A"]


def test_papers_are_named():
    texts = [*FILES, *ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("conf/**/*.yaml")]
    numbered = [str(path) for path in texts if re.search(r"papers? 00\d|\bnotes/\w+\.md", path.read_text())]
    assert numbered == []


RECORDS = PACKAGE / "monitor" / "events.py"  # named like what they record: events.NAME
# Functions that do the same in two rooms: a reader who knows the one knows the other.
SAME = {
    "main": "the entry point of a command",
}


def defined(kind: type[ast.stmt], files: list[Path]) -> dict[str, list[str]]:
    """Return the top-level public names of the given kind, each with the files that define it."""
    files_by_name: dict[str, list[str]] = {}
    for path in files:
        for node in parsed(path.read_text()).body:
            if isinstance(node, kind) and not node.name.startswith("_"):
                files_by_name.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    return files_by_name


def test_no_name_has_two_meanings():
    classes = defined(ast.ClassDef, [path for path in FILES if path != RECORDS])
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
    functions = {name: paths for name, paths in defined(ast.FunctionDef, FILES).items() if len(paths) > 1}
    assert functions.keys() == SAME.keys(), functions


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Of one run."""',
        'def f():\n    """The seats."""',
        'class A:\n    """Those that remain."""',
        '"""What is left."""',
    ],
)
def test_a_riddle_is_seen(source):
    assert len(strange(source)) == 1
