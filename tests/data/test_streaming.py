"""Sources that are read and tokenised while they are trained on."""

import gzip
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import cache_entries
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.source_kind import KINDS, SourceKind
from platform.data.text_sources import register_documents

SHAPE = {"length": 16, "vocab": 300, "seed": 5}
BLOCK = 2000
TEXTS = [f"document {i}: {i * 7919 % 1000} sheep and {i + 1} wolves\n" * (i % 4 + 1) for i in range(400)]


@pytest.fixture
def source(tmp_path):
    """The configuration of a stream of two files of records, of which one is compressed."""
    root = tmp_path / "texts"
    root.mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (root / "a.jsonl").write_text("".join(lines[:150]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[150:]).encode()))
    (tmp_path / "held.txt").write_text("".join(TEXTS[:20]))
    held = str(tmp_path / "held.txt")
    cache = str(tmp_path / "cache")
    return Data(kind="text", path=str(root), streaming=True, block=BLOCK, validation_path=held, cache=cache)


@pytest.fixture
def written(monkeypatch):
    """The first document of each block that is tokenised, in order."""
    firsts, write = [], SourceKind.write_tokens

    def counted(kind, folder, vocabulary, vocab, parts):
        [(documents, _), rest] = parts
        documents = list(documents)  # none, of a head
        firsts.extend(str(document) for _, document in documents[:1])
        return write(kind, folder, vocabulary, vocab, [(iter(documents), 0), rest])

    monkeypatch.setattr(SourceKind, "write_tokens", counted)
    return firsts


@pytest.fixture
def no_thread(monkeypatch):
    """Keeps streams from making blocks ahead."""
    monkeypatch.setattr(cache_entries, "Thread", lambda **_: threading.Thread())


def divided(texts, size=BLOCK):
    """Divide documents into blocks, as documentation says."""
    blocks, characters = [[]], 0
    for text in texts:
        if characters >= size:
            blocks.append([])
            characters = 0
        blocks[-1].append(text)
        characters += len(text)
    return blocks


