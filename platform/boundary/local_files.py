"""Files of this machine and of network file systems: replaced in one step, so that no reader finds half of one.

`find_protocol_fault` judges the protocol of a URL at which files may lie, without connecting to anything.
`remove_empty_directories` and `remove_files` remove all that was made for a run which is then refused: it leaves
nothing behind. `ReplacedFile` is the one way to write a file that a user names.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from platform.boundary.documents import open_regular_file, printable_line
from platform.boundary.refusals import ConfigError

Chunks = Iterable[bytes | memoryview]
UNKNOWN = -1  # size of an entry that cannot be inspected: a dangling link, no permission
_NO_FLUSH = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)  # of a folder, as databases take it
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # no more may be written


def replace_file(
    path: Path, chunks: Chunks, mode: int = 0o666, durable: bool = False, like: os.stat_result | None = None
) -> None:
    """Write a file by a draft beside it that takes its place in one step; `durable`: it survives a loss of power;
    `like`: the state of a file whose mode it gets, and its owner if this process may give files away. Raises OSError,
    having removed what it made: the draft, or a file that is there for the first time; one that has taken another's
    place stays, whole, if its folder alone cannot be flushed."""
    draft, is_new = path.with_name(_draft_name()), not os.path.lexists(path)
    written: Path | None = draft
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            if like:
                with suppress(PermissionError):
                    os.fchown(file, like.st_uid, like.st_gid)
                os.fchmod(file, stat.S_IMODE(like.st_mode))
            for chunk in chunks:
                unwritten = memoryview(chunk)
                while unwritten:  # os.write may take less than it is given
                    unwritten = unwritten[os.write(file, unwritten) :]
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, path)
        written = path if is_new else None
        if durable:
            _synchronise_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            if written:
                os.unlink(written)
        raise


def replace_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file in one step, by a draft that takes its place (`replace_file`); `mode`: its permissions."""
    replace_file(path, [text.encode(errors="surrogateescape")], mode)


