"""Documents from a function of one's own."""

import itertools
import json

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.source_kind import KINDS
from platform.data.text_sources import register_documents

SHAPE = {"length": 16, "vocab": 300, "seed": 0}
TEXTS = [f"{i} sheep and {i + 1} wolves\n" for i in range(300)]
TOKENS = [list(range(i % 7 + 2)) for i in range(300)]


@pytest.fixture
def registered(monkeypatch, tmp_path):
    """Registers a function for one test; returns the keys that read it."""

    def register(read, tokens=False, **keys):
        monkeypatch.setitem(KINDS, "own", None)
        register_documents("own", read, tokens=tokens)
        return Data(kind="own", cache=str(tmp_path / "cache"), **keys)

    return register


def test_texts_are_those_of_a_file(registered, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    plain = Data(kind="text", path=str(tmp_path / "a.jsonl"), cache=str(tmp_path / "cache"))
    wanted = open_corpus(plain, **SHAPE).batch("train", 0, 40)
    corpus = open_corpus(registered(lambda data: iter([*TEXTS, ""])), **SHAPE)
    assert all(np.array_equal(rows, wanted[name]) for name, rows in corpus.batch("train", 0, 40).items())
    again = open_corpus(registered(lambda data: TEXTS), **SHAPE, entry=corpus.entry)
    assert again.digest == corpus.digest
    assert open_corpus(registered(lambda data: TEXTS[1:]), **SHAPE).digest != corpus.digest


def test_tokens_keep_their_documents(registered):
    data = registered(lambda data: map(np.array, TOKENS), tokens=True, packing="best_fit", document_mask=True)
    corpus = open_corpus(data, **SHAPE)
    batch = corpus.batch("train", 0, corpus.sample_counts["train"])
    assert ((batch["tokens"] == batch["positions"]) | (batch["tokens"] < 0)).all()  # each begins with 0, 1, 2


WRONG = {
    "number": (lambda data: [1], False, "document 0 is a int, not a text"),
    "raises": (
        lambda data: (1 / (len(text) - 21) for text in TEXTS),
        False,
        "raises ZeroDivisionError: division by zero",
    ),
    "no iterable": (lambda data: 7, False, "raises TypeError: 'int' object is not iterable"),
    "text": (lambda data: ["a"], True, "document 0 is no list of token ids"),
    "ragged": (lambda data: [[1, [2]]], True, "document 0 is no list of token ids"),
    "negative": (lambda data: [[1, -2]], True, "document 0 is no list of token ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_document_is_refused_at_once(registered, name):
    read, tokens, reason = WRONG[name]
    [line] = violations_of_sources(registered(read, tokens))
    assert line.startswith("data.kind=own: ") and reason in line


def test_what_shows_later(registered, tmp_path):
    with pytest.raises(ConfigError, match="has token 300, and the model 300; nearest legal: model.vocab=301"):
        open_corpus(registered(lambda data: [*TOKENS, [300]], True), **SHAPE)
    count = itertools.count()
    with pytest.raises(ConfigError, match="gives other documents every time"):
        open_corpus(registered(lambda data: [*TEXTS, str(next(count))]), **SHAPE)
    with pytest.raises(ConfigError, match="document 300 is a NoneType"):
        open_corpus(registered(lambda data: [*TEXTS, None]), **SHAPE)
    assert not [*tmp_path.glob("cache/*")]
