"""Tokens that somebody else made: read where they lie, written as others read them, and refused where they are torn."""

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import token_files
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.streams import DocumentStream, JoinedTokens, find_document_starts, split_documents
from platform.data.token_files import WRITERS, locate_tokens

SIZES = {"length": 16, "vocab": 400, "seed": 0}
DOCUMENTS = [np.arange(7 + 3 * i) * 13 % 400 for i in range(60)]
ALL = np.concatenate(DOCUMENTS)


def megatron(path: Path, documents=DOCUMENTS, dtype: str = "<u2", code: int = 8) -> Path:
    """As `IndexedDatasetBuilder` of Megatron-LM writes it, byte by byte; some documents of two sequences."""
    sequences = [part for i, ids in enumerate(documents) for part in (np.split(ids, [3]) if i % 5 == 0 else [ids])]
    bounds = np.cumsum([0, *(2 if i % 5 == 0 else 1 for i in range(len(documents)))])
    path.write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    sizes = np.array([len(s) for s in sequences], "<i4")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(bounds))
    pointers = (np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize
    tail = sizes.tobytes() + pointers.astype("<i8").tobytes() + bounds.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(head + tail)
    return path


def raw(path: Path, documents=DOCUMENTS, dtype: str = "<u2") -> Path:
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    return path


def llm_c(path: Path, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ALL)
    path.write_bytes(header.tobytes() + ALL.astype(dtype).tobytes())
    return path


@pytest.fixture
def tokens(tmp_path):
    return lambda path: Data(kind="tokens", path=str(path), validation=0.1, cache=str(tmp_path / "cache"))


def whole(corpus) -> np.ndarray:
    part = corpus.parts[0].streams
    return np.concatenate([np.asarray(part[s][np.arange(len(part[s]))]) for s in ("train", "validation")])


@pytest.mark.parametrize(
    ("write", "dtype"),
    [(megatron, "uint16"), (raw, "uint16"), (llm_c, "uint16")]
    + [(lambda path, d=d: raw(path, dtype=d), d) for d in ("uint32", "int32", "int64")]
    + [(lambda path: llm_c(path, 20240801, 7, "<u4"), "uint16")]
    + [(lambda path, c=c, d=d: megatron(path, dtype=d, code=c), "uint16") for c, d in ((4, "<i4"), (5, "<i8"))],
)
def test_every_format_holds_the_same_tokens(tmp_path, tokens, write, dtype):
    data = replace(tokens(write(tmp_path / "x.bin")), dtype=dtype)
    assert violations_of_sources(data, vocab=400) == []
    corpus = open_corpus(data, **SIZES)
    assert np.array_equal(whole(corpus), ALL)
    batch = corpus.batch("train", 0, 7)
    assert batch["tokens"].dtype == np.int64 and np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    files = sorted(p.name for p in corpus.entry.iterdir())
    assert files == ["blocks.bin", "meta.json", "starts.bin"]  # nothing is copied


def test_the_index_says_where_documents_begin(tmp_path, tokens):
    corpus = open_corpus(tokens(megatron(tmp_path / "x.bin")), **SIZES)
    train, held = (corpus.parts[0].streams[s] for s in ("train", "validation"))
    documents = [*split_documents(train, -1), *split_documents(held, -1)]
    assert all(np.array_equal(a, b) for a, b in zip(documents, DOCUMENTS, strict=True))  # none is cut by the split
    assert 0 < len(held) <= 0.1 * len(ALL)


def test_several_files_are_one_stream(tmp_path, tokens):
    folder = tmp_path / "folder"
    folder.mkdir()
    for i in range(3):
        megatron(folder / f"{i}.bin", DOCUMENTS[20 * i : 20 * i + 20])
    corpus = open_corpus(replace(tokens(folder / "*.bin"), validation=0.0), **SIZES)
    assert np.array_equal(whole(corpus), ALL)
    assert np.array_equal(
        find_document_starts(corpus.parts[0].streams["train"], -1), np.cumsum([0, *map(len, DOCUMENTS)])[:-1]
    )
    same = open_corpus(replace(tokens(folder), validation=0.0), **SIZES)
    assert np.array_equal(same.batch("train", 3, 40)["tokens"], corpus.batch("train", 3, 40)["tokens"])


def test_files_of_their_own_are_held_out(tmp_path, tokens):
    raw(tmp_path / "train.bin"), raw(tmp_path / "val.bin", [ids + 1 for ids in DOCUMENTS[:-1]])
    data = replace(tokens(tmp_path / "train.bin"), validation_path=str(tmp_path / "val.bin"))
    corpus = open_corpus(replace(data, separator=7), **{**SIZES, "vocab": 500})
    streams = corpus.parts[0].streams
    assert len(streams["train"]) == len(ALL) and np.array_equal(streams["validation"][np.arange(7)], DOCUMENTS[0] + 1)
    assert corpus.special.begin == 7


@given(st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=9), min_size=1, max_size=20), st.data())
@settings(max_examples=40, deadline=None)
def test_joined_tokens_are_the_concatenation(documents, draw):
    arrays = [np.array(ids) for ids in documents]
    together = np.concatenate(arrays)
    start = draw.draw(st.integers(0, len(together) - 1))
    end = draw.draw(st.integers(start + 1, len(together)))
    joined = JoinedTokens(arrays, start, end)
    index = np.array(draw.draw(st.lists(st.integers(0, end - start - 1), min_size=2, max_size=8))).reshape(1, -1)
    assert len(joined) == end - start and np.array_equal(joined[index], together[start:end][index])


