"""What models are asked to predict: pure functions of (seed, sample), of fixed shapes."""

import json
import re

import numpy as np
import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Config, Data, Model
from platform.data.corpus import open_corpus, open_run_corpus
from platform.data.objectives import OBJECTIVES, Causal, SpanDenoising

VOCAB, END_OF_TEXT = 400, 0
SHAPES = {
    "causal": {"length": 32},
    "masked": {"length": 32},
    "span_denoising": {"length": 16, "source_length": 40},
}


def make(objective, data=None, seed=0):
    return open_corpus(data or Data(kind="synthetic"), vocab=VOCAB, seed=seed, objective=objective, **SHAPES[objective])


@pytest.mark.parametrize("objective", SHAPES)
def test_a_batch_does_not_depend_on_how_it_is_cut(objective, data):
    corpus = make(objective, data)
    start = corpus.sample_counts["train"] - 10
    whole = corpus.batch("train", start, start + 20)  # across the end of an epoch
    for size in (1, 7):
        parts = [corpus.batch("train", i, min(i + size, start + 20)) for i in range(start, start + 20, size)]
        for name, rows in whole.items():
            assert np.array_equal(np.concatenate([part[name] for part in parts]), rows) and rows.dtype == np.int64
    assert corpus.predicted("train", start, start + 20) == (whole["labels"] >= 0).sum()
    assert max(rows.max() for rows in whole.values()) < VOCAB
    other = make(objective, data, seed=1).batch("train", start, start + 20)
    assert not np.array_equal(other["labels"], whole["labels"])


def test_masked_tokens():
    """15 % are to be predicted; of those 80 % are masked, 10 % random, 10 % as they were, and the rest is untouched."""
    corpus = make("masked")
    batch = corpus.batch("train", 0, 4000)
    chosen = batch["labels"] >= 0
    assert (chosen.sum(1) == round(0.15 * 32)).all() and chosen.mean(0).std() < 0.01
    read, label = batch["tokens"][chosen], batch["labels"][chosen]
    assert (read == VOCAB - 1).mean() == pytest.approx(0.8, abs=0.01)
    assert (read == label).mean() == pytest.approx(0.1, abs=0.01)
    assert not (batch["labels"] == VOCAB - 1).any() and not (batch["tokens"][~chosen] == VOCAB - 1).any()


def test_denoising_puts_every_span_back():
    """Source and target together are the text, which no sample but its own has."""
    corpus = make("span_denoising")
    goal = corpus.objective
    batch = corpus.batch("validation", 0, 100)
    text = corpus.parts[0].streams["validation"][np.arange(100 * goal.needs)].reshape(100, -1).astype(int).tolist()
    lengths = set()
    for row, source, tokens, labels in zip(text, batch["source"], batch["tokens"], batch["labels"], strict=True):
        target = [i for i in labels.tolist() if i >= 0]
        assert tokens.tolist()[: len(target)] == [END_OF_TEXT, *target[:-1]] and target[-1] == END_OF_TEXT
        spans, rebuilt = {}, []
        for i in target[:-1]:
            if i >= VOCAB - goal.reserved:
                spans[sentinel := i] = []
            else:
                spans[sentinel].append(i)
        for i in (i for i in source.tolist() if i >= 0):
            rebuilt += spans.get(i, [i])
        assert rebuilt == row and list(spans) == [VOCAB - 1 - k for k in range(goal.reserved)]
        lengths |= {len(span) for span in spans.values()}
    assert sum(map(len, spans.values())) == round(0.15 * goal.needs) and len(lengths) > 2


@pytest.mark.parametrize(("source_length", "length"), [(512, 114), (96, 32), (4, 3), (40, 16)])
def test_denoising_fills_its_lengths(source_length, length):
    goal = SpanDenoising(source_length, length, 1000)
    batch = goal.batch(np.arange(2000), np.arange(1), np.zeros(1, np.uint64))
    free = min((batch["source"] < 0).sum(), (batch["labels"] < 0).sum())
    assert free <= 2 and batch["source"].shape == (1, source_length) and batch["labels"].shape == (1, length)


