"""Figures of the tree that inform and forbid nothing; people judge what they mean. `make house` prints them."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house.rooms import PACKAGE, rooms

BLANK = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
PREPOSITIONS = frozenset("of by at in to for from with on as within without".split())
VAGUE = frozenset("found there here given own made wrong result res out tmp obj data item".split())
EMPTY_PREFIXES = frozenset("get do make handle process".split())


def code_lines(source: str) -> int:
    """Return how many lines of a source are neither blank, nor comment, nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in BLANK]
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - docstrings)


def import_lines(tree: ast.Module) -> int:
    """Return how many lines of a module its imports take."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or 0) - node.lineno + 1 for node in imports)


def functions(trees: list[ast.Module]) -> list[ast.FunctionDef]:
    """Return all functions and methods, without dunders."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")]


def vague_locals(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function assigns and that do not say what they hold."""
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored & VAGUE


def figures() -> Iterator[str]:
    """Yield the figures of the package, a line each."""
    paths: list[Path] = sorted(PACKAGE.rglob("*.py"))
    sources = [path.read_text() for path in paths]
    trees = [ast.parse(source) for source in sources]
    code = [code_lines(source) for source in sources]
    yield f"{len(paths)} files in {len(rooms())} folders, {sum(code):,} lines of code, {sum(code) // len(paths)} a file"
    yield f"{sum(map(import_lines, trees)):,} lines of imports"
    ideas = [(path, lines) for path, lines in zip(paths, code, strict=True) if not path.stem.startswith("__")]
    long = [path for path in paths if len(path.read_text().splitlines()) > 600]
    yield f"files of at most 60 lines of code: {sum(lines <= 60 for _, lines in ideas)}"
    yield f"files of more than 600 lines: {', '.join(str(path.relative_to(PACKAGE)) for path in long) or 'none'}"
    names = [node.name.strip("_") for node in functions(trees)]
    words = [name.split("_") for name in names]

    def share(count: int) -> str:
        return f"{count / len(names):.1%}"

    yield f"{len(names):,} functions, of which"
    yield f"  {share(sum(len(word) == 1 for word in words))} are one word"
    yield f"  {share(sum(bool({word[0], word[-1]} & PREPOSITIONS) for word in words))} begin or end with a preposition"
    yield f"  {share(sum(word[0].endswith('ed') for word in words))} begin with a participle"
    yield f"  {share(sum(word[0] in EMPTY_PREFIXES for word in words))} begin with {', '.join(sorted(EMPTY_PREFIXES))}"
    vague = [vague_locals(node) for node in functions(trees)]
    yield f"functions that assign `found`: {sum('found' in names for names in vague)}"
    yield f"functions that assign a name that says nothing ({', '.join(sorted(VAGUE))}): {sum(map(bool, vague))}"


if __name__ == "__main__":
    print("\n".join(figures()))
