"""Parsers of foreign formats, each of which answers a request: tables, chat templates and tokenizers.

- `answer_table`: rows of a Parquet or Arrow table as lines of JSON, of the columns that are asked for.
- `answer_template`: conversations by a chat template, which is compiled and run in the sandbox of Jinja.
- `answer_tokenizer`: tokenizer.json, made of the other forms in which tokenizers are published, and texts encoded by
  it. Only here is a foreign tokenizer run.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from platform.boundary.parser_process import AskedFile, Read
from platform.data.tokenizer_files import convert_to_tokenizer_json, parse_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
        return _read_next_rows(request["output"])
    import pyarrow

    _left.clear()
    pyarrow.set_cpu_count(1)
    raw = AskedFile(read, request["size"])
    opened = _open_parquet if request["form"] == "parquet" else _open_arrow
    schema, batches = opened(pyarrow.PythonFile(raw, mode="r"), raw, request["columns"])
    _rows = (row for batch in batches for row in _encode_table_rows(batch))
    return json.dumps(schema.names[:1000]).encode()


def _read_next_rows(most: int) -> bytes:
    """Return the next rows of the opened data table as lines of JSON, b"" at its end; `most`: the most bytes of the
    answer. Raises ValueError if a single row has more."""
    rows, size = _left[:], sum(map(len, _left))
    _left.clear()
    for row in _rows:
        if rows and size + len(row) > _ENOUGH:
            _left.append(row)
            break
        if len(row) + 1 > most:
            raise ValueError(f"a row of more than {most >> 20} MiB; cut it")
        rows.append(row)
        size += len(row)
        if len(rows) == AT_ONCE:
            break
    return b"\n".join(rows)


def _open_parquet(source: Any, raw: AskedFile, wanted: list[str]) -> tuple[Any, Iterator[Any]]:
    """Open a Parquet data file; return its schema, and an iterator over batches of rows with the `wanted` columns."""
    from pyarrow import parquet

    table = parquet.ParquetFile(source, pre_buffer=False)
    columns = [name for name in wanted if name in table.schema_arrow.names]
    batches = table.iter_batches(AT_ONCE, columns=columns, use_threads=False) if columns else iter(())
    return table.schema_arrow, batches


def _open_arrow(source: Any, raw: AskedFile, wanted: list[str]) -> tuple[Any, Iterator[Any]]:
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


def _encode_table_rows(batch: Any) -> Iterator[bytes]:
    """Yield each row of a data table's batch (pyarrow) as JSON bytes. Raises pyarrow's error for corrupt ones."""
    batch.validate(full=True)
    step = 1 if "dictionary" in str(batch.schema) else AT_ONCE  # its size says nothing of that of its rows
    for start in range(0, batch.num_rows, step):
        yield from _encode_row_slice(batch.slice(start, step))


def _encode_row_slice(batch: Any) -> Iterator[bytes]:
    """Yield each row of a data table's batch (pyarrow) as JSON bytes, halving one too large to convert at once."""
    if batch.num_rows > 1 and batch.get_total_buffer_size() > _ENOUGH and batch.nbytes > _ENOUGH:
        half = batch.num_rows // 2
        yield from _encode_row_slice(batch.slice(0, half))
        yield from _encode_row_slice(batch.slice(half))
        return
    for row in batch.to_pylist():
        yield json.dumps(row, ensure_ascii=False, default=_replace_unknown_value).encode()


def _replace_unknown_value(value: Any) -> Any:
    """Return [type name] in place of a data table's value that JSON lacks (bytes, a date): no text and no number."""
    return [type(value).__name__]


_templates: dict[str, Any] = {}  # the last one, by its text
_blocks: list[str] = []  # of the text that is being written
_spans: list[tuple[int, int]] = []  # of that text: what {% generation %} marks


def answer_template(request: dict[str, Any], body: bytes, read: Read) -> bytes:
    """Answer the parent's request to this child process, which runs a chat template in Jinja's sandbox: check that
    `template` is one; or, for a body of JSON, return what the template makes of the `variants` of its conversation, as
    a JSON list (see `_render_variant`)."""
    template = _compile_template(request["template"])
    if not body:
        return b""
    payload = json.loads(body)
    return json.dumps([_render_variant(template, payload, variant) for variant in payload["variants"]]).encode()


