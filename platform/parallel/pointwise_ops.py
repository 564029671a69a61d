"""The `Ops` of run time that compute element by element or row by row: pointwise functions, norms, dropout, residual
connections. What they compute between collectives is compiled where the run wants it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.parallel.compiled import region
from platform.parallel.kernels import random, residual, statistics
from platform.parallel.kernels.dropout import Draw, Drawing, dropout, dropped, in_pieces
from platform.parallel.loss_ops import LossOps
from platform.parallel.sharding.convert import absent
from platform.plan.language.functions import EPS
from platform.plan.language.ops import Spec


def gated_silu(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by SiLU of its gate (SwiGLU, Shazeer 2020)."""
    return F.silu(gate) * x


def gated_gelu(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by GELU of its gate (GEGLU, Shazeer 2020)."""
    return F.gelu(gate) * x


def gated_gelu_tanh(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by the tanh approximation of GELU of its gate (GEGLU in T5's second version)."""
    return F.gelu(gate, approximate="tanh") * x


def gated_relu(gate: Tensor, x: Tensor) -> Tensor:
    """Multiply x by ReLU of its gate (ReGLU, Shazeer 2020)."""
    return F.relu(gate) * x


POINTWISE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": lambda x: F.gelu(x),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": lambda x: F.relu(x),
    "silu": lambda x: F.silu(x),
    "tanh": lambda x: x.tanh(),
    "identity": lambda x: x,
    "absolute": lambda x: x.abs(),
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "gated_silu": gated_silu,
    "gated_gelu": gated_gelu,
    "gated_gelu_tanh": gated_gelu_tanh,
    "gated_relu": gated_relu,
}
_COMPILED = {f for f in POINTWISE_FUNCTIONS if f.startswith("gated_")}  # the others are one kernel as they are


def where_present(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a method of `ParallelOps` so that, where its first tensor argument is absent (an empty block: this rank has
    none), it computes nothing and returns an empty tensor that stays connected to the autograd graphs of all its tensor
    arguments."""

    @wraps(operation)
    def run(self, *arguments, **options):
        x, *others = (a for a in (*arguments, *options.values()) if isinstance(a, Tensor))
        return sum(others, x) if absent(x) else operation(self, *arguments, **options)

    return run


class PointwiseOps(LossOps):
    """Adds the pointwise and row-wise operations. `compiles`: they are compiled between their collectives, which are
    not."""

    compiles: bool
    _counters: dict[Spec, list[Tensor]]  # of the dropout masks of activations

    def _region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, compiled if this run compiles."""
        return region(function) if self.compiles else function

    def pointwise(self, function, *x):
        compute = POINTWISE_FUNCTIONS[function]
        return (self._region(compute) if function in _COMPILED and not absent(x[0]) else compute)(*x)

    @where_present
    def scale(self, x, spec, factor):
        return x * factor

    @where_present
    def pointwise_each(self, functions, x, spec, dim):
        i = spec.dims.index(dim)
        first, n = self._blocks[spec][i]
        mine = functions[first : first + n]
        return torch.stack([POINTWISE_FUNCTIONS[f](part) for f, part in zip(mine, x.unbind(i), strict=True)], i)

    @where_present
    def norm(self, x, spec, kind, gain, bias, eps=EPS):
        planned = self._planned("norm", gain.name)
        first, *second = self._converted(planned)
        vectors = first, second[0] if bias else None
        if self.compiles and kind == "rmsnorm" and not planned.over:  # LayerNorm is one kernel as it is
            return region(statistics.rms_norm)(x, first, eps)
        return statistics.norm(x, *vectors, kind, eps, self.communicator, planned.over)

    @where_present
    def dropout(self, name, x, spec):
        drawing = self._drawing(name, spec, x.device)
        draw: Draw = region(dropped) if self.compiles else in_pieces
        return dropout(x, drawing, draw) if drawing else x

    def residual(self, name, x, y, spec):
        drawing = None if absent(x) or not self.compiles else self._drawing(name, spec, x.device)
        return residual.residual(x, y, drawing, region) if drawing else super().residual(name, x, y, spec)

    def residual_norm(self, name, x, y, spec, kind, gain, bias, eps=EPS):
        planned = self._planned("norm", gain.name)
        if absent(x) or not self.compiles or planned.over:
            return super().residual_norm(name, x, y, spec, kind, gain, bias, eps)
        first, *second = self._converted(planned)
        drawing = self._drawing(name, spec, x.device)
        return residual.residual_norm(x, y, first, second[0] if bias else None, kind, eps, drawing, region)

    def _drawing(self, name: str, spec: Spec, device: torch.device) -> Drawing | None:
        """Return what the dropout mask of the operation `name` on this rank's block of `spec` is drawn from, at the
        present position in the run; None if nothing is dropped there."""
        p = self.position
        if not self.dropout_rate or not p.training:
            return None
        sizes = dict(zip(spec.dims, self.plan.global_shape(spec), strict=True))
        dims = sorted(spec.dims, key=lambda d: d != "batch")  # batch first: its size is unused
        strides = {d: prod(sizes[e] for e in dims[i + 1 :]) for i, d in enumerate(dims)}
        if spec not in self._counters:
            self._counters[spec] = random.counters(self._blocks[spec], [strides[d] for d in spec.dims], device)
        key = random.key(p.seed, "dropout", p.step, name)
        start = random.start(key, p.first_sequence * strides["batch"], device)
        return Drawing(self._counters[spec], start, self.dropout_rate)