def rows_of(corpus, texts, length=16):
    """The samples of some documents that are cut end to end."""
    ids = list(chain.from_iterable([*corpus.special.front, *corpus.encode(text)] for text in texts))
    return [tuple(ids[i : i + length + 1]) for i in range(0, (len(ids) - 1) // length * length, length)]


def samples(corpus, start, end):
    batch = corpus.batch("train", start, end)
    assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    return [(*t, label) for t, label in zip(batch["tokens"].tolist(), batch["labels"][:, -1].tolist(), strict=True)]


def test_each_epoch_has_every_sample_of_every_block_once(source):
    corpus = open_corpus(source, **SHAPE)
    blocks = [rows_of(corpus, texts) for texts in divided(TEXTS)]
    assert len(blocks) > cache_entries.KEPT + 2
    place, epochs = 0, []
    for _ in range(2):
        epochs.append([samples(corpus, (place := place + len(b)) - len(b), place) for b in blocks])
        assert [sorted(rows) for rows in epochs[-1]] == [sorted(b) for b in blocks]
    first, second = epochs
    assert all(a != sorted(a) for a in first) and all(a != b for a, b in zip(first, second, strict=True))
    held = corpus.batch("validation", 0, corpus.count_samples("validation"))["tokens"]
    assert corpus.decode(held[:3].reshape(-1).tolist()) in f"<|endoftext|>{''.join(TEXTS[:20])}"


def test_the_order_is_no_matter_of_batches_or_processes(source, no_thread):
    corpus = open_corpus(source, **SHAPE)
    total = sum(len(rows_of(corpus, texts)) for texts in divided(TEXTS))
    wanted = samples(corpus, 0, total + 40)
    step = total // 3 + 1
    parts = [samples(corpus, i, min(i + step, len(wanted))) for i in range(0, len(wanted), step)]
    assert list(chain(*parts)) == wanted
    other = open_corpus(source, **SHAPE, entry=corpus.entry)
    assert samples(other, total - 10, total + 40) == wanted[-50:] and other.digest == corpus.digest


def test_a_run_that_resumes_tokenises_the_block_that_it_is_in(source, no_thread, written):
    corpus = open_corpus(source, **SHAPE)
    wanted = samples(corpus, 0, 700)
    first = [texts[0] for texts in divided(TEXTS)]
    assert written == first[: len(written)] and len(written) > 9
    blocks = sorted(corpus.entry.parent.glob("*/block-*"))
    assert len(blocks) == cache_entries.KEPT
    for block in blocks:
        shutil.rmtree(block)
    reached, written[:] = written[-1], []
    again = open_corpus(source, **SHAPE, entry=corpus.entry)
    assert samples(again, 699, 700) == wanted[-1:]
    assert written == [reached]
    assert len(again.parts[0].streams["train"]._ends) < len(first) / 2  # it does not look at every block before


def test_what_is_torn_is_made_again(source, no_thread, written):
    corpus = open_corpus(source, **SHAPE)
    wanted = samples(corpus, 0, 300)
    for path in corpus.entry.parent.glob("*/*/**/meta.json"):
        path.write_text("{}")
    for path in corpus.entry.parent.glob("*/block-*/tokens/tokens.bin"):
        path.write_bytes(b"")
    again = open_corpus(source, **SHAPE)
    assert samples(again, 0, 300) == wanted


def test_a_block_is_tokenised_once_by_many(source, written):
    corpora = [open_corpus(source, **SHAPE) for _ in range(4)]
    by_thread = {}

    def read(number):
        by_thread[number] = samples(corpora[number], 0, 500)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(by_thread) == 4 and all(rows == by_thread[0] for rows in by_thread.values())
    assert len(written) == len(set(written))


def test_a_block_that_one_process_is_done_with_is_there_for_the_others(source, monkeypatch):
    """One deletes what the others open, or make again for the next epoch."""
    monkeypatch.setattr(cache_entries, "KEPT", 1)
    wanted = samples(open_corpus(source, **SHAPE), 0, 1500)
    corpora = [open_corpus(source, **SHAPE) for _ in range(4)]
    with ThreadPoolExecutor(len(corpora)) as threads:
        passes = threads.map(lambda c: [row for i in range(0, 1500, 20) for row in samples(c, i, i + 20)], corpora)
        assert all(rows == wanted for rows in passes)


def test_a_long_document_is_cut(tmp_path, no_thread):
    text = "".join(f"{i * 7919} and {i * i}\n" for i in range(9000))  # pieces of it are of some 64 kB
    (tmp_path / "a.txt").write_text(text)
    data = Data(
        kind="text", path=str(tmp_path / "a.txt"), streaming=True, block=50_000, validation=0, cache=str(tmp_path / "c")
    )
    corpus = open_corpus(data, **SHAPE)
    stream = corpus.parts[0].streams["train"]
    ends = [stream._find_block_end(0)]
    while not ends[-1].is_last:
        ends.append(stream._find_block_end(len(ends)))
    assert len(ends) > 1
    rows = samples(corpus, 0, ends[-1].samples)
    assert len(set(rows)) == len(rows) > len(text) / 16 / 4


FORMS = {
    "packed rows": {"packing": "best_fit", "document_mask": True},
    "documents apart": {"document_mask": True},
}


@pytest.mark.parametrize("name", FORMS)
def test_documents_are_kept(source, name, no_thread):
    corpus = open_corpus(replace(source, **FORMS[name]), **SHAPE)
    batch = corpus.batch("train", 0, 200)
    first = batch["tokens"] == corpus.special.begin
    assert (batch["positions"][first] == 0).all() and first.sum() > 50
    if "packing" in FORMS[name]:
        assert (batch["tokens"] < 0).any()


def test_tokens_and_conversations(tmp_path, no_thread):
    tokens = [list(range(i % 20 + 2)) for i in range(300)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in tokens))
    keys = {"streaming": True, "block": 500, "validation": 0, "packing": "best_fit", "cache": str(tmp_path / "c")}
    data = Data(kind="tokens", path=str(tmp_path / "t.jsonl"), field="input_ids", **keys)
    batch = open_corpus(data, **{**SHAPE, "length": 32}).batch("train", 0, 40)
    assert ((batch["tokens"] == batch["positions"]) | (batch["tokens"] < 0)).all() and (batch["tokens"] >= 0).any()
    talks = [{"prompt": f"{i} sheep?", "answer": f"{i + 1} wolves."} for i in range(300)]
    (tmp_path / "i.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    data = Data(kind="instructions", path=str(tmp_path / "i.jsonl"), field="prompt", target_field="answer", **keys)
    corpus = open_corpus(data, **{**SHAPE, "length": 64})
    batch = corpus.batch("train", 0, 20)
    learned = corpus.decode(batch["labels"][batch["labels"] >= 0].tolist())
    assert "wolves" in learned and "sheep" not in learned


def test_documents_of_ones_own(monkeypatch, tmp_path, no_thread):
    monkeypatch.setitem(KINDS, "own", None)
    register_documents("own", lambda data: iter(TEXTS))
    data = Data(kind="own", streaming=True, block=BLOCK, validation=0, cache=str(tmp_path / "cache"))
    corpus = open_corpus(data, **SHAPE)
    blocks = [rows_of(corpus, texts) for texts in divided(TEXTS)]
    rows = samples(corpus, len(blocks[0]), len(blocks[0]) + len(blocks[1]))
    assert sorted(rows) == sorted(blocks[1])


def test_in_a_mixture_a_stream_has_the_order_that_it_has_alone(source, tmp_path, no_thread):
    (tmp_path / "more.txt").write_text("other words altogether\n" * 200)
    own = {"path": source.path, "weight": 3, "streaming": True}
    other = {"path": str(tmp_path / "more.txt"), "weight": 1, "streaming": False}
    data = replace(source, kind="mixture", path="", sources={"a": own, "b": other})
    corpus = open_corpus(data, **SHAPE)
    alone = replace(source, tokenizer=str(corpus.entry / "tokenizer.json"))
    wanted = samples(open_corpus(alone, **SHAPE), 0, 300)
    rows = samples(corpus, 0, 400)
    assert [row for row in rows if row in set(wanted)] == wanted
    assert sum(row not in set(wanted) for row in rows) == 100


WRONG = {
    "a part held out": (
        {"validation_path": "", "validation": 0.1},
        "data.validation=0.1: of a source that is never read as a whole no part can be held out; "
        "nearest legal: 0, data.validation_path=FILE",
    ),
    "pairs": ({"kind": "pairs"}, "data.streaming=true: data=pairs is read as a whole; nearest legal: false"),
    "tokens in place": (
        {"kind": "tokens", "path": "tokens", "validation_path": "", "validation": 0},
        "data.streaming=true: .bin files are read where they lie, without a copy; nearest legal: false",
    ),
    "mixture": (
        {"kind": "mixture", "path": "", "sources": {"a": {"path": "A"}, "b": {"path": "A"}}},
        "data.sources.a.weight: must be given, as data.sources.a is streamed",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys(source, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").mkdir()
    np.arange(100, dtype="<u2").tofile(tmp_path / "tokens" / "a.bin")
    keys, line = WRONG[name]
    assert line in violations_of_sources(replace(source, **keys))


def test_a_block_without_a_sample(source):
    with pytest.raises(
        ConfigError, match="the train split has .*; nearest legal: model.length=.* or a larger data.block"
    ):
        open_corpus(replace(source, block=100), **{**SHAPE, "length": 200})


def test_files_at_a_url(source, no_thread):
    wanted = samples(open_corpus(source, **SHAPE), 0, 300)
    corpus = open_corpus(replace(source, path=f"file://{source.path}"), **SHAPE)
    assert samples(corpus, 0, 300) == wanted


def test_a_torn_file_is_named(source, no_thread):
    with open(f"{source.path}/a.jsonl", "a") as file:
        file.write("{")
    corpus = open_corpus(source, **SHAPE)
    with pytest.raises(ConfigError, match=r"a\.jsonl: line 151 is"):
        samples(corpus, 0, 2000)
    assert len(samples(corpus, 0, 100)) == 100
