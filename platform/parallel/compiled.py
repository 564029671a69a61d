"""Compilation of the runtime's small pure functions of local tensors (regions) by torch.compile: `region` wraps one.

A region contains no collective, and takes as tensors all that changes between layers, steps and microbatches, so that
there is one graph per region and shape. Graphs stay in the process from one generation to the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from shutil import which
from threading import Lock

import torch
from torch import Tensor

from platform.parallel.communicator.progress import PROGRESS

BACKEND = "inductor"
MOST_GRAPHS = 64  # of one region: shapes, with and without gradients; further ones run eagerly
_LOCK = Lock()  # torch compiles one function at a time


@cache
def region(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `function`, a pure one of tensors and of constants, compiled by torch for each shape at its first call
    with it. While it is compiled, the process's progress says so, so that no rank counts as hung."""
    made = torch.compile(function, dynamic=False, backend=BACKEND)
    limits = import_module("torch._dynamo").config
    limits.recompile_limit = max(MOST_GRAPHS, limits.recompile_limit)
    known: set[object] = set()

    @wraps(function)
    def run(*arguments):
        """Call the compiled function, reporting progress while it is compiled for arguments of a new signature."""
        signature = torch.is_grad_enabled(), *(_signature(a) for a in arguments)
        if signature in known:
            return made(*arguments)
        with _LOCK, PROGRESS.preparing(f"compile {function.__name__}"):
            try:
                return made(*arguments)
            finally:
                known.add(signature)

    return run


def _signature(argument: object) -> object:
    """Return one argument's part of a compiled graph's key: shape, strides, type and gradient of its tensors."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    return tuple(map(_signature, argument)) if isinstance(argument, list | tuple) else argument


def uncompiled(choice: str, device: str) -> str:
    """Return why a process with this `device` (cpu, cuda) runs its functions uncompiled, in a line, under
    train.compile=`choice`: "" if it compiles them. `auto` compiles on GPUs alone: on CPU a start of seconds is longer
    than what most runs win."""
    return _lacking(device) if may_compile(choice, device) else f"train.compile={choice}"


def may_compile(choice: str, device: str) -> bool:
    """Return True if train.compile=`choice` wants functions compiled on this `device`, if the process can."""
    return choice == "on" or (choice == "auto" and device == "cuda")


@cache
def _lacking(device: str) -> str:
    """Return in a line the reason why torch.compile cannot work for `device` in this process, "" if it works: a tiny
    function is compiled, once. Takes seconds, as it imports torch's compiler."""
    if device == "cuda" and not find_spec("triton"):
        return "triton is not installed"
    if not any(map(which, [os.environ.get("CXX", "g++"), "clang++", "gcc", "cc"])):
        return "there is no C++ compiler"
    try:
        if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:  # no pool of processes beside each worker
            import_module("torch._inductor").config.compile_threads = 1  # the variable has been read by now
        x = torch.ones(64, device=device)
        right = torch.equal(torch.compile(_probed, dynamic=False)(x), _probed(x))
    except Exception as error:  # whatever a compiler, its headers or its cache may lack
        first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {(more or [first])[0] if first.endswith('raised:') else first}"[:300]
    return "" if right else "what it compiles computes wrong numbers"


def _probed(x: Tensor) -> Tensor:
    """Return 2 x + 1: the tiny function with which torch.compile is tried."""
    return x * 2 + 1
