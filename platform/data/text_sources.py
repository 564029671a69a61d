"""Sources of documents by kind: instructions, texts, iterables of the user's own, and pairs of texts.

- Instructions: conversations, or prompts with answers, of which only the answers are learned.
- Texts: files of text or of records, the standard library's, or files that a user's function finds.
- Iterables: texts, or lists of tokens, that a function of the user's own yields.
- Pairs: two texts, line by line, from fields of records, or from docstrings.
"""

from __future__ import annotations

import ast
import codecs
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from platform.boundary.refusals import READING, ConfigError, OwnCodeError, guard_user_code
from platform.config.extensions import bind_settings_object, register_own_function
from platform.config.fields import Data
from platform.data import data_files, source_kind, tokenizer
from platform.data.chat_templates import ANSWERS, Conversation, Parts, list_spellings, read_message_text
from platform.data.conversations import UNKNOWN, Instruction, Preference, read_instructions, read_preferences
from platform.data.data_files import (
    ROWS,
    DataFile,
    find_data_files,
    name_file_in_errors,
    replace_surrogates,
    uncompressed_suffix,
)
from platform.data.source_kind import KINDS, Documents, Encoded, SourceKind, Splits, hash_file_contents
from platform.data.token_files import encode_tokens
from platform.data.tokenizer import Vocabulary
from platform.plan.layout import format_count

ENDINGS = [".jsonl", ".parquet", ".arrow"]  # of records in a folder; others are named


def find_instruction_files(data: Data) -> list[DataFile]:
    """Find the record files of data=instructions (conversations, or prompts with answers). Raises ConfigError."""
    if not data.path:
        raise ConfigError(f"data.path: data={data.kind} needs a file of records: {', '.join(ROWS)}")
    files = find_data_files("data.path", data.path, ENDINGS)
    if other_files := [file for file in files if uncompressed_suffix(file) not in ROWS]:
        raise ConfigError(f"data.path={other_files[0]}: no file of records, which end with {', '.join(ROWS)}")
    return files


_PARTS = re.compile(r"\[\{'(type|text)': ")
_BATCH = 1024  # conversations that are encoded at once