@pytest.mark.parametrize("vocab", [400, 70_000])
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_reads_back(tmp_path, name, vocab):
    documents = [*DOCUMENTS, np.array([vocab - 1])]
    WRITERS[name](tmp_path / "x", iter(documents), vocab)
    back = locate_tokens(tmp_path / "x.bin", Data(kind="tokens"))
    assert np.array_equal(back.map_tokens(), np.concatenate(documents))
    back.check_tokens(vocab, whole=True)
    most, where = vocab - 1, np.concatenate(documents).argmax()
    with pytest.raises(ConfigError, match=f"token {where} is {most}, and the model has {most};"):
        back.check_tokens(vocab - 1, whole=True)
    assert (back.starts is None) == (name == "nanogpt")
    if name == "megatron":
        assert np.array_equal(back.starts, np.cumsum([0, *map(len, documents)])[:-1])


def test_a_file_too_long_to_be_read_before_starts_at_once(tmp_path, tokens):
    """A sparse one of a terabyte, of which reading every byte takes minutes."""
    path = tmp_path / "x.bin"
    path.touch()
    os.truncate(path, 1 << 40)
    corpus = open_corpus(tokens(path), **SIZES)
    assert sum(map(len, corpus.parts[0].streams.values())) == 1 << 39
    assert not corpus.batch("train", 5, 9)["tokens"].any()
    with path.open("r+b") as file:
        file.seek(2 * ((1 << 38) + 5))  # between the parts that are looked at before
        file.write(b"\xff\xff")
    stream = open_corpus(tokens(path), **SIZES).parts[0].streams["train"]
    with pytest.raises(ConfigError, match=f"data.path={path}: token {(1 << 38) + 5} is 65535, and the model has 400; "):
        stream[np.arange(1 << 38, (1 << 38) + 17)]


