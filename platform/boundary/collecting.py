"""Pauses of Python's search for cycles of objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Pause the search for cycles of objects, of which plans have hardly any."""
    # plans are many objects that stay: looking at all of them again and again takes a quarter of planning
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()  # nor later at what has come since
            gc.enable()
