"""Files of a tokenizer, in any of the forms in which tokenizers are published, and tokenizer.json made of them.

They travel together, from a source into the cache, checkpoints and exports: tokenizer.json, which says how a text is
encoded; tokenizer_config.json and its like, which name special tokens and hold the chat template; and the files that
they were made of. Merges of BPE are derived for vocabularies that are published as tokens in their order alone
(`derive_merges`).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec

from platform.boundary import documents
from platform.boundary.local_files import find_protocol_fault
from platform.boundary.redaction import register_url_secrets, strip_url_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, shorten_value
from platform.data.chat_templates import build_tokenizer_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def derive_merges(tokens: Iterable[str], known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield a BPE tokenizer's merges, the pairs of `known` tokens that make each of `tokens`, ordered by their ids."""
    for token in tokens:
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        legal = [(left, right) for left, right in pairs if left in known and right in known]
        yield from sorted(legal, key=lambda pair: (known[pair[0]], known[pair[1]]))


# Files of ranks as tiktoken writes them (byte-level BPE), as tokenizers of the library tokenizers.
#
# A line has a token in base64, and its rank, which is its id. The file says neither how a text is cut into words nor
# which special tokens there are; of published encodings both are known by the number of ranks.

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


def _llama3_special_tokens() -> dict[str, int]:
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
    128000: Encoding("cl100k_base", _llama3_special_tokens()),
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
        line_match = LINE.fullmatch(line)
        if not line_match or number > _MOST:
            raise Malformed(f"line {number} is no token in base64 and its rank")
        try:
            token = base64.b64decode(line_match[1], validate=True)
        except binascii.Error:
            raise Malformed(f"line {number} is no token in base64 and its rank") from None
        if token in tokens or int(line_match[2]) >= _MOST:
            raise Malformed(f"line {number} repeats a token, or its rank is too high")
        tokens[token] = int(line_match[2])
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


def build_tiktoken_tokenizer(tokens: Mapping[bytes, int], encoding: Encoding) -> Tokenizer:
    """Construct a Tokenizer that gives every text the ids that tiktoken gives it by these ranks. Raises Malformed if
    its regular expression of words is none."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # of byte-level BPE: a byte's own character, or one >= 256
    letters = dict(zip(sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte)), alphabet, strict=True))
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in tokens.items()}
    merges = [*derive_merges(sorted(spelled, key=spelled.__getitem__), spelled)]
    tokenizer = Tokenizer(models.BPE({**spelled, **encoding.special}, merges, ignore_merges=True))
    try:
        words: Any = pre_tokenizers.Split(Regex(WORDS.get(encoding.words, encoding.words)), "isolated")
    except Exception as error:  # the library raises its own
        raise Malformed(f"data.tokenizer_words is no regular expression: {error}") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    order = sorted(encoding.special, key=encoding.special.__getitem__)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in order])
    return tokenizer


# Models of sentencepiece, unigram and BPE, as tokenizers of the library tokenizers.
#
# A model file is a message of protocol buffers, of which the package sentencepiece has the schema. A model that asks
# for what the library cannot do is refused.

SPACE = "▁"  # stands for a space in pieces
_SENTENCEPIECE_MODEL_MOST = 1 << 21  # pieces
NEEDS = "a sentencepiece model needs sentencepiece: pip install 'elastic-platform[sentencepiece]'"


def read_sentencepiece_model(raw: bytes) -> Any:
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
    if not 0 < len(texts) <= _SENTENCEPIECE_MODEL_MOST or not all(
        isinstance(text, str) for text in texts
    ):  # bytes: no UTF-8
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


def build_sentencepiece_tokenizer(model: Any) -> Tokenizer:
    """Convert a sentencepiece `ModelProto` to a Tokenizer that gives every text the same ids."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces, trainer, normalizer = model.pieces, model.trainer_spec, model.normalizer_spec
    user_pieces = sorted((p.piece for p in pieces if p.type == p.USER_DEFINED), key=len, reverse=True)
    if trainer.model_type == trainer.UNIGRAM:
        best = max((p.score for p in pieces if p.type == p.NORMAL), default=0.0)
        scored = [(p.piece, len(p.piece) * best - 0.1 if p.type == p.USER_DEFINED else p.score) for p in pieces]
        core_model: Any = models.Unigram(scored, trainer.unk_id, trainer.byte_fallback)
    else:
        vocab = {piece.piece: number for number, piece in enumerate(pieces)}
        merged = sorted((p for p in pieces if p.type == p.NORMAL), key=lambda p: -p.score)
        parts = {p.piece: vocab[p.piece] for p in pieces if p.type in (p.NORMAL, p.USER_DEFINED)}
        unknown = pieces[trainer.unk_id].piece if 0 <= trainer.unk_id < len(pieces) else None
        more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": trainer.byte_fallback}
        merges = [*derive_merges((p.piece for p in merged), parts)]
        core_model = models.BPE(vocab, merges, ignore_merges=bool(user_pieces), **more)
    tokenizer = Tokenizer(core_model)
    charsmap = normalizer.precompiled_charsmap
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if normalizer.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    words: list[Any] = []
    if user_pieces:
        words.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, user_pieces))), "isolated"))
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


