"""A module of the user's own that imports by a path of before ends in one line, which names the import of today."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from platform.config import moved_imports
from platform.config.extensions import import_user_modules
from tests.harness.commands import in_this_process

TABLE = {
    "platform.before": "platform.boundary.schema",
    "platform.before.Causal": "platform.api.Causal",
    "platform.before.within": "platform.boundary.terminal",
    "platform.plan.Spec": "platform.api.Spec",
}
IMPORTS = {  # as a user has written it -> what is to be written
    "from platform.before import Causal": "from platform.api import Causal",
    "from platform.before import Malformed, Span": "from platform.boundary.schema import Malformed, Span",
    "from platform.before import (\n    Causal,\n    Span as S,\n)":
        "from platform.api import Causal; from platform.boundary.schema import Span as S",
    "from platform.before import *": "from platform.boundary.schema import *",
    "from platform.before.within import visible": "from platform.boundary.terminal import visible",
    "import platform.before.within as terminal": "import platform.boundary.terminal as terminal",
    "from platform.plan import Spec": "from platform.api import Spec",  # the module is there, the name is not
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the user's module `mine`, which can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(moved_imports, "read_moved_paths", lambda: TABLE)
    importlib.invalidate_caches()
    yield lambda text: (tmp_path / "mine.py").write_text(text)
    sys.modules.pop("mine", None)


@pytest.mark.parametrize("written", IMPORTS)
def test_the_line_names_the_new_import(write, written):
    write(f"import os\n\n{written}\n")
    [line] = import_user_modules(["mine"])
    module = written.split()[1].removesuffix(" as")
    assert line == f"extend=mine: mine.py:3 imports {module}, which has moved; nearest legal: {IMPORTS[written]}"


@pytest.mark.parametrize(
    "written", ["import platform.nonesuch", "from platform.plan import nonesuch", "import nonesuch", "1 / 0"]
)
def test_another_error_is_told_as_it_is(write, written):
    write(written)
    [line] = import_user_modules(["mine"])
    assert line.startswith("extend=mine: cannot be imported ("), line


def test_the_command_is_refused_with_that_line(write, tmp_path):
    write("from platform.before import Causal\n")
    done = in_this_process("+experiment=gpt_quick", "extend=[mine]", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    [line] = done.stderr.splitlines()
    assert line.endswith("mine.py:1 imports platform.before, which has moved; nearest legal: from platform.api import "
                         "Causal")  # fmt: skip


def is_importable(path: str) -> bool:
    """Whether a module, or a name in one, can be imported."""
    module, _, name = path.rpartition(".")
    try:
        importlib.import_module(path)
        return True
    except ModuleNotFoundError:
        pass
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def test_the_table_says_where_all_is():
    """What has a row is not where it was, and is where the row says."""
    table = moved_imports.read_moved_paths()
    assert [path for path in table if is_importable(path)] == []
    assert [path for path in table.values() if not is_importable(path)] == []


def test_what_the_door_exports_is_named_there():
    """A name of a module that has moved has a row of its own if `platform.api` exports it."""
    from platform import api

    table = moved_imports.read_moved_paths()
    modules = {path: now for path, now in table.items() if not now.startswith("platform.api.")}
    assert all(now.rpartition(".")[2] in api.__all__ for now in table.values() if now not in modules.values())
    for name in api.__all__:
        home = getattr(getattr(api, name), "__module__", None)
        for old in (path for path, now in modules.items() if now == home):
            assert table.get(f"{old}.{name}") == f"platform.api.{name}", f"{old}.{name}"
