"""Files of ranks as tiktoken writes them (byte-level BPE), as tokenizers of the library tokenizers.

A line has a token in base64, and its rank, which is its id. The file says neither how a text is cut into words nor
which special tokens there are; of published encodings both are known by the number of ranks.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from platform.boundary.schema import Malformed
from platform.data.tokenizers.merges import merges_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LINE = re.compile(rb"([A-Za-z0-9+/]{1,400}={0,2}) (\d{1,8})")
_MOST = 1 << 21  # ranks
END = "<|endoftext|>"

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
WORDS = {  # regular expressions of words, by the encoding that first had them
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "qwen": rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    "o200k_base": rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
}


@dataclass(frozen=True)
class Encoding:
    """Says what a file of ranks does not: the regular expression of `words`, by its name in WORDS or itself, and the
    `special` tokens with their ids; none: END alone, after the ranks."""

    words: str
    special: Mapping[str, int] = field(default_factory=dict)


def _llama3() -> dict[str, int]:
    """Return special token -> id for Llama 3's tokenizer: 256 tokens, from 128000 on."""
    first = ["begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
             "finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id", "eom_id",
             "eot_id", "python_tag"]  # fmt: skip
    names = [*first, *(f"reserved_special_token_{i}" for i in range(3, 248))]
    return {f"<|{name}|>": 128000 + i for i, name in enumerate(names)}


_FIM = {f"<|fim_{name}|>": 100258 + i for i, name in enumerate(("prefix", "middle", "suffix"))}
_QWEN = {END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
KNOWN = {  # number of ranks -> encoding
    50256: Encoding("gpt2", {END: 50256}),  # gpt2, r50k_base
    50280: Encoding("gpt2", {END: 50256}),  # p50k_base
    100256: Encoding("cl100k_base", {END: 100257, **_FIM, "<|endofprompt|>": 100276}),
    128000: Encoding("cl100k_base", _llama3()),
    151643: Encoding("qwen", _QWEN),
    199998: Encoding("o200k_base", {END: 199999, "<|endofprompt|>": 200018}),
}


def read_ranks(raw: bytes, words: str = "") -> tuple[dict[bytes, int], Encoding]:
    """Read the bytes of a tiktoken file: its tokens by rank, and the encoding's rules, which it lacks. `words`: a
    regular expression, or the name of one in WORDS; "": the published encoding's with as many ranks. Raises Malformed
    for other bytes, and if no `words` are given and no encoding has as many ranks."""
    tokens: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line:
            continue
        found = LINE.fullmatch(line)
        if not found or number > _MOST:
            raise Malformed(f"line {number} is no token in base64 and its rank")
        try:
            token = base64.b64decode(found[1], validate=True)
        except binascii.Error:
            raise Malformed(f"line {number} is no token in base64 and its rank") from None
        if token in tokens or int(found[2]) >= _MOST:
            raise Malformed(f"line {number} repeats a token, or its rank is too high")
        tokens[token] = int(found[2])
    if len({*tokens.values()}) < len(tokens) or not all(bytes([b]) in tokens for b in range(256)):
        raise Malformed("two tokens have one rank, or a byte has none")
    known = KNOWN.get(len(tokens), Encoding(""))
    words = words or known.words
    if not words:
        raise Malformed(
            f"has {len(tokens)} ranks, as no published encoding; how it cuts words must be said:"
            f" data.tokenizer_words={'|'.join(WORDS)}, or a regular expression"
        )
    special = known.special or {END: max(tokens.values()) + 1}
    if {*special.values()} & {*tokens.values()}:
        raise Malformed("a special token has the id of a rank")
    return tokens, Encoding(words, special)


def tokenizer_of_ranks(tokens: Mapping[bytes, int], encoding: Encoding) -> Tokenizer:
    """Construct a Tokenizer that gives every text the ids that tiktoken gives it by these ranks. Raises Malformed if
    its regular expression of words is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # of byte-level BPE: a byte's own character, or one >= 256
    letters = dict(zip(sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte)), alphabet, strict=True))
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in tokens.items()}
    merges = [*merges_of(sorted(spelled, key=spelled.__getitem__), spelled)]
    tokenizer = Tokenizer(models.BPE({**spelled, **encoding.special}, merges, ignore_merges=True))
    try:
        words: Any = pre_tokenizers.Split(Regex(WORDS.get(encoding.words, encoding.words)), "isolated")
    except Exception as error:  # the library raises its own
        raise Malformed(f"data.tokenizer_words is no regular expression: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    order = sorted(encoding.special, key=encoding.special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in order])
    return tokenizer
