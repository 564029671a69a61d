"""Every format of a file of text gives the same documents, and a torn one is refused in one line."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import data_files
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.text_sources import find_text_files, read_documents

TEXTS = [f"document {i}: {i * i} sheep, Käfer 🪲\n" * (i % 7 + 1) for i in range(700)]


def plain(path: Path) -> Path:
    path.write_text("".join(json.dumps({"body": text, "n": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress(plain(path).read_bytes()))
    return path


def zstd(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    path.write_bytes(arrow.compress(plain(path).read_bytes(), codec="zstd", asbytes=True))
    return path


def table():
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"n": range(len(TEXTS)), "body": TEXTS})


def parquet(path: Path) -> Path:
    rows = table()
    from pyarrow import parquet

    parquet.write_table(rows, path, row_group_size=100)
    return path


def arrow_file(path: Path) -> Path:
    rows = table()
    from pyarrow import ipc

    with ipc.new_file(path, rows.schema) as file:
        file.write_table(rows, max_chunksize=64)
    return path


def arrow_stream(path: Path) -> Path:
    rows = table()
    from pyarrow import ipc

    with ipc.new_stream(path, rows.schema) as file:
        file.write_table(rows, max_chunksize=64)
    return path


FORMATS = {
    "x.jsonl": plain,
    "x.jsonl.gz": gzipped,
    "x.jsonl.zst": zstd,
    "x.parquet": parquet,
    "x.arrow": arrow_file,
    "stream.arrow": arrow_stream,
}


def documents(data: Data) -> list[str]:
    joined: dict[int, str] = {}
    for number, piece in read_documents(find_text_files(data), data):
        joined[number] = joined.get(number, "") + piece
    return list(joined.values())


@pytest.fixture
def text(tmp_path):
    return lambda path: Data(kind="text", path=str(path), field="body", cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_same_documents(tmp_path, text, name):
    assert documents(text(FORMATS[name](tmp_path / name))) == TEXTS


def test_a_folder_takes_all_of_them(tmp_path, text):
    (tmp_path / "folder").mkdir()
    for name, write in FORMATS.items():
        write(tmp_path / "folder" / name)
    data = text(tmp_path / "folder")
    assert documents(data) == TEXTS * len(FORMATS) and violations_of_sources(data) == []
    assert open_corpus(data, length=32, vocab=400, seed=0).sample_counts["train"] > 1000


def saved(folder: Path, shards: int = 3, **state) -> Path:
    """A dataset as `Dataset.save_to_disk` of Hugging Face's datasets 5.2 leaves it."""
    rows = table()
    from pyarrow import ipc

    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    size = -(-len(TEXTS) // shards)
    for i, name in enumerate(names):
        part = rows.slice(i * size, size)
        with ipc.new_stream(folder / name, part.schema) as file:
            file.write_table(part)
    plain_state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(plain_state | state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_dataset_of_hugging_face(tmp_path, text):
    assert documents(text(saved(tmp_path / "set"))) == TEXTS


def test_of_several_splits_one_is_named(tmp_path, text):
    for split in ("train", "test"):
        saved(tmp_path / "set" / split, shards=1)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    [line] = violations_of_sources(text(tmp_path / "set"))
    assert line.startswith(f"data.path={tmp_path}/set: holds several splits; nearest: ") and "set/train" in line


def lacking(folder: Path) -> None:
    (folder / "data-00001-of-00003.arrow").unlink()


DATASETS = {
    "lacks data-00001-of-00003.arrow": lacking,
    "chosen by an index": lambda folder: (folder / "state.json").write_text(
        '{"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}'
    ),
    "state.json is none of a dataset": lambda folder: (folder / "state.json").write_text("[" * 1000),
    "state.json is none of a dataset: 0": lambda folder: (folder / "state.json").write_text('{"_data_files": [{}]}'),
}


@pytest.mark.parametrize("reason", DATASETS)
def test_a_dataset_that_is_not_whole(tmp_path, text, reason):
    DATASETS[reason](saved(tmp_path / "set"))
    [line] = violations_of_sources(text(tmp_path / "set"))
    assert line.startswith(f"data.path={tmp_path}/set: ") and reason.rstrip(": 0") in line


CUTS = {"at the end": lambda b: b[:-9], "in the middle": lambda b: b[: len(b) // 2], "to nothing": lambda b: b""}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "x.jsonl"])
def test_what_is_torn_is_refused_in_one_line(tmp_path, text, name, cut):
    path = FORMATS[name](tmp_path / name)
    path.write_bytes(CUTS[cut](path.read_bytes()))
    data = text(path)
    with pytest.raises(ConfigError) as caught:
        open_corpus(data, length=32, vocab=400, seed=0)
    [line] = caught.value.violations
    assert line.startswith(f"data.path={path}: ") and line.isprintable() and len(line) < 400
    assert not list((tmp_path / "cache").glob("*"))


def test_a_stream_that_was_cut_between_two_batches_is_torn(tmp_path, text):
    """It reads like a shorter one, but for its end."""
    path = arrow_stream(tmp_path / "x.arrow")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="torn: the end of an Arrow stream is missing"):
        documents(text(path))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "stream.arrow"])
def test_a_column_that_is_not_there(tmp_path, text, name):
    path = FORMATS[name](tmp_path / name)
    assert violations_of_sources(replace(text(path), field="boody")) == [
        f"data.path={path}: data.field=boody: no such column; its columns: n, body"
    ]
    [line] = violations_of_sources(replace(text(path), field="n"))
    assert "data.field=n is not a string in row 1" in line


def test_a_table_that_unpacks_to_far_more_than_its_size(tmp_path, text, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"body": ["x" * 10_000] * 5000}), tmp_path / "bomb.parquet", compression="zstd")
    monkeypatch.setattr(data_files, "UNPACKED", 1 << 20)
    with pytest.raises(ConfigError, match="unpacks to more than 300 times its size"):
        documents(text(tmp_path / "bomb.parquet"))


def test_without_pyarrow_the_line_says_what_installs_it(tmp_path, text, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    for name, what in (("x.parquet", ".parquet"), ("x.jsonl.zst", ".zst")):
        path = tmp_path / name
        assert violations_of_sources(text(path)) == [
            f"data.path={path}: {what} needs pyarrow: pip install 'elastic-platform[data]'"
        ]


def test_files_of_a_storage_are_read_where_they_are(tmp_path, text):
    import fsspec

    storage = fsspec.filesystem("memory")
    for name in ("corpus/a.jsonl", "corpus/deep/b.jsonl", "corpus/c.bin"):
        with storage.open(name, "wb") as file:
            file.write(plain(tmp_path / "x.jsonl").read_bytes())
    local = text(tmp_path / "x.jsonl")
    try:
        assert documents(text("memory://corpus/a.jsonl")) == TEXTS
        assert documents(text("memory://corpus/*.jsonl")) == TEXTS
        assert documents(text("memory://corpus")) == TEXTS * 2
        remote, same = (open_corpus(d, length=32, vocab=400, seed=0) for d in (text("memory://corpus/a.jsonl"), local))
        assert remote.digest == same.digest  # what decides is what is in the files
    finally:
        storage.rm("corpus", recursive=True)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("memory://nowhere/x.jsonl", "no such file"),
        ("memory://nowhere/*.jsonl", "no file there"),
        ("nosuch://a/b", "no storage is known by nosuch"),
    ],
)
def test_a_storage_without_them(text, url, reason):
    with pytest.raises(ConfigError) as caught:
        open_corpus(text(url), length=32, vocab=400, seed=0)
    [line] = caught.value.violations
    assert line.startswith(f"data.path={url}: ") and reason in line
