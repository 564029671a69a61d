"""Where checkpoints lie: a local or network file system, or any that fsspec knows."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import fsspec

from platform.boundary import documents
from platform.boundary.redaction import bare, learn_urls
from platform.config.fields import ConfigError, violation
from platform.config.surroundings import wrong_protocol

UNKNOWN = -1  # bytes of what is there and cannot be looked at: a link to nothing, somebody else's


class Storage(Protocol):
    """Files by path relative to a root. All raise OSError; FileNotFoundError where there is no such file."""

    url: str  # for people: without its secrets

    def write(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Makes a file. Afterwards it is durable and whole; after a failure it is not there."""

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Bytes [start, end), by default to the end; fewer where the file is shorter."""

    def list(self, path: str) -> dict[str, int]:
        """Map the names in a directory to bytes (any number for a directory in it, UNKNOWN where nothing is known);
        {} where there is no such directory. All that is there is listed, else OSError is raised."""

    def delete(self, path: str) -> None:
        """Removes a file, or a directory with all that is in it; nothing where there is none."""


def connect(url: str, key: str = "checkpoint.url") -> Storage:
    """The storage at a path or fsspec URL. Raises ConfigError, naming `key`, where no such storage can be had."""
    learn_urls(url)  # whatever its client says of it later
    if reason := wrong_protocol(url, key == "checkpoint.url"):
        raise ConfigError(violation(key, bare(url), reason, ["a path"]))
    protocol, separator, path = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return Local(path if separator else url)
    try:
        return Remote(url)
    except Exception as error:  # a client library may raise anything
        extra = " (pip install 'elastic-platform[s3]')" if isinstance(error, ImportError) and protocol == "s3" else ""
        raise ConfigError(violation(key, bare(url), f"cannot be used: {error}{extra}", ["a path"])) from None


class Local:
    """A directory, local or of a network file system: what was written survives a loss of power."""

    def __init__(self, root: Path | str):
        self.root = Path(root).expanduser()
        self.url = str(self.root)

    def write(self, path: str, chunks: Iterable[memoryview]) -> None:
        target = self.root / path
        _make_directory(target.parent)
        made = draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for chunk in chunks:
                    while chunk:  # os.write may take less than it is given
                        chunk = chunk[os.write(file, chunk) :]
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(draft, target)
            made = target
            _synchronise(target.parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(made)
            raise

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        with documents.opened(self.root / path) as file:
            there = os.fstat(file.fileno()).st_size
            data = bytearray(max(0, min(there, there if end is None else end) - start))
            file.seek(start)
            view, got = memoryview(data), 0
            while part := file.readinto(view[got:]):  # may be less than asked for
                got += part
        return data if got == len(data) else data[:got]

    def list(self, path: str) -> dict[str, int]:
        place = self.root / path
        try:
            with os.scandir(place) as entries:
                found = {entry.name: _size(entry) for entry in entries}
        except FileNotFoundError:
            if os.path.lexists(place):  # a link to nothing hides what is meant, which is not to hold nothing
                raise
            return {}
        return {name: size for name, size in found.items() if size is not None}

    def delete(self, path: str) -> None:
        target = self.root / path
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                for name in os.listdir(target):
                    self.delete(f"{path}/{name}")
                os.rmdir(target)
            else:
                os.unlink(target)
            _synchronise(target.parent)


def _size(entry: os.DirEntry[str]) -> int | None:
    """Return the bytes of an entry, UNKNOWN where it does not tell, None where it has been deleted meanwhile."""
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
    """With its parents, durably."""
    if not path.is_dir():
        _make_directory(path.parent)
        with suppress(FileExistsError):  # another worker was faster; whoever comes second synchronises too
            os.mkdir(path, 0o700)  # weights are nobody else's business; what is there keeps its mode
        _synchronise(path.parent)


def _synchronise(directory: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Remote:
    """Whatever fsspec reaches. An object appears when its upload is complete; nothing is renamed."""

    def __init__(self, url: str):
        self.url = bare(url).rstrip("/")
        caches = {"use_listings_cache": False, "skip_instance_cache": True}  # others write there too
        self._system, self._root = fsspec.core.url_to_fs(url, **caches)

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def write(self, path: str, chunks: Iterable[memoryview]) -> None:
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
                    file.closed = True  # or it would upload what it has when it is collected
                with suppress(Exception):
                    self._system.rm_file(target)
                raise

    def _open(self, target: str) -> Any:
        """A file that becomes visible when it is committed, not whenever it is closed."""
        try:
            return self._system.open(target, "wb", autocommit=False)
        except FileNotFoundError:  # where there are directories; an object store would make a bucket that is missing
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            return self._system.open(target, "wb", autocommit=False)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        with _translated(self.url):
            # S3 knows no range of an empty file.
            return bytearray(self._system.cat_file(self._path(path), start=start or None, end=end))

    def list(self, path: str) -> dict[str, int]:
        here = self._path(path)
        with _translated(self.url):
            try:
                entries: Any = self._system.ls(here, detail=True, refresh=True)
            except FileNotFoundError:
                return {}
        found = {str(e["name"]).rstrip("/"): _bytes(e) for e in entries}
        return {name.rpartition("/")[2]: size for name, size in found.items() if name.strip("/") != here.strip("/")}

    def delete(self, path: str) -> None:
        with _translated(self.url), suppress(FileNotFoundError):
            self._system.rm(self._path(path), recursive=True)


def _bytes(entry: dict[str, Any]) -> int:
    size = entry.get("size")
    return size if isinstance(size, int) else 0 if entry.get("type") == "directory" else UNKNOWN


@contextmanager
def _translated(url: str) -> Iterator[None]:
    """Client libraries have exceptions of their own for what is an OSError."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
