"""All-gather, reduce-scatter and all-to-all of gloo, built from its messages between two ranks: 2 to 3 times as fast as
gloo's own (`tests/benchmarks/RESULTS.md`), with as many bytes; and rotation, which gloo lacks.

gloo's all-to-all sends to a peer before or after it receives from the same one: two ranks use half of their link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

TAGS = 1 << 30  # after so many collectives of a group, tags begin anew


class Messages:
    """Collectives among the members of one gloo group. Every rank calls them in one order; each has a tag of its own,
    so that it does not matter in which order they are waited for. `timeout`: limit of the wait for one message."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta):
        """Prepare collectives made of messages within a gloo `group`, each of which may take `timeout`."""
        self._group, self._timeout = group, timeout
        self._me, self._size = group.rank(), group.size()
        self._number = count()

    def _tag(self) -> int:
        """Return the tag of the messages of the next collective; messages between stages have the tag 0."""
        return 1 + next(self._number) % TAGS

    def _exchange(self, sent: Callable[[int], Tensor], received: Callable[[int], Tensor]) -> list[dist.Work]:
        """Start sending the tensor `sent(peer)` to every other group member and receiving `received(peer)` from it,
        both contiguous; return the messages in progress, of which empty ones are none. Each member starts with the next
        in order, so that none is first for all."""
        tag = self._tag()
        peers = [(self._me + i) % self._size for i in range(1, self._size)]
        there, here = ([(peer, part(peer)) for peer in peers] for part in (sent, received))
        works = [self._group.recv([x], peer, tag) for peer, x in reversed(here) if x.numel()]
        return works + [self._group.send([x], peer, tag) for peer, x in there if x.numel()]

    def _wait(self, works: list[dist.Work]) -> None:
        """Wait for the messages (sends and receives over gloo) of which one collective is made."""
        for work in works:
            work.wait(self._timeout)

    def all_gather(self, given: Tensor, out: Tensor) -> Callable[[], None]:
        """Start gathering, by messages, every group member's `given` into `out` [members, ...]; `given` may be this
        rank's part of it. Returns the function that waits."""
        mine = out[self._me]
        works = self._exchange(lambda peer: given, lambda peer: out[peer])
        if mine.data_ptr() != given.data_ptr():
            mine.copy_(given)
        return lambda: self._wait(works)

    def all_to_all(self, given: Sequence[Tensor] | Tensor, out: Sequence[Tensor] | Tensor) -> Callable[[], None]:
        """Start giving part i of `given`, of any size, to member i, for part i of `out` from it; return what waits."""
        works = self._exchange(lambda peer: given[peer], lambda peer: out[peer])
        out[self._me].copy_(given[self._me])
        return lambda: self._wait(works)

    def rotate(self, given: Tensor, out: Tensor) -> Callable[[], None]:
        """Start giving `given` to the next group member for `out` from the one before; return what waits."""
        tag = self._tag()
        works = [self._group.recv([out], (self._me - 1) % self._size, tag)]
        works.append(self._group.send([given], (self._me + 1) % self._size, tag))
        return lambda: self._wait(works)

    def reduce_scatter(self, given: Tensor, out: Tensor) -> Callable[[], None]:
        """Start summing, by messages, every group member's `given` [members, ...], of which each gets the part of its
        index in `out`. The sum is made, in the members' order, by the function that waits, which is returned."""
        parts = [given[i] if i == self._me else torch.empty_like(out) for i in range(self._size)]
        works = self._exchange(lambda peer: given[peer], lambda peer: parts[peer])

        def wait() -> None:
            """Wait for the parts of all members, and sum them in the members' order into `out`."""
            self._wait(works)
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

        return wait
