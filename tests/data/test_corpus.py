import json
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import tokenizer
from platform.data.corpus import open_corpus
from platform.data.data_checks import violations_of_sources
from platform.data.source_kind import choose_held_out_documents
from platform.data.tokenizer import add_own_config, build_vocabulary

END_OF_TEXT = 0
LENGTH, VOCAB = 32, 400


@pytest.fixture
def corpus(data):
    return open_corpus(data, length=LENGTH, vocab=VOCAB, seed=0)


def rows(corpus, split, start, end):
    """int64 [end - start, LENGTH + 1]: what is read, and the token after it."""
    batch = corpus.batch(split, start, end)
    assert np.array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    return np.concatenate([batch["tokens"], batch["labels"][:, -1:]], 1)


def epoch(corpus, split, number=0):
    samples = corpus.sample_counts[split]
    return rows(corpus, split, number * samples, (number + 1) * samples)


def test_samples_have_the_contract_shape(corpus):
    batch = rows(corpus, "train", 3, 11)
    assert batch.shape == (8, LENGTH + 1) and batch.dtype == np.int64
    assert corpus.vocab == VOCAB and batch.min() >= 0 and batch.max() < VOCAB


def test_a_step_does_not_depend_on_how_it_is_cut(corpus):
    samples = corpus.sample_counts["train"]
    start, end = samples - 20, samples + 20  # across the end of an epoch
    whole = rows(corpus, "train", start, end)
    for size in (1, 3, 16):
        parts = [rows(corpus, "train", i, min(i + size, end)) for i in range(start, end, size)]
        assert np.array_equal(np.concatenate(parts), whole)


def test_every_epoch_holds_every_sample_once_in_another_order(corpus):
    first, second = (epoch(corpus, "train", number) for number in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(np.unique(first, axis=0), np.unique(second, axis=0))


def test_another_seed_is_another_order_of_the_same_samples(corpus, data):
    other = open_corpus(data, length=LENGTH, vocab=VOCAB, seed=1)
    assert other.digest == corpus.digest
    assert not np.array_equal(epoch(other, "train"), epoch(corpus, "train"))
    assert np.array_equal(epoch(other, "validation"), epoch(corpus, "validation"))


def test_validation_is_the_stream_in_its_own_order(corpus):
    first = epoch(corpus, "validation")
    assert np.array_equal(epoch(corpus, "validation", 1), first)
    assert np.array_equal(first[1:, 0], first[:-1, -1])  # neighbours share one token: the label that is the next input


def test_samples_tell_where_documents_begin(corpus, folder):
    """END_OF_TEXT stands in front of every document of the split, and nowhere else."""
    tokens = corpus.parts[0].streams["validation"][np.arange(len(corpus.parts[0].streams["validation"]))].tolist()
    starts = [i for i, token in enumerate(tokens) if token == END_OF_TEXT]
    texts = {corpus.decode(tokens[a + 1 : b]) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)}
    assert texts < {path.read_text() for path in folder.iterdir()}


def test_the_splits_are_disjoint_and_whole(corpus, folder):
    """Every document is in exactly one split; the validation split is near its fraction."""
    streams = {split: corpus.decode(np.asarray(stream).tolist()) for split, stream in corpus.parts[0].streams.items()}
    for path in folder.iterdir():
        assert sum(path.read_text() in text for text in streams.values()) == 1
    assert 0.05 <= len(streams["validation"]) / sum(map(len, streams.values())) <= 0.1


def test_a_single_document_is_cut_at_its_tail(data, folder, words):
    path = folder / "00.txt"
    path.write_text(words(0, lines=10_000))  # read in several pieces
    corpus = open_corpus(replace(data, path=str(path)), length=LENGTH, vocab=VOCAB, seed=0)
    train, validation = (np.asarray(corpus.parts[0].streams[split]).tolist() for split in ("train", "validation"))
    assert corpus.decode(train + validation) == "<|endoftext|>" + path.read_text()
    assert len(validation) == round(0.1 * len(train + validation))


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60), st.floats(0.01, 0.9))
def test_held_out_stays_within_its_fraction(sizes, fraction):
    held = choose_held_out_documents(sizes, fraction)
    budget = fraction * sum(sizes)
    assert not held or budget / 2 <= sum(sizes[i] for i in held) <= budget * (1 + 1e-12)
    assert held == choose_held_out_documents(sizes, fraction) and len(held) < len(sizes)


@pytest.mark.parametrize("text", ["héllo wörld", "日本語 🎉\U0001f9d1", " \t\r\n  x\0\x7f", "a <|endoftext|> b", ""])
def test_every_text_round_trips(corpus, text):
    ids = corpus.encode(text)
    assert corpus.decode(ids) == text and END_OF_TEXT not in ids


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the corpus does not change
@given(text=st.text())
def test_any_unicode_round_trips(corpus, text):
    assert corpus.decode(corpus.encode(text)) == text


def test_ids_that_the_tokenizer_lacks_are_left_out_of_the_text(corpus):
    """The model may have more rows than the tokenizer found entries."""
    assert corpus.decode([*corpus.encode("ab"), VOCAB + 5, END_OF_TEXT]) == "ab<|endoftext|>"


def test_a_large_vocabulary_is_stored_and_read_alike(data):
    small, large = (open_corpus(data, length=LENGTH, vocab=vocab, seed=0) for vocab in (65536, 65537))
    assert (small.parts[0].streams["train"].dtype, large.parts[0].streams["train"].dtype) == ("<u2", "<u4")
    assert np.array_equal(epoch(small, "train"), epoch(large, "train"))


