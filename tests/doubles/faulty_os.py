"""The operating system as `platform.boundary.local_files` sees it, failing where a test wants it to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("open", "write", "fsync", "close", "replace", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process is gone: nothing that would follow has an effect."""


class FaultyOs:
    """Stands for the module `os`. The `at`-th operation of all OPERATIONS (from 0) does `fault` instead; what follows
    works again, unless the process was killed.

    It keeps in mind what a loss of power would undo, see `lose_power`; so no fsync is really made, which is fast.
    """

    def __init__(self, at: int = -1, fault: Callable[[str], Any] | None = None, *, forget_fsync: bool = False):
        self.at, self.fault, self.forget_fsync = at, fault, forget_fsync
        self.count, self.seen, self.dead = 0, Counter[str](), False
        self._paths: dict[int, Path] = {}
        self._unsynced: set[Path] = set()  # files with data, or directories with names, that are not yet durable
        self._renamed: dict[Path, tuple[Path, Path]] = {}

    @property
    def fired(self) -> bool:
        return 0 <= self.at < self.count

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def call(*args, **kwargs):
            if self.dead:
                raise Killed
            number, self.count = self.count, self.count + 1
            self.seen[name] += 1
            if number == self.at:
                assert self.fault
                if name == "close":
                    real(*args)  # the handle is gone even if closing fails
                try:
                    out = self.fault(name, real, *args)
                except Killed:
                    self.dead = True
                    raise
            elif name == "fsync":
                if self.forget_fsync:
                    return None
                out = None
            else:
                out = real(*args, **kwargs)
            self._remember(name, args, out)
            return out

        return call

    def _remember(self, name: str, args: tuple, out: Any) -> None:
        if name == "open":
            self._paths[out] = Path(args[0])
        elif name == "write":
            self._unsynced.add(self._paths[args[0]])
        elif name == "fsync":
            path = self._paths[args[0]]
            self._unsynced.discard(path)
            self._renamed.pop(path, None)
        elif name == "replace":
            source, target = map(Path, args)
            if source in self._unsynced:
                self._unsynced.add(target)
            self._renamed[target.parent] = (source, target)

    def lose_power(self) -> None:
        """Data that was not synchronised is gone, and so is a name that was not."""
        for path in self._unsynced:
            if path.exists():
                os.truncate(path, path.stat().st_size // 2)
        for source, target in self._renamed.values():
            if target.exists():
                os.replace(target, source)


def error(number: int) -> Callable[..., Any]:
    def fault(name: str, real: Callable, *args: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fault


def torn(number: int) -> Callable[..., Any]:
    """A write that takes half, and then fails."""

    def fault(name: str, real: Callable, *args: Any) -> Any:
        if name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        raise OSError(number, os.strerror(number))

    return fault


def short(name: str, real: Callable, *args: Any) -> Any:
    """A write that takes only a part, which is no failure."""
    if name == "close":
        return None  # it is closed
    return real(args[0], args[1][: max(1, len(args[1]) // 3)]) if name == "write" else real(*args)


def kill(name: str, real: Callable, *args: Any) -> Any:
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    raise Killed


def kill_after(name: str, real: Callable, *args: Any) -> Any:
    if name != "close":
        real(*args)
    raise Killed
