"""Sums of gradients in the memory meter: what `platform.parallel.sharding.flat` allocates as gradients come."""

from __future__ import annotations

from collections.abc import Collection

from platform.plan.core.chunks import Chunk
from platform.plan.language.layout import at_zero
from platform.plan.memory.meter import Meter
from platform.plan.memory.storages import GradientKey, Leaves, MeteredStorage

UNDER_WAY = 2  # reductions of ZeRO-2 and 3 whose buffers are kept


class MeteredSums(Leaves):
    """Takes the gradients of parameters in passes of `chunk` on the memory meter, and adds them to flat sums per
    bucket. `there`: numbers of the buckets with sums from earlier passes; `early`: buckets are reduced as soon as all
    their gradients have come, where each pass does so (ZeRO-2 and 3)."""

    def __init__(self, meter: Meter, chunk: Chunk, there: Collection[int], *, early: bool):
        self._meter, self._plan, self._there, self._early = meter, meter.plan, there, early
        buckets = enumerate(meter.plan.buckets)
        self._buckets = {n: b for n, b in buckets if at_zero(b.only, meter.at) and chunk.parameters & b.ranges.keys()}
        self._number: dict[GradientKey, int] = {p.name: n for n, b in self._buckets.items() for p in b.parameters}
        self._sums: dict[int, MeteredStorage] = {}
        self._came: dict[int, set[str]] = {n: set() for n in self._buckets}
        self._reducing: list[tuple[int, MeteredStorage, MeteredStorage]] = []
        self._reduced: dict[int, MeteredStorage] = {}

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Add a gradient, which is freed after that."""
        if gradient.nbytes:
            self._take(name)

    def in_place(self, name: GradientKey) -> bool:
        alike = self._plan.zero >= 2 or self._plan.itemsize["master"] == self._plan.itemsize["compute"]
        if alike and name in self._number:
            self._take(name)
        return alike

    def _take(self, name: GradientKey) -> None:
        """Count a gradient of a parameter into the sums of its bucket."""
        assert isinstance(name, str)
        n = self._number[name]
        if n not in self._sums and (self._plan.zero >= 2 or n not in self._there):
            wide = 0 if self._plan.zero >= 2 else self._plan.itemsize["master"]
            self._sums[n] = self._meter.new(self._buckets[n].elements, wide)
        self._came[n].add(name)
        if self._early and self._plan.zero >= 2 and len(self._came[n]) == len(self._buckets[n].parameters):
            self._reduce(n)

    def _reduce(self, n: int) -> None:
        """Start reducing a bucket's sums into shards; the third reduction waits for the first."""
        each = self._buckets[n].elements // self._plan.shards
        self._reducing.append((n, self._sums.pop(n), self._meter.new(each)))
        self._came[n].clear()
        while len(self._reducing) > UNDER_WAY:
            self._settle()

    def _settle(self) -> None:
        n, _, part = self._reducing.pop(0)
        if n in self._there or n in self._reduced:
            return
        same = self._plan.itemsize["master"] == self._plan.itemsize["compute"]
        each = self._buckets[n].elements // self._plan.shards
        self._reduced[n] = part if same else self._meter.new(each, self._plan.itemsize["master"])

    def passed(self) -> None:
        """End a backward pass: what is left is reduced."""
        if self._plan.zero >= 2:
            for n in list(self._sums):
                self._reduce(n)
            while self._reducing:
                self._settle()

    def held(self) -> list[MeteredStorage]:
        """Return the sums that stay for the next pass."""
        return [*self._sums.values(), *self._reduced.values()]

    def new(self) -> dict[int, int]:
        """Return the bytes of all sums that passes have begun, by number of the bucket."""
        return {n: sum_.nbytes for n, sum_ in (self._reduced if self._plan.zero >= 2 else self._sums).items()}
