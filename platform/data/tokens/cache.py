"""A cache of folders, each built by the first process that asks and trusted only while it holds what was written."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

from platform.boundary import documents, schema
from platform.boundary.schema import Malformed, OpenMap, Span, Text
from platform.config.fields import ConfigError

_META = "meta.json"
_Name = Annotated[str, Text(r"[a-z_]{1,40}(\.[a-z]{1,10}){1,2}", "the name of a file of a cache entry")]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def root(cache: str) -> Path:
    """Return the folder of the cache of tokenised corpora: `cache` (the key data.cache) if given, else elastic-platform
    in the user's cache folder."""
    if cache:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "elastic-platform"


def hash_of(values: list[Any]) -> str:
    """Return a hash of plain data as 64 hexadecimal digits, which names an entry of the cache."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def fetch(entry: Path, build: Callable[[Path], dict[str, Any]], read: Callable[[Path, dict[str, Any]], T]) -> T:
    """Return what `read` makes of a cache entry, the folder `entry`, which is built first if it is missing, torn or
    corrupt.

    `build(folder)` fills an empty private folder and returns the description (plain JSON), to which `files: {name:
    {bytes, sha256}}` is added. `read(folder, description)` raises Malformed for an entry that `build` cannot have made.
    Of several processes that build at once, the first to finish wins. Raises ConfigError if the cache cannot be
    written.
    """
    if found := verified(entry, read):
        return found
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        workshop = TemporaryDirectory(dir=entry.parent, prefix=".building-")
    except OSError as error:
        raise ConfigError(
            f"data.cache={entry.parent}: cannot be written: {error.strerror}; name another folder"
        ) from None
    with workshop:
        with suppress(FileNotFoundError):
            entry.rename(Path(workshop.name, "corrupt"))
        private = Path(workshop.name, "new")
        private.mkdir()
        _seal(private, build(private))
        try:
            private.rename(entry)
        except OSError as error:
            if error.errno not in (EEXIST, ENOTEMPTY):  # these two: another process was faster
                raise
    if not (found := verified(entry, read)):
        raise OSError(f"{entry} does not hold what was just written into it")
    return found


def fetch_shared(
    entry: Path, folder: Path, build: Callable[[Path], dict[str, Any]], read: Callable[[Path, dict[str, Any]], T]
) -> tuple[Path, T]:
    """Return the same entry in `folder`, which other machines see too, and what `read` makes of it. If it is not there,
    or corrupt, it is put there from the cache, as `fetch` finds or builds it: linked, or copied if that is on another
    file system. Raises ConfigError, OSError."""
    shared = folder / entry.name
    if found := verified(shared, read):
        return shared, found
    made = fetch(entry, build, read)
    folder.mkdir(0o700, parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".building-") as workshop:
        with suppress(FileNotFoundError):
            shared.rename(Path(workshop, "corrupt"))
        private = Path(workshop, "new")
        private.mkdir()
        for file in entry.iterdir():
            try:
                os.link(file, private / file.name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(file, private / file.name)
        private.rename(shared)
    return shared, made


def open_trusted(entry: Path, read: Callable[[Path, dict[str, Any]], T]) -> T:
    """Return what `read` makes of a cache entry that another process of the same run has just verified: only the sizes
    of its files are looked at. Raises OSError, Malformed if it is not there as it was."""
    content = described(entry)
    for name, file in content["files"].items():
        if (entry / name).stat().st_size != file["bytes"]:
            raise Malformed("is not what was written", name)
    return read(entry, content)


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content as 64 hexadecimal digits."""
    with documents.open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seal(folder: Path, description: dict[str, Any]) -> None:
    """Write meta.json into the folder of a new cache entry: its description, size and hash of every file, and a hash of
    these."""
    files = {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in sorted(folder.iterdir())}
    content = description | {"files": files}
    (folder / _META).write_text(json.dumps({"content": content, "sha256": _hash(content)}, indent=2))


@dataclass(frozen=True)
class _File:
    """Size and hash of one file of a cache entry, from when it was made."""

    bytes: Annotated[int, Span(0, 1 << 50)]
    sha256: Annotated[str, Text("[0-9a-f]{64}", "a SHA-256")]


@dataclass(frozen=True)
class _Meta:
    """File meta.json of a cache entry: its description, of which `files` is checked, and the description's hash."""

    content: Annotated[dict[str, Any], OpenMap((("files", dict[_Name, _File]),), ("files",))]
    sha256: str


def verified(folder: Path, read: Callable[[Path, dict[str, Any]], T]) -> T | None:
    """Return what `read` makes of a cache entry if its files hold what was written, by size and hash, and `read`
    accepts it, None otherwise."""
    try:
        content = described(folder)
        for name, file in content["files"].items():
            if (folder / name).stat().st_size != file["bytes"] or sha256(folder / name) != file["sha256"]:
                raise Malformed("is not what was written", name)
        return read(folder, content)
    except FileNotFoundError:
        return None
    except (OSError, Malformed) as error:
        logger.info("%s is built again: %s", folder, documents.one_line(str(error).encode(errors="replace")))
        return None


def described(folder: Path) -> dict[str, Any]:
    """Return the description of a cache entry, whose `files` are not looked at. Raises Malformed or OSError."""
    meta: _Meta = schema.read(_Meta, documents.json_file(folder / _META))
    if meta.sha256 != _hash(meta.content):
        raise Malformed("is not what was written", _META)
    return meta.content


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
