"""docs/architecture.svg: the picture is what the imports of the package draw."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from docs import architecture
from docs.architecture import ROOMS, arrows, draw, imports
from tests.house.rooms import PACKAGE


def test_the_picture_is_drawn_from_the_imports():
    assert architecture.PICTURE.read_text() == draw(imports()), "`python -m docs.architecture` draws it"


def test_every_room_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(ROOMS) == folders | {"commands"}
    with pytest.raises(AssertionError, match="garden"):
        draw(imports() | {("garden", "plan")})


def test_an_import_is_an_arrow():
    """Negative control: another import is another picture, and one that follows from two others is none."""
    pairs = imports()
    assert "runtime imports data" in draw(pairs | {("runtime", "data")})
    edges = arrows(pairs)
    assert ("cluster", "train") in edges and ("train", "runtime") in pairs and ("train", "runtime") not in edges
    assert draw(pairs - {("cluster", "train")}) != draw(pairs)


def test_imports_are_found_at_any_depth(tmp_path):
    for room, text in {
        "data": "def read():\n    from platform.status.seen_run import Run\n",
        "train": "from platform import data\nimport platform.plan.rule\nimport torch\n",
    }.items():
        (tmp_path / room).mkdir()
        (tmp_path / room / "file.py").write_text(text)
        (tmp_path / room / "__main__.py").write_text("import platform.report.page\n")
    assert imports(tmp_path) == {("data", "status"), ("train", "data"), ("train", "plan")}


def test_the_picture_is_well_formed_and_shown():
    words = [text.text for text in ElementTree.parse(architecture.PICTURE).iter() if text.tag.endswith("text")]
    assert {"Plan", "The driver plans", "Workers execute", "The journal", "The page"} <= set(words)
    assert "](architecture.svg)" in (architecture.ROOT / "docs" / "design.md").read_text()
    assert "](docs/architecture.svg)" in (architecture.ROOT / "README.md").read_text()
