"""Tracer of values: which functions of platform/ return or change a value that depends on where a walk begins.

A tiny run is traced by `sys.setprofile`, in the driver and, as an extension (`extend=[tests.house.trace]`), in every
worker. Of each call of a function of platform/, when it returns, the values are noted that it returned, that it stored
in an attribute, or that it changed in place (tensors, lists, maps), by a hash of what is in them, with all their parts;
and which of those that it wrote nothing in its process had before: they have arrived there. A value is plain data, a
dataclass, an array or a tensor; an object that only holds values (a trainer, say) is none.

The same run is traced twice, and once more with another beginning: one byte of the file, one typed number, one letter
of the prompt is another one. What both equal runs note, and the other one does not, depends on the beginning; what only
one run notes at all (times, numbers of processes) says nothing. So no function is asked how it gets its value.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from dis import get_instructions
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

import numpy as np
import torch
from omegaconf import Container, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "TRACED_FOLDER"  # environment of a traced run: the folder of notes, one file a process
ARRAY, PACKED = "array", "packed"  # kinds of values: arrays, tensors and bytes; lists and maps of other values
TAKERS = frozenset({  # functions that give a value to the system or to torch, and whose arguments are noted too
    "platform/boundary/local_files.py:LocalStorage.write",
    "platform/monitor/metrics.py:MetricsLog.write_row",
    "platform/runtime/process_groups.py:ProcessGroups._start_collective",
    "platform/train/trainer.py:Trainer._update_weights",
})  # fmt: skip
UNTRACED = frozenset({"platform/plan/plan_data.py"})  # a check that calls itself for every part of a plan, for minutes
CHANGEABLE = (torch.Tensor, np.ndarray, bytearray, memoryview, list, tuple, dict, set)  # or may hold what is
LARGE = 30  # more parts than this, no arrays: a value, as a vocabulary, that is hashed again only if its length changes
DEPTH = 10  # how many levels of parts of a value are looked at


@cache
def stored_attributes(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes that a function's code sets."""
    return frozenset(str(step.argval) for step in get_instructions(code) if step.opname == "STORE_ATTR")


def _hash(kind: str, content: bytes) -> str:
    return hashlib.blake2b(content, key=kind.encode()[:32], digest_size=8).hexdigest()


def _parts(value: Any) -> list[Any] | None:
    """Return the parts of a composed value, in order; None if it is not one."""
    if isinstance(value, Container):  # of OmegaConf, which raises for what is missing
        value = OmegaConf.to_container(value)
    if isinstance(value, Mapping):
        return [part for item in list(value.items()) for part in item]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def length_of(value: Any) -> int:
    """Return how many parts a list or map has; -1 if it is none."""
    return len(value) if isinstance(value, (list, dict, set)) else -1


