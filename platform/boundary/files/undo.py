"""Removal of directories and files that were made for a run which is then refused, so that it leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def missing_directories(path: Path) -> list[Path]:
    """List the directories that creating `path` would create, deepest first, to remove them if the run is refused."""
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove the directories that were made for a refused run, in order, up to the first that is not empty; that one
    and the rest stay. One that is gone already counts as removed."""
    with suppress(OSError):
        for directory in directories:
            with suppress(FileNotFoundError):
                directory.rmdir()


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Remove the files and folders `names` in `directory`, made for a refused run, if they exist; ignore errors."""
    for path in (directory / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
