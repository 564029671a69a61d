"""Snapshots of ranks that share memory, or cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from platform.checkpoint.in_memory.snapshots import RankSnapshots
from platform.train.step.training_state import tell_all


def opened(state, nodes, communicator, shared: bool = True, divided: bool = True) -> RankSnapshots:
    """As a worker opens its own; unless `shared`, as where nobody finds the memory of others."""
    tell: Callable[[Any], list[Any]] = partial(tell_all, communicator)
    if not shared:
        found, tell = tell, lambda value: found(value is not True and value)
    memory = RankSnapshots.open(state, nodes, communicator.rank, tell, divided)
    assert memory.held.shared == shared
    return memory
