"""The walks of docs/walks.md: the page shows the files that make the walk's value, as two traced runs show them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.conftest import ROOT
from tests.house import walk_steps

PAGE = (ROOT / "docs" / "walks.md").read_text()
TABLE = yaml.safe_load((ROOT / "tests" / "docs" / "walks.yaml").read_text())
LONGEST = 20  # files


@dataclass(frozen=True)
class Walk:
    """A walk, as tests/docs/walks.yaml describes it: a `run` and its other `beginning` (tests/house/walked_runs.py),
    the functions (FILE:FUNCTION) between which it lies, whether `arrays` alone are followed, all but them, or both
    (None), and FILE or FILE:FUNCTION -> why it is left out."""

    run: str
    beginning: str
    starts: str
    ends: str
    arrays: bool | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


WALKS = {title: Walk(**keys) for title, keys in TABLE["walks"].items()}
LEFT_OUT: dict[str, str] = TABLE["left_out"]  # in every walk
CARRIERS = frozenset(TABLE["carriers"])


class PageWalk(NamedTuple):
    """Walk as the page shows it: its `hops` (file, a name in it), the files that are `handing_on`, and the numbers of
    both as its `counts` say them."""

    hops: list[tuple[str, str]]
    handing_on: list[str]
    counts: tuple[int, int]


def read_page(page: str) -> dict[str, PageWalk]:
    """Return the walks of a page by their titles."""
    parts = re.split(r"^\*\*(.+?)\.\*\* ", page, flags=re.M)[1:]
    walks = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        counts = re.search(r" (\d+) files; (\d+) more hand it on\.$", text, re.M)
        line = re.search(r"^Handed on as it is by (.+)\.$", text, re.M)
        assert counts and line, title
        hops = re.findall(r"^\d+\. `(platform/[\w/]+\.py)` `([\w.]+)`: .+\.$", text, re.M)
        handing_on = re.findall(r"`(platform/[\w/]+\.py)`", line[1])
        walks[title] = PageWalk(hops, handing_on, (int(counts[1]), int(counts[2])))
    return walks


@cache
def defined(path: str) -> set[str]:
    """Return the functions, classes and `Class.method`s of a file, with functions within functions."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {node.name} | {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return names


def list_faults(page: str) -> list[str]:
    """List what is wrong with a page: counts, limits, beginnings and ends, and names that are not in the code."""
    walks, faults = read_page(page), []
    if list(walks) != list(WALKS):
        faults.append(f"not these walks: {list(walks)}")
    for title in walks.keys() & WALKS.keys():
        (hops, handing_on, counts), walk = walks[title], WALKS[title]
        files = [file for file, _ in hops]
        if not 0 < len(hops) <= LONGEST:
            faults.append(f"{title}: {len(hops)} files")
        if counts != (len(hops), len(handing_on)) or len({*files, *handing_on}) != sum(counts):
            faults.append(f"{title}: counts {counts}")
        first, last = (point.split(":")[0] for point in (walk.starts, walk.ends))
        if files[0] != first or (last != first and files[-1] != last):  # each file is shown once
            faults.append(f"{title}: from {files[0]} to {files[-1]}")
        if left_out := {*files, *handing_on} & {*LEFT_OUT, *walk.left_out}:
            faults.append(f"{title}: left out, but shown: {sorted(left_out)}")
        unknown = [hop for hop in [*hops, *((file, "") for file in handing_on)] if not is_defined(*hop)]
        faults += [f"{title}: not in the code: {' '.join(hop)}" for hop in unknown]
    return faults


def is_defined(path: str, name: str = "") -> bool:
    """Tell whether there is a file, and in it a function or class of this name. Of a function in others (`<locals>`)
    the outermost one counts."""
    return (ROOT / path).is_file() and (not name or name.partition(".<locals>")[0] in defined(path))


def test_the_page_agrees_with_the_code():
    assert list_faults(PAGE) == []