TokenizerFiles = Mapping[str, bytes]  # by name

KEY = "data.tokenizer"
JSON, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
LARGEST = 256 << 20  # bytes of a file
_VALUES = 1 << 24  # of a document of JSON, and of tokenizer.json itself
BESIDE = (CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE)  # what goes along, whatever the form
MERGES = ("vocab.json", "merges.txt")
WORD_PIECES = "vocab.txt"
MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model", "tokenizer.tiktoken")
NAMES = (JSON, *BESIDE, *MERGES, WORD_PIECES, *MODELS)  # that files of a tokenizer may have here


def read_tokenizer_files(source: str, words: str = "", key: str = KEY) -> dict[str, bytes]:
    """Read the files of the tokenizer at `source`, a path or URL of a folder or file, by name; tokenizer.json is among
    them, made of the others if it is not there. `words`: word pattern of a tiktoken file, see `read_ranks`. Raises
    ConfigError, in a line that names `key`."""
    try:
        files = _gather_files(source)
        if all(name in BESIDE for name in files):
            forms = ", ".join((JSON, *MODELS, MERGES[0], WORD_PIECES, "*.tiktoken"))
            raise Malformed(f"holds no tokenizer: none of {forms}")
        return files if JSON in files else {**files, JSON: build_tokenizer_json(files, words)}
    except (Malformed, OSError, ValueError) as error:
        line = documents.printable_line(getattr(error, "strerror", None) or error)
        raise ConfigError(key, strip_url_secrets(source), line, ["train"] if key == KEY else []) from None


def has_tokenizer(folder: str) -> bool:
    """Return True if a folder, a path or URL, has files of a tokenizer; False also if it cannot be looked at."""
    try:
        storage, path = fsspec.core.url_to_fs(folder)
        names = {PurePosixPath(name).name for name in storage.ls(path, detail=False)}
    except (OSError, ValueError, ImportError):
        return False
    return bool(names & {JSON, MERGES[0], WORD_PIECES, *MODELS}) or any(name.endswith(".tiktoken") for name in names)


def _gather_files(source: str) -> dict[str, bytes]:
    """Read the files of a tokenizer at `source`, a path or URL: return name -> bytes, unchanged. Raises Malformed,
    OSError."""
    register_url_secrets(source)
    if reason := find_protocol_fault(source, writing=False):
        raise Malformed(reason)
    storage, path = fsspec.core.url_to_fs(source)
    if storage.isdir(path):
        entries = {PurePosixPath(entry["name"]).name: entry for entry in storage.ls(path, detail=True)}
        tiktoken = [name for name in entries if name.endswith(".tiktoken")]
        known_names = [JSON, *MERGES, WORD_PIECES, *MODELS, *BESIDE, *tiktoken]
        names = [name for name in known_names if name in entries and entries[name]["type"] == "file"]
        paths = {name: entries[name]["name"] for name in names}
        return {_usual_file_name(name): _read_tokenizer_file(storage, path) for name, path in paths.items()}
    if not storage.isfile(path):
        raise Malformed("no such file or folder")
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    if name in MERGES or name == WORD_PIECES:
        raise Malformed(f"{name} is one of several files; name their folder")
    beside = [other for other in BESIDE if storage.isfile(f"{folder}/{other}")]
    first = {_usual_file_name(name): _read_tokenizer_file(storage, path)}
    return first | {other: _read_tokenizer_file(storage, f"{folder}/{other}") for other in beside}


def _usual_file_name(name: str) -> str:
    """Return the name under which a tokenizer's file is kept: its own, or the usual one for its format."""
    if name in NAMES:
        return name
    return "tokenizer.tiktoken" if name.endswith(".tiktoken") else JSON if name.endswith(".json") else MODELS[0]


def _read_tokenizer_file(storage: Any, path: str) -> bytes:
    """Read a tokenizer's file from a storage of fsspec. Raises Malformed if it is too large, OSError."""
    if "file" in ([storage.protocol] if isinstance(storage.protocol, str) else storage.protocol):
        return documents.read_bytes(path, LARGEST)  # no pipe, no device
    if (size := storage.size(path) or 0) > LARGEST:
        raise Malformed(f"{PurePosixPath(path).name} has {size} bytes, and at most {LARGEST} are read")
    raw: bytes = storage.cat_file(path)
    return raw


def convert_to_tokenizer_json(files: dict[str, bytes], words: str) -> bytes:
    """Convert a tokenizer's other files to the bytes of a tokenizer.json. Raises Malformed, and what the library
    raises: only for a child process (`platform.data.parsers`)."""
    if {*MERGES} <= files.keys():
        tokenizer = _build_bpe_tokenizer(files)
    elif WORD_PIECES in files:
        tokenizer = _build_word_piece_tokenizer(files)
    else:
        tokenizer = _build_single_file_tokenizer(next(raw for name, raw in files.items() if name not in BESIDE), words)
    _add_listed_tokens(tokenizer, files)
    return tokenizer.to_str().encode()


