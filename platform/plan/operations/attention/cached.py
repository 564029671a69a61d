"""Keys and values from one pass to the next, where a text is written in several passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from platform.plan.operations.op import Op


@dataclass
class KeyValueCache:
    """Keys and values of the sequences under way: this rank's blocks [length, batch, ...] by the attention that reads
    them, with room for `capacity` tokens under causal attention, of which ranks that share these have a part each.
    `first`: the sequence at which each block begins."""

    capacity: int
    blocks: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)

    def reorder(self, rows: Any) -> None:
        """Let sequence i go on from the cached keys and values of sequence `rows[i]`, which lie on the same ranks."""
        for name, first in self.first.items():
            k, v = self.blocks[name]
            mine = (rows[first : first + k.shape[1]] - first).to(k.device)
            self.blocks[name] = k.index_select(1, mine), v.index_select(1, mine)


class RememberOp(Op):
    """Keys and values of all positions so far for the causal attention `name`, `Ops.remembered`: this pass's k and v,
    of types `kv` and `values`, behind the keys and values of the passes before; k and v themselves in a pass that reads
    a whole text, as in training."""

    def record(self, ops, name, k, v, kv, values):
        out = [ops.remembered(kv), ops.remembered(values)]
        return ops.record(self.kind, name, [k, v], [kv, values], out) if ops.cache else (k, v)

    def run(self, ops, name, k, v, kv, values):
        """Append k and v to the key-value cache of the attention `name`, and return all that it holds."""
        cache = ops.cache
        if cache is None or ops.absent(k):
            return k, v
        if name not in cache.blocks:
            shapes = [[n for _, n in ops.blocks[ops.remembered(t)]] for t in (kv, values)]
            cache.blocks[name] = k.new_zeros(shapes[0]), v.new_zeros(shapes[1])
            cache.first[name] = _first(ops, ops.remembered(kv))
        pair, (begin, room) = cache.blocks[name], ops.blocks[ops.remembered(kv)][0]
        first, end = max(ops.offset, begin), min(ops.offset + len(k), begin + room)
        for mine, new in zip(pair, (k, v), strict=True):
            if first < end:
                mine[first - begin : end - begin].copy_(new[first - ops.offset : end - ops.offset])
        return pair

    def meter(self, ops, name, k, v, kv, values):
        """Count the memory of all keys and values in the cache, allocated by the first use of the attention."""
        if ops.cache is None or ops.absent(k):
            return k, v
        if name not in ops.cache.blocks:
            ops.cache.blocks[name] = ops.block(ops.remembered(kv)), ops.block(ops.remembered(values))
        return ops.cache.blocks[name]


class RecallOp(Op):
    """Keys and values of type `kv` of the cross-attention `name`: k and v, or where these are None, the pair of the
    first of several passes with the same memory."""

    def record(self, ops, name, k, v, kv):
        given = [] if k is None else [k, v]
        return ops.record(self.kind, name, given, [kv for _ in given], [kv, kv]) if ops.cache else (k, v)

    def run(self, ops, name, k, v, kv):
        """Store k and v of the cross-attention `name` in the cache, if given, and return the stored ones."""
        if ops.cache and k is not None and not ops.absent(k):
            ops.cache.first[name] = _first(ops, kv)
        return self.meter(ops, name, k, v, kv)

    def meter(self, ops, name, k, v, kv):
        """Return k and v, cached if they are given, which takes no new memory."""
        if ops.cache is None:
            return k, v
        if k is not None:
            ops.cache.blocks[name] = k, v
        return ops.cache.blocks[name]


def _first(ops, kv) -> int:
    """Return the global number of the first sequence in this rank's block of the key-value cache of type `kv`."""
    assert kv.dims[1] == "batch"
    return ops.blocks[kv][1][0]
