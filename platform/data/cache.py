"""A cache of folders, each built by the first process that asks and trusted only while it holds the bytes written.

An entry is sealed by the hashes of its blocks.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

from platform.boundary import documents, schema
from platform.boundary.local_files import LocalStorage, draft_folder, refuse_full_disk
from platform.boundary.refusals import refuse_failures
from platform.boundary.schema import Malformed, OpenMap, Span, Text
from platform.boundary.sealed_blocks import LARGEST_BLOCK, FileRange, hash_blocks
from platform.boundary.terminal import show_phase

BLOCK = LARGEST_BLOCK  # bytes that are hashed by themselves; blocks.bin may say another size
THREADS = min(8, os.cpu_count() or 1)
_META = "meta.json"
_BLOCKS = "blocks.bin"  # size of a block as 8 bytes, then the hash of each block of the other files in order of names
_MOST = 1 << 28  # bytes of blocks.bin: of 128 TB
_LEAST = 1 << 20  # bytes of a block, whose size blocks.bin says
_Name = Annotated[str, Text(r"[a-z_]{1,40}(\.[a-z]{1,10}){1,2}", "the name of a file of a cache entry")]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def cache_root(cache: str) -> Path:
    """Return the folder in which tokenised data is cached: `cache` (data.cache), else in the user's ~/.cache."""
    if cache:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "elastic-platform"


def hash_cache_key(values: list[Any]) -> str:
    """Return the SHA-256 of plain data, 64 hexadecimal digits: the name of an entry in the token cache."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def fetch_entry(entry: Path, build: Callable[[Path], dict[str, Any]], read: Callable[[Path, dict[str, Any]], T]) -> T:
    """Return an entry of the token cache, the folder `entry` with one data source's tokens, as `read` reads it; build
    it first if it is missing, torn or corrupt.

    `build(folder)` fills an empty private folder and returns the description (plain JSON), to which `files: {name:
    {bytes, sha256}}` is added, and to the folder the hashes of their blocks. `read(folder, description)` raises
    Malformed for an entry that `build` cannot have made. Of several processes that build at once, the first to finish
    wins. Raises ConfigError if the cache cannot be written.
    """
    if (content := read_verified_entry(entry, read)) is not None:
        return content
    with _publish_entry("data.cache", entry) as private:
        _seal_entry(private, build(private))
    if (content := read_verified_entry(entry, read)) is None:
        raise OSError(f"{entry} does not hold what was just written into it")
    return content


def fetch_shared_entry(
    entry: Path, folder: Path, build: Callable[[Path], dict[str, Any]], read: Callable[[Path, dict[str, Any]], T]
) -> tuple[Path, T]:
    """Read an entry of the token cache, as `fetch_entry` does, from its copy in `folder`, which other machines see too;
    return the copy's path, and the result of `read`. If the copy is missing or corrupt, it is made from this machine's
    entry, as `fetch_entry` finds or builds it: linked, or copied if that is on another file system. Raises ConfigError,
    OSError."""
    shared = folder / entry.name
    if shared_content := read_verified_entry(shared, read):
        return shared, shared_content
    local_content = fetch_entry(entry, build, read)
    with refuse_full_disk("run.dir", folder):
        folder.mkdir(0o700, parents=True, exist_ok=True)
    with _publish_entry("run.dir", shared) as private:
        for file in entry.iterdir():
            try:
                os.link(file, private / file.name)
            except OSError:  # another file system, or one without links
                shutil.copyfile(file, private / file.name)
    return shared, local_content


@contextmanager
def _publish_entry(key: str, entry: Path) -> Iterator[Path]:
    """Yield an empty private folder that becomes the entry of the token cache after the block, in the place of a
    corrupt one; it is dropped if another process has made the entry meanwhile. Raises ConfigError, naming the
    configuration's `key` of caches, if their folder cannot be written."""
    with refuse_failures(key, entry.parent, OSError, why="cannot be written: {.strerror}; name another folder"):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), TemporaryDirectory(dir=entry.parent, prefix=".building-") as corrupt_folder:
            entry.rename(Path(corrupt_folder, "corrupt"))
    try:
        with refuse_full_disk(key, entry.parent), draft_folder(entry) as private:
            private.mkdir()
            yield private
    except OSError as error:
        if error.errno not in (EEXIST, ENOTEMPTY):  # these two: another process was faster
            raise


def open_trusted_entry(entry: Path, read: Callable[[Path, dict[str, Any]], T]) -> T:
    """Read by `read` a token cache entry that another process of this run has verified; check only sizes of files."""
    content = read_description(entry)
    for name, file in content["files"].items():
        if (entry / name).stat().st_size != file["bytes"]:
            raise Malformed("is not what was written", name)
    return read(entry, content)


