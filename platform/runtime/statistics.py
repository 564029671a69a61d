"""Norms, softmax and maxima over a dim that is split over ranks: only statistics are communicated, never the tensor
itself; and the gradients of parameters that kernels add up themselves (`compute_and_add_gradient`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.runtime.communicator import Communicator
from platform.runtime.flat_buffers import find_bucket_of_leaf


def widen_dtype(x: Tensor) -> Tensor:
    """Return x in the dtype of statistics, losses and rotations: fp32 if x is 16-bit, else unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def cap_softly(x: Tensor, cap: float) -> Tensor:
    """Return scores or logits x, each replaced in place by cap * tanh(x / cap); as they are where `cap` is 0."""
    return x.div_(cap).tanh_().mul_(cap) if cap else x


def slope_of_cap(capped: Tensor, cap: float) -> Tensor:
    """Return the derivatives of a soft cap in place of its results `capped`."""
    return capped.div_(cap).square_().neg_().add_(1)


def _sum_over_ranks(communicator: Communicator, x: Tensor, over: Sequence[str]) -> Tensor:
    """Return the all-reduced sum of x over the ranks along the axes `over`; x may be overwritten."""
    if not over:
        return x
    return communicator.launch("all_reduce", x, over, owned=True).wait()


def max_over_ranks(communicator: Communicator, x: Tensor, over: Sequence[str]) -> Tensor:
    """Return the all-reduced maximum of x over the ranks along the axes `over`; x may be overwritten."""
    if not over:
        return x
    return communicator.launch("all_reduce", x, over, reduce="max", owned=True).wait()


class _SplitNorm(torch.autograd.Function):
    """LayerNorm or RMSNorm over the last dim of local blocks [..., d], which is split over the axes `over`.

    LayerNorm's statistics merge as (count, mean, M2) (Chan, Golub, LeVeque 1979): one all-gather, no cancellation.
    """

    @staticmethod
    def forward(ctx, x, gain, bias, kind, eps, communicator, over, widths):
        """Return the LayerNorm or RMSNorm of x over its last dim, split over the axes `over` into these `widths`,
        merging statistics only."""
        wide = widen_dtype(x)
        n, size = len(widths), sum(widths)
        if kind == "layernorm":
            mean = wide.mean(-1, keepdim=True)
            m2 = (wide - mean).square().sum(-1, keepdim=True)
            parts = communicator.launch("all_gather", torch.stack((mean, m2)), over).wait().unflatten(0, (n, 2))
            means, m2s = parts.unbind(1)
            each: Tensor | int = x.shape[-1]
            if len(set(widths)) > 1:
                each = torch.tensor(widths, dtype=means.dtype, device=means.device).view(n, *[1] * (means.dim() - 1))
                mean = (means * each).sum(0) / size
            else:
                mean = means.mean(0)
            variance = (m2s.sum(0) + (each * (means - mean).square()).sum(0)) / size
        else:
            variance, mean = _sum_over_ranks(communicator, wide.square().sum(-1, keepdim=True), over) / size, None
        rstd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, mean, rstd, gain)
        ctx.options = communicator, over, size, bias is not None
        out = _normalise_rows(wide, mean, rstd) * gain
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        """Return the gradients of x, gain and bias, summing two statistics over the ranks."""
        x, mean, rstd, gain = ctx.saved_tensors
        communicator, over, size, has_bias = ctx.options
        dy, normal = widen_dtype(dy), _normalise_rows(widen_dtype(x), mean, rstd)
        scaled = dy * gain
        sums = [(scaled * normal).sum(-1, keepdim=True)]
        if mean is not None:
            sums.append(scaled.sum(-1, keepdim=True))
        coming = communicator.launch("all_reduce", torch.stack(sums), over, owned=True)
        dgain = (dy * normal).flatten(0, -2).sum(0)
        dbias = dy.flatten(0, -2).sum(0) if has_bias else None
        sums = coming.wait() / size
        dx = scaled - normal * sums[0]
        if mean is not None:
            dx -= sums[1]
        return (dx * rstd).to(x.dtype), dgain.to(gain.dtype), dbias, None, None, None, None, None