def _render_variant(template: Any, payload: dict[str, Any], variant: dict[str, Any]) -> Any:
    """Return [text, spans of {% generation %} blocks in it] that a chat template makes of a `variant` of the payload's
    conversation; None if it refuses one that is `optional`."""
    messages = payload["messages"][: variant["first"]]
    if variant["message"]:
        messages[variant["place"]] = variant["message"]
    options = {"tools": payload["tools"] if variant["tools"] else None, "documents": None, **payload["named"]}
    _blocks.clear()
    _spans.clear()
    try:
        for block in template.generate(messages=messages, add_generation_prompt=variant["prompt"], **options):
            _blocks.append(block)  # as it is made: a mark counts from the blocks before it
    except MemoryError:
        raise
    except Exception:
        if not variant["optional"]:
            raise
        return None
    return ["".join(_blocks), _spans[:]]


def _compile_template(text: str) -> Any:
    """Return a chat template, compiled from its text in Jinja's sandbox and kept until another one is asked for."""
    if text not in _templates:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        _templates.clear()
        extensions = [_build_generation_extension(), "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _dump_json
        environment.globals["raise_exception"] = _raise_template_error
        del environment.globals["lipsum"], environment.filters["random"]  # one conversation is always one text
        _templates[text] = environment.from_string(text)
    return _templates[text]


def _raise_template_error(message: str) -> NoReturn:
    """Raise TemplateError with a chat template's own message: the `raise_exception` that templates call to refuse."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def _dump_json(value: Any, indent: int | None = None, **more: Any) -> str:
    """Return plain data as JSON: the chat templates' filter `tojson`, without the HTML escapes of Jinja's own."""
    options = {name: more[name] for name in ("ensure_ascii", "separators", "sort_keys") if name in more}
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _build_generation_extension() -> type:
    """Return the Jinja extension for {% generation %} blocks of chat templates, which notes where their text lies, as
    `transformers` does."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Reads {% generation %} and {% endgeneration %}, which mark answers."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Parse a {% generation %} block of a chat template into a call with its body."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark_text"), [], [], body).set_lineno(line)

        def _mark_text(self, caller: Any) -> str:
            """Return the text of a {% generation %} block, and note where it lies in the whole text."""
            text: str = caller()
            start = sum(map(len, _blocks))
            _spans.append((start, start + len(text)))
            return text

    return Generation


_opened: list[Tokenizer] = []  # the last one


def answer_tokenizer(request: dict[str, Any], body: bytes, read: Read) -> bytes:
    """Answer the parent's request to this child process, which alone runs foreign tokenizers; `do` names the action."""
    return _DO[request["do"]](request, body)


def _answer_build(request: dict[str, Any], body: bytes) -> bytes:
    """Return a tokenizer.json made of a tokenizer's other files, listed in the request and end to end in the body."""
    files, offset = {}, 0
    for name, size in request["files"]:
        files[name] = body[offset : offset + size]
        offset += size
    return convert_to_tokenizer_json(files, request["words"])


def _answer_add(request: dict[str, Any], body: bytes) -> bytes:
    """Add the request's special tokens to the tokenizer.json in the body, and return it."""
    tokenizer = parse_tokenizer(body)
    tokenizer.add_special_tokens(request["tokens"])
    return tokenizer.to_str().encode()


def _answer_open(request: dict[str, Any], body: bytes) -> bytes:
    """Open the tokenizer.json in the body; return its vocabulary and its added tokens (id, text, special) as JSON."""
    _opened[:] = [parse_tokenizer(body)]
    added = [(i, token.content, token.special) for i, token in _opened[0].get_added_tokens_decoder().items()]
    return json.dumps({"vocab": _opened[0].get_vocab(with_added_tokens=True), "added": added}).encode()


def _answer_encode(request: dict[str, Any], body: bytes) -> bytes:
    """Tokenize the texts in the body (JSON) by the opened tokenizer. Return 4-byte integers: the number of tokens in
    each text, the ids of all and, with `ends`, the number of characters of its text up to the end of each token."""
    texts = json.loads(body)
    run = _opened[0].encode_batch if request["ends"] else _opened[0].encode_batch_fast
    encodings = run(texts, add_special_tokens=False)
    numbers = array("I", [len(e) for e in encodings])
    for encoding in encodings:
        numbers.extend(encoding.ids)
    for encoding in encodings if request["ends"] else ():
        numbers.extend([end for _, end in encoding.offsets])
    return numbers.tobytes()


def _answer_decode(request: dict[str, Any], body: bytes) -> bytes:
    """Return the text, in UTF-8, that the opened tokenizer decodes from the token ids in the body (JSON)."""
    return _opened[0].decode(json.loads(body), skip_special_tokens=request["skip"]).encode(errors="replace")


_DO = {
    "make": _answer_build,
    "add": _answer_add,
    "open": _answer_open,
    "encode": _answer_encode,
    "decode": _answer_decode,
}
