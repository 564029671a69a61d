"""An extension that kills its process at chosen moments of saving: `extend=[tests.doubles.killer]`, with a folder of
orders in the environment variable KILLER.

An order is a JSON file {"who": "driver" | "worker0" | ..., "moment": regular expression, "number": n}: the n-th such
moment in that process is its last. Orders are obeyed one after the other, in the order of their names; one that was
obeyed is renamed, so that nobody obeys it again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from platform.checkpoint.storage import storage
from platform.checkpoint.storage.image import Image
from platform.checkpoint.storage.storage import Local

FOLDER, DONE = "KILLER", ".done"
OPERATIONS = ("open", "write", "fsync", "close", "replace", "unlink", "rmdir", "mkdir")
_seen: dict[tuple[str, int], int] = {}  # (order, process): its moments so far
_lock, _doing = threading.Lock(), threading.local()


def order(folder: Path, place: int, who: str, moment: str, number: int) -> None:
    (folder / f"{place:02d}.json").write_text(json.dumps({"who": who, "moment": moment, "number": number}))


def _who() -> str:
    return multiprocessing.current_process().name.replace("MainProcess", "driver")


def moment(name: str, last_words: Callable[[], Any] = lambda: None) -> None:
    """`last_words`: what is still done if it is the last one."""
    with _lock:
        found = sorted(Path(os.environ[FOLDER]).glob("*.json"))
        if not found:
            return
        what = json.loads(found[0].read_text())
        if what["who"] != _who() or not re.fullmatch(what["moment"], name):
            return
        key = found[0].name, os.getpid()
        _seen[key] = _seen.get(key, 0) + 1
        if _seen[key] < what["number"]:
            return
        found[0].rename(f"{found[0]}{DONE}")
        last_words()
        os.kill(os.getpid(), signal.SIGKILL)


class _Os:
    """Stands for the module `os` in `platform.checkpoint.storage.storage`: every operation is a moment."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def call(*args, **kwargs):
            def half():
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])

            moment(f"{getattr(_doing, 'what', '')} {name}", half)
            return real(*args, **kwargs)

        return call


def _told(method: Callable[..., Any], verb: str) -> Callable[..., Any]:
    """The method of a storage, known by VERB NAME to the operations in it, and its end a moment too."""

    def call(self, path, *args):
        before, _doing.what = getattr(_doing, "what", ""), f"{verb} {path.rpartition('/')[2]}"
        try:
            out = method(self, path, *args)
            moment(f"{_doing.what} done")
            return out
        finally:
            _doing.what = before

    return call


def _snapshot(fill: Callable[..., None]) -> Callable[..., None]:
    def call(self, blocks):
        moment("snapshot")
        fill(self, blocks)
        moment("snapshot done")

    return call


if FOLDER in os.environ:
    storage.os = _Os()  # type: ignore[attr-defined]
    Local.write, Local.delete = _told(Local.write, "write"), _told(Local.delete, "delete")  # type: ignore[method-assign]
    Image.fill = _snapshot(Image.fill)  # type: ignore[method-assign]
