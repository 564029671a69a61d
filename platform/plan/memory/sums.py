"""Sums of gradients in the memory meter: what `platform.parallel.sharding.flat` allocates as gradients come."""

from __future__ import annotations

from collections.abc import Collection

from platform.plan.core.chunks import Chunk
from platform.plan.language.layout import at_zero
from platform.plan.memory.meter import Meter
from platform.plan.operations.storages import GradientKey, Leaves, MeteredStorage

UNDER_WAY = 2  # reductions of ZeRO-2 and 3 whose buffers are kept


class MeteredSums(Leaves):
    """Takes the gradients of parameters in passes of `chunk` on the memory meter, and adds them to flat sums per
    bucket. `summed`, `reduced`: numbers of the buckets with sums, and with shards of reduced ones, from earlier passes;
    `early`: buckets are reduced as soon as all their gradients have come, where each pass does so (ZeRO-2 and 3)."""

    def __init__(self, meter: Meter, chunk: Chunk, summed: Collection[int], reduced: Collection[int], *, early: bool):
        """Construct the metered gradient sums of the buckets that `chunk` uses; arguments as in the class."""
        self._meter, self._plan, self._early = meter, meter.plan, early
        self._summed, self._reduced = summed, reduced
        buckets = enumerate(meter.plan.buckets)
        self._buckets = {n: b for n, b in buckets if at_zero(b.only, meter.at) and chunk.parameters & b.ranges.keys()}
        self._number: dict[GradientKey, int] = {p.name: n for n, b in self._buckets.items() for p in b.parameters}
        self._sums: dict[int, MeteredStorage] = {}
        self._coming: dict[int, MeteredStorage] = {}  # gradients of the pass, where none can be added to sums at once
        self._taken: dict[int, list[MeteredStorage]] = {}  # gradients that will be added together with others
        self._came: dict[int, set[str]] = {n: set() for n in self._buckets}
        self._reducing: list[tuple[int, MeteredStorage, MeteredStorage]] = []
        self._parts: dict[int, MeteredStorage] = {}  # of buckets that passes have reduced: new shards

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Count the addition of a parameter's gradient to its bucket's sums, after which it is freed."""
        if gradient.nbytes:
            self._taken.setdefault(self._number[name], []).append(gradient)
            self._note(name)

    def in_place(self, name: GradientKey) -> bool:
        """Count a gradient that a kernel adds straight into the sums of its parameter's bucket; return True."""
        if name in self._number:
            self._add(self._number[name])
            self._note(name)
        return True

    def _add(self, n: int) -> None:
        """Count the bytes of the buffer into which a gradient of bucket number `n` is added when computed."""
        if self._plan.adds_at_once(self._buckets[n], self._meter.device):
            self._begin(n)
        elif n not in self._coming:
            self._coming[n] = self._meter.new(self._buckets[n].elements)

    def _begin(self, n: int) -> None:
        """Allocate the metered gradient sums of bucket number `n`, if no earlier pass has."""
        if n not in self._sums:
            wide = 0 if self._buckets[n].zero >= 2 else self._plan.itemsize["master"]
            self._sums[n] = self._meter.new(0 if n in self._summed else self._buckets[n].elements, wide)

    def _note(self, name: GradientKey) -> None:
        """Note that a parameter's gradient has been computed; once its whole bucket is, count adding them to the
        sums."""
        assert isinstance(name, str)
        n = self._number[name]
        if name not in self._plan.shared:  # of which several parts come
            self._came[n].add(name)
        if len(self._came[n]) == len(self._buckets[n].parameters):
            self._flush(n)
            if self._early and self._buckets[n].zero >= 2:
                self._reduce(n)

    def _flush(self, n: int) -> None:
        """Count the addition of the gradients of bucket number `n` to its sums, after which they are freed."""
        if self._taken.get(n):
            self._add(n)
            self._taken.pop(n)
        if n in self._coming:
            self._begin(n)
            del self._coming[n]

    def _reduce(self, n: int) -> None:
        """Count the reduction of a bucket's gradient sums into shards; the third reduction waits for the first."""
        each = self._buckets[n].shard_elements
        self._reducing.append((n, self._sums.pop(n), self._meter.new(each)))
        self._came[n].clear()
        while len(self._reducing) > UNDER_WAY:
            self._settle()

    def _settle(self) -> None:
        """End the oldest gradient reduction: free its buffers, and keep the bucket's shard of the sums if it is new."""
        n, _, part = self._reducing.pop(0)
        if n in self._parts:
            return
        same = self._plan.itemsize["master"] == self._plan.itemsize["compute"]
        each = 0 if n in self._reduced else self._buckets[n].shard_elements
        self._parts[n] = part if same and each else self._meter.new(each, self._plan.itemsize["master"])

    def flush(self) -> None:
        """Count the bytes of adding every gradient that is not yet in its bucket's sums to these."""
        for n in self._buckets:
            self._flush(n)

    def passed(self) -> None:
        """End a metered backward pass: count its last gradients' sums and (ZeRO-2 and 3) their reductions."""
        self.flush()
        for n in [n for n in self._sums if self._buckets[n].zero >= 2]:
            self._reduce(n)
        while self._reducing:
            self._settle()

    def held(self) -> list[MeteredStorage]:
        """Return the metered gradient sums and reduced shards that stay in memory for the next pass."""
        return [*self._sums.values(), *self._parts.values()]

    def begun(self) -> dict[int, int]:
        """Return the bytes of the gradient sums that passes have begun and not reduced, by number of the bucket."""
        return {n: sum_.nbytes for n, sum_ in self._sums.items() if n not in self._summed}

    def parts(self) -> dict[int, int]:
        """Return the bytes of new shards of reduced buckets (ZeRO-2 and 3), by number of the bucket."""
        return {n: part.nbytes for n, part in self._parts.items()}
