"""An extension that kills its process at chosen moments of saving, of copying a snapshot to a peer, or of answering:
`extend=[tests.doubles.killer]`, with a folder of orders in the environment variable KILLER.

An order is a JSON file {"who": "driver" | "worker0" | ..., "moment": ..., "number": n}, the first two of them regular
expressions: the n-th such moment in such a process is its last. Orders are obeyed one after the other, in the order of
their names; one that was obeyed is renamed, so that nobody obeys it again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from platform.boundary import local_files
from platform.boundary.local_files import LocalStorage
from platform.checkpoint import snapshots
from platform.checkpoint.buffer import FileImage
from platform.train.generator import RankPass
from platform.train.worker import Worker

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
        orders = sorted(Path(os.environ[FOLDER]).glob("*.json"))
        if not orders:
            return
        what = json.loads(orders[0].read_text())
        if not re.fullmatch(what["who"], _who()) or not re.fullmatch(what["moment"], name):
            return
        key = orders[0].name, os.getpid()
        _seen[key] = _seen.get(key, 0) + 1
        if _seen[key] < what["number"]:
            return
        orders[0].rename(f"{orders[0]}{DONE}")
        last_words()
        os.kill(os.getpid(), signal.SIGKILL)


class _Os:
    """Stands for the module `os` in `platform.boundary.local_files`: every operation is a moment."""

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

    def call(self, path, *args, **more):
        before, _doing.what = getattr(_doing, "what", ""), f"{verb} {path.rpartition('/')[2]}"
        try:
            out = method(self, path, *args, **more)
            moment(f"{_doing.what} done")
            return out
        finally:
            _doing.what = before

    return call


def _around(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, whose beginning and end are moments."""

    @wraps(function)  # whose types a worker's call is read by
    def call(*args, **more):
        moment(name)
        out = function(*args, **more)
        moment(f"{name} done")
        return out

    return call


if FOLDER in os.environ:
    local_files.os = _Os()  # type: ignore[attr-defined]
    LocalStorage.write, LocalStorage.delete = _told(LocalStorage.write, "write"), _told(LocalStorage.delete, "delete")  # type: ignore[method-assign]
    FileImage.fill_parts = _around(FileImage.fill_parts, "snapshot")  # type: ignore[method-assign]
    snapshots._transfer_parts = _around(snapshots._transfer_parts, "copies")
    Worker.score_texts = _around(Worker.score_texts, "score")  # type: ignore[method-assign]
    Worker.continue_texts = _around(Worker.continue_texts, "continue")  # type: ignore[method-assign]
    RankPass.run_pass = _around(RankPass.run_pass, "pass")  # type: ignore[method-assign]
