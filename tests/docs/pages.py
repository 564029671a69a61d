"""The pages that people read, the commands that they show, and the files that they tell people to write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
JOBS = [file for file in sorted((ROOT / "jobs").rglob("*")) if file.is_file()]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
LAUNCH = "python -m platform.launch "


class Typed(NamedTuple):
    """Command that a file tells people to type, and the lines that it shows below it."""

    file: str
    command: str
    shown: tuple[str, ...] = ()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of every block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def typed(page: Path) -> list[Typed]:
    """Return the commands of a page's console blocks, and whole commands of ours in its prose."""
    in_consoles = []
    for language, text in blocks(page):
        if language == "console":
            for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.M)[1:]:
                command, *shown = part.rstrip("\n").split("\n")
                in_consoles.append(Typed(page.name, re.sub(r" +", " ", command), tuple(shown)))
    spans = re.findall(r"`(python -m platform\.(?:launch|plan) [^`]*)`", prose(page))
    return in_consoles + [Typed(page.name, span) for span in spans if "NAME" not in span and "..." not in span]


def commands() -> list[Typed]:
    """Return every command once, with what is shown below it."""
    all_typed = [t for page in PAGES for t in typed(page)]
    return list({(t.command, t.shown): t for t in reversed(all_typed)}.values())[::-1]


def files() -> dict[str, str]:
    """Return path -> text of the files that pages tell people to write: a block whose first lines name its path in a
    comment, or what `cat FILE` shows."""
    named = {}
    for page in PAGES:
        for _, text in blocks(page):
            if path := re.match(r"(?:# @package _global_\n)?# ([\w/]+\.(?:yaml|py))\n", text):
                assert named.setdefault(path[1], text) == text, f"{page.name}: two texts of {path[1]}"
        for _, command, shown in typed(page):
            if command.startswith("cat "):
                named[command.removeprefix("cat ")] = "\n".join(shown) + "\n"
    return named
