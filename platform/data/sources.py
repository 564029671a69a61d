"""Sources of text: an entry of `SOURCES` finds the files, `read_documents` reads them, `register_source` adds a source.

A file is one document, but a .jsonl file holds one per line; any file may be compressed with gzip. Text is UTF-8
without NUL bytes.
"""

import codecs
import glob
import gzip
import io
import os
import sysconfig
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from platform.boundary.documents import from_json, one_line, open_regular
from platform.boundary.schema import Malformed
from platform.config.bounds import allow
from platform.config.fields import ConfigError, Data

# A folder is searched for these endings; a file or glob that the user names may have any.
ENDINGS = ".txt .md .rst .tex .html .py .c .h .cc .cpp .rs .go .java .js .ts .sh .jsonl".split()
_READ_AT_ONCE = 64 * 1024  # bytes of a long document that are read at once
LINE = 64 << 20  # bytes of the longest line
_UNPACKED, _RATIO = 64 << 20, 300  # gzip shrinks text 3 to 20 times, and nothing more than 1032 times
_SNIFFED = 32  # files whose beginnings `check_files` reads
# Third-party packages, and parts of the standard library that are tests, tables or second copies.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


def stdlib_files(data: Data) -> list[Path]:
    """Find the files of data=stdlib: Python source files of the running interpreter's own standard library (about 9
    MB)."""
    return _walk(Path(sysconfig.get_path("stdlib")), [".py"], skip=_NOT_STDLIB)


def stdlib_bytes(data: Data) -> int:
    """Return the size in bytes of the text of data=stdlib: the standard library's source files, all together."""
    return sum(file.stat().st_size for file in stdlib_files(data))


def text_files(data: Data) -> list[Path]:
    """Find the user's files of data=text: `data.path` is a file, a glob, or a folder (of which non-hidden files of
    `ENDINGS`). Raises ConfigError if there is none."""
    if not data.path:
        raise ConfigError("data.path: data=text needs a file, a folder or a glob")
    return find_files("data.path", data.path)


def find_files(key: str, value: str) -> list[Path]:
    """Find the files that the user names by the key `key`: `value` is a file, a glob, or a folder, as for `text_files`.
    Raises ConfigError, naming the key, if there is none."""
    path = Path(value).expanduser()
    if path.is_dir():
        found = _walk(path, ENDINGS, skip=set())
        wanted = f"no file in this folder ends with any of {' '.join(ENDINGS)}; name others by a glob"
    elif path.is_file():
        found, wanted = [path], ""
    else:
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        wanted = "no file or folder, and no file matches it as a glob" + _nearest(path)
    if not found:
        raise ConfigError(f"{key}={value}: {wanted}")
    return found


SOURCES: dict[str, Callable[[Data], list[Path]]] = {"stdlib": stdlib_files, "text": text_files}


def register_source(name: str, files: Callable[[Data], list[Path]]) -> None:
    """Register a source of text as `data.kind=NAME`: the function `files` finds its files of text, given the keys of
    group data."""
    SOURCES[name] = files
    allow("data.kind", name)


def files_of(data: Data) -> list[Path]:
    """Return the files of text that the source `data.kind` finds, as paths. Raises ConfigError, naming the source, if
    it raises, or gives anything but an iterable of paths; its own ConfigError and OSError pass unchanged."""
    found: object = None
    try:
        found = SOURCES[data.kind](data)
        return [Path(file) for file in cast(Iterable[Path], found)]
    except (ConfigError, OSError):
        raise
    except Exception as error:  # the source may be the user's code
        if SOURCES[data.kind] in (stdlib_files, text_files):
            raise
        given = "" if found is None else f" gives {type(found).__name__}, not paths of files:"
        raise ConfigError(f"data.kind={data.kind}: its source{given} {type(error).__name__}: {error}") from error


def check_files(data: Data) -> list[str]:
    """Return one refusal line per mistake in the source of text, as far as the beginnings of its first files tell: no
    file, no text, a fault in a file."""
    try:
        files = files_of(data)
        if not files:
            return [f"{_key(data)}: no file in it"]
        if all(file.stat().st_size == 0 for file in files):
            return [f"{_key(data)}: no text in it"]
    except ConfigError as error:
        return error.violations
    except OSError as error:
        return [f"{_key(data)}: cannot be read: {error.strerror}"]
    violations = []
    for file in files[:_SNIFFED]:
        try:
            with closing(read_documents([file], data)) as beginning:
                next(beginning, None)
        except ConfigError as error:
            violations += error.violations
    return violations


def read_documents(files: list[Path], data: Data) -> Generator[tuple[int, str], None, None]:
    """Read the documents in files of text: yield (number of the document, next piece of its text); no piece is empty.

    Raises ConfigError, naming the file and the place, for content that is unreadable, not text, or lacks `data.field`.
    """
    number = -1
    for file in files:
        reader = _lines if is_jsonl(file) else _blocks
        with naming_file(file), open_unpacked(file) as stream:
            for begins, piece in reader(stream, data):
                number += begins
                yield number, piece


