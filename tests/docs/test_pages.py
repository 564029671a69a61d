"""Pages lead to each other, and what they name is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import FOLDERS, PAGES, README, ROOT, blocks, prose

MOST_WORDS = 1800  # that are read in one sitting, blocks of code not counted
SHORT = [
    *("design.md", "numerics.md", "runtime.md", "recovery.md", "contract.md"),  # how the platform is built
    *("clusters.md", "slurm.md", "kubernetes.md", "doctor.md"),  # where a run runs
]

# Every file of Python, by every end of its path: `controller.py`, `control/controller.py`, ...
SOURCES = {
    "/".join(path.relative_to(ROOT).parts[i:])
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    for i in range(len(path.relative_to(ROOT).parts))
}
PLACEHOLDERS = {"CONTRIBUTING.md": {"test_FILE.py"}}

OPTIONS = {  # Hydra group -> the page whose table has a row for each of its options
    "tensor": "layouts.md",
    "branch": "layouts.md",
    "pipeline": "pipelines.md",
    "cluster": "clusters.md",
    "experiment": "experiments.md",
    "data": "data.md",
    "preference": "preferences.md",
    "monitor": "watching.md",
}


def links(page: Path) -> list[Path]:
    """Return the files of ours that a page links to."""
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose(page))
    return [(page.parent / path).resolve() for path in targets]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path):
    text = prose(page)
    missing = [str(path) for path in links(page) if not path.exists()]
    for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        other = page.parent / path if path else page
        missing += [f"{path}#{anchor}"] * (other.exists() and anchor not in anchors(other))
    for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text):
        missing += [path] * (path.split("/")[0] in FOLDERS - {"runs"} and not (ROOT / path).exists())
    for path in re.findall(r"`([\w/]+\.py)`", text):  # inside of a room, such as `runtime/progress.py`, or alone
        missing += [path] * (path not in SOURCES | PLACEHOLDERS.get(page.name, set()))
    for path in re.findall(r"(?<![\w/])tests/[\w./-]*\w", text):  # several in one span
        missing += [path] * (not (ROOT / path).exists())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    missing += [f"make {name}" for name in re.findall(r"`make ([a-z-]+)`", text) if name not in targets]
    assert missing == []


HASH = r"\b\w+-[0-9a-f]{12}\b"  # a run directory's, of keys and versions that change


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_promises_the_hash_of_a_run_directory(page: Path):
    assert re.findall(HASH, page.read_text()) == [] and re.search(HASH, "runs/gpt_quick-1359144e05f4")


def test_a_file_that_has_moved_is_missed():
    """Negative control."""
    assert "control/former.py" in SOURCES and "forming/former.py" not in SOURCES


def test_every_page_can_be_reached():
    reached, ahead = set(), [README]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            ahead += links(page)
    assert set(PAGES) <= reached


def words(text: str) -> int:
    """Return the number of words: signs that stand alone, such as the bars of tables, are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


@pytest.mark.parametrize("name", SHORT)
def test_a_page_is_read_in_one_sitting(name: str):
    assert 300 < words(prose(ROOT / "docs" / name)) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_is_a_book(page: Path):
    """But references that are printed, each searched as one."""
    books = {
        "CHANGELOG.md": 800,
        "configuration.md": 10_000,
        "api.md": 5000,
        "papers.md": 5000,
        "predictions.md": 13_000,
    }
    most = books.get(page.name, 3000)
    assert len(page.read_text().split()) <= most


def test_the_pages_are_sorted():
    """docs/README.md leads to every page, under one of four kinds."""
    text = (ROOT / "docs" / "README.md").read_text()
    kinds = [title.partition(":")[0] for title in re.findall(r"^## (.*)$", text, re.M)]
    assert kinds == ["Tour", "Guides", "Reference", "Design"]
    assert {path for path in PAGES if path.parent.name == "docs"} <= {
        *links(ROOT / "docs" / "README.md"),
        ROOT / "docs" / "README.md",
    }


def test_words_are_counted():
    assert words("| `a b` | - |\n|---|---|\n| c, d |") == 4


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 160


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_says_its_language(page: Path):
    assert {language for language, _ in blocks(page)} <= {"", "console", "text", "yaml", "python", "rule"}


@pytest.mark.parametrize("group", OPTIONS)
def test_every_option_has_its_row(group: str):
    page = (ROOT / "docs" / OPTIONS[group]).read_text()
    _, _, rows = re.split(rf"^\| `(\+?){group}=` \|", page, maxsplit=1, flags=re.M)
    first_cells = re.findall(r"^\| ([^|]+)\|", rows.partition("\n\n")[0], re.M)
    options = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(options) == sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version and len(citation["references"]) == 4
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
