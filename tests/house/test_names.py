"""No name stands for two things: files and folders, private functions, methods."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict

from tests.house.language import parsed
from tests.house.rooms import PACKAGE, ROOT

FILES = sorted(PACKAGE.rglob("*.py"))
# What no function, parameter or local is called.
NAMELESS = {"found", "given", "made", "there", "here"}
ENTRIES = {"__init__", "__main__"}

# Names of a file and of a folder, or of two folders, that still stand for two things: this list may only shrink. A
# file may have the name of the room that it is the heart of, if it lies in it.
SHARED = {"attention"}

# Private names at the top of more than one file: how many there are. The number may only fall.
PRIVATE_TWICE = 92

# A method's name has an object: `read_header`, not `read`. Methods that are one of these words: the numbers may only
# fall.
BARE = {
    "begin": 16,
    "of": 14,
    "read": 32,
    "say": 4,
    "take": 7,
    "tell": 5,
    "told": 1,
    "write": 32,
}


def places() -> dict[str, list[str]]:
    """Return the names of files and folders, each with where it stands."""
    paths_by_name = defaultdict(list)
    for path in FILES:
        if path.stem not in ENTRIES:
            paths_by_name[path.stem].append(str(path.relative_to(PACKAGE)))
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        paths_by_name[folder.name].append(f"{folder.relative_to(PACKAGE)}/")
    return paths_by_name


def heart(paths: list[str]) -> bool:
    """Return True for a file in a room of its name, or in a room inside that one."""
    folders = [path for path in paths if path.endswith("/")]
    return len(paths) == 2 and len(folders) == 1 and all(path.startswith(folders[0]) for path in paths)


def test_no_name_stands_for_two_places():
    twice = {name: paths for name, paths in places().items() if len(paths) > 1 and not heart(paths)}
    assert twice.keys() <= SHARED, twice


def test_a_shared_name_is_seen():
    assert heart(["plan/", "plan/plan.py"]) and not heart(["answers/", "train/answers/"])
    assert not heart(["model/attention.py", "checkpoint/blocks/"])


def test_private_names_are_not_defined_twice():
    paths_by_name: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.startswith("_"):
                paths_by_name[node.name].add(str(path.relative_to(PACKAGE)))
    entries = {name for name, paths in paths_by_name.items() if all(path.endswith("__main__.py") for path in paths)}
    twice = {name for name, paths in paths_by_name.items() if len(paths) > 1} - entries  # entry points are built alike
    assert 0 < len(twice) <= PRIVATE_TWICE, f"{len(twice)}: {sorted(twice)}"


def methods(source: str) -> list[str]:
    """Return the names of the methods in a source, without underscores before them."""
    classes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef)]
    return [item.name.lstrip("_") for node in classes for item in node.body if isinstance(item, ast.FunctionDef)]


def test_a_method_s_name_has_an_object():
    count = Counter(name for path in FILES for name in methods(path.read_text()))
    assert {name: count[name] for name in BARE if count[name] > BARE[name]} == {}


def test_a_bare_method_is_seen():
    assert methods("class A:\n  def _read(self): ...\n  def read_header(self): ...") == ["read", "read_header"]


def test_a_local_says_what_it_holds():
    """In the package, its tests, benchmarks and examples: never `found`, `given`, `made`, `there`, `here`."""
    paths = [path for room in (PACKAGE.name, "tests", "benchmarks", "examples") for path in (ROOT / room).rglob("*.py")]
    vague = {str(path.relative_to(ROOT)): names for path in paths if (names := find_nameless(path.read_text()))}
    assert len(paths) > 1000 and vague == {}


def find_nameless(source: str) -> set[str]:
    """Return the names in a source that no value should have, of functions, parameters and locals; fields may."""
    nodes = list(ast.walk(parsed(source)))
    statements = [statement for c in nodes if isinstance(c, ast.ClassDef) for statement in c.body]
    fields = {id(field.target) for field in statements if isinstance(field, ast.AnnAssign)}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and id(n) not in fields}
    parameters = {n.arg for n in nodes if isinstance(n, ast.arg)}
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return (stored | parameters | functions) & NAMELESS


def test_a_local_that_says_nothing_is_seen():
    assert find_nameless("def find(here):\n  for made, n in here:\n    return [given for given in n]") == {
        "here", "made", "given",
    }  # fmt: skip
    assert find_nameless("class Link:\n  there: str\nlink.found = 1\nf(given=2)") == set()
