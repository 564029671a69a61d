"""Imports in the user's own code of what the platform had under another path: what to write in their place."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb

_TABLE = Path(__file__).with_name("moved.yaml")


def read_moved_paths() -> dict[str, str]:
    """Read the table of modules, and names in modules, that have moved: the path that each had -> the one it has."""
    import yaml

    return yaml.safe_load(_TABLE.read_text()) or {}


def find_moved(error: BaseException | None) -> tuple[str, str] | None:
    """Find the import, by a path of before, with which the user's own code failed with `error`. Return its place and
    module, such as "my_module.py:3 imports platform.old", and the code in its place; None for any other error."""
    if not isinstance(error, ImportError) or not (error.name or "").startswith("platform."):
        return None
    path, line = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)][-1]
    moved = read_moved_paths()
    for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
        if isinstance(node, ast.Import | ast.ImportFrom) and node.lineno <= line <= (node.end_lineno or line):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            now = {within + part.name: _find_new_path(within + part.name, moved) for part in node.names}
            if any(old != new for old, new in now.items()):
                old = within[:-1] or next(old for old, new in now.items() if old != new)
                return f"{Path(path).name}:{line} imports {old}", _statement(node, now.values())
    return None


def _find_new_path(path: str, moved: dict[str, str]) -> str:
    """Return the path that a module of the platform, or a name in one, has now; `moved`: the rows of the table."""
    known, rest = path, ""
    while known and known not in moved:
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    return moved[known] + rest if known else path


def _statement(node: ast.Import | ast.ImportFrom, paths: Iterable[str]) -> str:
    """Write the imports of `node`, a statement of the user's own code, with `paths` for the ones that it has, in one
    line: names of the same module together."""
    aliases = (f" as {part.asname}" if part.asname else "" for part in node.names)
    parts = [(*path.rpartition(".")[::2], alias) for path, alias in zip(paths, aliases, strict=True)]
    if isinstance(node, ast.Import):
        return "import " + ", ".join(f"{module}.{name}{alias}" for module, name, alias in parts)
    modules = dict.fromkeys(module for module, _, _ in parts)
    names = {m: ", ".join(f"{name}{alias}" for module, name, alias in parts if module == m) for m in modules}
    return "; ".join(f"from {module} import {named}" for module, named in names.items())
