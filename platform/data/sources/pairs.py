"""Source of pairs of texts, line by line, from fields of records, or from docstrings."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, cast

import numpy as np

from platform.boundary.refusals import ConfigError
from platform.config.fields import Data
from platform.data.reading.data_files import DataFile, content_hash, encodable, ending, naming_file, open_unpacked
from platform.data.reading.listing import find_files
from platform.data.reading.record_files import ROWS
from platform.data.sources import texts
from platform.data.sources.source_kind import KINDS, Encoded, SourceKind, Splits, type_of
from platform.data.sources.stream_blocks import Documents
from platform.data.vocabulary import Vocabulary
from platform.plan.language.numbers import count_of


def pair_files(data: Data) -> list[DataFile]:
    """Find the files of data=pairs, for `read_pairs`: one of source texts and one of targets, files of records, or,
    without a path, Python's standard library. Raises ConfigError if a path is missing or they do not make pairs."""
    if not data.path:
        return list(texts.stdlib_files(data))
    named = {"data.path": data.path, "data.target_path": data.target_path}
    found = [find_files(key, path) for key, path in named.items() if path]
    if [len(f) for f in found] == [1, 1] or (len(found) == 1 and all(ending(file) in ROWS for file in found[0])):
        return [file for part in found for file in part]
    raise ConfigError(f"data.path={data.path}: data=pairs needs .jsonl files, or one file and data.target_path=FILE")


def read_pairs(files: Sequence[DataFile], data: Data) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts (source, target), neither blank, in the `files` of data=pairs. Raises ConfigError for
    files of unequal lengths and faults in them."""
    if not data.path:
        found = _stdlib(cast(Sequence[Path], files))
    elif data.target_path:
        found = _lines(*files)
    else:
        found = (pair for file in files for pair in _objects(file, data))
    return ((source, target) for source, target in found if source.strip() and target.strip())


def _lines(source: DataFile, target: DataFile) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts: each line of the data file `source` with the same line of the file `target`. Raises
    ConfigError if one has more lines."""
    lines = [0, 0]
    for pair in zip_longest(_text_lines(source, "data.path"), _text_lines(target, "data.target_path")):
        lines = [n + (text is not None) for n, text in zip(lines, pair, strict=True)]
        if None not in pair:
            yield pair
    if lines[0] != lines[1]:
        raise ConfigError(
            f"data.target_path={target}: {count_of(lines[1], 'line')} beside the {lines[0]} of data.path={source}"
        )


def _text_lines(file: DataFile, key: str) -> Iterator[str]:
    """Yield the lines of a data file of UTF-8 text, perhaps compressed. Raises ConfigError, which names `key`."""
    with naming_file(file, key), open_unpacked(file) as stream:
        for line in stream:
            yield line.decode().removesuffix("\n").removesuffix("\r")  # other line ends belong to the text


def _objects(file: DataFile, data: Data) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts, fields `data.field` and `data.target_field` of each record in a data file. Raises
    ConfigError for a record that lacks one."""
    fields = [data.field, data.target_field]
    with naming_file(file):
        for place, values in ROWS[ending(file)](file, fields):
            found = [values.get(name) for name in fields]
            if not all(isinstance(text, str) for text in found):
                raise ConfigError(f"{place} has no texts data.field={fields[0]} and data.target_field={fields[1]}")
            yield encodable(cast(str, found[0])), encodable(cast(str, found[1]))


def _stdlib(modules: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (header, first paragraph of the docstring) of every function and class in Python source files that has a
    docstring, as pairs of texts for data=pairs without a path."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
                node.body, node.decorator_list = [ast.Expr(ast.Constant(...))], []
                yield ast.unparse(node).rsplit(":\n", 1)[0] + ":", " ".join(text.split())


def deciding_options(data: Data) -> str:
    """Return, as JSON, the keys of `data` that decide which pairs of texts its files hold, to name the cache entry."""
    return json.dumps([bool(data.path), bool(data.target_path), data.field, data.target_field])


_BATCH = 4096  # pairs that are encoded at once


def encode_pairs(vocabulary: Vocabulary | None, pairs: Documents, characters: int) -> Iterator[Encoded]:
    """Yield the token ids of pairs of texts, batch by batch, with the positions at which each text ends."""
    assert vocabulary
    while batch := [text for _, pair in islice(pairs, _BATCH) for text in pair]:
        encoded = vocabulary.encode_all(batch)
        ids = np.concatenate([np.array(ids, np.int64) for ids in encoded])
        yield Encoded(ids, np.cumsum([len(ids) for ids in encoded]).tolist())


class PairKind(SourceKind):
    """Kind of source of pairs of texts, which are read as a whole."""

    def parts(self, files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
        """Return the data files of pairs of texts as one group, as a pair's halves may be in two files."""
        return [files] if files else []

    def held(self, data: Data) -> list[DataFile]:
        """Return no files to hold out: of pairs of texts, single pairs are held out for validation, not whole files."""
        return []

    def splits(self, files: Sequence[DataFile], data: Data) -> Splits:
        """Read a data source's pairs of texts once, and split them for training and validation. Raises ConfigError."""
        pairs = [*self.read(files, data, "data.path")]
        found = SourceKind.splits(replace(self, read=lambda *_: iter(pairs)), files, data)
        trained = sum(self.size(pair) for _, pair in found.read(False))
        return replace(found, texts=lambda: self._texts(found.read(False), trained), tail=0.0)

    def write_tokens(
        self, folder: Path, vocabulary: Vocabulary | None, vocab: int, parts: Sequence[tuple[Documents, int]]
    ) -> dict[str, Any]:
        """Tokenize pairs of texts into the cache entry `folder`: tokens.bin, and ends.bin (int64, the position in its
        split where each text ends). Return their description: of each split the numbers of tokens and pairs."""
        dtype, written = type_of(vocab), []
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
    pair_files,
    lambda files, data, key: enumerate(read_pairs(files, data)),
    encode_pairs,
    content=lambda data, files: [[deciding_options(data), *map(content_hash, files)]],
    texts=lambda pair: pair,
    size=lambda pair: sum(map(len, pair)),
    blockwise=False,
)
