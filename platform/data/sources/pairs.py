"""Source of pairs of texts, line by line, from fields of records, or from docstrings."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
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
from platform.data.sources.source_kind import SourceKind, Texts, held_out, tokenizer_for, type_of
from platform.data.vocabulary import Vocabulary
from platform.plan.language.numbers import count_of


def pair_files(data: Data) -> list[DataFile]:
    """Find the files of data=pairs, for `read_pairs`: one of sources and one of targets, files of records, or, without
    a path, the source files of Python's standard library. Raises ConfigError if a path is missing or they do not make
    pairs."""
    if not data.path:
        return list(texts.stdlib_files(data))
    named = {"data.path": data.path, "data.target_path": data.target_path}
    found = [find_files(key, path) for key, path in named.items() if path]
    if [len(f) for f in found] == [1, 1] or (len(found) == 1 and all(ending(file) in ROWS for file in found[0])):
        return [file for part in found for file in part]
    raise ConfigError(f"data.path={data.path}: data=pairs needs .jsonl files, or one file and data.target_path=FILE")


def violations_of_pairs(data: Data) -> list[str]:
    """Return one refusal line per mistake in the paths of data=pairs; the files are not read."""
    try:
        return [] if pair_files(data) else [f"data={data.kind}: no file"]
    except ConfigError as error:
        return error.violations


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
    """Yield each line of the file `source` with the same line of the file `target`. Raises ConfigError if one has more
    lines."""
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
    """Yield the lines of a file of UTF-8 text, which may be compressed, without their ends. Raises ConfigError, naming
    `key`, which leads to the file, for a fault in it."""
    with naming_file(file, key), open_unpacked(file) as stream:
        for line in stream:
            yield line.decode().removesuffix("\n").removesuffix("\r")  # other line ends belong to the text


def _objects(file: DataFile, data: Data) -> Iterator[tuple[str, str]]:
    """Yield the texts in fields `data.field` and `data.target_field` of each record of a file. Raises ConfigError for a
    record that lacks one."""
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
    """Return, as JSON, the keys of `data` that decide the pairs of texts in its files, to name the cache entry."""
    return json.dumps([bool(data.path), bool(data.target_path), data.field, data.target_field])


_BATCH = 4096  # pairs that are encoded at once
_Pairs = list[tuple[str, str]]


def _splits(files: Sequence[DataFile], data: Data) -> tuple[dict[str, _Pairs], Texts]:
    """Read the pairs of texts of a source, by split; return them, and the texts of those to train on."""
    found = list(read_pairs(files, data))
    if not found:
        raise ConfigError(f"data.path={data.path}: no pair of texts in it")
    sizes = [len(a) + len(b) for a, b in found]
    held = held_out(sizes, data.validation)
    splits = {
        "train": [pair for n, pair in enumerate(found) if n not in held],
        "validation": [found[n] for n in sorted(held)],
    }
    characters = sum(size for n, size in enumerate(sizes) if n not in held)
    return splits, Texts((text for pair in splits["train"] for text in pair), characters)


def _write(folder: Path, files: Sequence[DataFile], data: Data, vocab: int, given: Vocabulary | None) -> dict[str, Any]:
    """Build the cache entry of a corpus of pairs of texts: write into `folder` tokens.bin and ends.bin (the training
    pairs, then those held out) and the tokenizer, of at most `vocab` entries. Return its description."""
    splits, texts = _splits(files, data)
    vocabulary, dtype = tokenizer_for(folder, given, lambda: texts, vocab, data), type_of(vocab)
    written = {split: _append(folder, vocabulary, iter(part), dtype) for split, part in splits.items()}
    return {"dtype": dtype.str, "splits": written}


def _append(folder: Path, vocabulary: Vocabulary, found: Iterator[tuple[str, str]], dtype: np.dtype) -> list[int]:
    """Append the tokens of pairs of texts, the next split of a cached corpus, to the files in `folder`: tokens.bin (of
    type `dtype`), and ends.bin (int64, the position in this split where each text ends). Return the numbers of tokens
    and pairs that were written."""
    place = pairs_written = 0
    with (folder / "tokens.bin").open("ab") as tokens, (folder / "ends.bin").open("ab") as ends:
        while batch := list(islice(found, _BATCH)):
            encoded = vocabulary.encode_all([text for pair in batch for text in pair])
            tokens.write(np.concatenate([np.array(ids, dtype) for ids in encoded]).tobytes())
            bounds = place + np.cumsum([len(ids) for ids in encoded], dtype="<i8")
            ends.write(bounds.astype("<i8").tobytes())
            place, pairs_written = int(bounds[-1]), pairs_written + len(batch)
    return [place, pairs_written]


def _options(data: Data, files: Sequence[DataFile]) -> list[Any]:
    """Return what decides which pairs of texts files hold: options and contents."""
    return [[deciding_options(data), *map(content_hash, files)]]


PAIRS = SourceKind(
    find=pair_files,
    check=violations_of_pairs,
    decisive=_options,
    write=_write,
    texts=lambda files, data: _splits(files, data)[1],
)
