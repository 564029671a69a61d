"""Rules of the language of docstrings, each a function of a source: whole sentences, not the first word only.

    python -m tests.house.language [RULE]

prints how often each rule is broken, or where one is broken, worst files first.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from tests.house.rooms import PACKAGE

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module

# A relative clause as the subject of a sentence: it opens with one of these words.
RELATIVE = r"(?:Those|What|Who|Whoever|Whatever|Whichever|Whom|Whose|That (?:of|which|is)|The one (?:that|which))\b"
# Words of a dialect of our own, where the field says: report, print, no rank, elements that, ...
DIALECT = (
    r"\b(?:tells?|telling|told|nobody|somebody|whoever|whatever|those (?:that|of|which|who|whose)|that of|"
    r"(?:what|who) (?:is|are|was))\b"
)
# Words with which a note on a parameter or field is no noun phrase.
NO_NOUN = r"(?:of|those|what|who|whose|which|whether|by|where|how|as|to|from|than|that|so|for|with|because)\b"
NOTE = re.compile(r"^ *(?:[a-z_]\w*, )*[a-z_]\w* {2,}(\S.*)$|`[a-z_]\w*`: (\S[^;]*)", re.M)
SHORT = 8  # lines of a function without its docstring: one line says what it does
LONG = 4  # lines from which a function has a docstring


def sentences(docstring: str) -> list[str]:
    """Return the sentences of a docstring."""
    return re.split(r"(?<=[.;:])\s+|\n\s*\n", docstring.strip())


def documented(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and docstring of everything in a source that has one."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, Documented) and (docstring := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), docstring


@cache
def parsed(source: str) -> ast.Module:
    """Return the syntax tree of a source, parsed once for all rules."""
    return ast.parse(source)


def relative_subjects(source: str) -> Iterator[str]:
    """Yield sentences whose subject is a relative clause."""
    for name, docstring in documented(source):
        yield from (f"{name}: {s}" for s in sentences(docstring) if re.match(RELATIVE, s))


def dialect(source: str) -> Iterator[str]:
    """Yield sentences that use a word of our own dialect."""
    for name, docstring in documented(source):
        yield from (f"{name}: {s}" for s in sentences(docstring) if re.search(DIALECT, s, re.I))


def notes_without_noun(source: str) -> Iterator[str]:
    """Yield notes on parameters and fields that are no noun phrases."""
    for name, docstring in documented(source):
        notes = NOTE.finditer(docstring)
        yield from (f"{name}: {note[0].strip()}" for note in notes if re.match(NO_NOUN, note[1] or note[2], re.I))


def functions(source: str) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Yield the functions of a source, each with its class; functions inside functions are their business."""

    def within(body: list[ast.stmt], owner: ast.ClassDef | None) -> Iterator[tuple[Function, ast.ClassDef | None]]:
        for node in body:
            if isinstance(node, Function):
                yield node, owner
            elif isinstance(node, ast.ClassDef):
                yield from within(node.body, node)
            elif isinstance(node, ast.If | ast.Try | ast.With):
                yield from within(node.body, owner)

    return within(parsed(source).body, None)


def lines(node: Function) -> int:
    """Return how many lines a function has without its docstring."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return total
    said = node.body[0]
    return total - ((said.end_lineno or said.lineno) - said.lineno + 1)


def long_docstrings(source: str) -> Iterator[str]:
    """Yield short functions whose docstring is longer than a line."""
    for node, _ in functions(source):
        if lines(node) < SHORT and "\n" in (ast.get_docstring(node) or ""):
            yield node.name


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return the classes of the package: the names of their bases, and of their methods."""
    known_classes: dict[str, tuple[set[str], set[str]]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                methods = {item.name for item in node.body if isinstance(item, Function)}
                known = known_classes.get(node.name, (set(), set()))
                known_classes[node.name] = (known[0] | bases, known[1] | methods)
    return known_classes


def overrides(name: str, bases: set[str]) -> bool:
    """Return True if a class with these bases inherits a method of this name, or has a base that is not ours."""
    plain = {"Protocol", "NamedTuple", "Generic", "ABC", "object", "Enum", "Exception"}
    for base in bases - plain:
        if base not in classes():
            return True
        above, methods = classes()[base]
        if name in methods or overrides(name, above - {base}):
            return True
    return False


def undocumented(source: str) -> Iterator[str]:
    """Yield functions of more than three lines, no overrides, that have no docstring."""
    for node, owner in functions(source):
        special = node.name.startswith("__") and node.name.endswith("__")
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in owner.bases} if owner else set()
        if ast.get_docstring(node) is None and lines(node) >= LONG and not special and not overrides(node.name, bases):
            yield f"{owner.name}.{node.name}" if owner else node.name


def checkers(source: str) -> Iterator[str]:
    """Yield checkers with another name than their kind has: `check_*` raises and returns nothing, `violations_of_*`
    returns or yields what is wrong."""
    for node, _ in functions(source):
        returns = ast.unparse(node.returns) if node.returns else "None"
        name = node.name.lstrip("_")
        lists = "list[str]" in returns or "Iterator[str]" in returns
        if lists and re.match("check|wrong|mistakes|refus", name):
            yield f"{node.name} -> {returns}: violations_of_*"
        elif name.startswith("violations_of") and returns == "None":
            yield f"{node.name} -> {returns}: check_*"


RULES: dict[str, Callable[[str], Iterator[str]]] = {
    "relative_subjects": relative_subjects,
    "dialect": dialect,
    "notes_without_noun": notes_without_noun,
    "long_docstrings": long_docstrings,
    "undocumented": undocumented,
    "checkers": checkers,
}


def broken(rule: str) -> dict[str, list[str]]:
    """Return where a rule is broken: the files of the package, each with its lines."""
    breaches = {str(p.relative_to(PACKAGE)): list(RULES[rule](p.read_text())) for p in sorted(PACKAGE.rglob("*.py"))}
    return {path: lines for path, lines in breaches.items() if lines}


def main(rule: str = "") -> None:
    """Print how often each rule is broken, or where one is."""
    for name in [rule] if rule else RULES:
        breaches = broken(name)
        print(f"{name}: {sum(map(len, breaches.values()))} in {len(breaches)} files")
        counts = Counter({path: len(lines) for path, lines in breaches.items()})
        for path, count in counts.most_common() if rule else ():
            print(f"{path}: {count}", *(f"    {line}" for line in breaches[path]), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
