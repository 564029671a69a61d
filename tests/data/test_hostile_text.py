"""Text and token caches of strangers: refused or built again, in one line and in bounded memory."""

import gzip
import hashlib
import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import cache, data_files, text_sources
from platform.data.corpus import open_corpus
from platform.data.source_kind import find_source_kind

SIZES = {"length": 32, "vocab": 400, "seed": 0}
PAIRS = {**SIZES, "length": 4, "objective": "pairs"}
FILES = {
    "bomb.txt": gzip.compress(b"a b\n" * 200_000, 9, mtime=0),
    "bomb.jsonl.gz": gzip.compress(b'{"text": "a", "target": "b"}\n' * 30_000, 9, mtime=0),
    "blank.jsonl.gz": gzip.compress(b"\n" * 800_000, 9, mtime=0),
    "line.jsonl.gz": gzip.compress(b'{"text": "' + b"x" * 200_000, 9, mtime=0),
    "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
    "many.jsonl": b'{"text": [' + b"0," * 1_100_000 + b"0]}\n",
    "digits.jsonl": b'{"text": ' + b"1" * 10_000 + b"}\n",
    "bytes.jsonl": b'{"text": "\xff", "target": "x"}\n',
    "types.jsonl": b'{"text": 5, "target": ["x"]}\n',
    "torn.jsonl.gz": gzip.compress(b'{"text": "a", "target": "b"}\n' * 1000, mtime=0)[:-20],
    "garbage.jsonl.gz": b"\x1f\x8b" + b"\xff" * 100,
}


def consume(reader, most: int) -> None:
    """Reads all, in bounded memory."""
    tracemalloc.start()
    try:
        for _ in reader:
            pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most, peak


@pytest.fixture
def small(monkeypatch):
    """Bounds that take seconds, not minutes, to reach."""
    monkeypatch.setattr(data_files, "LINE", 1 << 17)
    monkeypatch.setattr(data_files, "UNPACKED", 1 << 19)


@pytest.mark.parametrize("read", ["documents", "pairs"])
@pytest.mark.parametrize("name", FILES)
def test_text_that_is_none_is_refused(tmp_path, small, name, read):
    if read == "pairs" and "jsonl" not in name:
        pytest.skip("pairs are .jsonl")
    file = tmp_path / name
    file.write_bytes(FILES[name])
    data = Data(kind="pairs" if read == "pairs" else "text", path=str(file))
    reader = (
        text_sources.read_pairs(text_sources.find_pair_files(data), data)
        if read == "pairs"
        else text_sources.read_documents([file], data)
    )
    with pytest.raises(ConfigError) as caught:
        consume(reader, 1 << 24)
    [line] = caught.value.violations
    assert line.startswith(f"data.path={file}: ") and line.isprintable() and len(line) < 500


@pytest.mark.parametrize(
    "content", [b"a\n\xff\n", gzip.compress(b"a\n" * 400_000, 9, mtime=0), gzip.compress(b"a\n", mtime=0)[:-9]]
)
@pytest.mark.parametrize(("key", "name"), [("data.path", "a"), ("data.target_path", "b")])
def test_two_files_of_pairs(tmp_path, small, content, key, name):
    for file in ("a", "b"):
        (tmp_path / file).write_bytes(content if file == name else b"a\nb\n")
    data = Data(kind="pairs", path=str(tmp_path / "a"), target_path=str(tmp_path / "b"))
    with pytest.raises(ConfigError, match=f"{key}={tmp_path}/{name}: "):
        consume(text_sources.read_pairs(text_sources.find_pair_files(data), data), 1 << 28)


@pytest.mark.parametrize(("key", "name"), [("data.path", "a"), ("data.target_path", "b")])
def test_a_missing_file_is_named_by_its_key(tmp_path, key, name):
    for file in {"a", "b"} - {name}:
        (tmp_path / file).write_text("a\n")
    data = Data(kind="pairs", path=str(tmp_path / "a"), target_path=str(tmp_path / "b"))
    assert (
        find_source_kind(data).violations_of_source(data)[0].startswith(f"{key}={tmp_path}/{name}: no file or folder")
    )


