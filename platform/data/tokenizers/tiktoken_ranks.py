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
    `special` tokens with their ids; None: END alone, after the ranks."""

    words: str
    special: Mapping[str, int] | None = None


def _llama3() -> dict[str, int]:
    """Return the ids of the 256 special tokens of Llama 3 by spelling, from 128000 on."""
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


@dataclass(frozen=True)
class Ranks:
    """Tokens of a file of ranks, by rank, and what belongs to them."""

    tokens: dict[bytes, int]
    words: str
    special: dict[str, int] = field(default_factory=dict)


def read_ranks(raw: bytes, words: str = "") -> Ranks:
    """Read the bytes of a file of ranks. `words`: a regular expression, or the name of one in WORDS; "": the published
    encoding's with as many ranks. Raises Malformed for other bytes, and if no `words` are given and no encoding has as
    many ranks."""
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
    special = dict(known.special or {END: max(tokens.values()) + 1})
    if {*special.values()} & {*tokens.values()}:
        raise Malformed("a special token has the id of a rank")
    return Ranks(tokens, WORDS.get(words, words), special)


def tokenizer_of_ranks(ranks: Ranks) -> Tokenizer:
    """Make the tokenizer that gives a text the ids that tiktoken gives it. Raises Malformed if its regular expression
    of words is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letter = {byte: chr(code) for byte, code in _letters().items()}
    spelled = {"".join(letter[b] for b in token): rank for token, rank in ranks.tokens.items()}
    merges = [pair for pairs in _merges(ranks.tokens) for pair in pairs]
    named = [("".join(letter[b] for b in left), "".join(letter[b] for b in right)) for left, right in merges]
    tokenizer = Tokenizer(models.BPE({**spelled, **ranks.special}, named, ignore_merges=True))
    try:
        words: Any = pre_tokenizers.Split(Regex(ranks.words), "isolated")
    except Exception as error:  # the library raises its own
        raise Malformed(f"data.tokenizer_words is no regular expression: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    order = sorted(ranks.special, key=lambda text: ranks.special[text])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in order])
    return tokenizer


def _letters() -> dict[int, int]:
    """Return the character for each byte in byte-level BPE (Radford et al. 2019): itself if it prints, else >= 256."""
    printing = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printing]
    return {**{b: b for b in printing}, **{b: 256 + i for i, b in enumerate(others)}}


def _merges(tokens: Mapping[bytes, int]) -> list[list[tuple[bytes, bytes]]]:
    """Return the pairs of tokens that make each token, in the order of ranks."""
    out = []
    for token in sorted((t for t in tokens if len(t) > 1), key=tokens.__getitem__):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        known = [(left, right) for left, right in pairs if left in tokens and right in tokens]
        out.append(sorted(known, key=lambda pair: (tokens[pair[0]], tokens[pair[1]])))
    return out
