"""Files by name: the same as the standard library's glob finds, within a bound, and none that is a pipe or a device."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from platform.boundary.local_files import find_protocol_fault
from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import data_files
from platform.data.data_checks import violations_of_sources
from platform.data.data_files import find_data_files

NAMES = st.sampled_from(["a", "b", "a-b", ".h", "a.txt", "b.txt", ".h.txt", "[x]"])
PARTS = st.sampled_from(["a", "b", "*", "**", "a*", "*.txt", ".*", "[ab]", "?.txt", "..", "a-b", "[[]x]"])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("trees")


@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=4), max_size=12),
    st.lists(PARTS, min_size=1, max_size=4),
    st.booleans(),
    st.lists(st.tuples(NAMES, NAMES), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_a_pattern_names_the_files_that_glob_finds(place, files, parts, absolute, links):
    root = place / str(len(os.listdir(place)))
    root.mkdir()
    for file in files:
        path = root.joinpath(*file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError:
            continue  # a file, where a folder is wanted
    for name, other in links:
        if not (root / name).exists() and (root / other).is_dir() and name != other:
            (root / name).symlink_to(root / other)
    pattern = "/".join(parts)
    before = os.getcwd()
    os.chdir(root)
    try:
        wanted = str(root / pattern) if absolute else pattern
        paths = data_files._glob_paths(Path(wanted))
        assert [p for p in paths if p.is_file()] == sorted(
            {Path(p) for p in glob.glob(wanted, recursive=True) if os.path.isfile(p)}
        )
    finally:
        os.chdir(before)


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A folder with more names than are looked at, and a link that leads in circles."""
    monkeypatch.setattr(data_files, "MOST", 200)
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(150):
        (folder / f"{i}.txt").touch()
    (folder / "again").symlink_to(folder)
    return folder


@pytest.mark.parametrize("pattern", ["**", "**/*.txt", "**/none*", "*/*/*", "again/again/**/x"])
def test_a_listing_without_end_is_refused(many, pattern):
    with pytest.raises(ConfigError, match="^data.path=[^:]*: more than 200 files and folders are there; name fewer"):
        find_data_files("data.path", str(many / pattern))


def test_a_folder_of_too_many_files_is_refused(many):
    assert len(find_data_files("data.path", str(many))) == 150
    for i in range(60):
        (many / f"more-{i}.txt").touch()
    with pytest.raises(ConfigError, match="more than 200 files and folders"):
        find_data_files("data.path", str(many))


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "url",
    ["file://{0}/pipe", "local://{0}/link", "zip://x.txt::file://{0}/pipe", "zip://x.txt::{0}/link",
     "simplecache::file://{0}/pipe", "simplecache::zip://x::local://{0}/pipe", "tar://x::file:{0}/pipe",
     "zip://x::file:///dev/zero", "filecache::zip://*::/dev/zero", "file:///dev/zero"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["text", "tokens", "pairs", "instructions"])
def test_pipes_and_devices_are_refused_under_any_url(pipe, url, kind):
    violations = violations_of_sources(Data(kind=kind, path=url.format(pipe), validation=0.0), vocab=400)
    assert violations and "is a pipe or a device, and a regular file or a folder is needed" in violations[0]
    assert violations[0].startswith("data.path=")
    assert "pipe or a device" in find_protocol_fault(url.format(pipe), writing=False)


@pytest.mark.parametrize("kind", ["text", "tokens", "pairs", "instructions"])
def test_pipes_and_devices_are_refused_by_path(pipe, kind):
    for path in (pipe / "pipe", pipe / "link", Path("/dev/zero")):
        [line] = violations_of_sources(Data(kind=kind, path=str(path), validation=0.0), vocab=400)
        assert line == f"data.path={path}: a pipe or a device, and a regular file is needed"


def test_what_is_there_is_read_through_a_chain(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "words " * 100)
    url = f"zip://a.txt::file://{tmp_path}/x.zip"
    assert violations_of_sources(Data(kind="text", path=url, validation=0.0), vocab=400) == []
    [file] = find_data_files("data.path", url)
    assert file.size == 600
