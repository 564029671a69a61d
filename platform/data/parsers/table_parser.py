"""Parser of Parquet and of Arrow's IPC formats: rows of a table as lines of JSON, of the columns that are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from platform.boundary.parser_process import AskedFile, Read

AT_ONCE = 256  # most rows of one answer
_ENOUGH = 1 << 22  # bytes of columns that are made rows at once, and of the rows of one answer
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream
_rows: Iterator[bytes] = iter(())  # of the file that is being read
_left: list[bytes] = []  # the row that no longer fitted into the last answer


def answer_table(request: dict[str, Any], body: bytes, read: Read) -> bytes:
    """Answer the parent's request to this child process, which parses a data file (Parquet or Arrow's IPC): open the
    file of `size` bytes for the wanted `columns` and return the names of all its columns as JSON; or return the next
    rows as lines of JSON, nothing after the last. `read` fetches bytes of the file from the parent."""
    global _rows
    if request["do"] == "next":
        return _next(request["output"])
    import pyarrow

    _left.clear()
    pyarrow.set_cpu_count(1)
    raw = AskedFile(read, request["size"])
    opened = _parquet if request["form"] == "parquet" else _arrow
    schema, batches = opened(pyarrow.PythonFile(raw, mode="r"), raw, request["columns"])
    _rows = (row for batch in batches for row in _lines(batch))
    return json.dumps(schema.names[:1000]).encode()


def _next(most: int) -> bytes:
    """Return the next rows of the opened data table as lines of JSON, b"" at its end; `most`: the most bytes of the
    answer. Raises ValueError if a single row has more."""
    found, size = _left[:], sum(map(len, _left))
    _left.clear()
    for row in _rows:
        if found and size + len(row) > _ENOUGH:
            _left.append(row)
            break
        if len(row) + 1 > most:
            raise ValueError(f"a row of more than {most >> 20} MiB; cut it")
        found.append(row)
        size += len(row)
        if len(found) == AT_ONCE:
            break
    return b"\n".join(found)


def _parquet(source: Any, raw: AskedFile, wanted: list[str]) -> tuple[Any, Iterator[Any]]:
    """Open a Parquet data file; return its schema, and an iterator over batches of rows with the `wanted` columns."""
    from pyarrow import parquet

    table = parquet.ParquetFile(source, pre_buffer=False)
    columns = [name for name in wanted if name in table.schema_arrow.names]
    batches = table.iter_batches(AT_ONCE, columns=columns, use_threads=False) if columns else iter(())
    return table.schema_arrow, batches


def _arrow(source: Any, raw: AskedFile, wanted: list[str]) -> tuple[Any, Iterator[Any]]:
    """Open an Arrow data file (IPC file or stream); return its schema, and an iterator over batches of rows with the
    `wanted` columns. Raises ValueError for a torn stream."""
    from pyarrow import ipc

    is_file = raw.read(6) == b"ARROW1"
    raw.seek(-len(_END), 2)
    if not is_file and raw.read() != _END:  # one that was cut between two of its parts reads like a shorter one
        raise ValueError("torn: the end of an Arrow stream is missing")
    raw.seek(0)
    schema = ipc.open_file(source).schema if is_file else ipc.open_stream(source).schema
    raw.seek(0)
    places = [i for i, name in enumerate(schema.names) if name in wanted]
    if not places:
        return schema, iter(())
    options = ipc.IpcReadOptions(included_fields=places, use_threads=False)
    if is_file:
        table = ipc.open_file(source, options=options)
        return schema, (table.get_batch(i) for i in range(table.num_record_batches))
    return schema, iter(ipc.open_stream(source, options=options))


def _lines(batch: Any) -> Iterator[bytes]:
    """Yield each row of a data table's batch (pyarrow) as JSON bytes. Raises pyarrow's error for corrupt ones."""
    batch.validate(full=True)
    step = 1 if "dictionary" in str(batch.schema) else AT_ONCE  # its size says nothing of that of its rows
    for start in range(0, batch.num_rows, step):
        yield from _of_slice(batch.slice(start, step))


def _of_slice(batch: Any) -> Iterator[bytes]:
    """Yield each row of a data table's batch (pyarrow) as JSON bytes, halving one too large to convert at once."""
    if batch.num_rows > 1 and batch.get_total_buffer_size() > _ENOUGH and batch.nbytes > _ENOUGH:
        half = batch.num_rows // 2
        yield from _of_slice(batch.slice(0, half))
        yield from _of_slice(batch.slice(half))
        return
    for row in batch.to_pylist():
        yield json.dumps(row, ensure_ascii=False, default=_no_json).encode()


def _no_json(value: Any) -> Any:
    """Return [type name] in place of a data table's value that JSON lacks (bytes, a date): no text and no number."""
    return [type(value).__name__]
