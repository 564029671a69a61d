"""Pairs of texts for an encoder-decoder, read from two files line by line, two fields of .jsonl, or the standard
library's signatures and docstrings."""

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from platform.boundary import documents
from platform.config.fields import ConfigError, Data
from platform.data import sources
from platform.data.objectives import PADDING, Ints
from platform.data.tokenizer import END_OF_TEXT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH = 4096  # pairs that are encoded at once


@dataclass(frozen=True)
class PairStream:
    """Tokenised pairs of texts: `tokens` holds source and target of each pair in turn, `ends` [pairs, 2] where they
    end."""

    tokens: NDArray[Any]
    ends: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, side: int, index: Ints, length: int) -> Ints:
        """Return token ids [len(index), length] of the pairs `index`: their sources (side 0) or targets (side 1), each
        followed by END_OF_TEXT, cut or padded with -1 to `length`."""
        bounds = np.concatenate([[0], self.ends.reshape(-1)])
        start, end = bounds[2 * index + side], bounds[2 * index + side + 1]
        offset = np.arange(length)
        place, size = start[:, None] + offset, (end - start)[:, None]
        ids = self.tokens[np.minimum(place, max(len(self.tokens) - 1, 0))].astype(np.int64)
        return np.where(offset < size, ids, np.where(offset == size, END_OF_TEXT, PADDING))


def pair_files(data: Data) -> list[Path]:
    """Find the files of data=pairs, for `read_pairs`: one of sources and one of targets, .jsonl files, or, without a
    path, the source files of Python's standard library. Raises ConfigError if a path is missing or they do not make
    pairs."""
    if not data.path:
        return sources.stdlib_files(data)
    named = {"data.path": data.path, "data.target_path": data.target_path}
    found = [sources.find_files(key, path) for key, path in named.items() if path]
    if [len(f) for f in found] == [1, 1] or (len(found) == 1 and all(map(sources.is_jsonl, found[0]))):
        return [file for part in found for file in part]
    raise ConfigError(f"data.path={data.path}: data=pairs needs .jsonl files, or one file and data.target_path=FILE")


def check_pairs(data: Data) -> list[str]:
    """Return one refusal line per mistake in the paths of data=pairs; the files are not read."""
    try:
        return [] if pair_files(data) else [f"data={data.kind}: no file"]
    except ConfigError as error:
        return error.violations


def read_pairs(files: Sequence[Path], data: Data) -> Iterator[tuple[str, str]]:
    """Yield the pairs of texts (source, target), neither blank, in the `files` of data=pairs. Raises ConfigError for
    files of unequal lengths and faults in them."""
    if not data.path:
        found = _stdlib(files)
    elif data.target_path:
        found = _lines(*files)
    else:
        found = (pair for file in files for pair in _objects(file, data))
    return ((source, target) for source, target in found if source.strip() and target.strip())


def _lines(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of the file `source` with the same line of the file `target`. Raises ConfigError if one has more
    lines."""
    lines = [0, 0]
    for pair in zip_longest(_text_lines(source, "data.path"), _text_lines(target, "data.target_path")):
        lines = [n + (text is not None) for n, text in zip(lines, pair, strict=True)]
        if None not in pair:
            yield pair
    if lines[0] != lines[1]:
        raise ConfigError(f"data.target_path={target}: {lines[1]} lines beside the {lines[0]} of data.path={source}")


def _text_lines(file: Path, key: str) -> Iterator[str]:
    """Yield the lines of a file of UTF-8 text, which may be compressed, without their ends. Raises ConfigError, naming
    `key`, which leads to the file, for a fault in it."""
    with sources.naming_file(file, key), sources.open_unpacked(file) as stream:
        for line in stream:
            yield from line.decode().splitlines()


def _objects(file: Path, data: Data) -> Iterator[tuple[str, str]]:
    """Yield the texts in fields `data.field` and `data.target_field` of each line's JSON object in a .jsonl file.
    Raises ConfigError for a line that lacks one."""
    with sources.naming_file(file), sources.open_unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                values = documents.from_json(line, sources.LINE + 1, strict=False)
                yield sources.encodable(values[data.field]), sources.encodable(values[data.target_field])
            except (ValueError, LookupError, TypeError, AttributeError):
                wanted = f"data.field={data.field} and data.target_field={data.target_field}"
                raise ConfigError(f"line {number} has no texts {wanted}") from None


def _stdlib(modules: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield (header, first paragraph of the docstring) of every function and class in Python source files that has a
    docstring, as pairs of texts for data=pairs without a path."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
                text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
                node.body, node.decorator_list = [ast.Expr(ast.Constant(...))], []
                yield ast.unparse(node).rsplit(":\n", 1)[0] + ":", " ".join(text.split())


def write_pairs(folder: Path, bpe: "Tokenizer", pairs: Iterator[tuple[str, str]], dtype: np.dtype) -> list[int]:
    """Append the tokens of pairs of texts, the next split of a cached corpus, to the files in `folder`: tokens.bin (of
    type `dtype`), and ends.bin (int64, the position in this split where each text ends). Return the numbers of tokens
    and pairs that were written."""
    place = pairs_written = 0
    with (folder / "tokens.bin").open("ab") as tokens, (folder / "ends.bin").open("ab") as ends:
        while batch := list(islice(pairs, _BATCH)):
            found = [e.ids for e in bpe.encode_batch_fast([text for pair in batch for text in pair])]
            tokens.write(np.concatenate([np.array(ids, dtype) for ids in found]).tobytes())
            bounds = place + np.cumsum([len(ids) for ids in found], dtype="<i8")
            ends.write(bounds.astype("<i8").tobytes())
            place, pairs_written = int(bounds[-1]), pairs_written + len(batch)
    return [place, pairs_written]


def deciding_options(data: Data) -> str:
    """Return, as JSON, the keys of `data` that decide which pairs of texts its files hold, to name the cache entry
    by."""
    return json.dumps([bool(data.path), bool(data.target_path), data.field, data.target_field])
