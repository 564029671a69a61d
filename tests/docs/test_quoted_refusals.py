"""Words that the page of troubleshooting quotes are words that the package says."""

from __future__ import annotations

import ast
import re

import pytest

from platform.config.fields import KEYS
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
TABLES = re.findall(r"^\| you see \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
QUOTED = [row for table in TABLES for row in re.findall(r"^\| `([^`]+)` \|", table, re.M)]
OF_PYTHON = ["__path__ attribute not found on 'platform'"]
NUMBER = r"\d+( [A-Z]+)?"  # with its noun; a text that is put together has {} in its place


@pytest.fixture(scope="module")
def said():
    """All texts in the package's sources, {} for what is put into them."""
    return {
        text
        for path in (ROOT / "platform").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := _text(node))
    }


def _text(node: ast.AST) -> str:
    """Return a text of a source, "" for what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "{}" for part in node.values)
    return ""


def is_said(quoted: str, said: set[str]) -> bool:
    """Return whether a refusal with these words can be said: KEY=VALUE of a key, and a constraint of the sources."""
    key, _, constraint = re.sub(NUMBER, "{}", quoted).rpartition(": ")
    first, *words = map(re.escape, constraint.split())
    whole = re.compile(" ".join([first, *(rf"({word}|{{}})" for word in words[:-1]), *words[-1:]]))
    return (not key or key.partition("=")[0] in KEYS) and any(map(whole.search, said))


def test_there_are_quotes():
    assert len(QUOTED) > 9 and set(OF_PYTHON) < set(QUOTED)


@pytest.mark.parametrize("quoted", [words for words in QUOTED if words not in OF_PYTHON])
def test_what_is_quoted_is_said(quoted, said):
    assert is_said(quoted, said)


@pytest.mark.parametrize("words", ["needs 1 CPU less", "cluster.memori=refuse: a worker needs", "is never divided by"])
def test_what_nothing_says_is_found(words, said):
    """Negative control."""
    assert not is_said(words, said)
