"""Offload of activations to host memory, in a stream of copies beside the computation: there in the forward pass, back
in the backward pass, one block ahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from platform.parallel.kept.pinned import pinned_bytes
from platform.plan.communication.away import Away

Arriving = Callable[[], Tensor]  # waits for an activation that is under way, and returns it


class Offload:
    """Activations of one rank in host memory. Memory there is used again, for activations of the same size.

    On a GPU the memory is page-locked, and all copies run in one stream, there and back: memory of the host that an
    activation has left is overwritten after that. An activation stays on the device until the block that reads it is
    computed (`leave`), and one that comes back is allocated when all computation before it is queued: no allocator has
    to know of the other stream. On a CPU the copies are made as well, though they lessen nothing.
    """

    def __init__(self, device: torch.device):
        """Construct the offload of a rank whose activations are on `device`; nothing is allocated yet."""
        self._device, self._beside = device, device.type != "cpu"
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by bytes
        self._last: Away[Arriving] | None = None

    def begin_pass(self) -> None:
        """Begin a forward pass, whose activations come back in its own backward pass."""
        self._last = None

    def leave(self, x: Tensor) -> tuple[Away[Arriving], Callable[[], None]]:
        """Start to copy the activation x to host memory; return it as it is away, and a function to call when its block
        is computed: work that is queued then may use the memory of x again."""
        there = self._memory(x.numel() * x.element_size())
        host = there.view(x.dtype).view(x.shape)
        left = self._copied(host, x)
        self._last = Away(partial(self._back, host, there), self._last)
        return self._last, left

    def _memory(self, count: int) -> Tensor:
        """Return `count` bytes of host memory (uint8 [count]) in which no activation is."""
        if found := self._free[count]:
            return found.pop()
        return pinned_bytes(count) if self._beside else torch.empty(count, dtype=torch.uint8)

    def _back(self, host: Tensor, there: Tensor) -> Arriving:
        """Start to copy an activation back from its place in host memory; `there`: the bytes of that place."""
        x = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        arrived = self._copied(x, host)
        self._free[len(there)].append(there)  # the next copy into it is queued behind this one

        def arrive() -> Tensor:
            """Return the activation that is copied back; work that is queued from now on may read it."""
            arrived()
            return x

        return arrive

    def _copied(self, to: Tensor, x: Tensor) -> Callable[[], None]:
        """Start to copy x, on one side, to a tensor on the other, after all that is queued by now; return a function
        after which the computation goes on behind the copy."""
        if not self._beside:
            to.copy_(x)
            return lambda: None
        stream = _stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            to.copy_(x, non_blocking=True)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


@cache
def _stream() -> torch.cuda.Stream:
    """Return this process's CUDA stream in which activations travel between device and host memory."""
    return torch.cuda.Stream()  # one for all passes: torch hands out 32 in turn, and groups have theirs
