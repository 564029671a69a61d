"""Checks of a model's declarations while it is recorded; each error names the mistake, its place, and the legal
choices."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

from platform.plan.language.ops import STATES, Parameter, Spec
from platform.plan.language.scheme import REGIONS, ROLES

INITS = ("normal", "zeros", "ones")


class ModelMistake(ValueError):
    """Error in the code of a user's model: the offending name, the reason with its file and line, and the names that
    would be legal there (empty if they cannot be listed)."""

    def __init__(self, name: str, reason: str, legal: Iterable[str] = (), place: str = ""):
        """Construct the error; `place`: file:line in the user's model, by default of the call being recorded."""
        self.name, self.legal = name, list(legal)
        self.reason = f"{reason} (at {place or _place_of_call()})"
        super().__init__(f"{name}: {self.reason}")


def check_specs(name: str, tensors: Sequence[Spec | Parameter], sizes: Mapping[str, int]) -> None:
    """Raise ModelMistake for an unknown region, an unknown dim, or a dim that one tensor has twice, among the inputs
    and outputs `tensors` of the operation `name` of a model. `sizes`: the model's dims."""
    for t in tensors:
        if isinstance(t, Spec) and t.region not in REGIONS:
            raise ModelMistake(t.region, f"no such region, in {name}", REGIONS)
        _check_dims(t, sizes, f"in {name}")
        for dim in t.dims:
            if t.dims.count(dim) > 1:
                raise ModelMistake(dim, f"a dim comes once, in {name}: {' '.join(t.dims)}")


def check_parameters(declared: Sequence[Parameter], model: Any, sizes: Mapping[str, int]) -> None:
    """Raise ModelMistake for a duplicate name or an unknown role, initialiser or dim among the parameters that `model`
    declares. `sizes`: the model's dims."""
    place = defined_at(model)
    names = Counter(p.name for p in declared)
    for p in declared:
        if names[p.name] > 1:
            raise ModelMistake(p.name, "several parameters have this name", place=place)
        for value, legal, what in ((p.role, (*ROLES, *STATES), "role"), (p.init, INITS, "initialiser")):
            if value not in legal:
                raise ModelMistake(value, f"no such {what}, of parameter {p.name}", legal, place)
        _check_dims(p, sizes, f"of parameter {p.name}", place)


def _check_dims(tensor: Spec | Parameter, sizes: Mapping[str, int], whose: str, place: str = "") -> None:
    """Raise ModelMistake for a dim of `tensor` that has a size neither in the model's `sizes` nor in the tensor's own;
    `whose` ends the message, `place` is file:line."""
    for dim in tensor.dims:
        if dim not in sizes and dim not in dict(tensor.sizes):
            raise ModelMistake(dim, f"no such dim, {whose}: the model's sizes have none", sizes, place)


def check_used(declared: Sequence[Parameter], used: Iterable[str], model: Any) -> None:
    """Raise ModelMistake for a parameter that `model` declares and no recorded operation uses: it would have no
    gradient. `used`: names."""
    there = set(used)
    for p in declared:
        if p.name not in there:
            raise ModelMistake(p.name, "a declared parameter that nothing uses", place=defined_at(model))


@contextmanager
def as_model_mistakes(model: Any) -> Iterator[None]:
    """Raise a ModelMistake with file and line in place of any exception that user code of `model`, from outside this
    package, raises within the context.

    Exceptions of this package's own models, ModelMistake and MemoryError pass unchanged.
    """
    try:
        yield
    except (ModelMistake, MemoryError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        own = [(frame, line) for frame, line in walk_tb(error.__traceback__) if not _is_ours(_module(frame))]
        if _is_ours(model.__module__) or not own:
            raise
        try:
            text = " ".join(str(error).split())
        except Exception:  # it may not even be printable
            text = "its text raises an error too"
        reason = f"{type(error).__name__}{': ' + text if text else ''}"
        raise ModelMistake(getattr(model, "__name__", type(model).__name__), reason, place=_place(*own[-1])) from error


def _module(frame: FrameType) -> str:
    """Return the name of the module that a stack frame runs in: of a user's model or of this package."""
    return frame.f_globals.get("__name__", "")


def _is_ours(module: str) -> bool:
    """Return True if a module on the stack belongs to this package, and so is not a user's model."""
    return module.startswith("platform.") or module == "contextlib"


def _place_of_call() -> str:
    """Return file:line of the statement in a user's model that is being recorded: the innermost frame outside this
    package, else (a model of this package) outside platform.plan."""
    stack = (frame for frame, _ in walk_stack(sys._getframe(2)))
    frames = list(takewhile(lambda f: _module(f) != "platform.plan.core.chunks", stack))  # the caller of the model
    models = [f for f in frames if not _module(f).startswith("platform.plan")]
    found = next((f for f in models if not _is_ours(_module(f))), (models or frames)[0])
    return _place(found, found.f_lineno)


def defined_at(model: Any) -> str:
    """Return file:line of a model class's `parameters` method for error messages; the class's name without one."""
    code = getattr(getattr(type(model), "parameters", None), "__code__", None)
    return f"{_short(code.co_filename)}:{code.co_firstlineno}" if code else type(model).__name__


def _place(frame: FrameType, line: int) -> str:
    """Return file:line of a line in a user's model, for a ModelMistake."""
    return f"{_short(frame.f_code.co_filename)}:{line}"


def _short(path: str) -> str:
    """Return a source file's path for a ModelMistake: absolute or relative, the shorter of the two."""
    return min(path, os.path.relpath(path), key=len)