def _cut_into_blocks(sizes: Mapping[str, int], size: int) -> list[FileRange]:
    """Divide the files of a token cache entry, name -> bytes, into blocks of `size` bytes, hashed one by one."""
    return [FileRange(name, i, min(size, n - i)) for name, n in sorted(sizes.items()) for i in range(0, n, size)]


def _seal_entry(folder: Path, description: dict[str, Any]) -> None:
    """Seal a new entry of the token cache: write into its folder blocks.bin (the hashes of its files' blocks) and
    meta.json (its description, size and hash of every file, and a hash of these)."""
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    whole_files = [FileRange(name, 0, size) for name, size in sizes.items()]
    hashed_ranges = [*whole_files, *_cut_into_blocks(sizes, BLOCK)]
    with show_phase("hashing the tokens", sum(block.size for block in hashed_ranges), "B") as shown:
        counted_ranges = shown.iterate_parts(hashed_ranges, lambda block: block.size)
        block_hashes = hash_blocks(LocalStorage(folder), hashed_ranges, threads=THREADS)
        hashes = [digest for _, digest in zip(counted_ranges, block_hashes, strict=True)]
    hashed_files = zip(sizes.items(), hashes, strict=False)
    files = {name: {"bytes": size, "sha256": digest} for (name, size), digest in hashed_files}
    blocks = BLOCK.to_bytes(8, "little") + bytes.fromhex("".join(hashes[len(files) :]))
    (folder / _BLOCKS).write_bytes(blocks)
    files[_BLOCKS] = {"bytes": len(blocks), "sha256": hashlib.sha256(blocks).hexdigest()}
    content = description | {"files": files}
    (folder / _META).write_text(json.dumps({"content": content, "sha256": _hash_description(content)}, indent=2))


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


def read_verified_entry(folder: Path, read: Callable[[Path, dict[str, Any]], T]) -> T | None:
    """Read an entry of the token cache by `read`, if sizes and hashes of its files' blocks show it unchanged and `read`
    accepts it; return None otherwise."""
    try:
        content = read_description(folder)
        _verify_blocks(folder, content["files"])
        return read(folder, content)
    except FileNotFoundError:
        return None
    except (OSError, Malformed) as error:
        logger.info("%s is built again: %s", folder, documents.printable_line(error))
        return None


def _verify_blocks(folder: Path, files: Mapping[str, Any]) -> None:
    """Check the files of a token cache entry, name -> its size and hash. Raises OSError or Malformed for the first
    block that has changed."""
    for name, file in files.items():
        if (size := (folder / name).stat().st_size) != file["bytes"]:
            raise Malformed(f"has {size:,} bytes, not {file['bytes']:,}", name)
    blocks = _list_blocks_with_hashes(folder, files)
    ranges = [block for block, _ in blocks]
    with (
        show_phase("verifying the tokens", sum(block.size for block in ranges), "B") as shown,
        closing(hash_blocks(LocalStorage(folder), ranges, threads=THREADS)) as hashes,
    ):
        for (block, expected_hash), actual_hash in zip(blocks, hashes, strict=True):
            if actual_hash != expected_hash:
                block_position = f"{block.file}, bytes {block.at:,} to {block.at + block.size - 1:,}"
                raise Malformed("is not what was written", block_position)
            shown.count_done(block.size)


def _list_blocks_with_hashes(folder: Path, files: Mapping[str, Any]) -> list[tuple[FileRange, str]]:
    """Return the blocks of a token cache entry's files, each with its recorded hash: whole files, if an earlier version
    made the entry. Raises OSError or Malformed."""
    if _BLOCKS not in files:
        return [(FileRange(name, 0, file["bytes"]), file["sha256"]) for name, file in files.items()]
    raw = documents.read_bytes(folder / _BLOCKS, _MOST)
    if hashlib.sha256(raw).hexdigest() != files[_BLOCKS]["sha256"]:
        raise Malformed("is not what was written", _BLOCKS)
    size, hashes = int.from_bytes(raw[:8], "little"), memoryview(raw)[8:]
    sizes = {name: file["bytes"] for name, file in files.items() if name != _BLOCKS}
    if size < _LEAST or len(hashes) != 32 * sum(-(-n // size) for n in sizes.values()):
        raise Malformed(f"has not one hash for each {size:,} bytes", _BLOCKS)
    return [(block, hashes[32 * i : 32 * i + 32].hex()) for i, block in enumerate(_cut_into_blocks(sizes, size))]


def read_description(folder: Path) -> dict[str, Any]:
    """Return the description in the meta.json of a token cache entry, by its own hash. Raises Malformed or OSError."""
    meta = schema.parse_value(_Meta, documents.read_json_file(folder / _META))
    if meta.sha256 != _hash_description(meta.content):
        raise Malformed("is not what was written", _META)
    return meta.content


def _hash_description(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a token cache entry's description, hexadecimal, which its meta.json records."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
