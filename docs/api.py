"""Renders docs/api.md: what `platform.api` exports, with signatures and docstrings as they stand in the source.

python -m docs.api
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from platform import api

HEAD = (
    "# The Python API\n\n[Own code](own-code.md) shows it at work. Classes with many methods are shown without them. "
    "(`python -m docs.api` prints this page.)\n"
)
CODE = (">>> ", "    ")  # begins a paragraph of code in a docstring
UNSAID = {"FILES", "PLAIN", "Rows"}  # values, which have no docstring
MOST_METHODS = 6  # of a class that are shown; those with more do the platform's own work


def sections() -> dict[str, list[str]]:
    """Return title -> exported names: what leads runs, what registers code, and what that code is built from."""
    names = [name for name in api.__all__ if name not in UNSAID]
    leads = [name for name in names if getattr(api, name).__module__ in (api.__name__, "platform.cluster.callbacks")]
    registers = [name for name in names if name.startswith("register_") or name == "key"]
    rest = [name for name in names if name not in leads + registers]
    return {"Runs": leads, "Code of your own": registers, "Building blocks": rest}


def render_text(docstring: str) -> str:
    """Return a docstring as Markdown: paragraphs on one line each, code in blocks."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    blocks = [f"```python\n{textwrap.dedent(text)}\n```" if text.startswith(CODE) else " ".join(text.split())
              for text in paragraphs]  # fmt: skip
    return "\n\n".join(blocks).replace("\n```\n\n```python\n", "\n\n")


def read_declaration(value: Any) -> ast.ClassDef | ast.FunctionDef:
    """Return the syntax tree of a class or function, whose texts are those of its source under any Python."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(tree, ast.ClassDef | ast.FunctionDef)
    return tree


def render_signature(function: ast.FunctionDef, name: str) -> str:
    """Return the line that declares a function, under a name of its own, without `self`."""
    arguments = function.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    return f"{name}({ast.unparse(arguments)}){returns}"


def render_members(tree: ast.ClassDef, name: str) -> Iterator[str]:
    """Yield the lines of a class's block of code: its fields, how it is made, and its methods if few."""
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    shown = methods if len(methods) <= MOST_METHODS else []
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            yield f"{name}.{node.target.id}: {ast.unparse(node.annotation)}"
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield render_signature(node, name)
        elif isinstance(node, ast.FunctionDef) and node in shown:
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            line = render_signature(node, f"{name}.{node.name}")
            yield line.replace("() -> ", ": ") if is_property else line


def render_entry(name: str) -> str:
    """Return the part of the page on an exported name: how it is called, and what its docstring says."""
    value = getattr(api, name)
    tree = read_declaration(value)
    lines = [render_signature(tree, name)] if isinstance(tree, ast.FunctionDef) else [*render_members(tree, name)]
    code = "\n".join(["```python", *lines, "```", ""]) + "\n" if lines else ""
    return f"### {name}\n\n{code}{render_text(inspect.getdoc(value) or '')}\n"


def render_page() -> str:
    """Return the text of docs/api.md."""
    parts = [HEAD, render_text(api.__doc__ or "") + "\n"]
    for title, names in sections().items():
        parts += [f"## {title}\n", *map(render_entry, names)]
    return "\n".join(parts)


if __name__ == "__main__":
    print(render_page(), end="")
