"""Snapshots of ranks that share memory, or cannot, taken at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from platform.checkpoint.snapshots import RankSnapshots, find_copy_peers
from platform.runtime.communicator import all_gather_values


def opened(state, nodes, communicator, shared: bool = True, divided: bool = True, base=()) -> RankSnapshots:
    """As a worker opens its own; unless `shared`, as where nobody finds the memory of others."""
    all_gather: Callable[[Any], list[Any]] = partial(all_gather_values, communicator)
    if not shared:
        gather, all_gather = all_gather, lambda value: gather(value is not True and value)
    memory = RankSnapshots.open(state, nodes, communicator.rank, all_gather, divided, base=base)
    assert memory.held.shared == shared
    communicator.connect_peers(find_copy_peers(memory.held.copies, communicator.rank))
    return memory


def take(memory: RankSnapshots, step: int, blocks, values: dict[str, Any], transfer) -> None:
    """As a worker on a CPU does."""
    memory.begin_snapshot(step, blocks, lambda: values, transfer)
    memory.finish_snapshot()