@contextmanager
def draft_folder(folder: Path, names: Sequence[str] = ()) -> Iterator[Path]:
    """Yield the path for a new hidden directory, which becomes `folder` after the block, or whose files `names`
    (default: all) move into `folder` in this order if it exists already. A failure leaves nothing of it. It is on the
    same file system, so that nothing is copied."""
    folder_exists, name = folder.is_dir(), _draft_name()
    draft = folder / name if folder_exists else folder.with_name(f".{folder.name}{name}")
    try:
        yield draft
        if not folder_exists:
            os.rename(draft, folder)  # fails if somebody else has made it meanwhile
            return _synchronise_directory(folder.parent)
        names = names or sorted(os.listdir(draft))
        try:
            for name in names:
                os.replace(draft / name, folder / name)
        except BaseException:
            for name in names:
                with suppress(OSError):
                    LocalStorage(folder).delete(name)
            raise
        os.rmdir(draft)
        _synchronise_directory(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _draft_name() -> str:
    """Return a random name for a hidden draft, a file that takes the place of another once it is complete."""
    return f".draft-{secrets.token_hex(4)}"


@contextmanager
def refuse_full_disk(key: str, place: object) -> Iterator[None]:
    """Raise ConfigError in place of the OSError of a full or read-only disk within the context; other errors pass.
    `key`: the configuration key or argument that names the folder or file `place`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL and not (error.errno is None and "requested and" in str(error)):  # as NumPy says it
            raise
        why = error.strerror or os.strerror(errno.ENOSPC)
        raise ConfigError(key, place, f"cannot be written: {why}", ["another place"]) from None


@contextmanager
def refuse_unwritable(flag: str, path: str | Path) -> Iterator[None]:
    """Raise ConfigError, naming the option `flag`, for an OSError on the file that it names in the context."""
    try:
        yield
    except OSError as error:
        raise ConfigError(flag, path, f"cannot be written: {printable_line(error.strerror or error)}") from None


class ReplacedFile:
    """File at `path`, which the option `flag` names, that is replaced as a whole by the text that `write` gets; without
    it, the old contents stay. A link stays, and its target is replaced by a file of the same owner and mode. A device,
    a pipe or this process's own output is never replaced: it is added to."""

    def __init__(self, path: str | Path, flag: str):
        """Check that the file at `path`, which a command's option `flag` names, can be written, and leave its contents.
        Raises ConfigError if it cannot."""
        self._path, self._flag, self._target = path, flag, Path(os.path.realpath(path))
        self._open_file = -1  # a device or pipe: one that is closed before it is written to has ended for its reader
        with refuse_unwritable(flag, path):
            old = _stat_if_there(path)
            if not os.fspath(path) or (old and stat.S_ISDIR(old.st_mode)):
                raise IsADirectoryError("Is a directory")
            if old and (own_outputs := _own_outputs(old)):
                self._open_file = os.dup(own_outputs[0])  # lines on their way into it go on behind
                return
            if old and not stat.S_ISREG(old.st_mode):
                self._open_file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.set_blocking(self._open_file, True)
                return
            if not old:
                _stat_if_there(self._target)  # a name that is too long
            with TemporaryFile(dir=self._target.parent):
                pass

    def write(self, text: str) -> None:
        """Replace the file by the text as a whole, or write it to the device, once. Raises ConfigError."""
        with refuse_unwritable(self._flag, self._path):
            if self._open_file < 0:
                replace_file(self._target, [text.encode(errors="surrogateescape")], like=_stat_if_there(self._target))
            else:
                with open(self._open_file, "w", errors="surrogateescape") as file:
                    file.write(text)


def _stat_if_there(path: str | Path) -> os.stat_result | None:
    """Return the state of a file, None if there is none."""
    with suppress(FileNotFoundError):
        return os.stat(path)
    return None


def may_be_replaced(path: Path) -> bool:
    """Return True if a path that the user has not named is free or a regular file: no link, pipe or device."""
    return not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode)


def _own_outputs(state: os.stat_result) -> list[int]:
    """Return which of this process's own outputs, 1 and 2, are a file, as /dev/stdout is."""
    outputs = []
    for number in (1, 2):
        with suppress(OSError):  # it is closed
            outputs += [number] * os.path.samestat(state, os.fstat(number))
    return outputs


class LocalStorage:
    """Storage (see `platform.boundary.storage`) in a directory on a local or network file system (`root`):
    durable writes survive a loss of power."""

    def __init__(self, root: Path | str):
        """Construct the storage in the local directory `root`, which need not exist yet; ~ is expanded."""
        self.root = Path(root).expanduser()
        self.url = str(self.root)

    def write(self, path: str, chunks: Chunks, durable: bool = True) -> None:
        """Write a file of this local storage by a draft that takes its place; make missing directories."""
        _create_directory((self.root / path).parent)
        replace_file(self.root / path, chunks, 0o644, durable)

    def read(self, path: str, start: int = 0, end: int | None = None) -> bytearray:
        """Return bytes [start, end) of a regular file of this local storage."""
        with open_regular_file(self.root / path) as raw, io.BufferedReader(raw) as file:
            file_size = os.fstat(raw.fileno()).st_size
            data = bytearray(max(0, min(file_size, file_size if end is None else end) - start))
            file.seek(start)
            del data[file.readinto(data) :]  # less only if the file became shorter
        return data

    def open(self, path: str, start: int, end: int) -> io.FileIO:
        """Open a regular file of this local storage at byte `start`; its end is not limited to `end`."""
        file = open_regular_file(self.root / path)
        file.seek(start)
        return file

    def list_sizes(self, path: str) -> dict[str, int]:
        """Map the names in a directory of this local storage to their sizes in bytes, without entries that have been
        deleted meanwhile."""
        directory = self.root / path
        try:
            with os.scandir(directory) as entries:
                sizes = {entry.name: _entry_size_or_unknown(entry) for entry in entries}
        except FileNotFoundError:
            if os.path.lexists(directory):  # a dangling link: the directory is out of reach, not empty
                raise
            return {}
        return {name: size for name, size in sizes.items() if size is not None}

    def read_version(self, path: str) -> str:
        """Return device, inode, size and modification time of a file as a text that changes when the file does."""
        file_stat = os.stat(self.root / path)
        return f"{file_stat.st_dev} {file_stat.st_ino} {file_stat.st_size} {file_stat.st_mtime_ns}"

    def delete(self, path: str, durable: bool = True) -> None:
        """Delete a file of this local storage, or a directory with everything in it; a link itself, not its target."""
        target = self.root / path
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                for name in os.listdir(target):
                    self.delete(f"{path}/{name}", durable)
                os.rmdir(target)
            else:
                os.unlink(target)
            if durable:
                _synchronise_directory(target.parent)