class Bounded:
    """Byte stream of a file within bounds: raises ConfigError if it unpacks to far more than its file (`packed` bytes),
    or has a line over LINE."""

    def __init__(self, stream: BinaryIO, packed: int):
        self._stream, self._most = stream, max(_UNPACKED, _RATIO * packed)

    def read(self, size: int) -> bytes:
        return self._checked(self._stream.read(size))

    def readline(self, size: int = LINE + 1) -> bytes:
        text = self._checked(self._stream.readline(size))
        if len(text) > LINE:
            raise ConfigError(f"a line of more than {LINE >> 20} MiB; cut it")
        return text

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")

    def tell(self) -> int:
        return self._stream.tell()

    def _checked(self, data: bytes) -> bytes:
        if self._stream.tell() > self._most:
            raise ConfigError(
                f"it unpacks to more than {_RATIO} times its size, which no text does; unpack it yourself"
            )
        return data


@contextmanager
def open_unpacked(file: Path) -> Iterator[Bounded]:
    """Open a file of text as a bounded byte stream, decompressed if it is in gzip format."""
    with open_regular(file) as raw, io.BufferedReader(raw) as plain:
        packed = plain.peek(2)[:2] == b"\x1f\x8b"
        stream = gzip.GzipFile(fileobj=plain) if packed else plain
        yield Bounded(cast(BinaryIO, stream), os.fstat(raw.fileno()).st_size)


@contextmanager
def naming_file(file: Path, key: str = "data.path") -> Iterator[None]:
    """Raise ConfigError, naming the file of data and the key that leads to it, in place of the errors that reading or
    parsing the file raises within the context."""
    try:
        yield
    except (ConfigError, OSError, EOFError, zlib.error, UnicodeDecodeError, Malformed) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error).encode(errors="replace"))
        raise ConfigError(f"{key}={file}: {reason}") from None


def is_jsonl(file: Path) -> bool:
    """Return True if a file of data, by its name, holds one JSON object per line."""
    return file.name.removesuffix(".gz").endswith(".jsonl")


def _blocks(stream: Bounded, data: Data) -> Iterator[tuple[bool, str]]:
    """Yield a file of text as one document: (True for the first, piece) of about _READ_AT_ONCE bytes, to a line end if
    near. Raises ConfigError for a NUL byte or text that is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begins = True
    while True:
        start = stream.tell()
        block = stream.read(_READ_AT_ONCE) + stream.readline(_READ_AT_ONCE)
        if (nul := block.find(0)) >= 0:
            raise ConfigError(f"a binary file (NUL at byte {start + nul}); text is needed")
        try:
            piece = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset = stream.tell() - len(error.object) + error.start
            raise ConfigError(f"not UTF-8 at byte {offset}; convert it (iconv -t UTF-8) or leave it out") from None
        if piece:
            yield begins, piece
            begins = False
        if not block:
            return


def _lines(stream: Bounded, data: Data) -> Iterator[tuple[bool, str]]:
    """Yield the documents of a .jsonl file: (True, the string in field `data.field`) of each line's JSON object; skip
    blank lines and empty strings."""
    for number, text in enumerate(stream, 1):
        if not text.strip():
            continue
        try:
            values = from_json(text, LINE + 1, strict=False)
        except Malformed as error:
            raise ConfigError(f"line {number} is {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"line {number} is a JSON {type(values).__name__}, not an object with fields")
        value = values.get(data.field)
        if not isinstance(value, str):
            fields = ", ".join(key for key, v in values.items() if isinstance(v, str)) or "none"
            fault = "is not a string" if data.field in values else "is missing"
            raise ConfigError(f"data.field={data.field} {fault} in line {number}; its fields with text: {fields}")
        if value:
            yield True, encodable(value)


def encodable(text: str) -> str:
    """Replace lone surrogates in a text by "?": JSON may escape them, and UTF-8 cannot hold them."""
    return text.encode(errors="replace").decode()


def _walk(folder: Path, endings: list[str], skip: set[str]) -> list[Path]:
    """Find the files of text under `folder` with one of the endings (or that and .gz), in one order on every machine;
    hidden folders and those named in `skip` are left out."""

    def refuse(error: OSError) -> None:  # to skip a folder would silently change the corpus
        raise error

    found = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [
            Path(parent, name)
            for name in names
            if not name.startswith(".") and name.removesuffix(".gz").endswith(tuple(endings))
        ]
    return sorted(file for file in found if file.is_file())


def _nearest(path: Path) -> str:
    """Name the files beside a missing `data.path` that have similar names, for its refusal; "" if there is none."""
    beside = sorted(p.name for p in islice(path.parent.glob("[!.]*"), 1000)) if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, cutoff=0.5)
    return f"; nearest: {', '.join(str(path.parent / name) for name in close)}" if close else ""


def _key(data: Data) -> str:
    """Return the setting that names the source of text, for a refusal: data.path=PATH, or data=KIND."""
    return f"data.path={data.path}" if data.path else f"data={data.kind}"
