"""The table of docs/known-bugs.md; `python -m tests.known_bugs.page` writes it."""

from __future__ import annotations

from tests.harness.oracle import CONF
from tests.known_bugs.bugs import BUGS
from tests.known_bugs.known_bug import KnownBug

PAGE = CONF.parent / "docs" / "known-bugs.md"
HEAD = "| whose | what it was | our mutant | killed by | static check |\n|---|---|---|---|---|\n"


def row(bug: KnownBug) -> str:
    case = ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in bug.case.items())
    killer = f"`{bug.killer}`" + (f", {case}" if case else "")
    return f"| {bug.where or '-'} | {bug.what} | {bug.ours} | {killer} | {'sees it' if bug.line else '-'} |\n"


def table() -> str:
    return HEAD + "".join(map(row, BUGS))


def divided() -> tuple[str, str, str]:
    """Return the page in three parts: before the table, the table, after it."""
    text = PAGE.read_text()
    start = text.index("| whose |")
    end = text.index("\n\n", start) + 1
    return text[:start], text[start:end], text[end:]


if __name__ == "__main__":
    before, _, behind = divided()
    PAGE.write_text(before + table() + behind)
