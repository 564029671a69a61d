import hashlib
import json
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import cache
from platform.data.corpus import open_corpus
from platform.data.source_kind import SourceKind

SIZES = {"length": 32, "vocab": 400, "seed": 0}


def _entry(data) -> Path:
    (entry,) = Path(data.cache).iterdir()  # also: no unfinished folder is left
    return entry


def _build_together(data, barrier, results):
    """In a process of its own: publish only when the other process has built, too."""
    write = SourceKind.write_cache_entry

    def slow(*args):
        description = write(*args)
        barrier.wait()
        return description

    SourceKind.write_cache_entry = slow
    corpus = open_corpus(data, **SIZES)
    results.put((corpus.digest, corpus.batch("train", 0, 4)["labels"].tolist()))


def test_two_processes_may_build_one_entry_at_once(data):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2, timeout=60), context.Queue()
    processes = [context.Process(target=_build_together, args=(data, barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = (results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert first == second
    _entry(data)


def test_the_second_time_nothing_is_built(data, writing):
    first = open_corpus(data, **SIZES)
    writing(None)
    assert np.array_equal(
        open_corpus(data, **SIZES).batch("train", 0, 9)["labels"], first.batch("train", 0, 9)["labels"]
    )


KEPT = Path(__file__).parent / "kept_cache"


def test_a_kept_cache_is_used(tmp_path, writing):
    """Never write this entry again: later versions must read what an earlier one wrote."""
    shutil.copytree(KEPT, tmp_path / "kept")
    writing(None)
    data = Data(kind="text", path=str(KEPT / "texts"), validation=0.1, cache=str(tmp_path / "kept" / "cache"))
    kept = open_corpus(data, length=32, vocab=270, seed=0)
    assert kept.digest == "a084e2067827"
    assert kept.batch("train", 0, 1)["labels"][0][:8].tolist() == [12, 257, 17, 221, 269, 259, 199, 264]


@pytest.mark.parametrize("file", ["tokens.bin", "tokenizer.json", "blocks.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "missing"])
def test_a_corrupt_entry_is_built_again(data, file, damage):
    first = open_corpus(data, **SIZES)
    digest, batch = first.digest, first.batch("train", 0, 9)["labels"]
    path = _entry(data) / file
    content = path.read_bytes()
    path.unlink()  # a new file: `first` still maps the old one
    middle = len(content) // 2
    damaged = {
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "cut": content[:-1],
        "longer": content + b"0",
        "empty": b"",
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    again = open_corpus(data, **SIZES)
    assert again.digest == digest and np.array_equal(again.batch("train", 0, 9)["labels"], batch)
    assert (_entry(data) / file).read_bytes() == content


SIZE = (5 << 20) + 7


def write(folder: Path) -> dict:
    (folder / "tokens.bin").write_bytes(np.random.default_rng(0).bytes(SIZE))
    (folder / "nothing.bin").touch()
    return {}


@pytest.fixture
def large(tmp_path, monkeypatch) -> Path:
    """An entry of several blocks, and nobody to build it again."""
    monkeypatch.setattr(cache, "BLOCK", 1 << 20)
    cache.fetch_entry(tmp_path / "key", write, lambda folder, content: content)
    monkeypatch.setattr(cache, "BLOCK", 1 << 24)  # what it was sealed with counts
    return tmp_path / "key"


class Built(Exception):
    """An entry is built again."""


def fetch(entry: Path) -> dict:
    def build(folder: Path) -> dict:
        raise Built

    return cache.fetch_entry(entry, build, lambda folder, content: content)


def reseal(entry: Path, **files: bytes | None) -> None:
    """Write an entry's files, or take them away, and its description as it would be with them alone."""
    meta = entry / "meta.json"
    content = json.loads(meta.read_text())["content"]
    for name, raw in files.items():
        file = entry / f"{name}.bin"
        file.unlink() if raw is None else file.write_bytes(raw)
        content["files"].pop(file.name)
        if raw is not None:
            content["files"][file.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    meta.write_text(json.dumps({"content": content, "sha256": cache._hash_description(content)}))


def test_an_entry_is_verified_by_blocks(large, caplog):
    caplog.set_level("INFO")
    fetch(large)
    assert (large / "blocks.bin").stat().st_size == 8 + 6 * 32  # an empty file has none
    tokens = bytearray((large / "tokens.bin").read_bytes())
    tokens[3 << 20] ^= 1
    (large / "tokens.bin").write_bytes(tokens)
    with pytest.raises(Built):
        fetch(large)
    assert "tokens.bin, bytes 3,145,728 to 4,194,303: is not what was written" in caplog.text


def test_a_file_that_is_torn_is_named(large, caplog):
    caplog.set_level("INFO")
    os.truncate(large / "tokens.bin", SIZE - 1)
    with pytest.raises(Built):
        fetch(large)
    assert f"tokens.bin: has {SIZE - 1:,} bytes, not {SIZE:,}" in caplog.text


def test_an_entry_of_an_earlier_version_is_used(large):
    """Which has no blocks: each file is one. Of another content it is not."""
    reseal(large, blocks=None)
    fetch(large)
    (large / "tokens.bin").write_bytes(bytes(SIZE))
    with pytest.raises(Built):
        fetch(large)


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 8, b"\0" * (8 + 192), (1 << 20).to_bytes(8, "little") + bytes(160), bytes([255] * 200)]
)
def test_blocks_that_are_none_are_not_trusted(large, raw):
    reseal(large, blocks=raw)
    with pytest.raises(Built):
        fetch(large)


def test_the_size_of_blocks_is_the_entry_s_own(large):
    """Resealed in blocks of another size it holds."""
    digest = [hashlib.sha256((large / "tokens.bin").read_bytes()[i : i + (3 << 20)]).digest() for i in (0, 3 << 20)]
    reseal(large, blocks=(3 << 20).to_bytes(8, "little") + b"".join(digest))
    fetch(large)


def test_a_changed_description_is_not_trusted(data):
    samples = open_corpus(data, **SIZES).sample_counts
    meta = _entry(data) / "meta.json"
    content = json.loads(meta.read_text())
    content["content"]["splits"]["train"][1] -= 64
    meta.write_text(json.dumps(content))
    assert open_corpus(data, **SIZES).sample_counts == samples


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.fetch_entry(tmp_path / "key", build, lambda folder, content: content)
    assert not list(tmp_path.iterdir())


def test_an_entry_that_does_not_read_back_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "read_verified_entry", lambda entry, read: None)
    with pytest.raises(OSError, match="does not hold what was just written"):
        cache.fetch_entry(tmp_path / "key", lambda folder: {"a": 1}, lambda folder, content: content)


def test_a_cache_that_cannot_be_written_is_named(data, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data.cache=.*name another folder"):
        open_corpus(replace(data, cache=str(tmp_path / "file" / "cache")), **SIZES)


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_root("") == tmp_path / "elastic-platform"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_root("") == tmp_path / ".cache" / "elastic-platform"
    assert cache.cache_root("~/here") == tmp_path / "here"


def test_other_machines_find_it_in_a_shared_folder(data, tmp_path, monkeypatch, writing):
    """By its name alone: no text is read there, nothing is tokenised and nothing is hashed."""
    first = open_corpus(data, **SIZES, shared=tmp_path / "run")
    assert first.entry.parent == tmp_path / "run"
    assert os.path.samefile(first.entry / "tokens.bin", tmp_path / "cache" / first.entry.name / "tokens.bin")
    monkeypatch.setattr(cache, "hash_blocks", None)
    writing(None)
    elsewhere = replace(data, path=str(tmp_path / "no such text"), cache=str(tmp_path / "no such cache"))
    second = open_corpus(elsewhere, **SIZES, entry=first.entry)
    assert second.digest == first.digest and second.sample_counts == first.sample_counts
    assert np.array_equal(*(c.batch("train", 0, 9)["labels"] for c in (second, first)))


@pytest.mark.parametrize("lost", ["cache", "run"])
def test_whichever_of_the_two_is_left_serves(data, tmp_path, monkeypatch, writing, lost):
    monkeypatch.setattr(os, "link", no_link)
    first = open_corpus(data, **SIZES, shared=tmp_path / "run")
    shutil.rmtree(tmp_path / lost)
    writing(None)
    again = open_corpus(data, **SIZES, shared=tmp_path / "run")
    assert again.digest == first.digest and again.entry == first.entry


def no_link(*_):
    raise OSError("another file system")


def test_what_is_shared_isverified_by_whoever_shares_it(data, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_link)
    first = open_corpus(data, **SIZES, shared=tmp_path / "run")
    tokens = first.entry / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert open_corpus(data, **SIZES, shared=tmp_path / "run").digest == first.digest
    assert tokens.read_bytes() == whole
    tokens.write_bytes(whole[:-2])
    with pytest.raises(OSError, match="is not what the driver has found there"):
        open_corpus(data, **SIZES, entry=first.entry)
