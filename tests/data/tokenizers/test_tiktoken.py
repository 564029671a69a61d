"""Files of ranks give the ids that tiktoken gives."""

from __future__ import annotations

import base64

import pytest

from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.data.tokenizer import build_vocabulary
from platform.data.tokenizer_files import KNOWN, WORDS, read_ranks, read_tokenizer_files
from tests.data.tokenizers.texts import texts
from tests.harness.peers import peer

PAIRS = "th he in er an re on the and  t  a  the  d de def self  self . self. ll 'll 12 123 ed ing \n  \n\n   ".split(
    " "
)


def ranks() -> dict[bytes, int]:
    """All bytes, then what two known tokens make: any such list is one."""
    tokens = [bytes([b]) for b in range(256)]
    for text in (b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"de", b"def", b" def", b"se", b"lf", b"self",
                 b" self", b"12", b"123", b"  ", b"    ", b"\n\n", b"'l", b"'ll", b"\xe6\x97", b"\xe6\x97\xa5", b"aa",
                 b"aaa", b"cl", b"class", b"ass", b"as", b"ss"):  # fmt: skip
        tokens.append(text)
    return {token: rank for rank, token in enumerate(tokens)}


def file_of(tokens: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in tokens.items())


@pytest.mark.parametrize("words", [*WORDS, r"\w+|\W"])
def test_ids_are_equal(tmp_path, words):
    library, tokens = peer("tiktoken"), ranks()
    file = tmp_path / "own.tiktoken"
    file.write_bytes(file_of(tokens))
    ours = build_vocabulary(read_tokenizer_files(str(file), words))
    special = {"<|endoftext|>": len(tokens)}
    theirs = library.Encoding("x", pat_str=WORDS.get(words, words), mergeable_ranks=tokens, special_tokens=special)
    for text, ids in zip(samples := texts(), ours.encode_texts(samples), strict=True):
        assert ids == theirs.encode_ordinary(text), text
        assert ours.decode(ids) == text
    assert (ours.size, ours.special.front) == (len(tokens) + 1, (len(tokens),))


def test_the_published_encodings_are_as_published(monkeypatch):
    """Special tokens, and patterns: with every pair of bytes a token, ids tell where words end."""
    library = peer("tiktoken")
    import tiktoken_ext.openai_public as published

    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: {})
    raw = [text.encode() for text in texts(100)]
    tokens = [bytes([b]) for b in range(256)] + sorted({text[i : i + 2] for text in raw for i in range(len(text) - 1)})
    pairs = {token: rank for rank, token in enumerate(tokens)}
    for name, count in {"r50k_base": 50256, "cl100k_base": 100256, "o200k_base": 199998}.items():
        said, ours = getattr(published, name)(), KNOWN[count]
        assert ours.special == said["special_tokens"]
        patterns = said["pat_str"], WORDS[ours.words]
        one, other = (library.Encoding("x", pat_str=p, mergeable_ranks=pairs, special_tokens={}) for p in patterns)
        for text in texts(100):
            assert one.encode_ordinary(text) == other.encode_ordinary(text)


def test_a_number_of_ranks_that_no_encoding_has():
    with pytest.raises(Malformed, match="data.tokenizer_words=gpt2"):
        read_ranks(file_of(ranks()))


BAD = {
    "no base64": b"!!! 0\n",
    "no rank": b"IQ==\n",
    "base64 of no length": b"IQ= 0\n",
    "a token twice": file_of(ranks()) + b"IQ== 900\n",
    "a rank twice": file_of(ranks()) + base64.b64encode(b"zz") + b" 3\n",
    "a rank beyond all": file_of(ranks()) + base64.b64encode(b"zz") + b" 99999999\n",
    "a byte that is missing": file_of({t: r for t, r in ranks().items() if t != b"a"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_none_is_refused(case):
    with pytest.raises(Malformed):
        read_ranks(BAD[case], "gpt2")


def test_a_regular_expression_that_is_none(tmp_path):
    file = tmp_path / "own.tiktoken"
    file.write_bytes(file_of(ranks()))
    with pytest.raises(ConfigError, match="no regular expression") as error:
        read_tokenizer_files(str(file), "(")
    assert len(error.value.violations) == 1 and "\n" not in str(error.value)