def test_lines_end_at_line_feeds(tmp_path):
    """Whatever else a library takes for the end of a line, and whatever other tools say in a field that is not read."""
    text = "a\nb\r\nc\rd\x0be\u2028f\n\ng"
    (tmp_path / "a").write_bytes(text.encode())
    (tmp_path / "b").write_bytes(text.encode())
    data = Data(kind="pairs", path=str(tmp_path / "a"), target_path=str(tmp_path / "b"))
    sources = [a for a, _ in text_sources.read_pairs(text_sources.find_pair_files(data), data)]
    assert sources == ["a", "b", "c\rd\x0be\u2028f", "g"]
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a,[{", "score": NaN}\n{"text": "b", "n": 1e999, "n": 2}\n')
    assert [piece for _, piece in text_sources.read_documents([file], Data(kind="text", path=str(file)))] == [
        "a,[{",
        "b",
    ]


def entry(data) -> Path:
    (folder,) = Path(data.cache).iterdir()
    return folder


def put(*keys, value):
    def change(folder: Path, content: dict) -> None:
        part = content
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value

    return change


def rewrite(name: str, raw: bytes):
    def change(folder: Path, content: dict) -> None:
        (folder / name).write_bytes(raw)
        content["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}

    return change


def beyond(folder: Path, content: dict) -> None:
    """Ids that no embedding has."""
    tokens = np.fromfile(folder / "tokens.bin", content["dtype"])
    tokens[7] = 401
    rewrite("tokens.bin", tokens.tobytes())(folder, content)


SEALED = {
    "no files": put("files", value={}),
    "files that are a list": put("files", value=[]),
    "a file elsewhere": put("files", "../../x.json", value={"bytes": 0, "sha256": "0" * 64}),
    "a size of text": put("files", "tokens.bin", value={"bytes": "1", "sha256": "0" * 64}),
    "an object type": put("dtype", value="O"),
    "a type of others": put("dtype", value="<f8"),
    "a type that is a number": put("dtype", value=2),
    "no splits": put("splits", value={}),
    "splits of text": put("splits", "train", value=["0", "9"]),
    "splits that are negative": put("splits", "train", value=[-9, 9]),
    "splits that are too long": put("splits", "validation", 1, value=10**9),
    "splits that overlap": put("splits", "validation", 0, value=0),
    "a tokenizer of bytes": rewrite("tokenizer.json", b"\xff"),
    "a tokenizer of depth": rewrite("tokenizer.json", b'{"a":' * 100_000),
    "a tokenizer of nothing": rewrite("tokenizer.json", b"{}"),
    "tokens that are none": rewrite("tokens.bin", b""),
    "half a token": rewrite("tokens.bin", b"\0" * 4001),
    "tokens beyond the vocabulary": beyond,
}


class Built(Exception):
    """An entry is built again."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """One corpus of text and one of pairs, in caches."""
    root = tmp_path_factory.mktemp("made")
    (root / "a.txt").write_text("".join(f"line {i} of text: {i * i} sheep\n" for i in range(300)))
    rows = (json.dumps({"text": f"a {i}", "target": f"b {i}"}) + "\n" for i in range(60))
    (root / "p.jsonl").write_text("".join(rows))
    text = Data(kind="text", path=str(root / "a.txt"), validation=0.2, cache=str(root / "text"))
    both = Data(kind="pairs", path=str(root / "p.jsonl"), validation=0.1, cache=str(root / "pairs"))
    open_corpus(text, **SIZES), open_corpus(both, **PAIRS)
    return text, both


@pytest.fixture
def copies(corpora, tmp_path, writing):
    """Those corpora, in caches of this test's own. Building one again raises Built."""

    def refuse(*_):
        raise Built

    writing(refuse)
    copied = [replace(data, cache=shutil.copytree(data.cache, tmp_path / data.kind)) for data in corpora]
    open_corpus(copied[0], **SIZES), open_corpus(copied[1], **PAIRS)  # as they are they will do
    return copied


def seal(data, change) -> None:
    folder = entry(data)
    content = json.loads((folder / "meta.json").read_bytes())["content"]
    del content["files"]["blocks.bin"]  # of a file that is changed they would tell
    change(folder, content)
    (folder / "meta.json").write_text(json.dumps({"content": content, "sha256": cache._hash_description(content)}))


@pytest.mark.parametrize("what", SEALED)
def test_a_sealed_entry_of_nonsense_is_built_again(copies, what):
    seal(copies[0], SEALED[what])
    with pytest.raises(Built):
        open_corpus(copies[0], **SIZES)


METAS = {
    "deep": b"[" * 100_000, "a list": b"[]", "bytes": b"\xff", "nothing": b"", "a number": b"5",
    "NaN": b'{"content": NaN, "sha256": "x"}', "digits": b"1" * 10_000,
    "a hash of lists": b'{"content": {}, "sha256": []}',
}  # fmt: skip


@pytest.mark.parametrize("what", [*METAS, "a directory", "a pipe", "a loop of links"])
def test_a_description_of_nonsense_is_built_again(copies, what):
    meta = entry(copies[0]) / "meta.json"
    meta.unlink()
    if what in METAS:
        meta.write_bytes(METAS[what])
    else:
        {"a directory": os.mkdir, "a pipe": os.mkfifo, "a loop of links": lambda p: os.symlink(p, p)}[what](meta)
    with pytest.raises(Built):
        open_corpus(copies[0], **SIZES)


@pytest.mark.parametrize("ends", [b"", b"\0" * 960, b"\xff" * 960])
def test_ends_of_pairs_of_nonsense_are_built_again(copies, ends):
    seal(copies[1], rewrite("ends.bin", ends))
    with pytest.raises(Built):
        open_corpus(copies[1], **PAIRS)
