"""Storages that files are kept on: a local or network file system, or any that fsspec supports.

Checkpoints, weights, caches and data are reached through here alone: a URL's secrets are registered when it is opened
or searched, and what a client library raises becomes one line. (Tokenizers' few files are read by
`platform.data.tokenizer_files`, from protocols that no checkpoint may have, too.)
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

import fsspec

from platform.boundary import documents
from platform.boundary.local_files import UNKNOWN, LocalStorage, draft_folder, find_protocol_fault
from platform.boundary.redaction import register_url_secrets, strip_url_secrets
from platform.boundary.refusals import ConfigError

_NOTE = 4096  # bytes of a note that are read
Reader = io.FileIO | io.BytesIO  # a file of a storage, open at the first byte to be read


class Storage(Protocol):
    """Place that files are kept on, each by a path relative to its root. All methods raise OSError; FileNotFoundError
    if there is no such file."""

    url: str  # for messages: without its secrets

    def write(self, path: str, chunks: Iterable[bytes | memoryview], durable: bool = True) -> None:
        """Write a file of the storage from `chunks`, whole or not at all; if `durable`, it survives a loss of power."""

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of a file of the storage, by default to its end; fewer if the file is shorter."""

    def open(self, path: str, start: int, end: int) -> Reader:
        """Open a file of the storage to read its bytes [start, end), by one request to the storage."""

    def list_sizes(self, path: str) -> dict[str, int]:
        """Map the names in a storage's directory to sizes in bytes, or UNKNOWN; {} if there is no such directory."""

    def read_version(self, path: str) -> str:
        """Return a short text that names the version of a file of the storage: it changes when the file changes."""

    def delete(self, path: str, durable: bool = True) -> None:
        """Delete a file of the storage, or a directory with all in it, if there is one; if `durable`, for good."""


def read_note(storage: Storage, path: str) -> str:
    """Return the first 4096 bytes of a small text file on the storage, see `write_note`, as one printable line."""
    return documents.printable_line(storage.read(path, 0, _NOTE))


def write_note(storage: Storage, path: str, text: str) -> None:
    """Write one line to a small file on the storage, such as who holds it, for `read_note` and for people."""
    storage.write(path, [f"{text}\n".encode()])


def open_storage(url: str, key: str = "checkpoint.url") -> Storage:
    """Open the storage at a path or fsspec URL. Raises ConfigError if it cannot be used, naming `key`, the
    configuration key that the URL comes from."""
    register_url_secrets(url)  # its secrets are then redacted from whatever its client reports
    if reason := find_protocol_fault(url, key == "checkpoint.url"):
        raise ConfigError(key, strip_url_secrets(url), reason, ["a path"])
    protocol, separator, path = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalStorage(path if separator else url)
    try:
        return RemoteStorage(url)
    except Exception as error:  # a client library may raise anything
        why = f"cannot be used: {error}{suggest_remedy(url, error)}"
        raise ConfigError(key, strip_url_secrets(url), why, ["a path"]) from None


def suggest_remedy(url: str, error: Exception) -> str:
    """Return a hint how to install the client library that a storage's URL lacks; "" if another `error` occurred."""
    lacking = isinstance(error, ImportError) and url.startswith("s3")
    return " (pip install 'elastic-platform[s3]')" if lacking else ""


@dataclass(frozen=True)
class RemoteFile:
    """File at an fsspec URL, as it was found: its size in bytes, and what its storage says of its version."""

    url: str
    size: int
    version: str

    @property
    def name(self) -> str:
        """Return the name of the remote file: the last part of its URL."""
        return PurePosixPath(self.url).name

    def __str__(self) -> str:
        """Return the URL of the remote file with the secrets in it redacted."""
        return strip_url_secrets(self.url)


def find_remote_files(url: str, is_wanted: Callable[[str], bool]) -> list[RemoteFile]:
    """Find the files at a URL, which names a file, a glob or a folder of a storage; a folder's files are filtered by
    `is_wanted`, which sees their path. Raises FileNotFoundError, and anything that a client library may raise."""
    register_url_secrets(url)
    system, path = fsspec.core.url_to_fs(url)
    if "*" in path:
        infos = system.glob(path, detail=True)
    elif system.isdir(path):
        infos = {name: info for name, info in system.find(path, detail=True).items() if is_wanted(name)}
    else:
        infos = {path: system.info(path)}
    sizes = [(name, int(info["size"])) for name, info in sorted(infos.items()) if info.get("type") == "file"]
    return [RemoteFile(system.unstrip_protocol(name), size, str(system.ukey(name))) for name, size in sizes]


