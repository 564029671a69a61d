"""Files of data, found by a path, a glob, a folder or a URL, of which a bounded number of names is looked at."""

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

from platform.boundary.documents import json_file
from platform.boundary.files.file_storage import find_remote, remedy
from platform.boundary.redaction import bare_url
from platform.boundary.refusals import ConfigError
from platform.boundary.schema import Malformed
from platform.data.reading.data_files import DataFile, ending, reason_of

# A folder is searched for these endings; a file or glob that the user names may have any.
ENDINGS = ".txt .md .rst .tex .html .py .c .h .cc .cpp .rs .go .java .js .ts .sh .jsonl .parquet .arrow".split()
MOST = 1_000_000  # names of files and folders that are looked at; links may lead in circles


def find_files(key: str, value: str, endings: list[str] = ENDINGS) -> list[DataFile]:
    """Find the data files that the user names by the configuration key `key`: `value` is a file, a glob, or a folder,
    of which the files count that are not hidden and have one of the suffixes `endings`; or a URL of any of these.
    Raises ConfigError, naming the key, if there is none."""
    if "://" in value:
        return _remote_files(key, value, endings)
    path = Path(value).expanduser()
    try:
        if path.is_dir():
            found = _saved_dataset(path) or walk(path, endings, skip=set())
            wanted = f"no file in this folder ends with any of {' '.join(endings)}; name others by a glob"
        elif path.exists():
            found, wanted = [path] if path.is_file() else [], "a pipe or a device, and a regular file is needed"
        else:
            found = [file for file in _matching(path) if file.is_file()]
            wanted = "no file or folder, and no file matches it as a glob" + _nearest(path)
    except ConfigError as error:
        raise ConfigError(f"{key}={value}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}={value}: cannot be read: {reason_of(error)}") from None
    if not found:
        raise ConfigError(f"{key}={value}: {wanted}")
    return list(found)


class _Looking:
    """Count of the names that are looked at for one key. Raises ConfigError if they are more than MOST."""

    def __init__(self) -> None:
        """Start the count of file names that the search for one path of data has examined at 0."""
        self._seen = 0

    def see(self, names: int) -> None:
        """Count `names` more file names that the search for data examined. Raises ConfigError beyond MOST in all."""
        self._seen += names
        if self._seen > MOST:
            raise ConfigError(f"more than {MOST:,} files and folders are there; name fewer, or put texts into .jsonl")


def _matching(pattern: Path) -> list[Path]:
    """Return the sorted paths of data files that match a glob, "**" included. Raises ConfigError beyond MOST names."""
    return sorted(set(map(Path, _below(pattern.anchor, pattern.parts[bool(pattern.anchor) :], _Looking()))))


def _below(folder: str, parts: Sequence[str], looking: _Looking) -> Iterator[str]:
    """Yield the paths of data files below `folder` ("" for the current one) that match `parts`, the components of a
    glob; `looking` counts the names examined."""
    if not parts:
        yield folder
    elif parts[0] == "**":
        for parent, folders, names in os.walk(folder or ".", followlinks=True):
            looking.see(len(folders) + len(names))
            folders[:] = [name for name in folders if not name.startswith(".")]
            if parts[1:]:
                yield from _below(parent, parts[1:], looking)
            else:
                yield from (os.path.join(parent, name) for name in names if not name.startswith("."))
    elif not glob.has_magic(parts[0]):
        if os.path.lexists(there := os.path.join(folder, parts[0])):
            yield from _below(there, parts[1:], looking)
    else:
        for name in _names(folder or "."):
            looking.see(1)
            if fnmatch(name, parts[0]) and (not name.startswith(".") or parts[0].startswith(".")):
                yield from _below(os.path.join(folder, name), parts[1:], looking)


def _names(folder: str) -> Iterator[str]:
    """Yield the file names in a folder of data; none if it is not a folder or may not be read."""
    with suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries)


def walk(folder: Path, endings: list[str], skip: set[str]) -> list[Path]:
    """Find the data files under `folder` whose suffix is one of `endings` (or that and a compression's), in one order
    on every machine; hidden folders and folders named in `skip` are left out. Raises OSError, and ConfigError if there
    are more than MOST names to look at."""

    def refuse(error: OSError) -> None:  # to skip a folder would silently change the corpus
        """Raise the error of a folder of data that cannot be listed: to skip it would silently change the corpus."""
        raise error

    found, looking = [], _Looking()
    for parent, folders, names in os.walk(folder, onerror=refuse):
        looking.see(len(folders) + len(names))
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(parent, name) for name in names if not name.startswith(".") and ending(Path(name)) in endings]
    return sorted(file for file in found if file.is_file())


def _remote_files(key: str, url: str, endings: list[str]) -> list[DataFile]:
    """Find the data files at a URL: a file, a glob or a folder of a remote storage. Raises ConfigError, naming the
    configuration `key`, if there is none or the storage refuses."""
    try:
        files = find_remote(url, lambda name: ending(Path(name)) in endings)
    except FileNotFoundError:
        raise ConfigError(f"{key}={bare_url(url)}: no such file") from None
    except Exception as error:  # a client library may raise anything
        raise ConfigError(f"{key}={bare_url(url)}: cannot be read: {reason_of(error)}{remedy(url, error)}") from None
    if not files:
        raise ConfigError(f"{key}={bare_url(url)}: no file there, or none ends with any of {' '.join(endings)}")
    return list(files)


def _saved_dataset(folder: Path) -> list[Path]:
    """Return the data files that Hugging Face's `datasets` saved in `folder`, in order; [] if it holds no dataset.
    Raises ConfigError for several datasets in one folder, and for a dataset whose rows are chosen by an index."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise ConfigError(
            f"holds several splits; nearest: {', '.join(str(folder / name) for name in splits) or 'none'}"
        )
    if not (folder / "state.json").is_file():
        return []
    try:
        state = json_file(folder / "state.json")
        names = [str(part["filename"]) for part in state["_data_files"]]
        chosen = state.get("_indices_data_files")
    except (Malformed, OSError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"state.json is none of a dataset: {error}") from None
    if chosen:
        raise ConfigError("its rows are chosen by an index; save it again with a newer version of datasets")
    found = [folder / Path(name).name for name in names]
    if missing := [path.name for path in found if not path.is_file()]:
        raise ConfigError(f"lacks {', '.join(missing[:3])}, which its state.json names")
    return found


def _nearest(path: Path) -> str:
    """Return "; nearest: PATHS", data files named like the missing `path`, for its refusal; "" if none is."""
    beside = sorted(p.name for p in islice(path.parent.glob("[!.]*"), 1000)) if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, cutoff=0.5)
    return f"; nearest: {', '.join(str(path.parent / name) for name in close)}" if close else ""
