"""Files of data: found by a path, a glob, a folder or a URL, of which a bounded number of names is looked at; opened
within bounds, hashed, and named in refusals.

Files of records have one JSON object per line or in an array, or one row of a table, by the ending of their name.
`ROWS` is the table of formats; each reader yields (place in the file, record) and reads within bounds.
"""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from platform.boundary.confinement import compute_limits, use_parser
from platform.boundary.documents import open_regular_file, parse_json, parser_error_line, printable_line, read_json_file
from platform.boundary.redaction import strip_url_secrets
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.boundary.storage import RemoteFile, find_remote_files, open_remote_file, suggest_remedy

PACKED = (".gz", ".zst")  # endings that may follow: of compressed files
LINE = 64 << 20  # bytes of the longest line
UNPACKED, RATIO = 64 << 20, 300  # gzip and zstd shrink text 3 to 30 times
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_HASHED = 4 << 20  # bytes hashed at once
_SAMPLES, _SAMPLE = 16, 64 << 10  # stretches of a file that stand for it, and the bytes of each

logger = logging.getLogger(__name__)
DataFile = Path | RemoteFile


def file_size(file: DataFile) -> int:
    """Return the size of a data file in bytes, as stored (compressed). Raises OSError."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def uncompressed_suffix(file: DataFile) -> str:
    """Return the suffix of a data file that gives its format, such as ".jsonl", without a suffix of compression."""
    name = file.name
    for packed in PACKED:
        name = name.removesuffix(packed)
    return PurePosixPath(name).suffix


@contextmanager
def open_raw(file: DataFile) -> Iterator[BinaryIO]:
    """Open a data file, at a path or URL, as a buffered byte stream that can seek, without unpacking it."""
    if isinstance(file, RemoteFile):
        with open_remote_file(file.url) as remote:
            yield remote
    else:
        with io.BufferedReader(open_regular_file(file)) as local:
            yield cast(BinaryIO, local)


class BoundedStream:
    """Byte stream of a file within bounds: raises ConfigError if it unpacks to far more than its file (`packed` bytes),
    or has a line over LINE."""

    def __init__(self, stream: BinaryIO, packed: int):
        """Bound `stream`, the unpacked bytes of a data file; `packed`: size of that file in bytes, as stored."""
        self._stream, self._place, self._most = stream, 0, max(UNPACKED, RATIO * packed)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the data file, at most `size`. Raises ConfigError if it unpacks to too many."""
        return self._count_bytes(self._stream.read(size))

    def readline(self, size: int | None = None) -> bytes:
        """Return the next line of a data file, of at most `size` bytes. Raises ConfigError beyond LINE bytes."""
        text = self._count_bytes(self._stream.readline(LINE + 1 if size is None else size))
        if len(text) > LINE:
            raise ConfigError(f"a line of more than {LINE >> 20} MiB; cut it")
        return text

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines of the data file as bytes, each checked against the bounds."""
        return iter(self.readline, b"")

    def tell(self) -> int:
        """Return how many unpacked bytes of the data file have been read."""
        return self._place

    def _count_bytes(self, data: bytes) -> bytes:
        """Count unpacked bytes of a data file, and return them. Raises ConfigError if it unpacks to too many."""
        self._place += len(data)
        if self._place > self._most:
            raise ConfigError(f"it unpacks to more than {RATIO} times its size, which no text does; unpack it yourself")
        return data


@contextmanager
def open_unpacked(file: DataFile) -> Iterator[BoundedStream]:
    """Open a data file as a stream of bytes within bounds, unpacked if it is in the format of gzip or zstd."""
    with open_raw(file) as raw:
        begins = raw.read(4)
        raw.seek(0)
        stream: Any = raw
        if begins[:2] == _GZIP:
            stream = gzip.GzipFile(fileobj=raw)
        elif begins == _ZSTD:
            arrow = import_pyarrow(file)
            stream = io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), "zstd"))
        yield BoundedStream(cast(BinaryIO, stream), file_size(file))


def import_pyarrow(file: DataFile) -> Any:
    """Return the module pyarrow, to read a data file. Raises ConfigError, with the install command, without it."""
    try:
        import pyarrow as found
    except ImportError:
        suffix_or_name = "".join(PurePosixPath(file.name).suffixes[-1:]) or file.name
        raise ConfigError(f"{suffix_or_name} needs pyarrow: pip install 'elastic-platform[data]'") from None
    return found


@contextmanager
def name_file_in_errors(file: DataFile, key: str = "data.path") -> Iterator[None]:
    """Raise ConfigError, naming the data file and the configuration's `key` that leads to it, in place of errors from
    reading or parsing the file within the context."""
    try:
        yield
    except (ConfigError, OSError, EOFError, zlib.error, UnicodeDecodeError, Malformed) as error:
        raise ConfigError(f"{key}={file}: {error_reason(error)}") from None
    except (OverflowError, RecursionError) as error:  # a date, or lists in lists, beyond what Python holds
        raise ConfigError(f"{key}={file}: {error_reason(error)}") from None
    except Exception as error:
        if isinstance(file, RemoteFile) or type(error).__module__.startswith("pyarrow"):  # they raise their own
            raise ConfigError(f"{key}={file}: {error_reason(error)}") from None
        raise


def error_reason(error: Exception) -> str:
    """Return why a data file could not be read, in one line, out of the error that reading it raised."""
    return getattr(error, "strerror", None) or parser_error_line(error)


def content_hash(file: DataFile) -> str:
    """Return the SHA-256 of a data file's content, 64 hexadecimal digits, to name its cache entry. Raises OSError."""
    digest = hashlib.sha256()
    with open_raw(file) as stream:
        while block := stream.read(_HASHED):
            digest.update(block)
    return digest.hexdigest()


