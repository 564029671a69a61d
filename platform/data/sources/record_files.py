"""Files of records: one JSON object per line, or one row of a table, by the ending of the file's name.

`ROWS` is the table of formats; each reader yields (place in the file, record) and reads within bounds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from platform.boundary.documents import from_json
from platform.boundary.schema import Malformed
from platform.config.fields import ConfigError
from platform.data.sources import data_files
from platform.data.sources.data_files import DataFile, open_raw, open_unpacked, pyarrow, size_of

Record = tuple[str, dict[str, Any]]  # (place in the file, for a refusal: "line 3", values by field)
_AT_ONCE = 256  # rows of a table that are read at once
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream


def json_lines(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a .jsonl file, which may be compressed; blank lines are left out."""
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


def parquet_rows(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a Parquet file, of the columns `fields` only."""
    arrow = pyarrow(file)
    from pyarrow import parquet

    with open_raw(file) as raw:
        table = parquet.ParquetFile(arrow.PythonFile(raw, mode="r"))
        columns = [name for name in fields if name in table.schema_arrow.names]
        _check_columns(table.schema_arrow, fields)
        yield from _rows(table.iter_batches(_AT_ONCE, columns=columns), size_of(file))


def arrow_rows(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a file of Arrow's IPC formats, stream (as Hugging Face datasets are saved) or file, of the
    columns `fields` only."""
    arrow = pyarrow(file)
    from pyarrow import ipc

    with open_raw(file) as raw:
        source = arrow.PythonFile(raw, mode="r")
        if _begins(raw) == b"ARROW1":
            table = ipc.open_file(source)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        else:
            if not _ends(raw):
                raise ConfigError("torn: the end of an Arrow stream is missing")
            batches = table = ipc.open_stream(source)
        _check_columns(table.schema, fields)
        columns = [name for name in fields if name in table.schema.names]
        yield from _rows((batch.select(columns) for batch in batches), size_of(file))


ROWS: dict[str, Callable[[DataFile, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": json_lines,
    ".parquet": parquet_rows,
    ".arrow": arrow_rows,
}


def _begins(raw: BinaryIO) -> bytes:
    """Return the first six bytes of a file, and go back to its start."""
    found = raw.read(6)
    raw.seek(0)
    return found


def _ends(raw: BinaryIO) -> bool:
    """Return True if a file ends as an Arrow stream does, and go back to its start: a stream that was cut between two
    of its parts reads like a shorter one."""
    raw.seek(max(0, raw.seek(0, 2) - len(_END)))
    found = raw.read()
    raw.seek(0)
    return found == _END


def _check_columns(schema: Any, fields: Sequence[str]) -> None:
    """Raise ConfigError if a table has none of the columns `fields`."""
    if not any(name in schema.names for name in fields):
        there = ", ".join(schema.names[:20]) or "none"
        raise ConfigError(f"data.field={fields[0]}: no such column; its columns: {there}")


def _rows(batches: Any, packed: int) -> Iterator[Record]:
    """Yield the rows of batches of a table of `packed` bytes as stored. Raises ConfigError if they are far more."""
    most, unpacked, number = max(data_files.UNPACKED, data_files.RATIO * packed), 0, 0
    for whole in batches:
        for start in range(0, whole.num_rows, _AT_ONCE):
            batch = whole.slice(start, _AT_ONCE)
            unpacked += batch.nbytes
            if unpacked > most:
                raise ConfigError(f"it unpacks to more than {data_files.RATIO} times its size, which no text does")
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row


def text_of(record: Record, field: str, key: str = "data.field") -> str:
    """Return the text in a field of a record; "" for null. Raises ConfigError, with the fields that hold texts, if it
    is missing or no text; `key` is the configuration key that names the field."""
    place, values = record
    value = values.get(field)
    if isinstance(value, str):
        return data_files.encodable(value)
    if value is None and field in values and not place.startswith("line"):
        return ""  # tables say null for what is empty
    texts = ", ".join(name for name, v in values.items() if isinstance(v, str)) or "none"
    fault = "is not a string" if field in values else "is missing"
    raise ConfigError(f"{key}={field} {fault} in {place}; its fields with text: {texts}")
