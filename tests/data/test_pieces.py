"""Pieces of samples: which tokens they have, by plain lists, and that an epoch has each token once at any lengths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from platform.config.fields import Config, Data
from platform.config.ramps import find_sequence_length, step_sample_range
from platform.data.corpus import Corpus, open_corpus
from platform.data.streams import cut_samples, read_sequence_batch

LENGTH = 12


@pytest.fixture
def tokens(tmp_path: Path) -> Data:
    """Documents that begin with token 0, whose other tokens tell where they are in the stream."""
    np.where(np.arange(1000) % 17 == 0, 0, np.arange(1000)).astype("<u2").tofile(tmp_path / "t.bin")
    fields = {"path": str(tmp_path / "t.bin"), "cache": str(tmp_path / "cache"), "separator": 0, "validation": 0.0}
    return Data(kind="tokens", **fields)


def opened(data: Data, length: int = LENGTH, **more) -> Corpus:
    return open_corpus(data, length=length, vocab=1001, seed=3, **more)


def taken(corpus: Corpus, c: Config, steps: range) -> list[tuple[int, int]]:
    """The pairs (token, label) of training steps, in their order."""
    pairs = []
    for step in steps:
        pieces = c.model.length // find_sequence_length(c, step)
        first, end = step_sample_range(c.train, step)
        rows = read_sequence_batch(corpus, "train", first * pieces, end * pieces, pieces)
        pairs += zip(rows["tokens"].flatten().tolist(), rows["labels"].flatten().tolist(), strict=True)
    return pairs


def test_pieces_by_hand():
    rows = {
        "tokens": np.array([[1, 2, 3, 4, 5, 6]]),
        "labels": np.array([[2, 3, 4, 5, 6, -1]]),
        "begins": np.array([[0, 0, 2, 2, 2, 5]]),  # a document from token 3 on, another from token 6 on
        "positions": np.array([[0, 1, 0, 1, 2, 0]]),
        "segments": np.array([[0, 0, 1, 1, 1, 2]]),
    }
    assert {name: piece.tolist() for name, piece in cut_samples(rows, 2).items()} == {
        "tokens": [[1, 2, 3], [4, 5, 6]],
        "labels": [[2, 3, 4], [5, 6, -1]],
        "begins": [[0, 0, 2], [0, 0, 2]],
        "positions": [[0, 1, 0], [0, 1, 0]],
        "segments": [[0, 0, 1], [0, 0, 1]],
    }


@pytest.mark.parametrize("pieces", [2, 3, 12])
def test_pieces_are_the_samples_of_a_shorter_length(tokens, pieces):
    """Where samples are cut from the tokens end to end, a piece is the sample that the shorter length has there."""
    long, short = opened(tokens), opened(tokens, LENGTH // pieces)
    for split, stream in (("train", long.parts[0].streams["train"]),):
        count = long.sample_counts[split]
        index, keys = np.arange(count), np.zeros(count, np.uint64)
        whole = cut_samples(long.objective.batch(stream, index, keys), pieces)
        index, keys = np.arange(count * pieces), np.zeros(count * pieces, np.uint64)
        wanted = short.objective.batch(stream, index, keys)
        assert whole.keys() == wanted.keys()
        assert all(np.array_equal(whole[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_an_epoch_has_each_token_once_whatever_the_lengths(tokens, packing):
    """Over two boundaries in its midst; and a step has the pairs of a run without a ramp, in their order."""
    data = replace(tokens, packing=packing, document_mask=packing == "best_fit")
    corpus, c = opened(data), Config()
    c.model.length, c.train.global_batch, c.train.length_ramp = LENGTH, 5, ["0:2", "4:6", "9:12"]
    count = corpus.sample_counts["train"]
    steps = range(1, -(-count // c.train.global_batch) + 1)
    assert steps[-1] > 9, "the last length is reached"
    pairs = taken(corpus, c, steps)
    assert pairs == taken(corpus, replace(c, train=replace(c.train, length_ramp=[])), steps)
    epoch = pairs[: count * LENGTH]
    last = count * LENGTH if packing == "cut" else 999
    words = [n for n in range(1, last) if n % 17]  # of which each is another token
    assert sorted(token for token, _ in epoch if token > 0) == words + [n for n in [last] if packing != "cut"]
    labels = [label for _, label in epoch if label > 0]
    assert len(labels) == len(set(labels)) and {*labels} <= {*words, last}


def test_ranks_read_parts_of_a_sample(tokens):
    """A rank may have sequences that neither begin nor end with a sample."""
    corpus = opened(tokens)
    whole = read_sequence_batch(corpus, "train", 0, 40, 4)
    for start, end in ((0, 1), (3, 4), (3, 6), (5, 17), (39, 40)):
        part = read_sequence_batch(corpus, "train", start, end, 4)
        assert all(np.array_equal(part[name], whole[name][start:end]) for name in whole)


def test_masked_tokens_are_chosen_of_the_whole_sample(tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": "some words " * 9}) + "\n" for _ in range(40)))
    data = Data(kind="text", path=str(tmp_path / "t.jsonl"), cache=str(tmp_path / "cache"), validation=0.0)
    corpus = open_corpus(data, length=LENGTH, vocab=300, seed=3, objective="masked", segments=2)
    whole, pieces = corpus.batch("train", 0, 6), read_sequence_batch(corpus, "train", 0, 18, 3)
    for name in ("tokens", "labels"):
        assert np.array_equal(pieces[name].reshape(6, LENGTH), whole[name])
    assert (pieces["segments"][:, 0] == 0).all() and (pieces["segments"] <= 1).all()