def _build_single_file_tokenizer(raw: bytes, words: str) -> Tokenizer:
    """Construct a tokenizer from one file, by content: tokenizer.json, tiktoken or sentencepiece. Raises Malformed."""
    if raw[:1] == b"{":
        return parse_tokenizer(raw)
    first = raw.partition(b"\n")[0]
    if LINE.fullmatch(first.rstrip(b"\r")):
        return build_tiktoken_tokenizer(*read_ranks(raw, words))
    return build_sentencepiece_tokenizer(read_sentencepiece_model(raw))


def _build_bpe_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Construct a BPE tokenizer from vocab.json and merges.txt, as GPT-2's. Raises Malformed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = read_json_map(files, MERGES[0])
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in vocab.values()):
        raise Malformed(f"{MERGES[0]}: holds more than tokens and their ids")
    lines = files[MERGES[1]].decode(errors="strict").splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed(f"{MERGES[1]}: a line is no pair of tokens")
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(_build_or_refuse(lambda: models.BPE(vocab, merges)))
    space = read_token_settings(files)[0].get("add_prefix_space", False) is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_word_piece_tokenizer(files: TokenizerFiles) -> Tokenizer:
    """Construct a WordPiece tokenizer from vocab.txt, as BERT's. Raises Malformed."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = files[WORD_PIECES].decode(errors="strict").split("\n")
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words[:-1] if words[-1] == "" else words)}
    settings = read_token_settings(files)[0]
    lower, accents = settings.get("do_lower_case", True) is True, settings.get("strip_accents")
    unknown = "[UNK]"
    tokenizer = Tokenizer(_build_or_refuse(lambda: models.WordPiece(vocab, unk_token=unknown)))
    chinese = settings.get("tokenize_chinese_chars", True) is True
    strips = accents if isinstance(accents, bool) else None
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=chinese, strip_accents=strips, lowercase=lower
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([t for t in (unknown, "[PAD]", "[CLS]", "[SEP]", "[MASK]") if t in vocab])
    return tokenizer


def _add_listed_tokens(tokenizer: Tokenizer, files: TokenizerFiles) -> None:
    """Add the tokens that added_tokens.json, or tokenizer_config.json, has beside the vocabulary, in the order of their
    ids. Raises Malformed if one would get another id."""
    from tokenizers import AddedToken

    listed_tokens: dict[int, tuple[str, bool]] = {}
    if "added_tokens.json" in files:
        added = read_json_map(files, "added_tokens.json")
        listed_tokens |= {i: (text, True) for text, i in added.items() if type(i) is int}
    described = read_token_settings(files)[0].get("added_tokens_decoder")
    for number, token in (described if isinstance(described, dict) else {}).items():
        if number.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            listed_tokens[int(number)] = token["content"], token.get("special") is True
    for number, (text, special) in sorted(listed_tokens.items()):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
        if tokenizer.token_to_id(text) != number:
            raise Malformed(f"the added token {shorten_value(text)} has the id {number}, which leaves a gap")


def _build_or_refuse(make: Callable[[], Any]) -> Any:
    """Call `make`, which builds a tokenizer's part from foreign data; return that. Raises Malformed if it fails."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises its own, and panics are no Exception
        raise Malformed(documents.printable_line(error)) from None


def parse_tokenizer(raw: bytes) -> Tokenizer:
    """Parse the bytes of a tokenizer.json that was made here, or in a child process (`ConfinedTokenizer`). The
    tokenizer encodes the spelling of a special token like any text, and neither cuts nor pads. Raises Malformed."""
    from tokenizers import Tokenizer

    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Malformed(f"{JSON} is no UTF-8") from None
    tokenizer: Tokenizer = _build_or_refuse(lambda: Tokenizer.from_str(text))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # not saved in the file: special tokens in a text are text
    return tokenizer


def read_json_map(files: TokenizerFiles, name: str) -> dict[str, Any]:
    """Return the map in the JSON file `name` of a tokenizer's files, {} if it is not there. Raises Malformed."""
    if name not in files:
        return {}
    try:
        value = documents.parse_json(files[name], LARGEST, _VALUES, strict=False)
    except Malformed as error:
        raise error.add_outer_key(name) from None
    if type(value) is not dict:
        raise Malformed("no map", name)
    return value


def read_token_settings(files: TokenizerFiles) -> list[dict[str, Any]]:
    """Return the settings in a tokenizer's files that name special tokens, most important first. Raises Malformed."""
    return [read_json_map(files, CONFIG), read_json_map(files, "special_tokens_map.json")]


def chat_template(files: TokenizerFiles) -> str:
    """Return the text of a tokenizer's chat template (Jinja), out of its files; "" if it has none. Raises Malformed."""
    if TEMPLATE in files:
        return files[TEMPLATE].decode(errors="strict")
    template = read_json_map(files, CONFIG).get("chat_template", "")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", "")
    return template if isinstance(template, str) else ""


def add_config_keys(files: TokenizerFiles, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a tokenizer's files with the keys `settings` added in tokenizer_config.json."""
    raw = json.dumps({**read_json_map(files, CONFIG), **settings}, indent=2) + "\n"
    return {**files, CONFIG: raw.encode()}
