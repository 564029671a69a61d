"""A trial of the words: functions drawn at random, as a reader meets them who has not seen the code.

    python -m tests.house.draw_functions SEED [COUNT]

prints the rooms with what their `__init__` says, then each function's signature and docstring without its place; the
key follows after a line of dashes. A room and a function are well worded if a reader can tell where it lives and what
it does.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from random import Random

from tests.house.rooms import PACKAGE, rooms, says

Function = tuple[str, str, str]  # place, signature, docstring


def functions(path: Path) -> list[Function]:
    """Return the functions and methods of a file, also inside of others, with "" for a missing docstring."""
    found = []

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
                place = f"{path.relative_to(PACKAGE.parent)}:{child.lineno}"
                signature = f"{owner}{child.name}({ast.unparse(child.args)}){returns}"
                found.append((place, signature, ast.get_docstring(child) or ""))
            visit(child, f"{child.name}." if isinstance(child, ast.ClassDef) else owner)

    visit(ast.parse(path.read_text()), "")
    return found


def main(seed: int, count: int = 30) -> None:
    """Print the rooms, `count` functions drawn with `seed`, and where they are."""
    print(f"seed {seed}\n")
    for room in rooms()[1:]:
        print(f"{room.relative_to(PACKAGE.parent)}/: {says(room)}")
    every = [f for path in sorted(PACKAGE.rglob("*.py")) for f in functions(path)]
    drawn = Random(seed).sample(every, count)
    for number, (_, signature, docstring) in enumerate(drawn, 1):
        print(f"\n{number}. {signature}\n    {docstring or '(no docstring)'}")
    print("\n" + "-" * 80)
    for number, (place, signature, _) in enumerate(drawn, 1):
        print(f"{number}. {place} {signature.partition('(')[0]}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
