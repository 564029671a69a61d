"""Storages that checkpoints are kept on: a local or network file system, or any that fsspec supports."""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec

from platform.boundary import documents
from platform.boundary.redaction import bare_url, register_url_secrets
from platform.boundary.refusals import ConfigError, violation
from platform.config.surroundings import violation_of_protocol

_NOTE = 4096  # bytes of a note that are read
Reader = io.FileIO | io.BytesIO  # a file of a storage, open at the first byte to be read
UNKNOWN = -1  # size of an entry that cannot be inspected: a dangling link, no permission


class Storage(Protocol):
    """Place that files are kept on, each by a path relative to its root. All methods raise OSError; FileNotFoundError
    if there is no such file."""

    url: str  # for messages: without its secrets

    def write(self, path: str, chunks: Iterable[memoryview], durable: bool = True) -> None:
        """Write `chunks`, in order, to a file. Afterwards it is complete and, if `durable`, survives a loss of power;
        after a failure it does not exist."""

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of a file, by default to its end; fewer if the file is shorter."""

    def open(self, path: str, start: int, end: int) -> Reader:
        """Open a file to read its bytes [start, end), by one request to the storage."""

    def list(self, path: str) -> dict[str, int]:
        """Map the names in a directory of the storage to their sizes in bytes (any number for a subdirectory, UNKNOWN
        if it cannot be inspected); {} if there is no such directory. Lists everything in it, or raises OSError."""

    def version(self, path: str) -> str:
        """Return a word that is another one once the file has changed."""

    def delete(self, path: str, durable: bool = True) -> None:
        """Delete a file of the storage, or a directory with everything in it; do nothing if there is none. `durable`:
        it stays so after a loss of power."""


def read_note(storage: Storage, path: str) -> str:
    """Return the first 4096 bytes of a note on the storage, see `write_note`, as one printable line."""
    return documents.one_line(storage.read(path, 0, _NOTE))


def write_note(storage: Storage, path: str, text: str) -> None:
    """Write a line, a lease's holder or the reason for a quarantine, to a file for `read_note` and for people."""
    storage.write(path, [memoryview(f"{text}\n".encode())])


def open_storage(url: str, key: str = "checkpoint.url") -> Storage:
    """Open the storage at a path or fsspec URL. Raises ConfigError if it cannot be used, naming `key`, the
    configuration key that the URL comes from."""
    register_url_secrets(url)  # its secrets are then redacted from whatever its client reports
    if reason := violation_of_protocol(url, key == "checkpoint.url"):
        raise ConfigError(violation(key, bare_url(url), reason, ["a path"]))
    protocol, separator, path = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return Local(path if separator else url)
    try:
        return Remote(url)
    except Exception as error:  # a client library may raise anything
        extra = " (pip install 'elastic-platform[s3]')" if isinstance(error, ImportError) and protocol == "s3" else ""
        raise ConfigError(violation(key, bare_url(url), f"cannot be used: {error}{extra}", ["a path"])) from None


@contextmanager
def all_or_nothing(folder: Storage, names: Sequence[str]) -> Iterator[Storage]:
    """Give the storage to which the files `names` are written so that they appear in `folder` together, the one that
    seals them last. A failure leaves none of them; a kill leaves none in a folder that was not there before, and else
    none that is sealed, beside a hidden draft."""
    if isinstance(folder, Local):
        with _drafted(folder.root.absolute(), names) as draft:
            yield Local(draft)
        return
    try:
        yield folder
    except BaseException:
        _delete(folder, names)
        raise


