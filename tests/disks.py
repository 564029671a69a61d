"""Disks of a few pages, which fill up and become read-only like large ones; root ignores permissions."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted tmpfs."""

    def __init__(self, path: Path):
        self.path = path

    def fill(self) -> None:
        """Leaves no byte; `free` gives it back."""
        try:
            with open(self.path / "ballast", "ab", buffering=0) as file:
                while file.write(b"x" * 4096):
                    pass
        except OSError:
            pass

    def free(self) -> None:
        (self.path / "ballast").unlink()

    def remount(self, how: str) -> None:
        """`how`: ro or rw."""
        mount("-o", f"remount,{how}", self.path)


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@contextmanager
def small_disk(path: Path, size: str = "1m") -> Iterator[SmallDisk]:
    """Mounted at `path`; skips the test where this process may not mount."""
    path.mkdir()
    try:
        mount("-t", "tmpfs", "-o", f"size={size}", "none", path)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this process may not mount a small disk")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", path], check=True)
