"""pyproject.toml says all that it should: each room's import order, no module left out, and every package imported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.house.language import parsed
from tests.house.rooms import PACKAGE, ROOT, files, inside

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LAYERS = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
MODULE_OF = {"hydra-core": "hydra", "pyyaml": "yaml", "lm-eval": "lm_eval", "wandb-workspaces": "wandb_workspaces",
             "protobuf": "google", "nvidia-ml-py": "pynvml"}  # fmt: skip
NEVER_RUN = {"_typeshed"}  # for type checkers


def contract(room: str) -> dict[str, Any]:
    """Return the layers contract inside a room."""
    return next(c for c in LAYERS if c.get("containers") == [room])


def order(room: str) -> dict[str, int]:
    """Return the rank of each module of a room: 0 for the topmost layer."""
    layers = enumerate(contract(room)["layers"])
    return {name.strip(): rank for rank, layer in layers for name in re.split("[|:]", layer)}


def test_every_layers_contract_is_exhaustive():
    assert [c["name"] for c in LAYERS if not c.get("exhaustive")] == []


def test_every_room_at_the_root_has_a_contract():
    contained = {room for c in LAYERS for room in c["containers"]}
    assert "platform" in contained
    assert {f"platform.{room.name}" for room in inside(PACKAGE)} - contained == set()


def test_rooms_inside_data_have_a_contract():
    contained = {room for c in LAYERS for room in c["containers"]}
    related = {f"platform.data.{room.name}" for room in inside(PACKAGE / "data")} - {"platform.data.parsers"}
    assert related <= contained, "parsers import nothing of ours"


def test_the_root_contract_names_every_module():
    named = {*order("platform"), *contract("platform")["exhaustive_ignores"]}
    assert named == {room.name for room in inside(PACKAGE)} | {name[:-3] for name in files(PACKAGE)}


def chains(text: str) -> list[list[set[str]]]:
    """Return the import orders that a text shows, as `{a, b} -> c -> ...` of at least four steps of rooms."""
    matches = re.findall(r"`((?:\{[\w, ]+\}|\w+)(?: -> (?:\{[\w, ]+\}|\w+)){3,})`", text)
    steps = [[set(re.findall(r"\w+", step)) for step in chain.split(" -> ")] for chain in matches]
    return [chain for chain in steps if set().union(*chain) <= order("platform").keys()]


def backward(chain: list[set[str]]) -> list[str]:
    """Return a line per pair of steps that the root contract orders the other way."""
    ranks = order("platform")
    pairs = zip(chain, chain[1:], strict=False)
    return [f"{a} -> {b}" for high, low in pairs for a in high for b in low if ranks[a] >= ranks[b]]


# A page may show an order of fewer rooms; these are the ones that pages leave out today, and may only shrink.
LEFT_OUT: set[str] = set()


def test_pages_show_the_order_of_the_contract():
    shown = [chain for page in ROOT.glob("docs/**/*.md") for chain in chains(page.read_text())]
    assert shown, "a page shows the order of imports"
    for chain in shown:
        assert backward(chain) == []
        assert order("platform").keys() - set().union(*chain) <= LEFT_OUT


def test_a_stale_order_is_seen():
    assert chains("`a -> b -> c -> d`") == [] and chains("`launch -> train`") == []
    (chain,) = chains("imports run `{api, doctor} -> launch -> train -> cluster -> plan`")
    assert backward(chain) == ["train -> cluster"]


def imported(source: str) -> Iterator[str]:
    """Yield the top-level packages that a source imports, anywhere in it."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def declared() -> set[str]:
    """Return the modules of the packages that pyproject.toml names, in any of its lists but `dev`."""
    extras = PROJECT["project"]["optional-dependencies"]
    lists = [PROJECT["project"]["dependencies"], *(extras[name] for name in extras if name != "dev")]
    names = {re.split(r"[\[<>=~! ]", line)[0].lower() for lines in lists for line in lines}
    return {MODULE_OF.get(name, name) for name in names}


def test_every_package_that_is_imported_is_declared():
    foreign = {name for path in PACKAGE.rglob("*.py") for name in imported(path.read_text())}
    ours = {"platform", "_platform_startup", *sys.stdlib_module_names}
    assert foreign - ours - declared() - NEVER_RUN == set()
    assert "torch" in foreign


RUNS = dict(re.findall(r"^\| (`platform/.*?`) \| `(.*?)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M))


def test_contributing_says_for_every_room_what_to_run():
    rows = {place.rstrip("/") for cell in RUNS for place in re.findall(r"`platform/([\w./]+)`", cell)}
    entries = {name for name in files(PACKAGE) if not name.startswith("_")}
    assert {room.name for room in inside(PACKAGE)} | entries == rows


@pytest.mark.parametrize("tests", RUNS.values())
def test_what_contributing_runs_is_there(tests):
    assert [path for path in tests.split() if not (ROOT / path).exists()] == []
