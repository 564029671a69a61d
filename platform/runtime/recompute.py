"""Activations that do not stay on the device until the backward pass: computed again, or offloaded to host memory.

`run_recomputed` runs a stretch of the forward pass that saves only its arguments and runs again in the backward pass;
`keep_arguments` does so with a function of elements, `gated_silu` with SwiGLU.
`ActivationOffload` copies activations to host memory in a stream beside the computation, and back one block ahead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from platform.plan.operation_plan import OffloadedActivation
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import copy_own_part, gather_parts, is_absent_block
from platform.runtime.pinned_memory import allocate_pinned_bytes


class _Recomputed(torch.autograd.Function):
    """Autograd function behind `run_recomputed`. `restore()` is entered around the second forward pass and restores the
    position in the run, on which dropout masks depend.

    All ranks of a stage run the same backward pass in the same order, so they also issue the collectives of the second
    forward pass in the same order.
    """

    @staticmethod
    def forward(ctx, communicator, function, restore, axes, elements, offload, x, *more):
        """Return the activation function(x, *more) without its graph, saving the arguments: of x one part per rank,
        which with `offload` leaves for host memory while `function` is computed."""
        ctx.communicator, ctx.function, ctx.restore = communicator, function, restore
        ctx.axes, ctx.shape = axes, x.shape
        ctx.tensors = [i for i, other in enumerate(more) if other is not None]
        ctx.count = len(more)
        kept_part, other_arguments = copy_own_part(communicator, x, axes, elements), [more[i] for i in ctx.tensors]
        ctx.away = None
        if offload is None or is_absent_block(kept_part):
            ctx.save_for_backward(kept_part, *other_arguments)
            return function(x, *more)
        ctx.away, left = offload.offload_activation(kept_part)
        ctx.save_for_backward(*other_arguments)
        out = function(x, *more)
        left()
        return out

    @staticmethod
    def backward(ctx, *gradients):
        """Recompute the activations from their saved arguments, now with autograd; return the arguments' gradients."""
        saved = list(ctx.saved_tensors)
        part = ctx.away.take_back()() if ctx.away else saved.pop(0)
        other_arguments: list[Any] = [None] * ctx.count
        for i, other in zip(ctx.tensors, saved, strict=True):
            other_arguments[i] = other.detach().requires_grad_(ctx.needs_input_grad[7 + i])
        x = gather_parts(ctx.communicator, part, ctx.axes, ctx.shape).detach().requires_grad_(ctx.needs_input_grad[6])
        with torch.enable_grad(), ctx.restore():
            out = ctx.function(x, *other_arguments)
        torch.autograd.backward(out, gradients)
        return None, None, None, None, None, None, x.grad, *(a if a is None else a.grad for a in other_arguments)


def run_recomputed(
    communicator: Communicator,
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    restore: Callable[[], Any],
    axes: tuple[str, ...],
    elements: int,
    offload: ActivationOffload | None,
    x: Tensor,
    *more: Tensor | None,
) -> Any:
    """Return function(x, *more), an activation or several, saving only the arguments for the backward pass, which calls
    `function` again to recompute the tensors between.

    The ranks along `axes` hold equal x and save one part of so many `elements` each, gathered again in the backward
    pass; `more` is saved whole. `restore`: returns a context in which `function` computes the same as now (dropout
    masks included); `offload`: takes the saved part of x to host memory until then, if it is given.
    """
    return _Recomputed.apply(communicator, function, restore, axes, elements, offload, x, *more)


class _GatedSilu(torch.autograd.Function):
    """Autograd function of `gated_silu`."""

    @staticmethod
    def forward(ctx, gate, x):
        """Return x times SiLU of its gate."""
        ctx.save_for_backward(gate, x)
        return F.silu(gate) * x  # nothing in place, since torch derives its own gradient where a block is traced

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the gate and of x."""
        gate, x = ctx.saved_tensors
        of_gate, silu = gradient * x, torch.ops.aten.silu_backward
        if get_proxy_mode() is None:
            silu.grad_input(of_gate, gate, grad_input=of_gate)
        else:  # a traced block has no memory to write to
            of_gate = silu(of_gate, gate)
        return of_gate, F.silu(gate).mul_(gradient)


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by SiLU of its gate (SwiGLU, Shazeer 2020), keeping both alone for the backward pass."""
    return _GatedSilu.apply(gate, x)