def test_another_process_and_cache_give_the_same_samples(data, corpus, tmp_path):
    code = f"""
from platform.config.fields import Data
from platform.data.corpus import open_corpus
data = Data(**{vars(replace(data, cache=str(tmp_path / "other")))!r})
corpus = open_corpus(data, length={LENGTH}, vocab={VOCAB}, seed=0)
print(corpus.digest, corpus.batch("train", 5, 9)["labels"].tolist())
"""
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{corpus.digest} {corpus.batch('train', 5, 9)['labels'].tolist()}"


def test_the_digest_tells_every_difference(data, corpus, folder):
    digests = {corpus.digest}
    digests.add(open_corpus(replace(data, validation=0.2), length=LENGTH, vocab=VOCAB, seed=0).digest)
    digests.add(open_corpus(data, length=LENGTH, vocab=VOCAB - 1, seed=0).digest)
    (folder / "00.txt").write_text("another text\n" * 50)
    digests.add(open_corpus(data, length=LENGTH, vocab=VOCAB, seed=0).digest)
    assert len(digests) == 4


def test_jsonl_becomes_samples(tmp_path, words):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"body": words(i, lines=20)}) + "\n" for i in range(50)))
    data = Data(kind="text", path=str(path), field="body", cache=str(tmp_path / "cache"))
    corpus = open_corpus(data, length=LENGTH, vocab=VOCAB, seed=0)
    assert corpus.sample_counts["train"] > 50 and corpus.sample_counts["validation"] > 1
    assert "sheep" in corpus.decode(rows(corpus, "train", 0, 1)[0].tolist())


def test_a_corpus_without_a_whole_sample_is_refused_with_what_would_do(data, folder, corpus):
    validation = len(corpus.parts[0].streams["validation"])
    with pytest.raises(ConfigError) as error:
        open_corpus(data, length=validation, vocab=VOCAB, seed=0)
    (line,) = error.value.violations
    assert f"model.length={validation - 1} or data.validation=" in line
    advised = float(line.split("data.validation=")[1].split()[0])
    assert open_corpus(data, length=validation - 1, vocab=VOCAB, seed=0).sample_counts["validation"] == 1
    assert open_corpus(replace(data, validation=advised), length=validation, vocab=VOCAB, seed=0).sample_counts[
        "validation"
    ]
    with pytest.raises(ConfigError) as error:
        open_corpus(data, length=10**6, vocab=VOCAB, seed=0)
    assert [("train" in line, "validation" in line) for line in error.value.violations] == [
        (True, False),
        (False, True),
    ]


def test_synthetic_tokens_need_no_text():
    data = Data(kind="synthetic")
    corpus, same, other = (open_corpus(data, length=8, vocab=50, seed=seed) for seed in (3, 3, 4))
    batch = rows(corpus, "train", 10**6, 10**6 + 500)
    assert batch.shape == (500, 9) and batch.dtype == np.int64 and set(np.unique(batch)) == set(range(50))
    assert np.array_equal(batch[7:9], rows(same, "train", 10**6 + 7, 10**6 + 9)) and corpus.digest == same.digest
    assert not np.array_equal(batch, rows(other, "train", 10**6, 10**6 + 500)) and corpus.digest != other.digest
    assert not np.array_equal(rows(corpus, "train", 0, 4), rows(corpus, "validation", 0, 4))
    assert corpus.decode([1, 22]) == "<1> <22>" and all(0 <= i < 50 for i in corpus.encode("start"))


def test_text_without_spaces_is_tokenised_in_linear_time():
    """Training is quadratic in the longest word: one of 256,000 letters would take 20 s."""
    draw = random.Random(0)
    text = "".join(draw.choice("acgt") for _ in range(256_000))
    began = time.process_time()
    bpe = tokenizer.train_tokenizer([text, text], 300)
    own = build_vocabulary(add_own_config({"tokenizer.json": bpe.to_str().encode()}), pretrained=False)
    [ids] = tokenizer.encode_documents(own, [(0, text)])
    assert time.process_time() - began < 5.0
    assert bpe.decode(ids[1:].tolist()) == text
    assert len(ids) < 0.7 * len(text)


def test_ordinary_text_is_trained_on_as_it_is():
    assert tokenizer._cut_long_runs("the quick brown fox " * 10_000) == ["the quick brown fox " * 10_000]
    text = "x" * 10_000 + " " * 5_000 + "é1_" * 3
    assert "".join(tokenizer._cut_long_runs(text)) == text and len(tokenizer._cut_long_runs(text)) > 3


def test_nothing_is_held_out_where_nobody_asks_for_it(data):
    """One check judges data.validation=0: it is legal, and eval.every alone cannot go with it."""
    corpus = open_corpus(replace(data, validation=0.0), length=LENGTH, vocab=VOCAB, seed=0)
    held = corpus.parts[0].streams["validation"]
    assert corpus.sample_counts["validation"] == 0 and len(held) == 0 and corpus.sample_counts["train"] > 50
    assert violations_of_sources(replace(data, validation=0.0), vocab=VOCAB) == []
    assert violations_of_sources(replace(data, validation=-0.1), vocab=VOCAB) and violations_of_sources(
        replace(data, validation=1.0), vocab=VOCAB
    )
