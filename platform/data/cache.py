"""A folder that is built once, whoever asks, and trusted only while it holds what was written into it."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from errno import EEXIST, ENOTEMPTY
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from platform.config import ConfigError
from platform.undo import missing, remove_empty

_META = "meta.json"


def root(cache: str) -> Path:
    """The folder of all entries: `data.cache`, else elastic-platform in the user's cache folder."""
    if cache:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "elastic-platform"


def fetch(entry: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The description of the folder `entry`, which is built first where it is missing, torn or corrupt.

    `build(folder)` fills an empty private folder and returns the description (plain JSON), to which
    `files: {name: {bytes, sha256}}` is added. Of several processes that build at once, the first to finish wins.
    Raises ConfigError where the cache cannot be written.
    """
    if description := _verified(entry):
        return description
    made = missing(entry.parent)
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
        try:
            _seal(private, build(private))
        except BaseException:
            workshop.cleanup()
            remove_empty(made)
            raise
        try:
            private.rename(entry)
        except OSError as error:
            if error.errno not in (EEXIST, ENOTEMPTY):  # these two: another process was faster
                raise
    description = _verified(entry)
    if not description:
        raise OSError(f"{entry} does not hold what was just written into it")
    return description


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _seal(folder: Path, description: dict[str, Any]) -> None:
    files = {f.name: {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in sorted(folder.iterdir())}
    content = description | {"files": files}
    (folder / _META).write_text(json.dumps({"content": content, "sha256": _hash(content)}, indent=2))


def _verified(folder: Path) -> dict[str, Any] | None:
    try:
        match json.loads((folder / _META).read_text()):
            case {"content": dict(content), "sha256": digest} if digest == _hash(content):
                for name, file in content["files"].items():
                    if (folder / name).stat().st_size != file["bytes"] or sha256(folder / name) != file["sha256"]:
                        return None
                return content
    except (OSError, ValueError):
        pass
    return None


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
