"""Buffers of collectives: contiguous, with equal room for the blocks of all ranks, even if these differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.communication.rule import JOIN, SPLIT
from platform.plan.language.layout import Parts


def buffers(
    op: str, x: Tensor, n: int, dim: int, joined: int, is_root: bool, owned: bool, into: Tensor | None = None
) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Prepare the collective `op` of `n` ranks on `x` (parameters as in `Communicator.launch`; `is_root`: this rank is
    the root): return the contiguous buffer that the transport reads, the one that it fills, and a function that returns
    the result from the latter with its dims in place."""

    def join(at: int) -> Tensor:
        """Return the gathered parts `out` [ranks, ...] as one tensor, joined along the dim at position `at`."""
        return out.movedim(0, at).flatten(at, at + 1)

    if op in ("all_gather", "gather"):
        given, receives = x.contiguous(), op == "all_gather" or is_root
        out = given.new_empty((n, *given.shape) if receives else 0) if into is None else into
        return given, out, lambda: join(dim) if receives else out
    if op in ("reduce_scatter", "all_to_all") or (op == "scatter" and is_root):
        given = x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0).contiguous()
        out = given.new_empty(given.shape if op == "all_to_all" else given.shape[1:])
        # in one piece: of dims of one index the join alone is a view with gaps, which each product would copy anew
        return given, out, lambda: join(joined).contiguous() if op == "all_to_all" else out
    if op in ("broadcast", "scatter", "rotate"):
        given = x.contiguous()
        out = torch.empty_like(given) if op == "rotate" else given
        return given, out, lambda: out
    assert op in ("all_reduce", "reduce"), op
    out = x.contiguous() if owned else x.detach().clone(memory_format=torch.contiguous_format)
    return out, out, lambda: out if op == "all_reduce" or is_root else out.new_empty(0)


@dataclass(frozen=True)
class Uneven:
    """Collective `op` of blocks that differ along the dim at position `dim`, or along the one that an all_to_all joins,
    `joined`, on member `index` of its group: before it, each block gets the longest one's room; after it, none has."""

    op: str
    index: int
    dim: int
    joined: int
    parts: Parts | None
    joined_parts: Parts | None
    is_root: bool

    def roomy(self, x: Tensor) -> Tensor:
        """Return this rank's tensor x as it is given to the collective: with room for equal blocks."""
        exchanges = self.op == "all_to_all"
        if self.parts and (self.op == "reduce_scatter" or exchanges or (self.op == "scatter" and self.is_root)):
            x = spread(x, self.dim, self.parts)
        elif self.parts:
            x = _filled(x, self.dim, self.parts.room)
        return _filled(x, self.joined, self.joined_parts.room) if exchanges and self.joined_parts else x

    def close(self, finish: Callable[[], Tensor]) -> Tensor:
        """Return what `finish` returns, the collective's result, without the room that its blocks do not fill."""
        x = finish()
        if self.parts and self.op in SPLIT:
            x = x.narrow(self.dim, 0, self.parts.extents[self.index]).contiguous()
        if self.op == "all_to_all":
            return closed(x, self.joined, self.joined_parts) if self.joined_parts else x
        joins = self.op in JOIN and (self.op == "all_gather" or self.is_root)
        return closed(x, self.dim, self.parts) if self.parts and joins else x


def spread(x: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return x with its blocks along `dim` apart, so that each begins a stretch of the longest one's length."""
    return torch.cat([_filled(block, dim, parts.room) for block in x.split(list(parts.extents), dim)], dim)


def closed(x: Tensor, dim: int, parts: Parts) -> Tensor:
    """Return x with its blocks along `dim` one after another: the inverse of `spread`."""
    begins = accumulate(parts.extents, lambda at, _: at + parts.room, initial=0)
    return torch.cat([x.narrow(dim, at, n) for at, n in zip(begins, parts.extents, strict=False)], dim)


def _filled(x: Tensor, dim: int, extent: int) -> Tensor:
    """Return x with zeros behind it along `dim`, up to `extent`."""
    missing = extent - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing]) if missing else x
