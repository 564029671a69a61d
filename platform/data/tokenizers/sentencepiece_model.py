"""Models of sentencepiece, unigram and BPE, as tokenizers of the library tokenizers.

A model file is a message of protocol buffers. Of the fields of sentencepiece_model.proto (version 0.2) those are read
that decide about tokens, and a model that asks for anything else is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from platform.boundary.schema import Malformed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"  # stands for a space in pieces
_MOST = 1 << 21  # pieces
_UNIGRAM, _BPE = 1, 2  # types of models
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # types of pieces
_FIXED = {1: 8, 5: 4}  # bytes of a value by its type on the wire


@dataclass(frozen=True)
class ModelPiece:
    """Entry of a model's vocabulary. `score`: its logarithmic probability in a unigram model; merges of BPE go by
    it."""

    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """Sentencepiece model as its file says: the pieces by id, and how a text is made ready for them."""

    pieces: list[ModelPiece]
    kind: int = _UNIGRAM
    byte_fallback: bool = False  # what no piece covers is encoded byte by byte
    ids: dict[str, int] = field(default_factory=dict)  # of the special tokens bos, eos, pad and unk
    charsmap: bytes = b""  # of characters to others, as Unicode's NFKC
    prefix: bool = True  # a space is put in front of a text
    collapse: bool = True  # spaces at both ends go, and several in a row are one


def read_model(raw: bytes) -> SentencePieceModel:
    """Read the bytes of a sentencepiece model file. Raises Malformed for other bytes and for unsupported features."""
    pieces, trainer, normalizer = [], {}, {}
    try:
        for number, value in _fields(raw):
            if number == 1:
                pieces.append(_piece(dict(_fields(_bytes(value)))))
                if len(pieces) > _MOST:
                    raise Malformed("no sentencepiece model: too many pieces")
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
            elif number == 3:
                normalizer = dict(_fields(_bytes(value)))
    except (struct.error, UnicodeDecodeError, RecursionError):
        raise Malformed("no sentencepiece model") from None
    if not pieces:
        raise Malformed("no sentencepiece model")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise Malformed("a piece comes twice")
    kind = _int(trainer.get(3, _UNIGRAM))
    if kind not in (_UNIGRAM, _BPE):
        raise Malformed(f"a sentencepiece model of type {kind}; unigram (1) and BPE (2) are known")
    if trainer.get(24) or not normalizer.get(5, 1) or any(piece.kind == _UNUSED for piece in pieces):
        raise Malformed("treats spaces as suffixes, does not escape them, or has unused pieces: not known here")
    signed = {name: _int(trainer.get(number, default)) for name, number, default in _IDS}
    ids = {name: i for name, i in signed.items() if 0 <= i < len(pieces)}
    if kind == _UNIGRAM and "unk" not in ids:
        raise Malformed("a unigram model without a token for what is unknown")
    return SentencePieceModel(
        pieces,
        kind,
        bool(trainer.get(35, 0)),
        ids,
        _bytes(normalizer.get(2, b"")),
        bool(normalizer.get(3, 1)),
        bool(normalizer.get(4, 1)),
    )


_IDS = (("unk", 40, 0), ("bos", 41, 1), ("eos", 42, 2), ("pad", 43, -1))  # name, number of the field, default


def _piece(values: dict[int, Any]) -> ModelPiece:
    """Make a piece from the fields of its message: 1 text, 2 score (fp32, default 0), 3 kind (default 1)."""
    score = values.get(2, b"\0\0\0\0")
    return ModelPiece(
        _bytes(values.get(1, b"")).decode(), struct.unpack("<f", _bytes(score))[0], _int(values.get(3, 1))
    )


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message as (number, value): an int, or bytes that are not yet read. Raises Malformed."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(raw, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(raw, at)
        elif (size := _FIXED.get(wire, -1)) < 0:
            raise Malformed("no sentencepiece model")
        if at + size > len(raw):
            raise Malformed("no sentencepiece model, or torn")
        yield number, raw[at : at + size]
        at += size


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return the integer that begins at byte `at`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise Malformed("no sentencepiece model, or torn")
        value |= (raw[at] & 0x7F) << shift
        at += 1
        if raw[at - 1] < 0x80:
            return value, at
    raise Malformed("no sentencepiece model")


def _int(value: Any) -> int:
    """Return an integer field, which may be negative."""
    if not isinstance(value, int):
        raise Malformed("no sentencepiece model")
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: Any) -> bytes:
    """Return the value of a field that must be bytes. Raises Malformed if it is not."""
    if not isinstance(value, bytes):
        raise Malformed("no sentencepiece model")
    return value


def tokenizer_of_model(model: SentencePieceModel) -> Tokenizer:
    """Make the tokenizer that gives a text the ids that the model gives it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = model.pieces
    unknown = pieces[model.ids["unk"]].text if "unk" in model.ids else None
    own = sorted((piece.text for piece in pieces if piece.kind == _USER), key=len, reverse=True)
    if model.kind == _UNIGRAM:
        best = max((piece.score for piece in pieces if piece.kind == _NORMAL), default=0.0)
        scored = [(p.text, len(p.text) * best - 0.1 if p.kind == _USER else p.score) for p in pieces]
        made: Any = models.Unigram(scored, model.ids["unk"], model.byte_fallback)
    else:
        vocab = {piece.text: number for number, piece in enumerate(pieces)}
        more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": model.byte_fallback}
        made = models.BPE(vocab, list(_merges(pieces)), ignore_merges=bool(own), **more)
    tokenizer = Tokenizer(made)
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.collapse:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.prefix:
        steps.append(normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    words: list[Any] = []
    if own:
        words.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated"))
    if not any(re.search(f"[^{SPACE}]{SPACE}", piece.text) for piece in pieces if piece.kind == _NORMAL):
        words.append(pre_tokenizers.Split(Regex(f"{SPACE}+"), "merged_with_next"))  # no piece crosses: word by word
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if model.prefix else back)
    special = [piece.text for piece in pieces if piece.kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def _merges(pieces: list[ModelPiece]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that BPE merges, first the pair whose piece has the highest score."""
    vocab = {piece.text: number for number, piece in enumerate(pieces) if piece.kind in (_NORMAL, _USER)}
    for piece in sorted((p for p in pieces if p.kind == _NORMAL), key=lambda p: -p.score):
        text = piece.text
        pairs = ((text[:i], text[i:]) for i in range(1, len(text)))
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