def _entry_size_or_unknown(entry: os.DirEntry[str]) -> int | None:
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


def _create_directory(path: Path) -> None:
    """Create a directory and its missing parents, so that they survive a loss of power."""
    if not path.is_dir():
        _create_directory(path.parent)
        with suppress(FileExistsError):  # another worker was faster; the second one synchronises too
            os.mkdir(path, 0o700)  # weights are private; an existing directory keeps its mode
        _synchronise_directory(path.parent)


def _synchronise_directory(directory: Path) -> None:
    """Flush a directory to disk, so that files created in it, renamed or deleted stay so after a loss of power, on file
    systems that can: some (CIFS, FUSE) have no such call, and nothing better."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(handle)


# fsspec protocols under which a file appears only when it is committed, as checkpoints need.
WRITABLE = tuple("file local memory s3 s3a gs gcs abfs abfss az adl sftp ssh oci oss obs cos tos hf dbfs".split())


def find_protocol_fault(url: str, writing: bool = True) -> str:
    """Return why checkpoints cannot be saved at a path or URL, judging by its protocol alone; "" if they can.

    With `writing` False, returns why a file there cannot be read.
    """
    protocol, separator, address = url.partition("://")
    if not separator:
        return ""
    if not address.strip("/"):
        return "cannot be used: names no place in the storage"
    if special := _find_special_file(url):
        return f"cannot be used: {special} is a pipe or a device, and a regular file or a folder is needed"
    if "::" in url:
        return "cannot be used: nothing can be saved through a chain of storages" if writing else ""
    if protocol in WRITABLE:
        return ""
    import fsspec
    from fsspec.registry import known_implementations

    if protocol in known_implementations:
        return f"cannot be used: nothing can be saved through {protocol}" if writing else ""
    if protocol not in fsspec.registry:  # a module in `extend` may have registered one
        return f"cannot be used: no storage is known by {protocol}"
    return ""


def _find_special_file(url: str) -> str:
    """Return the path of a pipe, socket or device of this machine that a file's URL, or a part of its chain, names; ""
    if none does."""
    from fsspec.implementations.local import LocalFileSystem

    for url_part in url.split("::"):
        if url_part.partition("://")[0] in ("file", "local") or "://" not in url_part:
            path = LocalFileSystem._strip_protocol(url_part)
            with suppress(OSError, ValueError):  # who reads it says what is wrong
                mode = os.stat(path).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    return path
    return ""


def list_missing_directories(path: Path) -> list[Path]:
    """List the directories of the file system that creating `path` would make, deepest first, to undo it later."""
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty_directories(directories: Iterable[Path]) -> None:
    """Remove directories of the file system that were made in vain, in order, up to the first that is not empty; that
    one and the rest stay. One that is gone already counts as removed."""
    with suppress(OSError):
        for directory in directories:
            with suppress(FileNotFoundError):
                directory.rmdir()


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Remove the files and folders `names` from a `directory` of the file system, if they exist; ignore errors."""
    for path in (directory / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
