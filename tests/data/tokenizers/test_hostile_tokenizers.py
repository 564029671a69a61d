"""Tokenizers of strangers: what they do with memory and time, and that they cannot encode, is one line."""

import json
import struct

import pytest

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data import chat_templates, tokenizer, tokenizer_files
from platform.data.chat_templates import ConfinedTokenizer
from tests.data.tokenizers import texts

tokenizers = pytest.importorskip("tokenizers")
ENDS = {"</s>": 1}


def saved(folder, model, normalizer=None, **more):
    theirs = tokenizers.Tokenizer(model)
    if normalizer:
        theirs.normalizer = normalizer
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    theirs.save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_text(json.dumps(content | more))


def words(**more):
    return tokenizers.models.WordLevel({"a": 0, **ENDS}, unk_token="[UNK]")


def multiplied(folder):
    step = tokenizers.normalizers.Replace("a", "a" * 10)
    saved(folder, words(), tokenizers.normalizers.Sequence([step] * 12))


def prepended(folder):
    saved(folder, words(), tokenizers.normalizers.Prepend("a " * 2_500_000))


def unknown(model):
    return lambda folder: saved(folder, model())


def word_pieces(folder):
    (folder / "vocab.txt").write_text("a\nb\n[SEP]\n")


def holes(folder):
    (folder / "vocab.json").write_text(json.dumps({"a": 0, **ENDS, "far": (1 << 31) - 1}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def charsmap(raw):
    """A sentencepiece model with this map of characters."""

    def field(number, value):
        return bytes([number << 3 | 2]) + bytes([len(value)]) + value

    def write(folder):
        pieces = [
            field(1, field(1, text) + b"\x15" + struct.pack("<f", -1) + bytes([0x18, kind])) for text, kind in PIECES
        ]
        (folder / "tokenizer.model").write_bytes(b"".join(pieces) + field(3, field(2, raw)))

    return write


PIECES = [(b"<unk>", 2), (b"<s>", 3), (b"</s>", 3), (b"a", 1)]
HOSTILE = {
    "multiplied": (multiplied, "memory|more than"),
    "prepended": (prepended, "more than|memory|takes"),
    "words without unknown": (unknown(words), "Missing .UNK. token|unk_token"),
    "pieces without unknown": (word_pieces, "Missing .UNK. token|unk_token"),
    "unigram without unknown": (
        unknown(lambda: tokenizers.models.Unigram([("a", -1.0), ("</s>", -1.0)], None)),
        "[uU]nk",
    ),
    "holes": (holes, "memory"),
    "short map": (charsmap(b"\x01"), ""),
    "lying map": (charsmap(struct.pack("<I", 1 << 30) + b"abc"), ""),
    "map that is none": (charsmap(struct.pack("<I", 4) + b"\xff" * 8), ""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(chat_templates, "_SECONDS", 2)
    monkeypatch.setattr(chat_templates, "_MEMORY", 64 << 20)
    write, wanted = HOSTILE[name]
    write(tmp_path)
    with pytest.raises(ConfigError, match=wanted or "data.tokenizer") as caught:
        vocabulary = tokenizer.load_named_vocabulary(Data(tokenizer=str(tmp_path)))
        vocabulary.encode("a zebra" if "without" in name else "a")
    [line] = caught.value.violations
    assert line.startswith("data.tokenizer") and line.isprintable() and len(line) < 500


@pytest.mark.parametrize("role", ["eos", "bos", "unk", "other"])
@pytest.mark.parametrize("beside", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_that_is_no_text_is_refused(tmp_path, role, beside):
    saved(tmp_path, words())
    for token in ("x\ud800", {"content": "x\ud800"}):
        (tmp_path / beside).write_text(json.dumps({"eos_token": "</s>", f"{role}_token": token}))
        with pytest.raises(ConfigError) as caught:
            tokenizer.load_named_vocabulary(Data(tokenizer=str(tmp_path)))
        [line] = caught.value.violations
        assert line.startswith(
            f"data.tokenizer={tmp_path}: {role}_token is no text: it has U+D800, half a character, at"
        )
        assert "place 1;" in line and line.isprintable()


@pytest.mark.parametrize("encode", ["encode_batch", "encode_batch_fast"])
def test_half_a_character_is_no_question_mark(tmp_path, encode):
    """The text is named by its number and the place in it; others are encoded."""
    saved(tmp_path, tokenizers.models.WordLevel({"a": 0, **ENDS, "?": 2, "[UNK]": 3}, unk_token="[UNK]"))
    confined = ConfinedTokenizer((tmp_path / "tokenizer.json").read_bytes())
    assert [e.ids for e in getattr(confined, encode)(["a", "?"])] == [[0], [2]]
    with pytest.raises(ConfigError, match=r"text 1 of 3 is none: it has U\+D83D, half a character, at place 2$"):
        getattr(confined, encode)(["a", "a \ud83d", "\ud83d"])
    assert [e.ids for e in getattr(confined, encode)(["a \U0001f600"])] == [[0, 3]]


def test_it_does_as_the_library(tmp_path):
    """Ids, ends, texts and tokens, and after a child's death too."""
    samples, trained = texts.texts(40), tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer, trained.decoder = tokenizers.pre_tokenizers.ByteLevel(), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], show_progress=False)
    trained.train_from_iterator(samples, trainer)
    trained.add_tokens(["plain"])
    raw = trained.to_str().encode()
    theirs, ours = tokenizer_files.parse_tokenizer(raw), ConfinedTokenizer(raw)
    for _ in range(2):
        some = [*samples, "", "</s> plain \U0001f600"]
        wanted, actual = theirs.encode_batch(some, add_special_tokens=False), ours.encode_batch(some)
        assert [e.ids for e in actual] == [e.ids for e in wanted] == [e.ids for e in ours.encode_batch_fast(some)]
        assert [[end for _, end in e.offsets] for e in actual] == [[end for _, end in e.offsets] for e in wanted]
        for e in wanted:
            assert ours.decode(e.ids, skip_special_tokens=False) == theirs.decode(e.ids, skip_special_tokens=False)
        assert ours.get_vocab() == theirs.get_vocab() and ours.encode_batch([]) == []
        added = {i: (t.content, t.special) for i, t in theirs.get_added_tokens_decoder().items()}
        assert ours.get_added_tokens_decoder() == added
        assert all(ours.id_to_token(i) == theirs.id_to_token(i) for i in range(410))
        assert ours.token_to_id("</s>") == theirs.token_to_id("</s>") and ours.token_to_id("none") is None
        ours._parser.close()
