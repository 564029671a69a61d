"""Files of data: opened within bounds, hashed, and named in refusals."""

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from platform.boundary.documents import first_line, open_regular
from platform.boundary.files.file_storage import RemoteFile, open_remote
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed

PACKED = (".gz", ".zst")  # endings that may follow: of compressed files
LINE = 64 << 20  # bytes of the longest line
UNPACKED, RATIO = 64 << 20, 300  # gzip and zstd shrink text 3 to 30 times
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_HASHED = 4 << 20  # bytes hashed at once
_SAMPLES, _SAMPLE = 16, 64 << 10  # stretches of a file that stand for it, and the bytes of each


DataFile = Path | RemoteFile


def size_of(file: DataFile) -> int:
    """Return the size of a data file in bytes, as stored (compressed). Raises OSError."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def ending(file: DataFile) -> str:
    """Return the suffix of a data file that gives its format, such as ".jsonl", without a suffix of compression."""
    name = file.name
    for packed in PACKED:
        name = name.removesuffix(packed)
    return PurePosixPath(name).suffix


@contextmanager
def open_raw(file: DataFile) -> Iterator[BinaryIO]:
    """Open a data file, at a path or URL, as a buffered byte stream that can seek, without unpacking it."""
    if isinstance(file, RemoteFile):
        with open_remote(file.url) as remote:
            yield remote
    else:
        with io.BufferedReader(open_regular(file)) as local:
            yield cast(BinaryIO, local)


class Bounded:
    """Byte stream of a file within bounds: raises ConfigError if it unpacks to far more than its file (`packed` bytes),
    or has a line over LINE."""

    def __init__(self, stream: BinaryIO, packed: int):
        """Bound `stream`, the unpacked bytes of a data file; `packed`: size of that file in bytes, as stored."""
        self._stream, self._place, self._most = stream, 0, max(UNPACKED, RATIO * packed)

    def read(self, size: int) -> bytes:
        """Return the next bytes of the data file, at most `size`. Raises ConfigError if it unpacks to too many."""
        return self._checked(self._stream.read(size))

    def readline(self, size: int | None = None) -> bytes:
        """Return the next line of a data file, of at most `size` bytes. Raises ConfigError beyond LINE bytes."""
        text = self._checked(self._stream.readline(LINE + 1 if size is None else size))
        if len(text) > LINE:
            raise ConfigError(f"a line of more than {LINE >> 20} MiB; cut it")
        return text

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines of the data file as bytes, each checked against the bounds."""
        return iter(self.readline, b"")

    def tell(self) -> int:
        """Return how many unpacked bytes of the data file have been read."""
        return self._place

    def _checked(self, data: bytes) -> bytes:
        """Count unpacked bytes of a data file, and return them. Raises ConfigError if it unpacks to too many."""
        self._place += len(data)
        if self._place > self._most:
            raise ConfigError(f"it unpacks to more than {RATIO} times its size, which no text does; unpack it yourself")
        return data


@contextmanager
def open_unpacked(file: DataFile) -> Iterator[Bounded]:
    """Open a data file as a stream of bytes within bounds, unpacked if it is in the format of gzip or zstd."""
    with open_raw(file) as raw:
        begins = raw.read(4)
        raw.seek(0)
        stream: Any = raw
        if begins[:2] == _GZIP:
            stream = gzip.GzipFile(fileobj=raw)
        elif begins == _ZSTD:
            arrow = pyarrow(file)
            stream = io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(raw, mode="r"), "zstd"))
        yield Bounded(cast(BinaryIO, stream), size_of(file))


def pyarrow(file: DataFile) -> Any:
    """Return the module pyarrow, to read a data file. Raises ConfigError, with the install command, without it."""
    try:
        import pyarrow as found
    except ImportError:
        what = "".join(PurePosixPath(file.name).suffixes[-1:]) or file.name
        raise ConfigError(f"{what} needs pyarrow: pip install 'elastic-platform[data]'") from None
    return found


@contextmanager
def naming_file(file: DataFile, key: str = "data.path") -> Iterator[None]:
    """Raise ConfigError, naming the data file and the configuration's `key` that leads to it, in place of errors from
    reading or parsing the file within the context."""
    try:
        yield
    except (ConfigError, OSError, EOFError, zlib.error, UnicodeDecodeError, Malformed) as error:
        raise ConfigError(f"{key}={file}: {reason_of(error)}") from None
    except (OverflowError, RecursionError) as error:  # a date, or lists in lists, beyond what Python holds
        raise ConfigError(f"{key}={file}: {reason_of(error)}") from None
    except Exception as error:
        if isinstance(file, RemoteFile) or type(error).__module__.startswith("pyarrow"):  # they raise their own
            raise ConfigError(f"{key}={file}: {reason_of(error)}") from None
        raise


def reason_of(error: Exception) -> str:
    """Return why a data file could not be read, in one line, out of the error that reading it raised."""
    return getattr(error, "strerror", None) or first_line(error)


def content_hash(file: DataFile) -> str:
    """Return the SHA-256 of a data file's content, 64 hexadecimal digits, to name its cache entry. Raises OSError."""
    digest = hashlib.sha256()
    with open_raw(file) as stream:
        while block := stream.read(_HASHED):
            digest.update(block)
    return digest.hexdigest()


def stamp(file: DataFile) -> list[Any]:
    """Return values that identify a data file's content without reading all of it: for a path its size and the SHA-256
    of _SAMPLES stretches, spread evenly from the first to the last byte; for a URL its size and the version that its
    storage reports. Raises OSError."""
    if isinstance(file, RemoteFile):
        return [file.size, file.version]
    digest, size = hashlib.sha256(), size_of(file)
    with open_raw(file) as stream:
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE) * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE))
    return [size, digest.hexdigest()]


def encodable(text: str) -> str:
    """Replace lone surrogates in the text of a data file, which JSON may hold and UTF-8 cannot encode, by "?"."""
    return text.encode(errors="replace").decode()