class _KeepingArguments(torch.autograd.Function):
    """Autograd function of `keep_arguments`."""

    @staticmethod
    def forward(ctx, compute, *arguments):
        """Return the activation compute(*arguments), saving the arguments alone."""
        ctx.compute = compute
        ctx.save_for_backward(*arguments)
        return compute(*arguments)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the arguments, by a second forward pass of the function."""
        arguments = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.compute(*arguments)
        return None, *torch.autograd.grad(out, arguments, gradient)


def keep_arguments(compute: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Return the activation compute(*arguments), keeping its arguments alone for the backward pass."""
    return _KeepingArguments.apply(compute, *arguments)


class Rebuild(NamedTuple):
    """Way to make an activation again: `compute` of `tensors`, which are kept anyway."""

    compute: Callable[..., Tensor]
    tensors: Sequence[Tensor]


def note_rebuild(y: Tensor, compute: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """Return the activation y, noting on it that compute(*arguments) makes it again (`find_rebuild`)."""
    if torch.is_grad_enabled() and get_proxy_mode() is None:  # a block that is traced whole keeps what it likes
        y.rebuild = Rebuild(compute, [x.detach() for x in arguments])  # type: ignore[attr-defined]
    return y


def find_rebuild(x: Tensor) -> Rebuild | None:
    """Return the way to make the activation x again, if `note_rebuild` has noted one on it."""
    return getattr(x, "rebuild", None)


Arriving = Callable[[], Tensor]  # waits for an activation that is under way, and returns it


class ActivationOffload:
    """Activations of one rank in host memory. Memory there is used again, for activations of the same size.

    On a GPU the memory is page-locked, and all copies run in one stream, there and back: memory of the host that an
    activation has left is overwritten after that. An activation stays on the device until the block that reads it is
    computed (`offload_activation`), and one that comes back is allocated when all computation before it is queued: no
    allocator has to know of the other stream. On a CPU the copies are made as well, though they lessen nothing.
    """

    def __init__(self, device: torch.device):
        """Construct the offload of a rank whose activations are on `device`; nothing is allocated yet."""
        self._device, self._beside = device, device.type != "cpu"
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by bytes
        self._last: OffloadedActivation[Arriving] | None = None

    def begin_pass(self) -> None:
        """Begin a forward pass, whose activations come back in its own backward pass."""
        self._last = None

    def offload_activation(self, x: Tensor) -> tuple[OffloadedActivation[Arriving], Callable[[], None]]:
        """Start to copy the activation x to host memory; return it as it is away, and a function to call when its block
        is computed: work that is queued then may use the memory of x again."""
        host_bytes = self._take_host_bytes(x.numel() * x.element_size())
        host = host_bytes.view(x.dtype).view(x.shape)
        left = self._start_copy(host, x)
        self._last = OffloadedActivation(partial(self._start_copy_back, host, host_bytes), self._last)
        return self._last, left

    def _take_host_bytes(self, count: int) -> Tensor:
        """Return `count` bytes of host memory (uint8 [count]) in which no activation is."""
        if free_bytes := self._free[count]:
            return free_bytes.pop()
        return allocate_pinned_bytes(count) if self._beside else torch.empty(count, dtype=torch.uint8)

    def _start_copy_back(self, host: Tensor, host_bytes: Tensor) -> Arriving:
        """Start to copy an activation back from its place in host memory; `host_bytes`: the bytes of that place."""
        x = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        arrived = self._start_copy(x, host)
        self._free[len(host_bytes)].append(host_bytes)  # the next copy into it is queued behind this one

        def wait_for_activation() -> Tensor:
            """Return the activation that is copied back; work that is queued from now on may read it."""
            arrived()
            return x

        return wait_for_activation

    def _start_copy(self, to: Tensor, x: Tensor) -> Callable[[], None]:
        """Start to copy x, on one side, to a tensor on the other, after all that is queued by now; return a function
        after which the computation goes on behind the copy."""
        if not self._beside:
            to.copy_(x)
            return lambda: None
        stream = _copy_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            to.copy_(x, non_blocking=True)
        done = stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


@cache
def _copy_stream() -> torch.cuda.Stream:
    """Return this process's CUDA stream in which activations travel between device and host memory."""
    return torch.cuda.Stream()  # one for all passes: torch hands out 32 in turn, and groups have theirs
