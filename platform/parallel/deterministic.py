"""Sums in a fixed order: settings of torch with which a step done again is equal in every bit (train.deterministic)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

_SETTINGS: Any = import_module("torch.utils.deterministic")


@contextmanager
def deterministic(compiles: bool) -> Iterator[None]:
    """Make torch use deterministic kernels within the context, which take every sum in a fixed order, in forward and
    backward passes alike; an operation without such a kernel raises RuntimeError with its name. `compiles`: True if
    functions compiled by torch are to be deterministic too.

    Its environment variables, read before CUDA and NCCL start, are in `platform.cluster.crew.base.job`.
    """
    before = torch.get_deterministic_debug_mode(), _SETTINGS.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.set_deterministic_debug_mode("error")
    _SETTINGS.fill_uninitialized_memory = (
        False  # costs a pass over all memory, and nothing is read before it is written
    )
    torch.backends.cudnn.benchmark = False  # chooses kernels by how fast they happen to be
    if compiles:
        torch.use_deterministic_algorithms(True)  # tells the compiler too, whose import takes seconds
    try:
        yield
    finally:
        if compiles:
            torch.use_deterministic_algorithms(False)
        torch.set_deterministic_debug_mode(before[0])
        _SETTINGS.fill_uninitialized_memory, torch.backends.cudnn.benchmark = before[1:]