def encode_instructions(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of conversations, as the tokenizer's chat template writes them, with a mask of the answers'
    tokens, which are learned; prompts with answers need no template. Raises ConfigError, with the place, for a
    conversation that the template refuses."""
    assert vocabulary
    while batch := [instruction for _, instruction in islice(documents, _BATCH)]:
        encoded = vocabulary.encode_parts([_render_instruction_parts(instruction, vocabulary) for instruction in batch])
        ids = np.array([i for some, _ in encoded for i in some], np.int64)
        learned = np.array([is_learned for _, some in encoded for is_learned in some], bool)
        ends = np.cumsum([len(some) for some, _ in encoded])
        yield Encoded(ids, [0, *ends[:-1].tolist()], learned)


def _render_instruction_parts(instruction: Instruction, vocabulary: Vocabulary) -> Parts:
    """Write a conversation as pieces of text to be tokenised: (text, True if it is one special token, True if it is
    learned). `vocabulary`: the tokenizer, whose chat template is used. Raises ConfigError if it writes no answer."""
    if instruction.pair and not vocabulary.has_chat:
        prompt, answer = instruction.message_texts
        begin, end = (vocabulary.spell_token(i) for i in (vocabulary.special.begin, vocabulary.special.end))
        return [(begin, True, False), (prompt, False, False), (answer, False, True), (end, True, True)]
    refusals: list[ConfigError] = []
    for messages in list_spellings(instruction.messages):
        try:
            parts = vocabulary.chat.render_parts(messages, instruction.tools, instruction.skipped)
            learned = "".join(text for text, special, is_learned in parts if is_learned and not special)
            parted = any(isinstance(message.get("content"), list) for message in messages)
            if parted and _PARTS.search("".join(text for text, _, _ in parts)):  # as Python writes a list
                raise ConfigError("the chat template reads no content in parts; nearest legal: content of text")
            if not _writes_answer(messages, learned):
                reason = "the chat template writes no answer of this conversation, of which nothing would be learned"
                raise ConfigError(f"{reason}; nearest legal: another data.chat_template")
            return parts
        except ConfigError as error:
            refusals.append(error)
    telling = next((r for r in refusals if "refuses a conversation" not in str(r)), refusals[0])  # if one was written
    raise ConfigError([f"{instruction.place}: {line}" for line in telling.violations])


def _writes_answer(messages: Conversation, learned: str) -> bool:
    """Return True if the text that the chat template marks as learned has a word of the conversation's answers."""
    words = [word for message in messages if message["role"] == ANSWERS for word in read_message_text(message).split()]
    return any(word in learned for word in words) if words else bool(learned.strip())


KINDS["instructions"] = SourceKind(
    find_instruction_files,
    read_instructions,
    encode_instructions,
    content=lambda data, files: [
        *("instructions", *deciding_values(data, files), *source_kind.extra_fields(data)),
        *sorted({*data.unread} - {*UNKNOWN}),
    ],
    texts=lambda instruction: instruction.message_texts,
    size=lambda instruction: sum(map(len, instruction.message_texts)),
    endings=ENDINGS,
    starts=True,
    learned=True,
    rules=1,
)


def encode_preferences(vocabulary: Vocabulary | None, documents: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of pairs of answers: two documents each, the chosen one first, as conversations are."""
    both = (side for _, pair in documents for side in (pair.chosen, pair.rejected))
    yield from encode_instructions(vocabulary, enumerate(both), characters)


def _texts_of_preference(pair: Preference) -> list[str]:
    """Return the texts of a pair of answers, for a tokenizer to be trained on."""
    return [*pair.chosen.message_texts, *pair.rejected.message_texts]


KINDS["preferences"] = replace(
    KINDS["instructions"],
    read=read_preferences,
    encode=encode_preferences,
    content=lambda data, files: ["preferences", *hash_file_contents(files), *sorted({*data.unread})],
    texts=_texts_of_preference,
    size=lambda pair: sum(map(len, _texts_of_preference(pair))),
    together=2,
)


_READ_AT_ONCE = 64 * 1024  # bytes of a long document that are read at once
# Third-party packages, and parts of the standard library that are tests, tables or second copies.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


def find_stdlib_files(data: Data) -> list[Path]:
    """Find the files of data=stdlib: Python sources of the running interpreter's standard library (about 9 MB)."""
    return data_files.find_files_in_folder(Path(sysconfig.get_path("stdlib")), [".py"], skip=_NOT_STDLIB)


def count_stdlib_bytes(data: Data) -> int:
    """Return the size in bytes of the text of data=stdlib: the standard library's source files, all together."""
    return sum(file.stat().st_size for file in find_stdlib_files(data))


def find_text_files(data: Data) -> list[DataFile]:
    """Find the user's files of data=text: `data.path` is a file, a glob, a folder (of which non-hidden files with the
    suffixes ENDINGS count), or a URL. Raises ConfigError if there is none."""
    if not data.path:
        raise ConfigError(f"data.path: data={data.kind} needs a file, a folder or a glob")
    return find_data_files("data.path", data.path)


def register_source(name: str, files: Callable[..., Sequence[DataFile | str]], settings: type | None = None) -> None:
    """Register a user's source of text as `data.kind=NAME`: the function `files`, given the keys of group data, returns
    the paths of its text files. `settings`: a dataclass of data.settings, which `files` gets as `settings`."""
    register_own_function("data.kind", name, settings, files)
    KINDS[name] = replace(KINDS["text"], find=partial(find_registered_files, files))


def find_registered_files(find: Callable[..., object], data: Data) -> list[DataFile]:
    """Return the text files of a user's data source, which its function `find` returns. Raises ConfigError, naming the
    source, if that raises, or gives anything but an iterable of paths; its own ConfigError and OSError pass
    unchanged."""
    returned: object = None
    try:
        with guard_user_code(f"data.kind={data.kind}", (ConfigError, OSError), READING):
            returned = bind_settings_object(find, "data.kind", data.kind, data.settings)(data)
            entries = cast(Iterable[Any], returned)
            files = [file if isinstance(file, data_files.RemoteFile) else Path(file) for file in entries]
    except OwnCodeError as error:
        type_phrase = "" if returned is None else f" gives {type(returned).__name__}, not paths of files:"
        reason = str(error).removeprefix("raises ")
        raise ConfigError(f"data.kind={data.kind}: its source{type_phrase} {reason}") from error
    if not files:
        raise ConfigError(f"{source_kind.source_setting(data)}: no file in it")
    return files


def read_documents(files: Iterable[DataFile], data: Data, key: str = "data.path") -> Iterator[tuple[int, str]]:
    """Read the documents in files of text: yield (number of the document, next piece of its text); no piece is empty.

    Raises ConfigError, naming the file, by the `key` that leads to it, and the place, for content that is unreadable,
    not text, or lacks `data.field`.
    """
    number = -1
    for file in files:
        reader = _read_record_texts if uncompressed_suffix(file) in ROWS else _read_text_pieces
        with name_file_in_errors(file, key):
            for begins, piece in reader(file, data):
                number += begins
                yield number, piece


def _read_text_pieces(file: DataFile, data: Data) -> Iterator[tuple[bool, str]]:
    """Read a text file as one document: yield its pieces of about _READ_AT_ONCE bytes, each with True if it is the
    first, ended by a line end if one is near. Raises ConfigError for a NUL byte or text that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begins = True
    with data_files.open_unpacked(file) as stream:
        while True:
            start = stream.tell()
            block = stream.read(_READ_AT_ONCE) + stream.readline(_READ_AT_ONCE)
            piece = _decode_block(decoder, block, start, stream)
            if piece:
                yield begins, piece
                begins = False
            if not block:
                return


def _decode_block(
    decoder: codecs.IncrementalDecoder, block: bytes, start: int, stream: data_files.BoundedStream
) -> str:
    """Decode the next block of a text file from UTF-8; `start`: its first byte's number. Raises ConfigError for a NUL
    byte, or bytes that are not UTF-8."""
    if (nul := block.find(0)) >= 0:
        raise ConfigError(f"a binary file (NUL at byte {start + nul}); text is needed")
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        offset = stream.tell() - len(error.object) + error.start
        raise ConfigError(f"not UTF-8 at byte {offset}; convert it (iconv -t UTF-8) or leave it out") from None


def _read_record_texts(file: DataFile, data: Data) -> Iterator[tuple[bool, str]]:
    """Yield (True, text of field `data.field`) of each record in a data file, a document each; skip empty texts."""
    for record in ROWS[uncompressed_suffix(file)](file, [data.field]):
        if text := data_files.read_field_text(record, data.field):
            yield True, text


def encode_texts(vocabulary: Vocabulary | None, pieces: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of documents that come in `pieces`; `characters`: their total length, 0 if unknown."""
    assert vocabulary
    return map(Encoded, tokenizer.encode_documents(vocabulary, pieces, characters))


def deciding_values(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return formats, content hashes and field of text files, which decide their documents and name a cache entry."""
    others = source_kind.find_validation_files(data)
    return [hash_file_contents(files), data.field, *([hash_file_contents(others)] if others else [])]


KINDS["text"] = SourceKind(find_text_files, read_documents, encode_texts, deciding_values, texts=lambda piece: [piece])
KINDS["stdlib"] = replace(KINDS["text"], find=find_stdlib_files)


_NO_MORE = object()


def register_documents(
    name: str, read: Callable[..., Iterable[Any]], *, tokens: bool = False, settings: type | None = None
) -> None:
    """Register a user's function as the data source `data.kind=NAME`: `read`, given the keys of group data, returns an
    iterable of documents: texts or, with `tokens`, sequences of token ids. It is called anew for every pass over them,
    and must then give the same documents in the same order. `settings`: a dataclass of data.settings, which `read` gets
    as `settings`."""
    register_own_function("data.kind", name, settings, read)
    documents = partial(read_user_documents, read, _convert_token_ids if tokens else _convert_text)
    texts = None if tokens else lambda text: [text]
    encode = encode_tokens if tokens else encode_texts
    KINDS[name] = UserFunctionKind(
        lambda data: [], documents, encode, partial(_hash_documents, documents), texts, starts=tokens
    )


def read_user_documents(
    read: Callable[..., Iterable[Any]],
    convert: Callable[[Any, Data, int], Any],
    files: Sequence[DataFile],
    data: Data,
    key: str = "data.path",
) -> Iterator[tuple[int, str | NDArray[np.int64]]]:
    """Yield (number, text or token ids) of each document that the user's function `read` gives, converted and checked
    by `convert`; empty ones are left out. Raises ConfigError, naming the function and the document, for any error that
    it raises, and for a value that is no document."""
    number, place = 0, 0
    with _name_document_in_errors(data):
        documents = iter(bind_settings_object(read, "data.kind", data.kind, data.settings)(data))
    while True:
        with _name_document_in_errors(data, f", for document {place}"):
            document = next(documents, _NO_MORE)
        if document is _NO_MORE:
            return
        converted = convert(document, data, place)
        place += 1
        if len(converted):
            yield number, converted
            number += 1


def _hash_documents(read: Callable[..., Iterable[Any]], data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return ["own", SHA-256 of all documents that the user's function gives], which names their cache entry."""
    digest = hashlib.sha256()
    for _, document in read(files, data):
        raw = document.encode() if isinstance(document, str) else document.astype("<i8").tobytes()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return ["own", digest.hexdigest()]


def _convert_text(document: Any, data: Data, place: int) -> str:
    """Return a document that the user's data source gives as text. Raises ConfigError, with its number, if not."""
    if isinstance(document, str):
        return replace_surrogates(document)
    raise ConfigError(f"data.kind={data.kind}: document {place} is a {type(document).__name__}, not a text")


def _convert_token_ids(document: Any, data: Data, place: int) -> NDArray[np.int64]:
    """Return a document that the user's data source gives as token ids. Raises ConfigError if it is no list of them."""
    try:
        ids = np.asarray(document)
    except (TypeError, ValueError):
        ids = np.zeros((1, 1))
    if ids.ndim != 1 or (len(ids) and (ids.dtype.kind not in "iu" or int(ids.min()) < 0)):
        raise ConfigError(f"data.kind={data.kind}: document {place} is no list of token ids")
    if len(ids) and int(ids.max()) >= 1 << 31:
        raise ConfigError(f"data.kind={data.kind}: document {place} has token {ids.max()}")
    return ids.astype(np.int64)


@contextmanager
def _name_document_in_errors(data: Data, which: str = "") -> Iterator[None]:
    """Raise ConfigError, naming data.kind and `which` document, in place of an error of the user's data source."""
    name = f"data.kind={data.kind}"
    try:
        with guard_user_code(name, (ConfigError, OSError), READING):
            yield
    except OwnCodeError as error:
        raise ConfigError(f"{name}: {error}{which}") from error


class UserFunctionKind(SourceKind):
    """Kind of source of a user's function that yields documents, and reads no files of ours."""

    def group_files(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return a single empty group of files, as the user's function gives all documents at once, without files."""
        return [[]]

    def find_held_out_files(self, data: Data) -> list[DataFile]:
        """Return no files to hold out, as the user's data source has none. Raises ConfigError if some are named."""
        if data.validation_path:
            reason = f"data.kind={data.kind} reads no files"
            raise ConfigError("data.validation_path", data.validation_path, reason, ['""'])
        return []

    def write_cache_entry(
        self, folder: Path, files: Sequence[DataFile], data: Data, vocab: int, existing_vocabulary: Vocabulary | None
    ) -> dict[str, Any]:
        """Build the cache entry of the documents that the user's function gives; return its description. Raises
        ConfigError if two passes over the documents differ."""
        whole = not source_kind.is_streamed(data)
        content_before = whole and self.content(data, files)
        description = super().write_cache_entry(folder, files, data, vocab, existing_vocabulary)
        if (whole and self.content(data, files)) != content_before:
            raise ConfigError(f"data.kind={data.kind}: gives other documents every time; give the same, in one order")
        return description


def find_pair_files(data: Data) -> list[DataFile]:
    """Find the files of data=pairs, for `read_pairs`: one of source texts and one of targets, files of records, or,
    without a path, Python's standard library. Raises ConfigError if a path is missing or they do not make pairs."""
    if not data.path:
        return list(find_stdlib_files(data))
    named = {"data.path": data.path, "data.target_path": data.target_path}
    file_groups = [find_data_files(key, path) for key, path in named.items() if path]
    of_rows = len(file_groups) == 1 and all(uncompressed_suffix(file) in ROWS for file in file_groups[0])
    if of_rows or [len(f) for f in file_groups] == [1, 1]:
        return [file for part in file_groups for file in part]
    raise ConfigError(f"data.path={data.path}: data=pairs needs .jsonl files, or one file and data.target_path=FILE")


def read_pairs(files: Sequence[DataFile], data: Data) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts (source, target), neither blank, in the `files` of data=pairs. Raises ConfigError for
    files of unequal lengths and faults in them."""
    if not data.path:
        pairs = _read_docstring_pairs(cast(Sequence[Path], files))
    elif data.target_path:
        pairs = _read_line_pairs(*files)
    else:
        pairs = (pair for file in files for pair in _read_record_pairs(file, data))
    return ((source, target) for source, target in pairs if source.strip() and target.strip())


def _read_line_pairs(source: DataFile, target: DataFile) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts: each line of the data file `source` with the same line of the file `target`. Raises
    ConfigError if one has more lines."""
    lines = [0, 0]
    for pair in zip_longest(_read_text_lines(source, "data.path"), _read_text_lines(target, "data.target_path")):
        lines = [n + (text is not None) for n, text in zip(lines, pair, strict=True)]
        if None not in pair:
            yield pair
    if lines[0] != lines[1]:
        beside = f"beside the {lines[0]} of data.path={source}"
        raise ConfigError(f"data.target_path={target}: {format_count(lines[1], 'line')} {beside}")


def _read_text_lines(file: DataFile, key: str) -> Iterator[str]:
    """Yield the lines of a data file of UTF-8 text, perhaps compressed. Raises ConfigError, which names `key`."""
    with name_file_in_errors(file, key), data_files.open_unpacked(file) as stream:
        for line in stream:
            yield line.decode().removesuffix("\n").removesuffix("\r")  # other line ends belong to the text


def _read_record_pairs(file: DataFile, data: Data) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts, fields `data.field` and `data.target_field` of each record in a data file. Raises
    ConfigError for a record that lacks one."""
    fields = [data.field, data.target_field]
    with name_file_in_errors(file):
        for place, values in ROWS[uncompressed_suffix(file)](file, fields):
            texts = [values.get(name) for name in fields]
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError(f"{place} has no texts data.field={fields[0]} and data.target_field={fields[1]}")
            yield replace_surrogates(cast(str, texts[0])), replace_surrogates(cast(str, texts[1]))


def _read_docstring_pairs(modules: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (header, first paragraph of the docstring) of every function and class in Python source files that has a
    docstring, as pairs of texts for data=pairs without a path."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
                node.body, node.decorator_list = [ast.Expr(ast.Constant(...))], []
                yield ast.unparse(node).rsplit(":\n", 1)[0] + ":", " ".join(text.split())


def encode_pair_options(data: Data) -> str:
    """Return, as JSON, the keys of `data` that decide which pairs of texts its files hold, to name the cache entry."""
    return json.dumps([bool(data.path), bool(data.target_path), data.field, data.target_field])


_PAIRS_BATCH = 4096  # pairs that are encoded at once


def encode_pairs(vocabulary: Vocabulary | None, pairs: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of pairs of texts, batch by batch, with the positions at which each text ends."""
    assert vocabulary
    while batch := [text for _, pair in islice(pairs, _PAIRS_BATCH) for text in pair]:
        encoded = vocabulary.encode_texts(batch)
        ids = np.concatenate([np.array(ids, np.int64) for ids in encoded])
        yield Encoded(ids, np.cumsum([len(ids) for ids in encoded]).tolist())


class PairKind(SourceKind):
    """Kind of source of pairs of texts, which are read as a whole."""

    def group_files(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return the data files of pairs of texts as one group, as a pair's halves may be in two files."""
        return [files] if files else []

    def find_held_out_files(self, data: Data) -> list[DataFile]:
        """Return no files to hold out: of pairs of texts, single pairs are held out for validation, not whole files."""
        return []

    def read_splits(self, files: Sequence[DataFile], data: Data) -> Splits:
        """Read a data source's pairs of texts once, and split them for training and validation. Raises ConfigError."""
        pairs = [*self.read(files, data, "data.path")]
        splits = SourceKind.read_splits(replace(self, read=lambda *_: iter(pairs)), files, data)
        trained = sum(self.size(pair) for _, pair in splits.read(False))
        return replace(splits, texts=lambda: self._gather_texts(splits.read(False), trained), tail=0.0)

    def write_tokens(
        self, folder: Path, vocabulary: Vocabulary | None, vocab: int, parts: Sequence[tuple[Documents, int]]
    ) -> dict[str, Any]:
        """Tokenize pairs of texts into the cache entry `folder`: tokens.bin, and ends.bin (int64, the position in its
        split where each text ends). Return their description: of each split the numbers of tokens and pairs."""
        dtype, written = source_kind.token_dtype(vocab), []
        with (folder / "tokens.bin").open("wb") as tokens, (folder / "ends.bin").open("wb") as ends:
            for pairs, characters in parts:
                place = texts = 0
                for part in self.encode(vocabulary, pairs, characters):
                    tokens.write(part.ids.astype(dtype).tobytes())
                    ends.write((np.array(part.bounds) + place).astype("<i8").tobytes())
                    place, texts = place + len(part.ids), texts + len(part.bounds)
                written.append([place, texts // 2])
        return {"dtype": dtype.str, "splits": {"train": written[0], "validation": written[1]}}


KINDS["pairs"] = PairKind(
    find_pair_files,
    lambda files, data, key: enumerate(read_pairs(files, data)),
    encode_pairs,
    content=lambda data, files: [[encode_pair_options(data), *map(data_files.content_hash, files)]],
    texts=lambda pair: pair,
    size=lambda pair: sum(map(len, pair)),
    blockwise=False,
)
