"""Host memory that is page-locked for copies from and to a GPU, to the byte.

torch's own pinned memory is rounded up to a power of two and kept in a cache after use: of a snapshot of 5 GB it takes
8, for good.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from platform.runtime.progress import PROGRESS

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


def allocate_pinned_bytes(count: int) -> Tensor:
    """Allocate `count` bytes of page-locked host memory, to and from which this rank's GPU copies (uint8 [count],
    zeros), in whole pages and no more; they are released when no tensor uses them any longer. Raises RuntimeError if
    CUDA cannot lock them."""
    if not count:
        return torch.zeros(0, dtype=torch.uint8)
    return lock_pages(mmap.mmap(-1, count))  # memory of its own, so that no other pages are locked


def lock_pages(mapping: mmap.mmap) -> Tensor:
    """Lock the pages of mapped host memory for copies from and to this rank's GPU, of at least one byte, and return
    it (uint8 [bytes]); they are unlocked when no tensor uses it any longer. Raises RuntimeError if CUDA cannot lock
    them."""
    array = np.frombuffer(mapping, dtype=np.uint8)
    address = array.ctypes.data
    with PROGRESS.mark_preparing("lock pages"):  # 10 s for tens of GB
        error = int(torch.cuda.cudart().cudaHostRegister(address, len(array), _PORTABLE))
    if error:
        raise RuntimeError(f"{len(array)} bytes of host memory cannot be page-locked: CUDA error {error}")
    weakref.finalize(array, _unlock_pages, address)  # runs before the memory is unmapped: the array refers to it
    return torch.from_numpy(array)


def _unlock_pages(address: int) -> None:
    """Release the page lock on this rank's host memory at `address`; ignore an error, as CUDA may be gone by now."""
    torch.cuda.cudart().cudaHostUnregister(address)
