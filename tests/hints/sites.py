"""Places in the platform's code that give a hint: what is legal instead, or what to go on with."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

from platform.boundary import refusals

PACKAGE = Path(refusals.__file__).parents[1]
WORDS = re.compile("nearest legal: |or go on with ")  # of a hint, where no function writes it
LONGEST = 90  # characters of a constraint in a site's name
CALLS = ("format_violation", "ConfigError")


@dataclass(frozen=True)
class Site:
    """Place that gives a hint: a call of `violation` with legal values, or a text with the WORDS of one. `pattern`: of
    the lines that a text makes, "" for a call."""

    name: str
    file: str
    first: int
    last: int
    pattern: str = ""


def sites() -> list[Site]:
    """Return all places that give a hint, but those of `refusals`, which writes all of them."""
    files = (path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "refusals.py")
    return [site for path in files for site in _sites_of(path)]


def _sites_of(path: Path) -> Iterator[Site]:
    name = str(path.relative_to(PACKAGE))
    tree = ast.parse(path.read_text())
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLS and len(node.args) > 3:
            what = f"{ast.unparse(node.args[0])}: {ast.unparse(node.args[2])}"
            yield Site(_short(name, what), str(path), node.lineno, node.end_lineno or node.lineno)
        elif (
            isinstance(node, ast.JoinedStr | ast.Constant)
            and id(node) not in inner
            and WORDS.search(text := _text(node))
        ):
            pattern = ".*".join(re.escape(part) for part in text.split("\0"))
            yield Site(_short(name, text.replace("\0", "*")), str(path), node.lineno, node.end_lineno or 0, pattern)


def _short(file: str, what: str) -> str:
    plain = " ".join(what.split())
    return f"{file} {plain[:LONGEST].rstrip()}" + ("..." if len(plain) > LONGEST else "")


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    """Return a text of the code, with a zero byte in the place of each value."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(p.value if isinstance(p, ast.Constant) and isinstance(p.value, str) else "\0" for p in parts)


@contextmanager
def reached() -> Iterator[set[tuple[str, int]]]:
    """Collect (file, line) of every call of `violation`, wherever it was imported, in the block."""
    sites: set[tuple[str, int]] = set()
    original = refusals.format_violation

    def recorded(*arguments: Any, **named: Any) -> str:
        frame: FrameType | None = sys._getframe(1)
        if frame and frame.f_code.co_name == "__init__":
            frame = frame.f_back
        while frame and frame.f_code.co_name.startswith("<"):  # a comprehension's, in Python 3.11
            sites.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        if frame:
            sites.add((frame.f_code.co_filename, frame.f_lineno))
        return original(*arguments, **named)

    modules = [refusals, *(m for name, m in list(sys.modules.items()) if name.startswith("platform."))]
    holders = [m for m in modules if isinstance(m, ModuleType) and vars(m).get("format_violation") is original]
    patches = [mock.patch.object(module, "format_violation", recorded) for module in holders]
    try:
        for patch in patches:
            patch.start()
        yield sites
    finally:
        for patch in patches:
            patch.stop()
        for module in list(sys.modules.values()):  # imported in the block
            if isinstance(module, ModuleType) and vars(module).get("format_violation") is recorded:
                module.violation = original  # type: ignore[attr-defined]


def hit(site: Site, calls: set[tuple[str, int]], lines: Mapping[str, Any] | set[str]) -> bool:
    """Return True if a site gave one of the hints that were collected. A text with no words of its own matches every
    line, so that no line tells of it."""
    if site.pattern:
        own_words = re.search(r"[a-z]{2}", site.pattern.replace(re.escape("nearest legal"), ""))
        return bool(own_words) and any(re.search(site.pattern, line) for line in lines)
    return any(file == site.file and site.first <= line <= site.last for file, line in calls)
