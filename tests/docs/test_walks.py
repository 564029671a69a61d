"""The walks of docs/design.md: every hop names a file that is there and something that it defines."""

from __future__ import annotations

import ast
import re

import pytest

from tests.conftest import ROOT

WALKS = (ROOT / "docs" / "design.md").read_text().partition("### Four walks")[2].partition("**How `plan/`")[0]
LONGEST = 6  # hops: more cannot be remembered


def defined(path: str) -> set[str]:
    """Return the functions, classes and `Class.method`s of a file."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def hops() -> list[tuple[str, str]]:
    """Return (file, name) for every name that a walk gives right after its file; the name is "" where there is none."""
    return re.findall(r"`(platform/[\w/]+\.py|conf/[\w/]+\.yaml)`(?: `([\w.]+)`)?", WALKS)


@pytest.mark.parametrize(("path", "name"), hops())
def test_a_hop_is_there(path, name):
    assert (ROOT / path).exists()
    assert not name or name in defined(path)


def test_the_walks_are_short():
    walks = re.split(r"^\*\*.*\*\*$", WALKS, flags=re.M)[1:]
    assert len(walks) == 4
    assert all(1 < len(re.findall(r"^\d\. ", walk, re.M)) <= LONGEST for walk in walks)


def test_a_stale_hop_is_seen():
    assert "Controller.run" in defined("platform/cluster/control/controller.py")
    assert "Controller.walk" not in defined("platform/cluster/control/controller.py")
