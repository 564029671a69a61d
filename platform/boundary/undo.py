"""Directories that were made for nothing are taken away again: what is refused leaves nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def missing(path: Path) -> list[Path]:
    """Return the directories, deepest first, that making `path` would make."""
    return [p for p in (path, *path.parents) if not p.exists()]


def remove_empty(directories: Iterable[Path]) -> None:
    """Remove these directories as far as they are empty; the first that is not, and those above it, stay."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Remove these files and folders of a directory, where they are there."""
    for path in (directory / name for name in names):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
