"""Pairs of texts for an encoder-decoder, read from two files line by line, two fields of records, or the standard
library's signatures and docstrings."""

import ast
import inspect
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import cast

from platform.config.fields import ConfigError, Data
from platform.data.sources import texts
from platform.data.sources.data_files import DataFile, encodable, ending, find_files, naming_file, open_unpacked
from platform.data.sources.record_files import ROWS


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


def check_pairs(data: Data) -> list[str]:
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
        raise ConfigError(f"data.target_path={target}: {lines[1]} lines beside the {lines[0]} of data.path={source}")


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
    """Return, as JSON, the keys of `data` that decide which pairs of texts its files hold, to name the cache entry
    by."""
    return json.dumps([bool(data.path), bool(data.target_path), data.field, data.target_field])
