"""Disks of a few pages, which fill up and become read-only like large ones; root ignores permissions."""

from __future__ import annotations

import os
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

    def read_only(self) -> None:
        """For whoever goes by paths; what is open stays open. `uncover` ends it."""
        mount("--bind", self.path, self.path)
        mount("-o", "remount,bind,ro", self.path)

    def cover(self) -> None:
        """Takes everything away, as where a mount is lost, and leaves an empty place that takes nothing."""
        mount("-t", "tmpfs", "-o", "ro,size=4k", "none", self.path)

    def uncover(self) -> None:
        subprocess.run(["umount", self.path], check=True)


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
        while os.path.ismount(path):
            subprocess.run(["umount", "-l", path], check=True)