class Hasher:
    """Hashes values; remembers the hashes of those that cannot change, and of large ones."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, str, frozenset[str]]] = {}  # by identity, kept alive; with its length
        self.kinds: dict[str, str] = {}  # by hash: ARRAY or PACKED, if it is one of these
        self._plain: dict[tuple[type, Any], tuple[str, frozenset[str]]] = {}  # of numbers and texts

    def hash_value(self, value: Any, depth: int = DEPTH) -> tuple[str, frozenset[str]]:
        """Return the hash of a value, "" if it says nothing, and the hashes of all its parts, itself included."""
        if (known := self._known.get(id(value))) and known[1] == length_of(value):
            return known[2:]
        if value is None or isinstance(value, (int, type)) or depth == 0:
            return "", frozenset()
        if type(value) in (float, str):
            if (type(value), value) not in self._plain:
                plain = self._hash_plain(value) or ""
                self._plain[type(value), value] = plain, frozenset([plain])
            return self._plain[type(value), value]
        if (plain := self._hash_plain(value)) is not None:
            return plain, frozenset([plain] if plain else [])
        if (parts := _parts(value)) is None:
            return "", frozenset()
        hashed = [self.hash_part(part, depth - 1) for part in parts]
        whole = _hash(type(value).__name__, "/".join(one for one, _ in hashed).encode())
        is_record = dataclasses.is_dataclass(value) or hasattr(value, "_fields")
        if not is_record and not all(isinstance(part, (int, float)) for part in parts):
            self.kinds[whole] = PACKED
        every = frozenset([whole]).union(*(inner for _, inner in hashed))
        parameters = getattr(type(value), "__dataclass_params__", None)
        is_large = len(every) > LARGE and not any(self.kinds.get(each) == ARRAY for each in every)
        if depth > DEPTH // 2 and (is_large or (parameters and parameters.frozen)):
            self._known[id(value)] = value, length_of(value), whole, every
        return whole, every

    def hash_part(self, value: Any, depth: int) -> tuple[str, frozenset[str]]:
        """Return what `hash_value` does; a whole number, which says nothing alone, has a hash as a part."""
        if type(value) is int:
            return _hash("number", str(value).encode()), frozenset()
        return self.hash_value(value, depth)

    def _hash_plain(self, value: Any) -> str | None:
        """Return the hash of a number, text, array or tensor; None if a value is none of these."""
        if isinstance(value, (float, np.number)):
            return _hash("number", repr(float(value)).encode())
        if isinstance(value, (str, bytes, bytearray, memoryview)):
            if isinstance(value, str):
                return _hash("text", value.encode(errors="replace"))
            return self._note_array(_hash("array", bytes(value)))
        if isinstance(value, np.ndarray):
            if value.dtype == object:
                return ""
            return self._note_array(_hash("array", np.ascontiguousarray(value).tobytes()))
        if isinstance(value, torch.Tensor):
            try:
                content = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            except (RuntimeError, TypeError, NotImplementedError):
                return ""  # without content, as on the device meta
            return self._note_array(_hash("array", content))
        if isinstance(value, Path):
            return _hash("text", str(value).encode())
        return None

    def _note_array(self, hashed: str) -> str:
        self.kinds[hashed] = ARRAY
        return hashed


class Tracer:
    """Notes what every call of a function of platform/ makes, in a file of `folder`, from when it is entered."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file: TextIO | None = None
        self._process = 0
        self._files: dict[str, str] = {}  # path of a file below the root, by the name that code has
        self._noted: set[tuple[str, str, str]] = set()
        self._hasher = Hasher()
        self._known = set[str]()  # all values noted in this process
        self._states: dict[
            int, list[tuple[Any, str, frozenset[str]]]
        ] = {}  # of the arguments of a call in progress, by its frame

    def __enter__(self) -> None:
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        if self._file:
            self._file.close()

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        if event not in ("call", "return") or not (file := self._file_of(frame.f_code)):
            return
        if event == "call":
            arguments = list(frame.f_locals.values())
            if f"{file}:{frame.f_code.co_qualname}" in TAKERS:
                self._note(file, frame.f_code.co_qualname, arguments)
            held = getattr(frame.f_locals.get("self"), "__dict__", None) or {}
            values = [*arguments, *held.values()]
            states = [(value, self._hasher.hash_value(value)) for value in values if isinstance(value, CHANGEABLE)]
            self._states[id(frame)] = [(value, *hashed) for value, hashed in states if hashed[0]]
        else:
            changed = self._hash_changed(frame)
            self._note(file, frame.f_code.co_qualname, list(self._iterate_made(frame, value)), changed)

    def _hash_changed(self, frame: FrameType) -> set[str]:
        """Return the hashes of what is new in arguments that a call that ends has changed in place."""
        changed = set[str]()
        for argument, whole, every in self._states.pop(id(frame), ()):
            now, parts = self._hasher.hash_value(argument)
            changed |= parts - every if now != whole else set()
        return changed

    def _iterate_made(self, frame: FrameType, value: Any) -> Iterator[Any]:
        """Yield what a call that ends returns and stores."""
        yield value
        if (names := stored_attributes(frame.f_code)) and (holder := frame.f_locals.get("self")) is not None:
            attributes = getattr(holder, "__dict__", None) or {}
            yield from (attributes[name] for name in names if name in attributes)

    def _note(self, file: str, name: str, values: Iterable[Any], changed: Set[str] = frozenset()) -> None:
        every = changed.union(*(self._hasher.hash_value(value)[1] for value in values))
        rows = [hashed for hashed in every if (file, name, hashed) not in self._noted]
        arrived = [hashed for hashed in rows if hashed in changed and hashed not in self._known]
        self._noted.update((file, name, hashed) for hashed in rows)
        self._known.update(rows)
        if not rows:
            return
        if self._process != os.getpid():  # the first call, or the process was forked
            self._process, self._file = os.getpid(), open(self._folder / f"{os.getpid()}.jsonl", "a")
        if self._file and not self._file.closed:
            kinds = {hashed: self._hasher.kinds.get(hashed, "") for hashed in rows}
            self._file.write(json.dumps([time.monotonic(), file, name, kinds, arrived]) + "\n")
            self._file.flush()

    def _file_of(self, code: CodeType) -> str:
        """Return the path of a function's file below the root, "" unless it is a named one in platform/."""
        if code.co_name[0] == "<":
            return ""  # what a comprehension or a lambda makes is made by the function around it
        name = code.co_filename
        if name not in self._files:
            path = str(Path(name).relative_to(ROOT)) if Path(name).is_relative_to(ROOT / "platform") else ""
            self._files[name] = path if path not in UNTRACED else ""
        return self._files[name]


if os.environ.get(FOLDER):  # as an extension of a traced run, in a worker
    Tracer(Path(os.environ[FOLDER])).__enter__()  # to the end of its process
