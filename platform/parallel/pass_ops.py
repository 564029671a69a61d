"""The `Ops` of a pass of generation: attention writes keys and values into a cache, and reads the keys and values of
all passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.parallel_ops import ParallelOps, PassPosition
from platform.parallel.sharding.convert import absent
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Spec, lengthened


@dataclass
class KeyValueCache:
    """Keys and values of the sequences under way: this rank's blocks [length, batch, ...] by the attention that reads
    them, with room for `capacity` tokens under causal attention. `first`: the sequence at which each block begins."""

    capacity: int
    blocks: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def reorder(self, rows: Tensor) -> None:
        """Let each sequence i continue the cache of sequence `rows[i]`; both have their blocks on the same ranks."""
        for name, first in self.first.items():
            k, v = self.blocks[name]
            mine = (rows[first : first + k.shape[1]] - first).to(k.device)
            self.blocks[name] = k.index_select(1, mine), v.index_select(1, mine)


class PassOps(ParallelOps):
    """Executes passes of one plan on a rank; see `ParallelOps`. `cache`: keys and values of the sequences under way."""

    cache: KeyValueCache

    def __init__(self, plan: Plan, communicator: Communicator, tensors: Mapping[str, Tensor]):
        super().__init__(plan, communicator, tensors, ahead=False)

    def enter(self, offset: int, cache: KeyValueCache) -> None:
        """Begin a pass whose sequences have `offset` tokens in `cache`."""
        self.offset, self.cache = offset, cache
        self.position = PassPosition(training=False)
        self.angles.clear()
        self.begin()

    def leave(self) -> None:
        """End a pass: its cache is its caller's alone, who may drop it."""
        del self.cache

    def remembered(self, spec):
        return lengthened(spec, self.cache.capacity)

    def remember(self, name, k, v, kv):
        """Write the keys and values of a pass into the cache, and return the keys and values of all passes so far."""
        out = self.remembered(kv)
        if absent(k):
            return k, v, out  # k and v are empty
        if name not in self.cache.blocks:
            shape = self.plan.local_shape(out)
            self.cache.blocks[name] = k.new_zeros(shape), v.new_zeros(shape)
            self.cache.first[name] = self._first(out)
        pair = self.cache.blocks[name]
        for whole, new in zip(pair, (k, v), strict=True):
            whole.narrow(kv.dims.index("length"), self.offset, new.shape[kv.dims.index("length")]).copy_(new)
        return *pair, out

    def recall(self, name, k, v, kv):
        """Return the keys and values of the source, from this pass or the cache."""
        if k is not None:
            self.cache.blocks[name] = k, v
            if not absent(k):
                self.cache.first[name] = self._first(kv)
        return self.cache.blocks[name]

    def _first(self, kv: Spec) -> int:
        """Return the first sequence of this rank's block of keys or values."""
        assert kv.dims[:2] == ("length", "batch")
        return self.blocks[kv][1][0]
