"""Ray's private modules may change with any version: whatever touches them goes on without."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.language import parsed
from tests.house.rooms import PACKAGE

PRIVATE = ("ray._private", "ray._raylet")


def name_of(node: ast.AST) -> str:
    """Return the dotted name that an expression or import mentions, "" for none."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.ImportFrom):
        return node.module or ""
    return node.names[0].name if isinstance(node, ast.Import) else ""


def guards(node: ast.AST) -> bool:
    """Return True for `try: ... except` and `with suppress(...)`."""
    if isinstance(node, ast.Try):
        return bool(node.handlers)
    calls = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
    return any(isinstance(call, ast.Call) and name_of(call.func) == "suppress" for call in calls)


def uses(source: str) -> list[tuple[int, bool]]:
    """Return line and guardedness of everything in a source that touches a private module of Ray."""
    private_uses = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if name_of(node).startswith(PRIVATE):
            private_uses.append((node.lineno, guarded))  # type: ignore[attr-defined]
            return
        guarded = guarded or guards(node)
        for child in ast.iter_child_nodes(node):
            visit(child, guarded)

    visit(parsed(source), False)
    return private_uses


def test_every_use_is_guarded():
    private_uses = {path: uses(path.read_text()) for path in PACKAGE.rglob("*.py")}
    bare = [
        f"{Path(path).name}:{line}" for path, lines in private_uses.items() for line, guarded in lines if not guarded
    ]
    assert bare == [] and sum(map(len, private_uses.values())) >= 3


@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.state",
        "from ray._private import ray_constants",
        "x = import_module('ray._raylet')",
        "def f():\n    return ray._private.worker.global_worker",
        "try:\n    pass\nfinally:\n    ray._private.x",
        "with open('x'):\n    ray._private.x",
    ],
)
def test_a_bare_use_is_seen(source):
    assert [guarded for _, guarded in uses(source)] == [False]


def test_a_guarded_use_is_seen():
    guarded = "try:\n    ray._private.x\nexcept Exception:\n    pass\nwith suppress(AttributeError):\n    ray._raylet.y"
    assert [guarded for _, guarded in uses(guarded)] == [True, True]
