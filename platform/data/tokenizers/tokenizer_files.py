"""Files of a tokenizer, in any of the forms in which tokenizers are published, and tokenizer.json made of them.

They travel together, from a source into the cache, checkpoints and exports: tokenizer.json, which says how a text is
encoded; tokenizer_config.json and its like, which name special tokens and hold the chat template; and what they were
made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import fsspec

from platform.boundary import documents
from platform.boundary.files.protocols import violation_of_protocol
from platform.boundary.redaction import bare_url, register_url_secrets
from platform.boundary.refusals import ConfigError, violation
from platform.boundary.schema import Malformed, shown
from platform.data.tokenizers import sentencepiece_model, tiktoken_ranks
from platform.data.tokenizers.confined_tokenizer import make_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def read_files(source: str, words: str = "", key: str = KEY) -> dict[str, bytes]:
    """Read the files of the tokenizer at `source`, a path or URL of a folder or file, by name; tokenizer.json is among
    them, made of the others if it is not there. `words`: word pattern of a tiktoken file, see `read_ranks`. Raises
    ConfigError, in a line that names `key`."""
    try:
        found = _gathered(source)
        if all(name in BESIDE for name in found):
            forms = ", ".join((JSON, *MODELS, MERGES[0], WORD_PIECES, "*.tiktoken"))
            raise Malformed(f"holds no tokenizer: none of {forms}")
        return found if JSON in found else {**found, JSON: make_json(found, words)}
    except (Malformed, OSError, ValueError) as error:
        line = documents.one_line(getattr(error, "strerror", None) or error)
        raise ConfigError(violation(key, bare_url(source), line, ["train"] if key == KEY else [])) from None


def has_tokenizer(folder: str) -> bool:
    """Return True if a folder, a path or URL, has files of a tokenizer; False also if it cannot be looked at."""
    try:
        storage, path = fsspec.core.url_to_fs(folder)
        names = {PurePosixPath(name).name for name in storage.ls(path, detail=False)}
    except (OSError, ValueError, ImportError):
        return False
    return bool(names & {JSON, MERGES[0], WORD_PIECES, *MODELS}) or any(name.endswith(".tiktoken") for name in names)


def _gathered(source: str) -> dict[str, bytes]:
    """Read the files of a tokenizer at `source`, a path or URL: return name -> bytes, unchanged. Raises Malformed,
    OSError."""
    register_url_secrets(source)
    if reason := violation_of_protocol(source, writing=False):
        raise Malformed(reason)
    storage, path = fsspec.core.url_to_fs(source)
    if storage.isdir(path):
        there = {PurePosixPath(entry["name"]).name: entry for entry in storage.ls(path, detail=True)}
        tiktoken = [name for name in there if name.endswith(".tiktoken")]
        wanted = [JSON, *MERGES, WORD_PIECES, *MODELS, *BESIDE, *tiktoken]
        names = [name for name in wanted if name in there and there[name]["type"] == "file"]
        return {_name_of(name): _read(storage, there[name]["name"]) for name in dict.fromkeys(names)}
    if not storage.isfile(path):
        raise Malformed("no such file or folder")
    folder, name = str(PurePosixPath(path).parent), PurePosixPath(path).name
    if name in MERGES or name == WORD_PIECES:
        raise Malformed(f"{name} is one of several files; name their folder")
    beside = [other for other in BESIDE if storage.isfile(f"{folder}/{other}")]
    return {_name_of(name): _read(storage, path), **{other: _read(storage, f"{folder}/{other}") for other in beside}}


def _name_of(name: str) -> str:
    """Return the name under which a tokenizer's file is kept: its own, or the usual one for its format."""
    if name in NAMES:
        return name
    return "tokenizer.tiktoken" if name.endswith(".tiktoken") else JSON if name.endswith(".json") else MODELS[0]


def _read(storage: Any, path: str) -> bytes:
    """Read a tokenizer's file from a storage of fsspec. Raises Malformed if it is too large, OSError."""
    if "file" in ([storage.protocol] if isinstance(storage.protocol, str) else storage.protocol):
        return documents.read_bytes(path, LARGEST)  # no pipe, no device
    if (size := storage.size(path) or 0) > LARGEST:
        raise Malformed(f"{PurePosixPath(path).name} has {size} bytes, and at most {LARGEST} are read")
    raw: bytes = storage.cat_file(path)
    return raw


def made_of(found: dict[str, bytes], words: str) -> bytes:
    """Convert a tokenizer's other files to the bytes of a tokenizer.json. Raises Malformed, and what the library
    raises: only for a child process (`platform.data.parsers`)."""
    if {*MERGES} <= found.keys():
        made = _of_merges(found)
    elif WORD_PIECES in found:
        made = _of_word_pieces(found)
    else:
        made = _of_one(next(raw for name, raw in found.items() if name not in BESIDE), words)
    _add_tokens(made, found)
    return made.to_str().encode()