@given(st.integers(0, 499), st.sampled_from([400, 65_535]), st.booleans(), st.booleans())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_token_beyond_the_vocabulary_is_trained_on(tmp_path, tokens, place, value, several, indexed):
    """Wherever it stands in a file that is not read as a whole before: it is refused by its place, there or in the step
    that reads it, and no other step is."""
    wrong, cut = ALL[:500].copy(), 100
    wrong[place] = value
    folder = tmp_path / "f"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write = megatron if indexed else raw
    parts = [wrong[:cut], wrong[cut:]] if several else [wrong]
    for i, part in enumerate(parts):
        write(folder / f"{i}.bin", [part[j : j + 9] for j in range(0, len(part), 9)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files.TokenFile, "check_tokens", lambda *_: None)
        corpus = open_corpus(replace(tokens(folder), validation=0.0), **SIZES)
    samples, refused = corpus.sample_counts["train"], []
    for i in range(samples):
        try:
            corpus.batch("train", i, i + 1)
        except ConfigError as error:
            refused += error.violations
    file, at = (1, place - cut) if several and place >= cut else (0, place)
    read = place <= samples * SIZES["length"]
    assert len(set(refused)) == read and (len(refused) <= 2)  # the label of one sample is read by the next one
    assert not read or refused[0].startswith(f"data.path={folder}/{file}.bin: token {at} is {value}, and the model ")


def test_an_index_that_fills_the_memory_is_refused(tmp_path, tokens):
    path = megatron(tmp_path / "x.bin")
    os.truncate(path.with_suffix(".idx"), 1 << 40)
    with pytest.raises(ConfigError, match="1099511627776 bytes of an index, and at most"):
        locate_tokens(path, tokens(path))


def test_documents_by_a_separator():
    stream = np.array([5, 9, 0, 3, 0, 0, 4])
    assert find_document_starts(stream, 0).tolist() == [0, 2, 4, 5] and find_document_starts(stream, -1).tolist() == [0]
    assert [d.tolist() for d in split_documents(stream, 0)] == [[5, 9], [0, 3], [0], [0, 4]]
    assert find_document_starts(DocumentStream(stream, np.array([0, 5])), 0).tolist() == [0, 5]


def written(path: Path, dtype="<i8") -> Path:
    rows = [{"input_ids": ids.tolist(), "n": i} for i, ids in enumerate(DOCUMENTS)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_records_of_tokens_are_documents(tmp_path, tokens, name):
    data = replace(tokens(written(tmp_path / name)), field="input_ids")
    assert violations_of_sources(data) == []
    corpus = open_corpus(data, **SIZES)
    documents = [d.tolist() for s in ("train", "validation") for d in split_documents(corpus.parts[0].streams[s], -1)]
    assert sorted(documents) == sorted(ids.tolist() for ids in DOCUMENTS)
    assert corpus.decode([5, 7]) == "<5> <7>"


def cut(by: int):
    def change(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-by])

    return change


def poke(offset: int, value: bytes, suffix: str = ".idx"):
    def change(path: Path) -> None:
        file = path.with_suffix(suffix)
        content = bytearray(file.read_bytes())
        content[offset : offset + len(value)] = value
        file.write_bytes(content)

    return change


INDICES = {
    "a cut .bin": (cut(2), "x.idx: it tells of"),
    "a cut .idx": (lambda path: cut(9)(path.with_suffix(".idx")), "bytes, where"),
    "an empty .idx": (lambda path: path.with_suffix(".idx").write_bytes(b""), "no index of Megatron-LM"),
    "another's .idx": (poke(0, b"TNTIDX"), "no index of Megatron-LM"),
    "a version": (poke(9, b"\x02"), "version 2 and type 8"),
    "floats": (poke(17, b"\x07"), "version 1 and type 7"),
    "another type": (poke(17, b"\x04"), "do not lie end to end"),
    "many sequences": (poke(18, b"\xff" * 8), "bytes, where"),
    "a length below 0": (poke(34, b"\xff" * 4), "do not lie end to end"),
    "documents elsewhere": (poke(34 + 12 * 72, b"\x01"), "documents are not made of its sequences"),
}


@pytest.mark.parametrize("what", INDICES)
def test_a_wrong_index_is_refused(tmp_path, tokens, what):
    path = megatron(tmp_path / "x.bin")
    change, reason = INDICES[what]
    change(path)
    [line] = violations_of_sources(tokens(path))
    assert line.startswith(f"data.path={tmp_path}/x.idx: ") and reason.removeprefix("x.idx: ") in line
    with pytest.raises(ConfigError):
        open_corpus(tokens(path), **SIZES)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


WIDTHS = [(wrote, read) for wrote in ("<u4", "<i4", "<i8", ">u4", ">i8") for read in ("uint8", "uint16", "uint32")]


@pytest.mark.parametrize(("wrote", "read"), WIDTHS)
def test_a_bin_of_wider_integers_is_refused(tmp_path, tokens, wrote, read):
    size = np.dtype(wrote).itemsize
    ids = np.random.default_rng(0).integers(0, min(250, SIZES["vocab"]), 2000)
    ids.astype(wrote).tofile(tmp_path / "x.bin")
    lines = violations_of_sources(replace(tokens(tmp_path / "x.bin"), dtype=read))
    if (parts := size // np.dtype(read).itemsize) < 2:
        assert not lines
        return
    [line] = lines
    assert f"x.bin: all tokens but one in {parts} are 0, read as data.dtype={read}; nearest legal: data.dtype=" in line
    cure = line.rpartition("=")[2]
    assert cure.startswith("int64" if size == 8 else "uint32") and ("other order" in cure) == (wrote[0] == ">")
    if wrote[0] == "<":
        assert not violations_of_sources(replace(tokens(tmp_path / "x.bin"), dtype=cure))


@pytest.mark.parametrize("ids", [[0] * 100, [5] + [0] * 99, [0, 7] * 3, [1, 0, 2] * 40, list(range(100))])
def test_a_bin_with_many_zeros_may_be_one(tmp_path, tokens, ids):
    np.array(ids, "<u2").tofile(tmp_path / "x.bin")
    assert not violations_of_sources(tokens(tmp_path / "x.bin"))


def test_torn_bins_are_refused(tmp_path, tokens):
    cut(1)(raw(tmp_path / "half.bin"))
    assert (
        "are no whole number of tokens of data.dtype=uint16" in violations_of_sources(tokens(tmp_path / "half.bin"))[0]
    )
    cut(2)(llm_c(tmp_path / "c.bin"))
    assert "tokens of llm.c's format take" in violations_of_sources(tokens(tmp_path / "c.bin"))[0]
    llm_c(tmp_path / "v.bin", version=3)
    assert "version 3 of llm.c's format is not known" in violations_of_sources(tokens(tmp_path / "v.bin"))[0]


RECORDS = {
    '{"text": [1, 400]}': "has token 400",
    '{"text": [1, -4]}': "has token -4 in line 1",
    '{"text": "a b"}': "no list of tokens in line 1",
    '{"text": [1, true]}': "no list of tokens",
    '{"text": [1e99]}': "no list of tokens",
    '{"text": [99999999999999999999999]}': "no list of tokens",
    '{"text": [1, [2]]}': "no list of tokens",
    '{"text": [1.5]}': "no list of tokens",
    '{"t": [1]}': "is missing in line 1",
    '{"text": []}': "no tokens in it",
}


def test_tokens_that_the_model_does_not_have(tmp_path, tokens):
    path = raw(tmp_path / "x.bin")
    with pytest.raises(ConfigError) as caught:
        open_corpus(tokens(path), **{**SIZES, "vocab": 399})
    [line] = caught.value.violations
    assert line == f"data.path={path}: token 2619 is 399, and the model has 399; nearest legal: model.vocab=400"
    raw(path, [ids - 3 for ids in DOCUMENTS], "<i4")
    with pytest.raises(ConfigError, match="data.dtype says of which type|another type"):
        open_corpus(replace(tokens(path), dtype="int32"), **SIZES)
    rows = tmp_path / "x.jsonl"
    for content, reason in RECORDS.items():
        rows.write_text(content)
        with pytest.raises(ConfigError) as caught:
            open_corpus(tokens(rows), **SIZES)
        [line] = caught.value.violations
        assert line.startswith(f"data.path={rows}: ") and reason in line


def test_a_file_that_changes_is_another_corpus(tmp_path, tokens):
    path = raw(tmp_path / "x.bin")
    first = open_corpus(tokens(path), **SIZES)
    raw(path, [ids[::-1] for ids in DOCUMENTS])
    assert open_corpus(tokens(path), **SIZES).digest != first.digest
    cut(200)(path)
    with pytest.raises(OSError, match="has another size than before"):
        open_corpus(tokens(path), **SIZES, entry=first.entry)


def test_several_sources_of_tokens_mix_and_text_does_not_beside(tmp_path, tokens, words):
    raw(tmp_path / "a.bin"), megatron(tmp_path / "b.bin")
    (tmp_path / "c.txt").write_text(words(3))
    entries = {name: {"kind": "tokens", "path": str(tmp_path / f"{name}.bin")} for name in "ab"}
    data = replace(tokens(""), kind="mixture", sources=entries)
    corpus = open_corpus(data, **SIZES)
    assert len(corpus.shares) == 2 and corpus.batch("train", 0, 8)["tokens"].shape == (8, 16)
    again = open_corpus(data, **SIZES, entry=corpus.entry)
    assert again.digest == corpus.digest
    data.sources["c"] = {"path": str(tmp_path / "c.txt")}
    with pytest.raises(ConfigError, match="data.sources.a.kind=tokens: beside data.sources.c: a tokenizer"):
        open_corpus(data, **SIZES)