@pytest.mark.parametrize(("old", "new", "fault"), [
    ("`LocalStorage.read`", "`LocalStorage.gone`", "not in the code"),
    ("`platform/plan/rule.py`", "`platform/plan/gone.py`", "not in the code"),
    (" 20 files;", " 19 files;", "counts"),
    ("1. `platform/boundary/local_files.py`", "1. `platform/boundary/storage.py`", "from "),
    ("\nHanded on", "21. `platform/api.py` `train`: does it.\nHanded on", "21 files"),
    ("A checkpoint block", "A block", "not these walks"),
    ("as it is by `", "as it is by `platform/runtime/progress.py`, `", "left out, but shown"),
])  # fmt: skip
def test_a_page_that_does_not_agree_is_noticed(old, new, fault):
    assert any(fault in line for line in list_faults(PAGE.replace(old, new, 1)))


def test_what_the_table_names_is_there():
    for walk in WALKS.values():
        for point in (walk.starts, walk.ends):
            assert is_defined(*point.split(":")), point
    for entries in (LEFT_OUT, *(walk.left_out for walk in WALKS.values())):
        for entry, reason in entries.items():
            path, _, name = entry.partition(":")
            assert len(reason.split()) >= 3
            assert is_defined(path, name), entry
    assert all(is_defined(path) for path in CARRIERS)
    assert all(not LEFT_OUT.keys() & walk.left_out.keys() for walk in WALKS.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], walk_steps.Notes]:
    """Return the notes of all runs, by run and beginning. All of one kind run in one folder, as its path is a value.
    With TRACED_NOTES=FOLDER in the environment the notes of an earlier test are read there, or else left there."""
    kept = Path(os.environ.get("TRACED_NOTES") or tmp_path_factory.mktemp("notes"))
    folder = tmp_path_factory.mktemp("walks")
    wanted = {(walk.run, beginning) for walk in WALKS.values() for beginning in ("same", "again", walk.beginning)}
    for run, beginning in sorted(wanted):
        if not (notes := kept / f"{run}-{beginning}").exists():
            command = [sys.executable, "-m", "tests.house.walked_runs", str(folder / run), run, beginning]
            finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
            assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
            shutil.copytree(folder / run / "notes", notes)
    return {key: walk_steps.read_notes(kept / "-".join(key)) for key in wanted}


def follow_value(walk: Walk, runs: Mapping[tuple[str, str], walk_steps.Notes]) -> list[walk_steps.Step]:
    """Return the steps of a walk from its beginning to its end, with those that are left out. The end is a step that
    makes something: it takes the value, even as it is."""
    same, again, other = (
        walk_steps.end_notes(runs[walk.run, beginning], walk.ends) for beginning in ("same", "again", walk.beginning)
    )
    differences = walk_steps.keep_differences(same, again, other)
    steps = walk_steps.list_steps(walk_steps.cut_notes(differences, walk.starts, walk.ends, same), arrays=walk.arrays)
    return [*steps, walk_steps.Step(*walk.ends.split(":"), makes=True)]


def drop_left_out(steps: list[walk_steps.Step], left_out: Mapping[str, str]) -> list[walk_steps.Step]:
    """Return those of the steps that no entry of `left_out` names."""
    return [step for step in steps if step.file not in left_out and f"{step.file}:{step.name}" not in left_out]


@pytest.mark.full  # it starts twelve runs, which take minutes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", WALKS)
def test_the_page_shows_the_files_that_make_the_value(title, runs):
    walk, shown = WALKS[title], read_page(PAGE)[title]
    every = follow_value(walk, runs)
    steps = drop_left_out(every, {**LEFT_OUT, **walk.left_out})
    makers: dict[str, list[str]] = {}
    for step in steps:
        if step.makes:
            makers.setdefault(step.file, []).append(step.name)
    files = dict.fromkeys(step.file for step in steps)
    print(f"{title}: {len(makers)} files", *(f"  {file} {names}" for file, names in makers.items()), sep="\n")
    print("  handed on by", *(file for file in files if file not in makers))
    assert [file for file, _ in shown.hops if file not in CARRIERS] == [file for file in makers if file not in CARRIERS]
    assert {*shown.handing_on} - CARRIERS == files.keys() - makers.keys() - CARRIERS
    assert files.keys() <= {*shown.handing_on, *(file for file, _ in shown.hops)} | CARRIERS
    for file, name in shown.hops:
        assert file in CARRIERS or any(f"{maker}.".startswith(f"{name}.") for maker in makers[file]), (file, name)
    seen = {step.file for step in every} | {f"{step.file}:{step.name}" for step in every}
    assert walk.left_out.keys() <= seen, "left out, and not met"