def sample_file_content(file: DataFile) -> list[Any]:
    """Return values that identify a data file's content without reading all of it: for a path its size and the SHA-256
    of _SAMPLES stretches, spread evenly from the first to the last byte; for a URL its size and the version that its
    storage reports. Raises OSError."""
    if isinstance(file, RemoteFile):
        return [file.size, file.version]
    digest, size = hashlib.sha256(), file_size(file)
    with open_raw(file) as stream:
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE))
    return [size, digest.hexdigest()]


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates in the text of a data file, which JSON may hold and UTF-8 cannot encode, by "?"."""
    return text.encode(errors="replace").decode()


# A folder is searched for these endings; a file or glob that the user names may have any.
ENDINGS = ".txt .md .rst .tex .html .py .c .h .cc .cpp .rs .go .java .js .ts .sh .jsonl .parquet .arrow".split()
MOST = 1_000_000  # names of files and folders that are looked at; links may lead in circles


def find_data_files(key: str, value: str, endings: list[str] = ENDINGS) -> list[DataFile]:
    """Find the data files that the user names by the configuration key `key`: `value` is a file, a glob, or a folder,
    of which the files count that are not hidden and have one of the suffixes `endings`; or a URL of any of these.
    Raises ConfigError, naming the key, if there is none."""
    if "://" in value:
        return _find_remote_files(key, value, endings)
    path = Path(value).expanduser()
    try:
        if path.is_dir():
            files = _find_saved_dataset(path) or find_files_in_folder(path, endings, skip=set())
            reason = f"no file in this folder ends with any of {' '.join(endings)}; name others by a glob"
        elif path.exists():
            files, reason = [path] if path.is_file() else [], "a pipe or a device, and a regular file is needed"
        else:
            files = [file for file in _glob_paths(path) if file.is_file()]
            reason = "no file or folder, and no file matches it as a glob" + _suggest_nearest_paths(path)
    except ConfigError as error:
        raise ConfigError(f"{key}={value}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}={value}: cannot be read: {error_reason(error)}") from None
    if not files:
        raise ConfigError(f"{key}={value}: {reason}")
    return _drop_links(files)


def _drop_links(files: Sequence[Path]) -> list[DataFile]:
    """Return data files without links to another one of them, in their order: a file and its links count once."""
    named: dict[tuple[int, int], Path] = {}
    for file in sorted(files, key=Path.is_symlink):  # the file itself before the links to it
        same_file = named.setdefault((file.stat().st_dev, file.stat().st_ino), file)
        if same_file is not file:
            logger.info("%s is %s, which counts once", file, same_file)
    kept = {*named.values()}
    return [file for file in files if file in kept]


class _NameCounter:
    """Count of the names that are looked at for one key. Raises ConfigError if they are more than MOST."""

    def __init__(self) -> None:
        """Start the count of file names that the search for one path of data has examined at 0."""
        self._seen = 0

    def count_names(self, names: int) -> None:
        """Count `names` more file names that the search for data examined. Raises ConfigError beyond MOST in all."""
        self._seen += names
        if self._seen > MOST:
            raise ConfigError(f"more than {MOST:,} files and folders are there; name fewer, or put texts into .jsonl")


def _glob_paths(pattern: Path) -> list[Path]:
    """Return the sorted paths of data files that match a glob, "**" included. Raises ConfigError beyond MOST names."""
    return sorted(set(map(Path, _expand_glob(pattern.anchor, pattern.parts[bool(pattern.anchor) :], _NameCounter()))))


def _expand_glob(folder: str, parts: Sequence[str], name_counter: _NameCounter) -> Iterator[str]:
    """Yield the paths of data files below `folder` ("" for the current one) that match `parts`, the components of a
    glob; `name_counter` counts the names examined."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        for parent, folders, names in os.walk(folder or ".", followlinks=True):
            name_counter.count_names(len(folders) + len(names))
            folders[:] = [name for name in folders if not name.startswith(".")]
            if parts[1:]:
                yield from _expand_glob(parent, parts[1:], name_counter)
            else:
                yield from (os.path.join(parent, name) for name in names if not name.startswith("."))
    elif not glob.has_magic(parts[0]):
        if os.path.lexists(path := os.path.join(folder, parts[0])):
            yield from _expand_glob(path, parts[1:], name_counter)
    else:
        for name in _list_file_names(folder or "."):
            name_counter.count_names(1)
            if fnmatch(name, parts[0]) and (not name.startswith(".") or parts[0].startswith(".")):
                yield from _expand_glob(os.path.join(folder, name), parts[1:], name_counter)


