"""A trial of the words: functions drawn at random, as a reader meets them who has not seen the code.

    python -m tests.house.draw_functions SEED [COUNT]

prints the rooms with what their `__init__` says, then each function's signature and docstring (an override's is its
base's, as help() shows it) without its place; the
key follows after a line of dashes. A room and a function are well worded if a reader can tell where it lives and what
it does.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

from tests.house.rooms import PACKAGE, rooms, says

Function = tuple[str, str, str]  # place, signature, docstring


def functions(path: Path, said: Mapping[tuple[str, str], str] | None = None) -> list[Function]:
    """Return the functions and methods of a file, also inside of others, whose names then stand before theirs, with ""
    for a missing docstring. `said`: docstrings that an override inherits, (class, method) -> text."""
    drawn = []

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = owner
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
                place = f"{path.relative_to(PACKAGE.parent)}:{child.lineno}"
                signature = f"{owner}{child.name}({ast.unparse(child.args)}){returns}"
                inherited = (said or {}).get((owner.rstrip("."), child.name), "")
                drawn.append((place, signature, ast.get_docstring(child) or inherited))
                name = f"{owner}{child.name}()."
            visit(child, f"{child.name}." if isinstance(child, ast.ClassDef) else name)

    visit(ast.parse(path.read_text()), "")
    return drawn


def inherited_docstrings(paths: Iterable[Path]) -> dict[tuple[str, str], str]:
    """Return the docstring that each method without one has from a base class, as help() shows it: (class, method) ->
    text."""
    classes = {n.name: n for p in paths for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ClassDef)}

    def says_of(name: str, method: str) -> str:
        """Return the docstring of a method in the class `name` or the nearest of its bases, "" if none has one."""
        node = classes.get(name)
        if node is None:
            return ""
        own = [ast.get_docstring(m) for m in node.body if isinstance(m, ast.FunctionDef) and m.name == method]
        bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]
        return next(filter(None, [*own, *(says_of(base, method) for base in bases if base != name)]), "")

    methods = [(name, m.name) for name, c in classes.items() for m in c.body if isinstance(m, ast.FunctionDef)]
    return {(name, method): says_of(name, method) for name, method in methods}


def main(seed: int, count: int = 30) -> None:
    """Print the rooms, `count` functions drawn with `seed`, and where they are."""
    print(f"seed {seed}\n")
    for room in rooms():
        print(f"{room.relative_to(PACKAGE.parent)}/: {says(room)}")
    paths = sorted(PACKAGE.rglob("*.py"))
    said = inherited_docstrings(paths)
    every = [f for path in paths for f in functions(path, said)]
    drawn = Random(seed).sample(every, count)
    for number, (_, signature, docstring) in enumerate(drawn, 1):
        print(f"\n{number}. {signature}\n    {docstring or '(no docstring)'}")
    print("\n" + "-" * 80)
    for number, (place, signature, _) in enumerate(drawn, 1):
        print(f"{number}. {place} {signature.partition('(')[0]}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