def open_remote_file(url: str) -> BinaryIO:
    """Open the file at an fsspec URL to read and seek in it. Raises anything that a client library may raise."""
    system, path = fsspec.core.url_to_fs(url)
    return cast(BinaryIO, system.open(path, "rb"))


@contextmanager
def write_all_or_nothing(folder: Storage, names: Sequence[str]) -> Iterator[Storage]:
    """Yield the storage to write the files `names` to, so that they appear in `folder` together, in this order, of
    which the last makes the others valid. A failure leaves none of them; a kill leaves none in a folder that was not
    there before, and else none that is valid, beside a hidden draft."""
    if isinstance(folder, LocalStorage):
        with draft_folder(folder.root.absolute(), names) as draft:
            yield LocalStorage(draft)
        return
    try:
        yield folder
    except BaseException:
        for name in names:
            with suppress(OSError):
                folder.delete(name)
        raise


class RemoteStorage:
    """Storage at a URL that fsspec reaches, such as s3://. An object appears when its upload is complete; nothing is
    renamed."""

    def __init__(self, url: str):
        """Open the storage at an fsspec URL, such as s3://BUCKET/PATH, without caches of its listings."""
        self.url = strip_url_secrets(url).rstrip("/")
        caches = {"use_listings_cache": False, "skip_instance_cache": True}  # other processes write there too
        self._system, self._root = fsspec.core.url_to_fs(url, **caches)

    def _object_path(self, path: str) -> str:
        """Return an object's path in the client library, from its path relative to the root of this storage."""
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def write(self, path: str, chunks: Iterable[bytes | memoryview], durable: bool = True) -> None:
        """Upload an object to this remote storage, and commit it once all is written; discard it after a failure."""
        with _translate_errors(self.url):
            target = self._object_path(path)
            file = self._open_object(target)
            try:
                for chunk in chunks:
                    file.write(chunk)
                file.close()
                file.commit()
            except BaseException:
                with suppress(Exception):
                    file.discard()
                with suppress(Exception):
                    file.closed = True  # else its garbage collection would upload what it has
                with suppress(Exception):
                    self._system.rm_file(target)
                raise

    def _open_object(self, target: str) -> Any:
        """Open the object `target` on a remote storage for writing; it becomes visible when it is committed, not
        whenever it is closed. Creates missing directories."""
        try:
            return self._system.open(target, "wb", autocommit=False)
        except FileNotFoundError:  # only now: an object store would create a missing bucket
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            return self._system.open(target, "wb", autocommit=False)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of an object of this remote storage."""
        with _translate_errors(self.url):
            # Start 0 is left out: S3 refuses a range of an empty file.
            return bytearray(self._system.cat_file(self._object_path(path), start=start or None, end=end))

    def open(self, path: str, start: int, end: int) -> Reader:
        """Open an object of this remote storage: its bytes [start, end) are read into memory at once."""
        return io.BytesIO(self.read(path, start, end))

    def list_sizes(self, path: str) -> dict[str, int]:
        """Map the names below a path of this remote storage to their sizes in bytes, by a listing that no cache
        serves."""
        directory = self._object_path(path)
        with _translate_errors(self.url):
            try:
                entries: Any = self._system.ls(directory, detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        sizes = {str(e["name"]).rstrip("/"): _entry_size_or_unknown(e) for e in entries}
        inside = ((name, size) for name, size in sizes.items() if name.strip("/") != directory.strip("/"))
        return {name.rpartition("/")[2]: size for name, size in inside}

    def read_version(self, path: str) -> str:
        """Return the client library's word for the version of an object of this remote storage."""
        with _translate_errors(self.url):
            return str(self._system.ukey(self._object_path(path)))

    def delete(self, path: str, durable: bool = True) -> None:
        """Delete an object of this remote storage, or all objects below a path; do nothing if there is none."""
        with _translate_errors(self.url), suppress(FileNotFoundError):
            self._system.rm(self._object_path(path), recursive=True)


def _entry_size_or_unknown(entry: dict[str, Any]) -> int:
    """Return the size of an entry in a remote storage's listing: 0 for a directory, UNKNOWN where none is given."""
    size = entry.get("size")
    return size if isinstance(size, int) else 0 if entry.get("type") == "directory" else UNKNOWN


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Raise OSError, naming the remote storage's `url`, in place of its client library's exceptions in the context."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