def corpus_of_pairs(tmp_path, pairs, **more):
    data = Data(kind="pairs", cache=str(tmp_path / "cache"), validation=0.2, **more)
    model = Model(kind="encoder_decoder", length=12, source_length=9, vocab=300)
    return open_run_corpus(Config(data=data, model=model))


PAIRS = [(f"the word {i}", f"das Wort {i}{i}") for i in range(40)]


@pytest.mark.parametrize("form", ["lines", "jsonl"])
def test_pairs(tmp_path, form):
    if form == "lines":
        for side, name in enumerate("ab"):
            (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in PAIRS))
        corpus = corpus_of_pairs(tmp_path, PAIRS, path=str(tmp_path / "a"), target_path=str(tmp_path / "b"))
    else:
        (tmp_path / "x.jsonl").write_text("".join(json.dumps({"en": a, "de": b}) + "\n" for a, b in PAIRS))
        corpus = corpus_of_pairs(tmp_path, PAIRS, path=str(tmp_path / "x.jsonl"), field="en", target_field="de")
    known, seen = {a: b for a, b in PAIRS}, set()
    assert sum(corpus.sample_counts.values()) == 40
    for split, samples in corpus.sample_counts.items():
        batch = corpus.batch(split, 0, samples)
        assert corpus.predicted(split, 0, samples) == (batch["labels"] >= 0).sum()
        for source, tokens, labels in zip(batch["source"], batch["tokens"], batch["labels"], strict=True):
            left, right = ([i for i in ids.tolist() if i >= 0] for ids in (source, labels))
            assert [i for i in tokens.tolist() if i >= 0] == [END_OF_TEXT, *right[:-1]]
            a, b = corpus.decode(left).removesuffix("<|endoftext|>"), corpus.decode(right)
            (full,) = (k for k in known if k == a or (len(left) == 9 and k.startswith(a)))
            assert b == known[full] + "<|endoftext|>" or (len(right) == 12 and known[full].startswith(b))
            seen.add(full)
    assert seen == set(known)


def test_pairs_that_are_no_pairs_are_refused(tmp_path):
    for name, lines in (("a", 3), ("b", 4)):
        (tmp_path / name).write_text("line\n" * lines)
    with pytest.raises(ConfigError, match="4 lines beside the 3"):
        corpus_of_pairs(tmp_path, PAIRS, path=str(tmp_path / "a"), target_path=str(tmp_path / "b"))
    with pytest.raises(ConfigError, match="data.target_path=FILE"):
        corpus_of_pairs(tmp_path, PAIRS, path=str(tmp_path / "a"))
    (tmp_path / "x.jsonl").write_text('{"source": "a"}\n')
    with pytest.raises(ConfigError, match="line 1 has no texts data.field=source"):
        corpus_of_pairs(tmp_path, PAIRS, path=str(tmp_path / "x.jsonl"), field="source")


class Strange(Causal):
    """Objective of one's own with one wrong number in one sample."""

    wrong = ("labels", 300)

    def batch(self, stream, index, keys):
        arrays = {name: rows.copy() for name, rows in super().batch(stream, index, keys).items()}
        arrays[self.wrong[0]][index == 5, 3] = self.wrong[1]
        return arrays


STRANGE = [("labels", 10**9), ("labels", 300), ("tokens", -7), ("tokens", 300), ("begins", 16), ("positions", -2)]


@pytest.mark.parametrize(("name", "value"), STRANGE)
def test_every_sample_of_ones_own_objective_is_checked(monkeypatch, tmp_path, name, value):
    kind = type("Own", (Strange,), {"wrong": (name, value)})
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: kind(shape.length, shape.special))
    corpus = open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
    stream = corpus.parts[0].streams["train"]
    keys = np.zeros(1, np.uint64)
    for index in (0, 4, 6):
        corpus.objective.batch(stream, np.array([index]), keys)
    legal = 15 if name in ("begins", "positions") else 299
    says = f"data.objective=strange: sample 5 has {value} in '{name}', at place 3: legal are 0 to {legal}, and -1"
    with pytest.raises(ConfigError, match=re.escape(says)):
        corpus.objective.batch(stream, np.arange(3, 9), np.zeros(6, np.uint64))


