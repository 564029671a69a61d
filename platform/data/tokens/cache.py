"""A cache of folders, each built by the first process that asks and trusted only while it holds the bytes written.

An entry is sealed by the hashes of its blocks, which several threads verify at once: one SHA-256 is slower than a disk.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

from platform.boundary import documents, schema
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed, OpenMap, Span, Text
from platform.config.surroundings import writing_to

BLOCK = 1 << 24  # bytes that are hashed by themselves; a file may say another size
THREADS = min(8, os.cpu_count() or 1)
TELL_EVERY = 10.0  # seconds between lines that tell how much is verified
_META = "meta.json"
_BLOCKS = "blocks.bin"  # size of a block as 8 bytes, then the hash of each block of the other files in order of names
_MOST = 1 << 28  # bytes of blocks.bin: of 128 TB
_PIECE = 1 << 20  # bytes read at once, while they are in a core's cache
_Name = Annotated[str, Text(r"[a-z_]{1,40}(\.[a-z]{1,10}){1,2}", "the name of a file of a cache entry")]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def root(cache: str) -> Path:
    """Return the folder of tokenised corpora: `cache` (data.cache), else elastic-platform in the user's cache
    folder."""
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
    {bytes, sha256}}` is added, and to the folder the hashes of their blocks. `read(folder, description)` raises
    Malformed for an entry that `build` cannot have made. Of several processes that build at once, the first to finish
    wins. Raises ConfigError if the cache cannot be written.
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
    with workshop, writing_to("data.cache", entry.parent):
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
    with writing_to("run.dir", folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        workshop = TemporaryDirectory(dir=folder, prefix=".building-")
    with workshop as place, writing_to("run.dir", folder):
        with suppress(FileNotFoundError):
            shared.rename(Path(place, "corrupt"))
        private = Path(place, "new")
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


@dataclass(frozen=True)
class _Block:
    """Part of a file that is hashed by itself, `size` bytes from `offset` on; `sha256`: its expected hash."""

    file: Path
    offset: int
    size: int
    sha256: str = ""

    def found(self) -> str:
        """Return the SHA-256 of the present content, as 64 hexadecimal digits."""
        digest, left, piece = hashlib.sha256(), self.size, memoryview(bytearray(min(_PIECE, self.size)))
        with documents.open_regular(self.file) as stream:
            stream.seek(self.offset)
            while left and (n := stream.readinto(piece[: min(left, _PIECE)])):
                digest.update(piece[:n])
                left -= n
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"{self.file.name}, bytes {self.offset:,} to {self.offset + self.size - 1:,}"


def _cut(folder: Path, sizes: Mapping[str, int], size: int) -> list[_Block]:
    """Cut the files in `folder`, name -> bytes, into blocks of `size` bytes, the last of each as long as is left."""
    return [_Block(folder / name, i, min(size, n - i)) for name, n in sorted(sizes.items()) for i in range(0, n, size)]


def _hashed(blocks: Sequence[_Block]) -> Generator[str]:
    """Yield the hash of each block, in order; they are read by several threads."""
    pool = ThreadPoolExecutor(THREADS, "cache-hash")
    try:
        yield from pool.map(_Block.found, blocks)
    finally:
        pool.shutdown(cancel_futures=True)


def _seal(folder: Path, description: dict[str, Any]) -> None:
    """Write blocks.bin and meta.json into the folder of a new cache entry: the hashes of the blocks of its files; its
    description, size and hash of every file, and a hash of these."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    with ThreadPoolExecutor(THREADS, "cache-hash") as pool:
        hashes = pool.map(_Block.found, _cut(folder, sizes, BLOCK))
        files = {name: {"bytes": size, "sha256": sha256(folder / name)} for name, size in sizes.items()}  # meanwhile
        blocks = BLOCK.to_bytes(8, "little") + bytes.fromhex("".join(hashes))
    (folder / _BLOCKS).write_bytes(blocks)
    files[_BLOCKS] = {"bytes": len(blocks), "sha256": hashlib.sha256(blocks).hexdigest()}
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
    """Return what `read` makes of a cache entry if its files are unchanged, by their sizes and the hashes of their
    blocks, and `read` accepts it, None otherwise."""
    try:
        content = described(folder)
        _verify(folder, content["files"])
        return read(folder, content)
    except FileNotFoundError:
        return None
    except (OSError, Malformed) as error:
        logger.info("%s is built again: %s", folder, documents.one_line(str(error).encode(errors="replace")))
        return None


def _verify(folder: Path, files: Mapping[str, Any]) -> None:
    """Check the files of a cache entry, name -> its size and hash. Raises OSError or Malformed for the first block that
    has changed."""
    for name, file in files.items():
        if (size := (folder / name).stat().st_size) != file["bytes"]:
            raise Malformed(f"has {size:,} bytes, not {file['bytes']:,}", name)
    blocks = _blocks_of(folder, files)
    total, done, told = sum(block.size for block in blocks), 0, time.monotonic()
    with closing(_hashed(blocks)) as hashes:
        for block, found in zip(blocks, hashes, strict=True):
            if found != block.sha256:
                raise Malformed("is not what was written", str(block))
            done += block.size
            if time.monotonic() - told > TELL_EVERY:
                logger.info("verifying %s: %.1f of %.1f GB", folder, done / 1e9, total / 1e9)
                told = time.monotonic()


def _blocks_of(folder: Path, files: Mapping[str, Any]) -> list[_Block]:
    """Return the blocks of a cache entry, and what each is to be: every file as a whole, if an earlier version made it.
    Raises OSError or Malformed."""
    sealed = {name: _Block(folder / name, 0, file["bytes"], file["sha256"]) for name, file in files.items()}
    if _BLOCKS not in files:
        return list(sealed.values())
    own = sealed.pop(_BLOCKS)
    raw = documents.read_bytes(own.file, _MOST)
    if hashlib.sha256(raw).hexdigest() != own.sha256:
        raise Malformed("is not what was written", _BLOCKS)
    size, hashes = int.from_bytes(raw[:8], "little"), memoryview(raw)[8:]
    sizes = {name: block.size for name, block in sealed.items()}
    if size < _PIECE or len(hashes) != 32 * sum(-(-n // size) for n in sizes.values()):
        raise Malformed(f"has not one hash for each {size:,} bytes", _BLOCKS)
    return [replace(b, sha256=hashes[32 * i : 32 * i + 32].hex()) for i, b in enumerate(_cut(folder, sizes, size))]


def described(folder: Path) -> dict[str, Any]:
    """Return the description of a cache entry, whose `files` are not looked at. Raises Malformed or OSError."""
    meta: _Meta = schema.read(_Meta, documents.json_file(folder / _META))
    if meta.sha256 != _hash(meta.content):
        raise Malformed("is not what was written", _META)
    return meta.content


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