def _list_file_names(folder: str) -> Iterator[str]:
    """Yield the file names in a folder of data; none if it is not a folder or may not be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries)


def find_files_in_folder(folder: Path, endings: list[str], skip: set[str]) -> list[Path]:
    """Find the data files under `folder` whose suffix is one of `endings` (or that and a compression's), in one order
    on every machine; hidden folders and folders named in `skip` are left out. Raises OSError, and ConfigError if there
    are more than MOST names to look at."""

    def raise_error(error: OSError) -> None:  # to skip a folder would silently change the corpus
        """Raise the error of a folder of data that cannot be listed: to skip it would silently change the corpus."""
        raise error

    files, looking = [], _NameCounter()
    for parent, folders, names in os.walk(folder, onerror=raise_error):
        looking.count_names(len(folders) + len(names))
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        visible = (Path(parent, name) for name in names if not name.startswith("."))
        files += [path for path in visible if uncompressed_suffix(path) in endings]
    return sorted(file for file in files if file.is_file())


def _find_remote_files(key: str, url: str, endings: list[str]) -> list[DataFile]:
    """Find the data files at a URL: a file, a glob or a folder of a remote storage. Raises ConfigError, naming the
    configuration `key`, if there is none or the storage refuses."""
    try:
        files = find_remote_files(url, lambda name: uncompressed_suffix(Path(name)) in endings)
    except FileNotFoundError:
        raise ConfigError(f"{key}={strip_url_secrets(url)}: no such file") from None
    except Exception as error:  # a client library may raise anything
        reason = f"{error_reason(error)}{suggest_remedy(url, error)}"
        raise ConfigError(f"{key}={strip_url_secrets(url)}: cannot be read: {reason}") from None
    if not files:
        reason = f"no file there, or none ends with any of {' '.join(endings)}"
        raise ConfigError(f"{key}={strip_url_secrets(url)}: {reason}")
    return list(files)


def _find_saved_dataset(folder: Path) -> list[Path]:
    """Return the data files that Hugging Face's `datasets` saved in `folder`, in order; [] if it holds no dataset.
    Raises ConfigError for several datasets in one folder, and for a dataset whose rows are chosen by an index."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        nearest = ", ".join(str(folder / name) for name in splits) or "none"
        raise ConfigError(f"holds several splits; nearest: {nearest}")
    if not (folder / "state.json").is_file():
        return []
    try:
        state = read_json_file(folder / "state.json")
        names = [str(part["filename"]) for part in state["_data_files"]]
        chosen = state.get("_indices_data_files")
    except (Malformed, OSError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"state.json is none of a dataset: {error}") from None
    if chosen:
        raise ConfigError("its rows are chosen by an index; save it again with a newer version of datasets")
    files = [folder / Path(name).name for name in names]
    if missing := [path.name for path in files if not path.is_file()]:
        raise ConfigError(f"lacks {', '.join(missing[:3])}, which its state.json names")
    return files


def _suggest_nearest_paths(path: Path) -> str:
    """Return "; nearest: PATHS", data files named like the missing `path`, for its refusal; "" if none is."""
    beside = sorted(p.name for p in islice(path.parent.glob("[!.]*"), 1000)) if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, cutoff=0.5)
    return f"; nearest: {', '.join(str(path.parent / name) for name in close)}" if close else ""