def _of_one(raw: bytes, words: str) -> Tokenizer:
    """Construct a tokenizer from one file, by content: tokenizer.json, tiktoken or sentencepiece. Raises Malformed."""
    if raw[:1] == b"{":
        return parse_tokenizer(raw)
    first = raw.partition(b"\n")[0]
    if tiktoken_ranks.LINE.fullmatch(first.rstrip(b"\r")):
        return tiktoken_ranks.tokenizer_of_ranks(*tiktoken_ranks.read_ranks(raw, words))
    return sentencepiece_model.tokenizer_of_model(sentencepiece_model.read_model(raw))


def _of_merges(found: TokenizerFiles) -> Tokenizer:
    """Construct a BPE tokenizer from vocab.json and merges.txt, as GPT-2's. Raises Malformed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = json_of(found, MERGES[0])
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in vocab.values()):
        raise Malformed(f"{MERGES[0]}: holds more than tokens and their ids")
    lines = found[MERGES[1]].decode(errors="strict").splitlines()
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed(f"{MERGES[1]}: a line is no pair of tokens")
    merges = [(left, right) for left, right in pairs]
    tokenizer = Tokenizer(_built(lambda: models.BPE(vocab, merges)))
    space = settings_of(found)[0].get("add_prefix_space", False) is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_word_pieces(found: TokenizerFiles) -> Tokenizer:
    """Construct a WordPiece tokenizer from vocab.txt, as BERT's. Raises Malformed."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = found[WORD_PIECES].decode(errors="strict").split("\n")
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words[:-1] if words[-1] == "" else words)}
    settings = settings_of(found)[0]
    lower, accents = settings.get("do_lower_case", True) is True, settings.get("strip_accents")
    unknown = "[UNK]"
    tokenizer = Tokenizer(_built(lambda: models.WordPiece(vocab, unk_token=unknown)))
    chinese = settings.get("tokenize_chinese_chars", True) is True
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=chinese,
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=lower,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([t for t in (unknown, "[PAD]", "[CLS]", "[SEP]", "[MASK]") if t in vocab])
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, found: TokenizerFiles) -> None:
    """Add the tokens that added_tokens.json, or tokenizer_config.json, has beside the vocabulary, in the order of their
    ids. Raises Malformed if one would get another id."""
    from tokenizers import AddedToken

    wanted: dict[int, tuple[str, bool]] = {}
    if "added_tokens.json" in found:
        wanted |= {i: (text, True) for text, i in json_of(found, "added_tokens.json").items() if type(i) is int}
    described = settings_of(found)[0].get("added_tokens_decoder")
    for number, token in (described if isinstance(described, dict) else {}).items():
        if number.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            wanted[int(number)] = token["content"], token.get("special") is True
    for number, (text, special) in sorted(wanted.items()):
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
        if tokenizer.token_to_id(text) != number:
            raise Malformed(f"the added token {shown(text)} has the id {number}, which leaves a gap")


def _built(make: Callable[[], Any]) -> Any:
    """Call `make`, which builds a tokenizer's part from foreign data; return that. Raises Malformed if it fails."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises its own, and panics are no Exception
        raise Malformed(documents.one_line(error)) from None


def parse_tokenizer(raw: bytes) -> Tokenizer:
    """Parse the bytes of a tokenizer.json that was made here, or in a child process (`ConfinedTokenizer`). The
    tokenizer encodes the spelling of a special token like any text, and neither cuts nor pads. Raises Malformed."""
    from tokenizers import Tokenizer

    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Malformed(f"{JSON} is no UTF-8") from None
    tokenizer: Tokenizer = _built(lambda: Tokenizer.from_str(text))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # not saved in the file: special tokens in a text are text
    return tokenizer


def json_of(found: TokenizerFiles, name: str) -> dict[str, Any]:
    """Return the map in the JSON file `name` of a tokenizer's files, {} if it is not there. Raises Malformed."""
    if name not in found:
        return {}
    try:
        value = documents.from_json(found[name], LARGEST, _VALUES, strict=False)
    except Malformed as error:
        raise error.within(name) from None
    if type(value) is not dict:
        raise Malformed("no map", name)
    return value


def settings_of(found: TokenizerFiles) -> list[dict[str, Any]]:
    """Return the settings in a tokenizer's files that name special tokens, most important first. Raises Malformed."""
    return [json_of(found, CONFIG), json_of(found, "special_tokens_map.json")]


def chat_template(found: TokenizerFiles) -> str:
    """Return the text of a tokenizer's chat template (Jinja), out of its files; "" if it has none. Raises Malformed."""
    if TEMPLATE in found:
        return found[TEMPLATE].decode(errors="strict")
    given = json_of(found, CONFIG).get("chat_template", "")
    if isinstance(given, list):  # several by name
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.get("default", "")
    return given if isinstance(given, str) else ""


def with_config(found: TokenizerFiles, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a tokenizer's files with the keys `settings` added in tokenizer_config.json."""
    raw = json.dumps({**json_of(found, CONFIG), **settings}, indent=2) + "\n"
    return {**found, CONFIG: raw.encode()}
