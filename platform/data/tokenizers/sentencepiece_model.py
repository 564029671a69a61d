"""Models of sentencepiece, unigram and BPE, as tokenizers of the library tokenizers.

A model file is a message of protocol buffers, of which the package sentencepiece has the schema. A model that asks for
what the library cannot do is refused.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from platform.boundary.schema import Malformed
from platform.data.tokenizers.merges import merges_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "▁"  # stands for a space in pieces
_MOST = 1 << 21  # pieces
NEEDS = "a sentencepiece model needs sentencepiece: pip install 'elastic-platform[sentencepiece]'"


def read_model(raw: bytes) -> Any:
    """Parse the bytes of a sentencepiece model file as its `ModelProto`. Raises Malformed for other bytes, for
    unsupported features, and if the package that has the schema is not there."""
    try:
        from google.protobuf.message import DecodeError

        schema = import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        raise Malformed(NEEDS) from None
    except Exception as error:  # protobuf's own, where it is older than the schema
        raise Malformed(f"{NEEDS}: {error}") from None
    try:
        model = schema.ModelProto.FromString(raw)
    except DecodeError:
        raise Malformed("no sentencepiece model, or torn") from None
    texts = [piece.piece for piece in model.pieces]
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    if not 0 < len(texts) <= _MOST or not all(isinstance(text, str) for text in texts):  # bytes: no UTF-8
        raise Malformed("no sentencepiece model: no pieces, too many, or not of text")
    if len({*texts}) < len(texts):
        raise Malformed("a piece comes twice")
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise Malformed(f"a sentencepiece model of type {trainer.model_type}; unigram (1) and BPE (2) are known")
    suffixes = trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces
    if suffixes or any(piece.type == piece.UNUSED for piece in model.pieces):
        raise Malformed("treats spaces as suffixes, does not escape them, or has unused pieces: not known here")
    if trainer.model_type == trainer.UNIGRAM and not 0 <= trainer.unk_id < len(texts):
        raise Malformed("a unigram model without a token for what is unknown")
    return model


def tokenizer_of_model(model: Any) -> Tokenizer:
    """Convert a sentencepiece `ModelProto` to a Tokenizer that gives every text the same ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    own = sorted((p.piece for p in pieces if p.type == p.USER_DEFINED), key=len, reverse=True)
    if trainer.model_type == trainer.UNIGRAM:
        best = max((p.score for p in pieces if p.type == p.NORMAL), default=0.0)
        scored = [(p.piece, len(p.piece) * best - 0.1 if p.type == p.USER_DEFINED else p.score) for p in pieces]
        made: Any = models.Unigram(scored, trainer.unk_id, trainer.byte_fallback)
    else:
        vocab = {piece.piece: number for number, piece in enumerate(pieces)}
        merged = sorted((p for p in pieces if p.type == p.NORMAL), key=lambda p: -p.score)
        parts = {p.piece: vocab[p.piece] for p in pieces if p.type in (p.NORMAL, p.USER_DEFINED)}
        unknown = pieces[trainer.unk_id].piece if 0 <= trainer.unk_id < len(pieces) else None
        more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
        made = models.BPE(vocab, [*merges_of((p.piece for p in merged), parts)], ignore_merges=bool(own), **more)
    tokenizer = Tokenizer(made)
    charsmap = normalizer.precompiled_charsmap
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    words: list[Any] = []
    if own:
        words.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated"))
    if not any(re.search(f"[^{SPACE}]{SPACE}", p.piece) for p in pieces if p.type == p.NORMAL):
        words.append(pre_tokenizers.Split(Regex(f"{SPACE}+"), "merged_with_next"))  # no piece crosses: word by word
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = [decoders.Strip(" ", 1, 0)] if normalizer.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence([*back, *prefix])
    special = [p.piece for p in pieces if p.type in (p.UNKNOWN, p.CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer
