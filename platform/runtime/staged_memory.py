"""Optimizer states and master copies in host memory, which pass through two buffers of the device piece by piece.

While one buffer is updated, the other one's last piece leaves and its next one arrives: each direction has a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from platform.plan.model_types import STAGING_BUFFERS, count_buffer_bytes
from platform.runtime.pinned_memory import allocate_pinned_bytes

Tensors = Sequence[Tensor]


def allocate_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros on a worker's `device`."""
    return torch.zeros(*shape, dtype=dtype, device=device)


def allocate_host_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in host memory, page-locked unless the worker's `device` is a CPU."""
    if device.type == "cpu":
        return torch.zeros(*shape, dtype=dtype)
    return allocate_pinned_bytes(prod(shape) * dtype.itemsize).view(dtype).view(*shape)


class StagingBuffers:
    """Two buffers in device memory, there while pieces pass. On a CPU the copies are made as well."""

    def __init__(self, device: torch.device):
        """Prepare to stage pieces on `device`; nothing is allocated yet."""
        self.device, self._beside = device, device.type != "cpu"

    def pass_pieces(self, pieces: Sequence[Tensors]) -> Iterator[list[Tensor]]:
        """Yield each of `pieces`, flat tensors in host memory, as copies on the device, to change in place until the
        next is taken: they are copied back then. In the end the current stream waits for what has left."""
        if not any(pieces):
            yield from ([] for _ in pieces)
            return
        size = max(count_buffer_bytes([x.nbytes for x in piece]) for piece in pieces)
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(STAGING_BUFFERS)]
        staged = [_view_piece(buffers[i % STAGING_BUFFERS], piece) for i, piece in enumerate(pieces)]
        arrived: torch.cuda.Event | None = self._start_copies(0, staged[0], pieces[0], None)
        before: torch.cuda.Event | None = None
        for i, piece in enumerate(pieces):
            after = self._start_copies(0, staged[i + 1], pieces[i + 1], before) if i + 1 < len(pieces) else None
            self._wait_for(arrived)
            yield staged[i]
            arrived, before = after, self._start_copies(1, piece, staged[i], None)
        self._wait_for(before)

    def _start_copies(
        self, way: int, targets: Tensors, sources: Tensors, before: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Start copies in the stream of a `way` (0: to the device), after the current stream's work and the event
        `before`; return the event of their end, None on a CPU, where they are done."""
        if not self._beside:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        stream = _copy_streams()[way]
        stream.wait_stream(torch.cuda.current_stream())
        if before is not None:
            stream.wait_event(before)
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream go on behind an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def _view_piece(buffer: Tensor, piece: Tensors) -> list[Tensor]:
    """Return the place of each tensor of a piece in a staging buffer (uint8 [bytes]), as tensors of the same types."""
    ends = [count_buffer_bytes([x.nbytes for x in piece[: i + 1]]) for i in range(len(piece))]
    starts = [end - count_buffer_bytes([x.nbytes]) for end, x in zip(ends, piece, strict=True)]
    return [buffer[at : at + x.nbytes].view(x.dtype) for at, x in zip(starts, piece, strict=True)]


@cache
def _copy_streams() -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return this process's CUDA streams in which states travel to the device, and back."""
    return torch.cuda.Stream(), torch.cuda.Stream()
