"""Choice of the kernel in which torch computes attention, as the plan names it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from platform.plan.language.attention_kernels import AUTO

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CHOOSING = Lock()  # the choice is the process's, of which ranks may be threads


def in_kernel(name: str) -> AbstractContextManager[None]:
    """Return a context in which torch's scaled_dot_product_attention runs in the kernel `name` (flash, cudnn,
    efficient, math), or raises RuntimeError if that kernel cannot compute on its tensors; under `auto` torch chooses.
    The backward pass uses the kernel that ran forward."""
    return nullcontext() if name == AUTO else _alone(_BACKENDS[name])


@contextmanager
def _alone(backend: SDPBackend) -> Iterator[None]:
    """Restrict torch's scaled_dot_product_attention to one kernel within the context, one thread at a time."""
    with _CHOOSING, sdpa_kernel(backend):
        yield


def lacking(name: str, device: str, dtype: torch.dtype, d_kv: int, d_value: int = 0) -> str:
    """Return the reason, in a line, why this process cannot compute attention with heads of width `d_kv` in the kernel
    `name` on `device`; "" if it can. A tiny attention is computed and differentiated to find out. `d_value`: the width
    of values; 0 = d_kv."""
    if name == AUTO:
        return ""
    x, v = (torch.zeros(1, 1, 8, n, dtype=dtype, device=device, requires_grad=True) for n in (d_kv, d_value or d_kv))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with in_kernel(name):
                F.scaled_dot_product_attention(x, x, v, is_causal=True).sum().backward()
        except RuntimeError as error:
            reasons = [str(w.message).partition(" (Triggered")[0] for w in warned]  # per kernel, after its name
            named = [i + 1 for i, line in enumerate(reasons) if name in line.lower() and line.endswith("because:")]
            return next(iter(reasons[named[0] :] if named else []), str(error).partition("\n")[0])[:300]
    return ""
