"""Page-locked host memory, with a double of the CUDA runtime: locked to the byte, and released with its last user."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from platform.checkpoint.blocks import Box, HeldTensor, Share
from platform.checkpoint.buffer import HostBuffer
from platform.runtime.pinned_memory import allocate_pinned_bytes


@pytest.fixture
def locked(monkeypatch):
    """Address -> bytes locked there now; an error for whoever has the same page already."""
    sizes: dict[int, int] = {}

    def register(address: int, count: int, flags: int) -> int:
        pages = range(address >> 12, (address + count - 1 >> 12) + 1)
        taken = any(a >> 12 in pages or (a + n - 1) >> 12 in pages for a, n in sizes.items())
        sizes[address] = count
        return 712 if taken else 0  # cudaErrorHostMemoryAlreadyRegistered

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=sizes.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return sizes


def test_to_the_byte_and_released_with_the_last_view(locked):
    one, other = allocate_pinned_bytes(5000), allocate_pinned_bytes(3)
    assert sorted(locked.values()) == [3, 5000] and not one.any()
    one[4999], other[2] = 7, 8
    view = one[4000:]
    del one
    gc.collect()
    assert sorted(locked.values()) == [3, 5000] and view[999] == 7
    del view, other
    gc.collect()
    assert locked == {}


def test_a_snapshot_s_buffer_is_locked_while_it_is_there(locked):
    tensor = HeldTensor("model.w", "float32", (3, 5), {Box((0, 0), (3, 5)): (0,)})
    buffer = HostBuffer.build_aligned([Share(tensor, Box((0, 0), (3, 5)))], pinned=True)
    assert list(locked.values()) == [60] == [buffer.data.numel()]
    del buffer
    gc.collect()
    assert locked == {} and allocate_pinned_bytes(0).numel() == 0 and locked == {}


def test_a_lock_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(RuntimeError, match="1000 bytes of host memory cannot be page-locked: CUDA error 2"):
        allocate_pinned_bytes(1000)