Record = tuple[str, dict[str, Any]]  # (place in the file, for a refusal: "line 3", values by field)
_MEMORY = 512 << 20  # bytes that parsing a small table takes; a larger one takes up to 4 times its size more
_SPEED = 1e6  # bytes of a file that are parsed in a second, at the least
_ROW = 1 << 16  # bytes of a row of a table beside its text
_VALUES = 1 << 24  # in a row of a table, such as tokens


def read_json_lines(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a .jsonl data file, perhaps compressed, as (place, fields); blank lines are left out."""
    with open_unpacked(file) as stream:
        for number, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                values = parse_json(text, LINE + 1, strict=False)
            except Malformed as error:
                raise ConfigError(f"line {number} is {error}") from None
            if not isinstance(values, dict):
                raise ConfigError(f"line {number} is a JSON {type(values).__name__}, not an object with fields")
            yield f"line {number}", values


def read_table_rows(form: str, file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a data table as (place, fields), of the columns `fields` only. `form`: parquet, or arrow for an
    Arrow IPC file or stream (as Hugging Face datasets are saved). A child process parses it, see
    `platform.data.parsers`."""
    import_pyarrow(file)
    packed = file_size(file)
    most, unpacked, number = max(UNPACKED, RATIO * packed), 0, 0
    bounds = compute_limits(_MEMORY + 4 * packed, 60 + packed / _SPEED, LINE + _ROW)
    with open_raw(file) as raw, use_parser("platform.data.parsers:answer_table") as parser:

        def read_range(offset: int, size: int) -> bytes:
            """Return `size` bytes of the data table's file from byte `offset` on, for the process that parses it."""
            raw.seek(offset)
            return raw.read(size)

        opening = {"do": "open", "form": form, "size": packed, "columns": [*fields]}
        _require_any_column(parse_json(parser.request_answer(opening, b"", bounds, read_range), bounds.output), fields)
        while lines := parser.request_answer({"do": "next", "output": bounds.output}, b"", bounds, read_range):
            unpacked += len(lines)
            if unpacked > most:
                raise ConfigError(f"it unpacks to more than {RATIO} times its size, which no text does")
            for line in lines.split(b"\n"):
                number += 1
                row = parse_json(line, bounds.output, _VALUES, strict=False)
                assert isinstance(row, dict)
                yield f"row {number}", row


_MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{}]', re.DOTALL)  # texts of JSON, ends of maps and lists
_CUT = 1 << 20  # bytes of an array that are read at once


