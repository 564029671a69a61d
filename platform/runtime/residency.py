"""Residency of parameters that are gathered from shards: under ZeRO-3 whole from shortly before a span of the model
runs, in either direction, until it has run; under ZeRO-1 and 2 from the first span after an update that reads them.

`Operands` converts the operands of planned einsums where they are used, or ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from platform.plan.gather_order import ParameterPrefetcher, Use
from platform.plan.operation_plan import EinsumGroup
from platform.runtime.communicator import Communicator
from platform.runtime.conversion import PendingConversion, convert
from platform.runtime.flat_buffers import FlatBucket


class ResidentSpan(NamedTuple):
    """Span of a chunk's forward pass: its name, "" if it has no parameters, and the buckets that it needs."""

    name: str
    buckets: Sequence[FlatBucket]


Spans = Sequence[ResidentSpan]  # of one chunk


class _SpanBorder(torch.autograd.Function):
    """Identity on an activation between two spans; its backward pass calls `back` before the gradient goes on."""

    @staticmethod
    def forward(ctx, x: Tensor, back: Callable[[], None]) -> Tensor:
        """Return the activation x unchanged, at a border between spans of the model; backward calls `back` there."""
        ctx.back = back
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient unchanged, once the parameters of the span before the border have been gathered."""
        ctx.back()
        return gradient, None


class ParameterResidency:
    """Gathers the buckets of the span under way and, if `ahead`, starts gathering the next span's, forward and
    backward. `spans`: spans by chunk number; `turns`: the buckets of the last span of a forward pass stay for the
    backward pass. The clock of `communicator` notes when each span computes.

    `frees`: False where parameters stay once they are there (ZeRO-1 and 2): a span of the forward pass waits for those
    that an update has begun to gather. `as_they_are`: of passes without products in 8 bits, for which none is rounded.
    """

    def __init__(
        self,
        communicator: Communicator,
        spans: Mapping[int, Spans],
        *,
        frees_parameters: bool,
        keeps_last_span: bool,
        prefetches: bool,
        as_they_are: bool = False,
    ):
        """Prepare to gather the parameters of the model's `spans`, by pipeline chunk, each before its span runs."""
        self._communicator, self._spans, self._turns, self._ahead = communicator, spans, keeps_last_span, prefetches
        self._frees, self._as_they_are = frees_parameters, as_they_are
        self._chunk: Spans = ()
        self._at = 0
        self._whole: Sequence[FlatBucket] = ()
        self._turned = False

    def begin_pass(self, chunk: int) -> None:
        """Begin a forward pass of pipeline chunk number `chunk`: gather the parameters of its first span (ZeRO-3)."""
        self.end_pass()
        self._chunk, self._at = self._spans[chunk], 0
        self._move_to_span(self._chunk, 0, 1)

    def run_block(self, function: Callable[..., Any], x: Tensor) -> Any:
        """Run a block of the model on the activation x, its parameters gathered before and freed after it (ZeRO-3)."""
        outputs = function(self._enter_span(x))
        return (self._enter_span(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else self._enter_span(outputs)

    def _enter_span(self, x: Tensor) -> Tensor:
        """Gather the next span's parameters; return the activation x with a border for the backward pass (ZeRO-3)."""
        spans, before = self._chunk, self._at
        self._at += 1
        self._move_to_span(spans, self._at, 1)
        return _SpanBorder.apply(x, lambda: self._move_to_span(spans, before, -1)) if self._frees else x

    def end_forward_pass(self, outputs: Mapping[str, Tensor]) -> None:
        """End a chunk's forward pass: free its gathered parameters (ZeRO-3), and have them gathered again when the
        backward pass reaches `outputs`, the chunk's output activations."""
        spans = self._chunk
        self._communicator.clock.begin_span("")
        differentiable = [x for x in outputs.values() if x.requires_grad and self._frees]
        if not (self._turns and differentiable):
            self.end_pass()
        self._turned = False

        def gather_last_span(_: Tensor) -> None:
            """Gather the last span's parameters again when the first output gradient of the chunk arrives."""
            if not self._turned:
                self._turned = True
                self._move_to_span(spans, len(spans) - 1, -1)

        for x in differentiable:
            x.register_hook(gather_last_span)

    def end_pass(self) -> None:
        """Free all gathered parameters at the end of a forward or backward pass (ZeRO-3); shards stay."""
        self._communicator.clock.begin_span("")
        for bucket in self._whole:
            bucket.release_parameters()
        self._whole, self._turned = (), False

    def _move_to_span(self, spans: Spans, at: int, way: int) -> None:
        """Gather the parameters of span number `at`, free the parameters of others (ZeRO-3), and start the all-gather
        for the next span that has any, forward (`way` 1) or backward (-1)."""
        clock, (name, buckets) = self._communicator.clock, spans[at]
        clock.begin_span("")
        for bucket in self._whole:
            if bucket not in buckets:
                bucket.release_parameters()
        self._whole = buckets
        for bucket in self._whole:
            bucket.prefetch_parameters(self._as_they_are)
        for bucket in self._whole:
            bucket.gather_parameters(self._as_they_are)
        onwards = spans[at + 1 :] if way > 0 else spans[:at][::-1]
        if self._ahead:
            for bucket in next((span.buckets for span in onwards if span.buckets), ()):
                bucket.prefetch_parameters(self._as_they_are)
        clock.begin_span(name and f"{'forward' if way > 0 else 'backward'} {name}")


class Operands(NamedTuple):
    """Conversions of the operands of one `group` of einsums. With `ahead`, they are parameters that `ahead` converts
    for the `use` of them."""

    communicator: Communicator
    group: EinsumGroup
    ahead: ParameterPrefetcher[PendingConversion] | None = None
    use: Use = ("", "", 0)

    def start_conversions(self, operands: Sequence[Tensor], in_backward: bool = False) -> list[PendingConversion]:
        """Start the gathers of an einsum group's operand tensors from the layouts in which they are `operands`, or
        return the conversions started ahead. `in_backward`: True in the backward pass, for which only operands that the
        plan gathers again are converted."""
        steps = [e.operand.forward if e.regathered or not in_backward else () for e in self.group.einsums]
        if self.ahead and any(steps):
            return self.ahead.take_parameters(self.use, in_backward)
        return [convert(self.communicator, w, s) for w, s in zip(operands, steps, strict=True)]

    def start_next_conversions(self, in_backward: bool = False) -> None:
        """Start gathering the parameters of the next group of einsums (of the backward pass if `in_backward`), which
        travel beside the product of this group, whose own have arrived."""
        if self.ahead:
            self.ahead.start_next_gathers(self.use, in_backward)
