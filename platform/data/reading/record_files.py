"""Files of records: one JSON object per line, or one row of a table, by the ending of the file's name.

`ROWS` is the table of formats; each reader yields (place in the file, record) and reads within bounds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from platform.boundary.confined import limits, parser_of
from platform.boundary.documents import from_json, one_line
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.data.reading import data_files
from platform.data.reading.data_files import DataFile, open_raw, open_unpacked, pyarrow, size_of

Record = tuple[str, dict[str, Any]]  # (place in the file, for a refusal: "line 3", values by field)
_MEMORY = 512 << 20  # bytes that parsing a small table takes; a larger one takes up to 4 times its size more
_SPEED = 1e6  # bytes of a file that are parsed in a second, at the least
_ROW = 1 << 16  # bytes of a row of a table beside its text
_VALUES = 1 << 24  # in a row of a table, such as tokens


def json_lines(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a .jsonl data file, perhaps compressed, as (place, fields); blank lines are left out."""
    with open_unpacked(file) as stream:
        for number, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                values = from_json(text, data_files.LINE + 1, strict=False)
            except Malformed as error:
                raise ConfigError(f"line {number} is {error}") from None
            if not isinstance(values, dict):
                raise ConfigError(f"line {number} is a JSON {type(values).__name__}, not an object with fields")
            yield f"line {number}", values


def table_rows(form: str, file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a data table as (place, fields), of the columns `fields` only. `form`: parquet, or arrow for an
    Arrow IPC file or stream (as Hugging Face datasets are saved). A child process parses it, see
    `platform.data.parsers`."""
    pyarrow(file)
    packed = size_of(file)
    most, unpacked, number = max(data_files.UNPACKED, data_files.RATIO * packed), 0, 0
    bounds = limits(_MEMORY + 4 * packed, 60 + packed / _SPEED, data_files.LINE + _ROW)
    with open_raw(file) as raw, parser_of("platform.data.parsers.table_parser:answer_table") as parser:

        def read(offset: int, size: int) -> bytes:
            """Return `size` bytes of the data table's file from byte `offset` on, for the process that parses it."""
            raw.seek(offset)
            return raw.read(size)

        opening = {"do": "open", "form": form, "size": packed, "columns": [*fields]}
        _check_columns(from_json(parser.ask(opening, b"", bounds, read), bounds.output), fields)
        while lines := parser.ask({"do": "next", "output": bounds.output}, b"", bounds, read):
            unpacked += len(lines)
            if unpacked > most:
                raise ConfigError(f"it unpacks to more than {data_files.RATIO} times its size, which no text does")
            for line in lines.split(b"\n"):
                number += 1
                row = from_json(line, bounds.output, _VALUES, strict=False)
                assert isinstance(row, dict)
                yield f"row {number}", row


ROWS: dict[str, Callable[[DataFile, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": json_lines,
    ".parquet": partial(table_rows, "parquet"),
    ".arrow": partial(table_rows, "arrow"),
}


def _check_columns(names: list[str], fields: Sequence[str]) -> None:
    """Raise ConfigError if a table of data, with columns `names`, has none of the wanted columns `fields`."""
    if not any(name in names for name in fields):
        there = one_line(", ".join(names[:20])) or "none"
        raise ConfigError(f"data.field={fields[0]}: no such column; its columns: {there}")


def text_of(record: Record, field: str) -> str:
    """Return the text in a `field` of a data record, "" for null. Raises ConfigError, which lists the fields with text,
    if the field is missing or no text."""
    place, values = record
    value = values.get(field)
    if isinstance(value, str):
        return data_files.encodable(value)
    if value is None and field in values and not place.startswith("line"):
        return ""  # tables say null for what is empty
    texts = ", ".join(name for name, v in values.items() if isinstance(v, str)) or "none"
    fault = "is not a string" if field in values else "is missing"
    raise ConfigError(f"data.field={field} {fault} in {place}; its fields with text: {texts}")