@contextmanager
def _drafted(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """Give a new directory, which becomes `folder` after the block, or whose files `names` move into it if it is there
    already. On the same file system, so that nothing is copied."""
    there, name = folder.is_dir(), f".draft-{secrets.token_hex(4)}"
    draft = folder / name if there else folder.with_name(f".{folder.name}{name}")
    try:
        yield draft
        if not there:
            os.rename(draft, folder)  # fails if somebody else has made it meanwhile
            return _synchronise(folder.parent)
        try:
            for name in names:
                os.replace(draft / name, folder / name)
        except BaseException:
            _delete(Local(folder), names)
            raise
        os.rmdir(draft)
        _synchronise(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _delete(folder: Storage, names: Iterable[str]) -> None:
    """Delete files of a folder, as far as the storage allows."""
    for name in names:
        with suppress(OSError):
            folder.delete(name)


class Local:
    """Storage in a directory on a local or network file system (`root`): durable writes survive a loss of power."""

    def __init__(self, root: Path | str):
        self.root = Path(root).expanduser()
        self.url = str(self.root)

    def write(self, path: str, chunks: Iterable[memoryview], durable: bool = True) -> None:
        """Write a draft beside the file, then rename it to the file's name."""
        target = self.root / path
        _make_directory(target.parent)
        made = draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for chunk in chunks:
                    while chunk:  # os.write may take less than it is given
                        chunk = chunk[os.write(file, chunk) :]
                if durable:
                    os.fsync(file)
            finally:
                os.close(file)
            os.replace(draft, target)
            made = target
            if durable:
                _synchronise(target.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of a regular file."""
        with documents.open_regular(self.root / path) as raw, io.BufferedReader(raw) as file:
            there = os.fstat(raw.fileno()).st_size
            data = bytearray(max(0, min(there, there if end is None else end) - start))
            file.seek(start)
            del data[file.readinto(data) :]  # less only if the file became shorter
        return data

    def open(self, path: str, start: int, end: int) -> Reader:
        """Open a regular file at byte `start`; its end is not limited to `end`."""
        file = documents.open_regular(self.root / path)
        file.seek(start)
        return file

    def list(self, path: str) -> dict[str, int]:
        """Map the names in a directory to their sizes, without entries that have been deleted meanwhile."""
        place = self.root / path
        try:
            with os.scandir(place) as entries:
                found = {entry.name: _size(entry) for entry in entries}
        except FileNotFoundError:
            if os.path.lexists(place):  # a dangling link: the directory is out of reach, not empty
                raise
            return {}
        return {name: size for name, size in found.items() if size is not None}

    def version(self, path: str) -> str:
        found = os.stat(self.root / path)
        return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"

    def delete(self, path: str, durable: bool = True) -> None:
        """Delete a file, or a directory with everything in it; a link itself, not its target."""
        target = self.root / path
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                for name in os.listdir(target):
                    self.delete(f"{path}/{name}", durable)
                os.rmdir(target)
            else:
                os.unlink(target)
            if durable:
                _synchronise(target.parent)


def _size(entry: os.DirEntry[str]) -> int | None:
    """Return the size in bytes of a file found in a directory of a storage, UNKNOWN if it cannot be inspected, None if
    it has been deleted meanwhile."""
    with suppress(OSError):
        return entry.stat().st_size
    try:
        entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError:
        pass
    return UNKNOWN


def _make_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a loss of power."""
    if not path.is_dir():
        _make_directory(path.parent)
        with suppress(FileExistsError):  # another worker was faster; the second one synchronises too
            os.mkdir(path, 0o700)  # weights are private; an existing directory keeps its mode
        _synchronise(path.parent)


def _synchronise(directory: Path) -> None:
    """Flush a directory to disk, so that files created in it, renamed or deleted stay so after a loss of power."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Remote:
    """Storage at a URL that fsspec reaches, such as s3://. An object appears when its upload is complete; nothing is
    renamed."""

    def __init__(self, url: str):
        self.url = bare_url(url).rstrip("/")
        caches = {"use_listings_cache": False, "skip_instance_cache": True}  # other processes write there too
        self._system, self._root = fsspec.core.url_to_fs(url, **caches)

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def write(self, path: str, chunks: Iterable[memoryview], durable: bool = True) -> None:
        """Upload an object, and commit it once all is written; discard it after a failure."""
        with _translated(self.url):
            target = self._path(path)
            file = self._open(target)
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

    def _open(self, target: str) -> Any:
        """Open the object `target` on a remote storage for writing; it becomes visible when it is committed, not
        whenever it is closed. Creates missing directories."""
        try:
            return self._system.open(target, "wb", autocommit=False)
        except FileNotFoundError:  # only now: an object store would create a missing bucket
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            return self._system.open(target, "wb", autocommit=False)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of an object."""
        with _translated(self.url):
            # Start 0 is left out: S3 refuses a range of an empty file.
            return bytearray(self._system.cat_file(self._path(path), start=start or None, end=end))

    def open(self, path: str, start: int, end: int) -> Reader:
        return io.BytesIO(self.read(path, start, end))

    def list(self, path: str) -> dict[str, int]:
        """Map the names below a path to their sizes, by a listing that no cache serves."""
        here = self._path(path)
        with _translated(self.url):
            try:
                entries: Any = self._system.ls(here, detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        found = {str(e["name"]).rstrip("/"): _bytes(e) for e in entries}
        return {name.rpartition("/")[2]: size for name, size in found.items() if name.strip("/") != here.strip("/")}

    def version(self, path: str) -> str:
        with _translated(self.url):
            return str(self._system.ukey(self._path(path)))

    def delete(self, path: str, durable: bool = True) -> None:
        with _translated(self.url), suppress(FileNotFoundError):
            self._system.rm(self._path(path), recursive=True)


def _bytes(entry: dict[str, Any]) -> int:
    size = entry.get("size")
    return size if isinstance(size, int) else 0 if entry.get("type") == "directory" else UNKNOWN


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Raise OSError, naming the storage's `url`, in place of its client library's exceptions in the context."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