def read_json_array(file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a .json data file, an array of objects, perhaps compressed, as (place, fields)."""
    with open_unpacked(file) as stream:
        for number, record in enumerate(_cut_json_array(stream), 1):
            try:
                values = parse_json(record, LINE + 1, strict=False)
            except Malformed as error:
                raise ConfigError(f"record {number} is {error}") from None
            yield f"record {number}", values


def _cut_json_array(stream: BoundedStream) -> Iterator[bytes]:
    """Yield the objects of a JSON array, each as its bytes, without reading more than one of them and a little. Raises
    ConfigError for anything else, and for an array that is cut off."""
    held, depth, begin, number = b"", 0, 0, 0
    while block := stream.read(max(_CUT, len(held))):
        held += block
        if not number and not depth:
            held = held.removeprefix(codecs.BOM_UTF8).lstrip()
        depth, end = min(depth, 1), 0
        for mark in _MARKS.finditer(held):
            sign = mark[0]
            if sign == b'"':  # a text that goes on
                break
            if len(sign) > 1 and depth > 1:
                continue
            if depth < 2 and (len(sign) > 1 or sign not in (b"[" if not depth else b"{]")):
                raise ConfigError(f"record {number + 1} is no object; a .json file is one array of objects")
            depth += 1 if sign in b"[{" else -1
            if sign == b"{" and depth == 2:
                if held[end : mark.start()].strip() != (b"," if number else b""):
                    raise ConfigError(f"before record {number + 1} there is no comma")
                begin = mark.start()
            elif depth == 1 and sign != b"[":
                number, end = number + 1, mark.end()
                yield held[begin:end]
            elif not depth:
                if held[end : mark.start()].strip():
                    raise ConfigError(f"record {number + 1} is no object; a .json file is one array of objects")
                if held[mark.end() :].strip() or stream.read(_CUT).strip():
                    raise ConfigError("there is more behind its array; a .json file is one array of objects")
                return
            elif depth == 1:
                end = mark.end()
        if len(held) - end > LINE:
            raise ConfigError(f"record {number + 1} has more than {LINE >> 20} MiB; cut it")
        held = held[end:]
    raise ConfigError("torn: the end of its array is missing" if number or depth else "no array of objects")


def read_separated_rows(separator: str, file: DataFile, fields: Sequence[str]) -> Iterator[Record]:
    """Yield the rows of a .csv or .tsv data file, whose first row names the columns, as (place, texts by column)."""
    csv.field_size_limit(LINE)
    with open_unpacked(file) as stream:
        rows = csv.reader(codecs.iterdecode(stream, "utf-8-sig"), delimiter=separator, strict=True)
        try:
            names = next(rows, [])
            _require_any_column(names, fields)
            for row in rows:
                if row and len(row) != len(names):
                    raise ConfigError(f"line {rows.line_num} ends a row of {len(row)} cells, of {len(names)} columns")
                if row:
                    yield f"line {rows.line_num}", dict(zip(names, row, strict=True))
        except csv.Error as error:
            raise ConfigError(f"line {rows.line_num} is no row of a table: {error}") from None


ROWS: dict[str, Callable[[DataFile, Sequence[str]], Iterator[Record]]] = {
    ".jsonl": read_json_lines,
    ".parquet": partial(read_table_rows, "parquet"),
    ".arrow": partial(read_table_rows, "arrow"),
    ".json": read_json_array,
    ".csv": partial(read_separated_rows, ","),
    ".tsv": partial(read_separated_rows, "\t"),
}


def _require_any_column(columns: list[str], wanted: Sequence[str]) -> None:
    """Raise ConfigError if a table of data, with columns `columns`, has none of the wanted columns `wanted`."""
    if not any(name in columns for name in wanted):
        known_columns = printable_line(", ".join(columns[:20])) or "none"
        raise ConfigError(f"data.field={wanted[0]}: no such column; its columns: {known_columns}")


def read_field_text(record: Record, field: str) -> str:
    """Return the text in a `field` of a data record, "" for null. Raises ConfigError, which lists the fields with text,
    if the field is missing or no text."""
    place, values = record
    value = values.get(field)
    if isinstance(value, str):
        return replace_surrogates(value)
    if value is None and field in values and not place.startswith("line"):
        return ""  # tables say null for what is empty
    texts = ", ".join(name for name, v in values.items() if isinstance(v, str)) or "none"
    fault = "is not a string" if field in values else "is missing"
    raise ConfigError(f"data.field={field} {fault} in {place}; its fields with text: {texts}")
