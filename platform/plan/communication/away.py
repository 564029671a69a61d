"""Activations that are away: in host memory from the forward pass of a block to its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Away(Generic[T]):
    """Activation in host memory. `fetch()` starts to bring it back; `before`: the one that left before it in the same
    pass, which the backward pass needs next, and which so travels while this one's block is computed."""

    def __init__(self, fetch: Callable[[], T], before: Away[T] | None):
        """Construct the place of an activation that has left for host memory; arguments as in the class."""
        self._fetch: Callable[[], T] | None = fetch
        self._before, self._coming = before, list[T]()

    def start(self) -> None:
        """Start to bring the activation back from host memory, unless it is on its way, or was."""
        if self._fetch:
            self._coming.append(self._fetch())
            self._fetch = None

    def take_back(self) -> T:
        """Return the activation from host memory, once, and start to bring back that before it."""
        self.start()
        if self._before:
            self._before.start()
            self._before = None
        return self._coming.pop()