def test_a_label_where_the_tokens_are_padding_is_refused(monkeypatch):
    """The model would learn from the embedding of token 0."""

    def batch(self, stream, index, keys):
        arrays = Causal.batch(self, stream, index, keys)
        return {**arrays, "tokens": np.where((index == 5)[:, None] & (np.arange(16) == 3), -1, arrays["tokens"])}

    kind = type("Own", (Causal,), {"batch": batch})
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: kind(shape.length, shape.special))
    corpus = open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
    stream = corpus.parts[0].streams["train"]
    corpus.objective.batch(stream, np.arange(5), np.zeros(5, np.uint64))
    with pytest.raises(ConfigError, match="sample 5 has a label at place 3, where its tokens are padding; -1 is a lab"):
        corpus.objective.batch(stream, np.arange(3, 9), np.zeros(6, np.uint64))


@pytest.mark.parametrize("wrong", [lambda rows: rows[:1], lambda rows: rows * 1.0, lambda rows: rows[0]])
def test_rows_that_are_no_samples_are_refused(monkeypatch, wrong):
    def batch(self, stream, index, keys):
        return {name: wrong(rows) for name, rows in Causal.batch(self, stream, index, keys).items()}

    kind = type("Own", (Causal,), {"batch": batch})
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: kind(shape.length, shape.special))
    corpus = open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
    with pytest.raises(ConfigError, match="data.objective=strange: makes 'tokens' as .* for 2 samples: rows of"):
        corpus.batch("train", 0, 2)


COUNTS = {  # what an objective says, by the samples that it is asked of
    "one more": lambda index: len(index) * 16 + (index == 5).sum(),
    "of another": lambda index: len(index) * 16 - (index == 5).sum() + (index == 9).sum(),
    "not alone": lambda index: len(index) * 16 + (len(index) > 1),
}


@pytest.mark.parametrize("how", COUNTS)
def test_labels_are_as_many_as_an_objective_says(monkeypatch, how):
    kind = type("Own", (Causal,), {"predicted": lambda self, stream, index: int(COUNTS[how](index))})
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: kind(shape.length, shape.special))
    corpus = open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
    stream, refused = corpus.parts[0].streams["train"], {}
    for samples in ([4], [5], [9], [4, 5, 6], [1, 2]):
        try:
            corpus.objective.batch(stream, np.array(samples), np.zeros(len(samples), np.uint64))
        except ConfigError as error:
            refused[tuple(samples)] = str(error)
    five = f"data.objective=strange: sample 5: 16 labels, and predicted says {17 if how == 'one more' else 15}; -1 is"
    if how == "not alone":
        assert refused[1, 2].startswith("data.objective=strange: samples 1 to 2: 32 labels, and predicted says 33; ")
        assert refused.keys() == {(1, 2), (4, 5, 6)}
    else:
        assert refused.keys() == {(5,), (4, 5, 6)} | ({(9,)} if how == "of another" else set())
        assert refused[5,].startswith(five) and refused[4, 5, 6].startswith(five)


@pytest.mark.parametrize("count", ["x", -3, 1.5, None])
def test_numbers_that_an_objective_says_are_checked(monkeypatch, count):
    kind = type("Own", (Causal,), {"predicted": lambda self, stream, index: count})
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: kind(shape.length, shape.special))
    with pytest.raises(ConfigError, match=re.escape(f"data.objective=strange: says predicted={count!r}; an integer")):
        open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
    monkeypatch.setitem(OBJECTIVES, "strange", lambda shape: None)
    with pytest.raises(ConfigError, match="data.objective=strange: raises AttributeError"):
        open_corpus(Data(kind="synthetic"), length=16, vocab=300, seed=0, objective="strange")
