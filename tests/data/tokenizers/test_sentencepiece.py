"""Models of sentencepiece give the ids that sentencepiece gives, and what is none is refused."""

from __future__ import annotations

import struct
import sys
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from platform.boundary.schema import Malformed
from platform.data.tokenizer import build_vocabulary
from platform.data.tokenizer_files import NEEDS, read_sentencepiece_model, read_tokenizer_files
from tests.data.tokenizers.texts import sources, texts

OPTIONS = {
    "as it comes": {},
    "like Llama's": {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True,
                     "normalization_rule_name": "identity"},
    "like Gemma's": {"byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False,
                     "split_by_whitespace": False, "normalization_rule_name": "identity"},
    "with pieces of the user's": {"user_defined_symbols": ["<sep>", "ab"], "pad_id": 3},
}  # fmt: skip


@cache
def trained(kind: str, option: str, root: Path) -> Path:
    lines = [line for text in sources(0, 12) for line in text.splitlines() if line.strip()][:3000]
    prefix = root / f"{kind}-{len(option)}"
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_prefix=str(prefix), vocab_size=500,
                                       model_type=kind, minloglevel=2, **OPTIONS[option])  # fmt: skip
    return prefix.with_suffix(".model")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_are_equal(root, kind, option):
    """Where several cuts of a unigram model have one probability, any of them; and what spells a special token of it is
    cut, as it makes tokens of texts too."""
    file = trained(kind, option, root)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = build_vocabulary(read_tokenizer_files(str(file)))
    score = {i: theirs.get_score(i) for i in range(theirs.get_piece_size())}
    assert ours.size == theirs.get_piece_size()
    apart = 0
    for text, ids in zip(samples := texts(), ours.encode_texts(samples), strict=True):
        wanted = theirs.encode(text)
        if kind == "unigram" and ("<s>" in text or "</s>" in text):
            assert not {*ids} & {1, 2}
            continue
        if ids != wanted:
            apart += 1
            assert kind == "unigram", text
            assert sum(map(score.get, ids)) == pytest.approx(sum(map(score.get, wanted)), abs=1e-2), text
            assert "".join(map(theirs.id_to_piece, ids)) == "".join(map(theirs.id_to_piece, wanted)), text
        assert ours.decode(ids) == theirs.decode(wanted) or "unk" in ours.decode(ids) or "⁇" in theirs.decode(wanted)
    assert apart <= 3


def test_special_tokens_are_those_of_the_model(root):
    vocabulary = build_vocabulary(read_tokenizer_files(str(trained("unigram", "with pieces of the user's", root))))
    assert (vocabulary.special.end, vocabulary.special.begin, vocabulary.special.start) == (2, 1, 1)
    assert vocabulary.special_tokens == ["<unk>", "<s>", "</s>", "<pad>"]


def varint(n: int) -> bytes:
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def message(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text: str, kind: int = 1, score: float = -1.0) -> bytes:
    return message(1, message(1, text.encode()) + message(2, score) + message(3, kind))


GOOD = piece("<unk>", 2) + piece("<s>", 3) + piece("</s>", 3) + piece("▁a") + piece("b")
BAD = {
    "nothing": (b"", "no sentencepiece model"),
    "torn": (GOOD[:-1], "torn"),
    "text": (b"hello, world, hello", "sentencepiece model"),
    "a type of the wire": (b"\x0b\x00", "no sentencepiece model"),
    "an endless number": (b"\xff" * 20, "no sentencepiece model"),
    "no letters": (message(1, message(1, b"\xff\xfe")), "no sentencepiece model"),
    "a number for a text": (message(1, 7), "no sentencepiece model"),
    "a piece twice": (GOOD + piece("b"), "a piece comes twice"),
    "of words": (GOOD + message(2, message(3, 3)), "type 3; unigram (1) and BPE (2) are known"),
    "suffixes": (GOOD + message(2, message(24, 1)), "suffixes"),
    "unused": (GOOD + piece("c", 5), "unused"),
    "no unknown": (GOOD + message(2, message(40, 99)), "without a token for what is unknown"),
}


def test_what_is_good_is_read():
    assert [p.piece for p in read_sentencepiece_model(GOOD).pieces] == ["<unk>", "<s>", "</s>", "▁a", "b"]


@pytest.mark.parametrize("case", BAD)
def test_what_is_none_is_refused(case):
    raw, reason = BAD[case]
    with pytest.raises(Malformed, match=reason.replace("(", r"\(").replace(")", r"\)")):
        read_sentencepiece_model(raw)


@pytest.mark.parametrize("package", ["sentencepiece.sentencepiece_model_pb2", "google.protobuf.message"])
def test_a_package_that_is_missing_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Malformed) as error:
        read_sentencepiece_model(GOOD)
    assert str(error.value) == NEEDS


@given(st.binary(max_size=60), st.integers(0, len(GOOD)))
def test_any_bytes_are_read_or_refused(raw, at):
    for damaged in (raw, GOOD[:at] + raw + GOOD[at:]):
        try:
            assert read_sentencepiece_model(damaged).pieces
        except Malformed as error:
            assert str(error)