def _normalise_rows(wide: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """Return rows, in the type of statistics, less their `mean`, if there is one, times `rstd`, 1 / deviation."""
    return (wide if mean is None else wide - mean) * rstd


def apply_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the dims of the gain, which are whole, to x [..., d_model]."""
    if gain.dtype != x.dtype:
        return F.rms_norm(widen_dtype(x), gain.shape, gain, eps).to(x.dtype)
    return F.rms_norm(x, gain.shape, gain, eps)


def centre_gain(gain: Tensor) -> Tensor:
    """Return what an rmsnorm_centred multiplies by: 1 + its gain, in the type of statistics."""
    return 1 + widen_dtype(gain)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm over the dims of the gain, the last of x, which are whole. Both sums of the gradient are products of one
    matrix, gradient times x, with a vector. torch's own is not fused on a CPU: it takes 2 to 3 times as long there, and
    of 16 bits keeps two tensors of 32."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        """Return the RMSNorm of x, keeping x and one number a row."""
        over, wide = tuple(range(-gain.dim(), 0)), widen_dtype(x)
        length = torch.linalg.vector_norm(wide, dim=over, keepdim=True)
        rstd = torch.rsqrt(length.square() / gain.numel() + eps)
        ctx.save_for_backward(x, gain, rstd)
        # nothing in place, since torch derives its own gradient where a block is traced
        return (wide * rstd * gain).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of x and of the gain."""
        x, gain, rstd = ctx.saved_tensors
        dtype, of_gain, x, gradient, gain = x.dtype, gain.dtype, *map(widen_dtype, (x, gradient, gain))
        products = (gradient * x).reshape(-1, gain.numel())
        dgain = (rstd.reshape(1, -1) @ products).view(gain.shape)
        along = (products @ gain.reshape(-1)).view(rstd.shape).mul_(rstd.pow(3).div_(-gain.numel()))
        return (gradient * gain).mul_(rstd).addcmul_(x, along).to(dtype), dgain.to(of_gain), None


class _LayerNorm(torch.autograd.Function):
    """LayerNorm over the dims of the gain, the last of x, in the type of statistics. torch's own adds up gradients of
    gain and bias in 16 bits on a CPU: over 8,192 rows they lose half of their sums."""

    @staticmethod
    def forward(ctx, x, gain, bias, eps):
        """Return the LayerNorm of x, keeping x and two numbers a row."""
        wide_bias = None if bias is None else widen_dtype(bias)
        out, mean, rstd = torch.native_layer_norm(widen_dtype(x), gain.shape, widen_dtype(gain), wide_bias, eps)
        ctx.save_for_backward(x, gain, bias, mean, rstd)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of x, gain and bias."""
        x, gain, bias, mean, rstd = ctx.saved_tensors
        wide = [v if v is None else widen_dtype(v) for v in (gradient, x, gain, bias)]
        of = torch.ops.aten.native_layer_norm_backward(
            *wide[:2], gain.shape, mean, rstd, *wide[2:], [True, True, bias is not None]
        )
        return *(v if g is None else g.to(v.dtype) for g, v in zip(of, (x, gain, bias), strict=True)), None


class _UnitRows(torch.autograd.Function):
    """Rows of x over the roots of their mean squares, of which x and one number a row are kept, as by `_RmsNorm`."""

    @staticmethod
    def forward(ctx, x, eps):
        """Return the rows of x [..., d] over their root mean squares."""
        wide = widen_dtype(x)
        rstd = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, rstd)
        return (wide * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of x."""
        x, rstd = ctx.saved_tensors
        dtype, x, gradient = x.dtype, *map(widen_dtype, (x, gradient))
        along = (gradient * x).mean(-1, keepdim=True) * rstd.pow(3)
        return (gradient * rstd).addcmul_(x, along, value=-1).to(dtype), None


def normalise_rows(x: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm without a gain over the last dim of x, which is whole; `eps` is added to the mean square."""
    return _UnitRows.apply(x, eps) if x.device.type == "cpu" else F.rms_norm(x, x.shape[-1:], None, eps)


def apply_norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor | None,
    kind: str,
    eps: float,
    communicator: Communicator,
    over: Sequence[str],
    widths: Sequence[int] = (),
) -> Tensor:
    """Apply LayerNorm or RMSNorm (`kind`: layernorm, rmsnorm) over the dims of the gain, which are split over the axes
    `over` (none: whole) into these `widths`: x [..., d_model], gain and bias [d_model], all local blocks; `eps` is
    added to the variance. Only statistics are communicated."""
    if over:
        vectors = [None if v is None else v.flatten() for v in (gain, bias)]
        rows = x.flatten(x.dim() - gain.dim())
        return _SplitNorm.apply(rows, *vectors, kind, eps, communicator, over, widths).view(x.shape)
    if kind == "layernorm":
        is_wide = x.device.type != "cpu" or x.dtype.itemsize > 2
        return F.layer_norm(x, gain.shape, gain, bias, eps) if is_wide else _LayerNorm.apply(x, gain, bias, eps)
    if x.device.type == "cpu" and gain.dtype in (x.dtype, torch.float32 if x.dtype.itemsize == 2 else x.dtype):
        return _RmsNorm.apply(x, gain, eps)
    return apply_rms_norm(x, gain, eps)


class _Softmax(torch.autograd.Function):
    """Softmax over the dim at `position`, split over the axes `over`, with one score more in each sum, `sink`, which
    broadcasts against x, or None; its gradient is the part that comes from this rank's block of x."""

    @staticmethod
    def forward(ctx, x, sink, position, communicator, over):
        """Return the softmax of x over a split dim, 0 for rows of -inf, merging maxima and sums over the ranks."""
        top = max_over_ranks(communicator, widen_dtype(x.amax(position, keepdim=True)), over)
        if sink is not None:
            top = torch.maximum(top, widen_dtype(sink))
        e = torch.exp(widen_dtype(x) - top.clamp(min=torch.finfo(top.dtype).min))
        total, share = _sum_over_ranks(communicator, e.sum(position, keepdim=True), over), None
        if sink is not None:
            share = torch.exp(widen_dtype(sink) - top)
            total = total + share
            share /= total
        p = (e / total.clamp(min=1)).to(x.dtype)  # the greatest score adds 1 to a sum that has any
        ctx.save_for_backward(p, share)
        ctx.options = position, communicator, over, sink is not None and (sink.shape, sink.dtype)
        return p

    @staticmethod
    def backward(ctx, dp):
        """Return the gradients of x and of the sink, summing one statistic over the ranks."""
        p, share = ctx.saved_tensors
        position, communicator, over, of_sink = ctx.options
        inner, dsink = widen_dtype(dp * p).sum(position, keepdim=True), None
        if of_sink:
            shape, dtype = of_sink
            dsink = (share * inner).sum_to_size(shape).neg_().to(dtype)
        inner = _sum_over_ranks(communicator, inner, over)
        return p * (dp - inner.to(dp.dtype)), dsink, None, None, None


def softmax(
    x: Tensor, dim: int, communicator: Communicator, over: Sequence[str], sink: Tensor | None = None, *, blank: bool
) -> Tensor:
    """Compute softmax of the local block x over its dim at `dim`, split over the axes `over`, beside a `sink`."""
    if over or sink is not None or blank:  # torch's own makes NaN of rows that are blank, -inf alone
        return _Softmax.apply(x, sink, dim, communicator, over)
    return torch.softmax(x, dim)


class _SplitMaximum(torch.autograd.Function):
    """Maximum over dims that are split over the axes `over`; equal maxima share the gradient, as in torch.amax."""

    @staticmethod
    def forward(ctx, x, positions, communicator, over):
        """Return the maximum of x over split dims, and save each element's share in it."""
        wide = widen_dtype(x)
        top = max_over_ranks(communicator, wide.amax(positions, keepdim=True), over)
        share = (wide == top).to(wide.dtype)
        share /= _sum_over_ranks(communicator, share.sum(positions, keepdim=True), over)
        ctx.save_for_backward(share)
        ctx.positions = positions
        return top.squeeze(positions).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of x: to the elements that are the maximum, in equal shares."""
        (share,) = ctx.saved_tensors
        for position in sorted(ctx.positions):
            gradient = gradient.unsqueeze(position)
        return (share * gradient).to(gradient.dtype), None, None, None


def max_over_dims(x: Tensor, positions: Sequence[int], communicator: Communicator, over: Sequence[str]) -> Tensor:
    """Compute the maximum of the local block x over the dims at `positions`, which are split over the axes `over`
    (none: whole) and vanish; every rank along these axes gets it."""
    positions = tuple(positions)
    return _SplitMaximum.apply(x, positions, communicator, over) if over else x.amax(positions)


# Gradients of autograd leaves that kernels compute themselves: added where they stay, in the matrix product if it can,
# with no temporary of the parameter's size and no further pass over it. Autograd then gets None.

# (memory, True if what is there does not count) -> the gradient, in that memory; (None, ...) -> in new memory
Compute = Callable[[Tensor | None, bool], Tensor]


def can_accumulate(w: Tensor | None) -> bool:
    """Return True if a kernel may add the gradient of the tensor w itself: an autograd leaf, outside of tracing."""
    return w is not None and w.requires_grad and w.is_leaf and not torch.compiler.is_compiling()


def compute_and_add_gradient(w: Tensor, compute: Compute) -> None:
    """Compute a gradient of the parameter w, an autograd leaf, and add it to the sum of its gradients in w's bucket,
    else in `w.grad`; a frozen one has none. `compute(memory, fresh)` adds the gradient to `memory`, overwrites it if
    `fresh`, or returns it in new memory if `memory` is None."""
    if not w.requires_grad:
        return
    if home := find_bucket_of_leaf(w):
        bucket, name = home
        if bucket.here:
            memory, fresh = bucket.gradient_memory(name)
            compute(memory.view(w.shape), fresh)
            bucket.note_added_gradients(name)
    elif w.grad is None:
        w.grad = torch.empty_like(w, requires_grad=False).copy_(compute(None, True))
    else:
        compute(w.grad, False)


def add_local_gradient_sum(w: Tensor, compute_total: Callable[..., Tensor]) -> None:
    """Add to the leaf w's gradient, unless it is frozen, a small tensor that `total(dtype=...)` computes, such as a
    bias's row sum."""
    if not w.requires_grad:
        return
    if home := find_bucket_of_leaf(w):
        bucket, name = home
        if bucket.here:
            bucket.add_gradient(name, compute_total(dtype=bucket.adds_in))
    else:
        w.grad = compute_total(dtype=w.dtype) if w.grad is None else w.grad.add_(compute_total(dtype=w.dtype))


def add_gradient(w: Tensor, gradient: Tensor) -> None:
    """Add `gradient`, which may be a view of other memory, to the sum of the gradients of the autograd leaf w."""

    def write_gradient(into: Tensor | None, fresh: bool) -> Tensor:
        """Add the gradient to the memory `into`, or overwrite it if `fresh`; return it as it is without `into`."""
        return gradient if into is None else into.copy_(gradient) if fresh else into.add_(gradient)

    compute_and_add_gradient(w, write_gradient)


AddPart = Callable[[Callable[[Tensor, bool], None]], None]


@contextmanager
def open_gradient_adder(w: Tensor) -> Iterator[AddPart]:
    """Yield a function that adds a part of one gradient of the parameter w, an autograd leaf, as `compute(memory,
    fresh)` of `compute_and_add_gradient` does; the gradient counts as computed when the context ends."""
    if not w.requires_grad:
        yield lambda compute: None
        return
    home = find_bucket_of_leaf(w)
    memory, fresh = home[0].gradient_memory(home[1]) if home else (w.grad, False)
    if memory is None:
        memory, fresh = torch.empty_like(w, requires_grad=False), True
    memory = memory.view(w.shape)

    def add_part(compute: Callable[[Tensor, bool], None]) -> None:
        """Add the part of the gradient that `compute` computes."""
        nonlocal fresh
        compute(memory, fresh)
        fresh = False

    yield add_part
    if home:
        home[0].note_added_gradients(home[1])
    else:
        w.grad = memory
