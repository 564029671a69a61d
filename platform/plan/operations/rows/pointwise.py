"""Functions element by element. They are not recorded: nothing of them is planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from platform.plan.language.functions import POINTWISE
from platform.plan.language.mistakes import ModelMistake
from platform.plan.operations.op import BlockOp, Op

_OF_RESULT = {"relu", "tanh", "sigmoid"}  # functions that save their result, not their input


@cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    """Return torch's implementations of a model's pointwise functions (gelu, add, ...) by name."""
    import torch.nn.functional as F

    def gated_silu(gate, x):
        """Multiply x by SiLU of its gate (SwiGLU, Shazeer 2020)."""
        return F.silu(gate) * x

    def gated_gelu(gate, x):
        """Multiply x by GELU of its gate (GEGLU, Shazeer 2020)."""
        return F.gelu(gate) * x

    def gated_gelu_tanh(gate, x):
        """Multiply x by the tanh approximation of GELU of its gate (GEGLU in T5's second version)."""
        return F.gelu(gate, approximate="tanh") * x

    def gated_clamped(gate, x):
        """Multiply x + 1 by SiLU of 1.702 times its gate, over 1.702, both clamped at 7 (GPT-OSS, OpenAI 2025)."""
        return F.silu(1.702 * gate.clamp(max=7)) * ((x.clamp(-7, 7) + 1) / 1.702)

    def gated_relu(gate, x):
        """Multiply x by ReLU of its gate (ReGLU, Shazeer 2020)."""
        return F.relu(gate) * x

    return {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "tanh": lambda x: x.tanh(),
        "sigmoid": lambda x: x.sigmoid(),
        "identity": lambda x: x,
        "absolute": lambda x: x.abs(),
        "add": lambda x, y: x + y,
        "multiply": lambda x, y: x * y,
        "gated_silu": gated_silu,
        "gated_gelu": gated_gelu,
        "gated_gelu_tanh": gated_gelu_tanh,
        "gated_relu": gated_relu,
        "gated_clamped": gated_clamped,
    }


def function_of(ops, function: str) -> Callable[..., Any]:
    """Return a pointwise function as a rank computes it: a gated one compiled; the others are one kernel each."""
    compute = _functions()[function]
    return ops.region(compute) if function.startswith("gated_") else compute


class PointwiseOp(Op):
    """Pointwise function by name (gelu, gelu_tanh, relu, silu, tanh, identity, absolute, sigmoid; add, multiply, or
    gated_ and one of the first four or clamped, whose gate is first) of one or two activations that share a layout."""

    def record(self, ops, function, *x):
        _check(function, len(x))
        for other in x[1:]:
            ops.check(other, x[0].spec)
        ops.note(self.kind, function, x[0].spec)
        return x[0]

    def run(self, ops, function, *x):
        """Apply this pointwise function (gelu, add, ...) to this rank's blocks of its activations."""
        compute = _functions()[function]
        if x[0].dim() == 2:  # rows of experts: another number in every pass, and each would be compiled for itself
            return {"gated_silu": ops.kernels.gated_rows.gated_silu}.get(function, compute)(*x)
        return (compute if ops.absent(x[0]) else function_of(ops, function))(*x)

    def meter(self, ops, function, *x):
        """Count the bytes of a pointwise function's result; the result or the arguments are kept for the backward."""
        if function == "identity":
            return x[0]
        if function == "gated_clamped":
            gate, other = (ops.pointwise("silu", a) for a in x)  # clamped: the argument is kept, as by SiLU
            gate = ops.pointwise("silu", ops.plain(ops.tensor(gate.elements), [gate]))
            other = ops.plain(ops.tensor(other.elements), [other])
            return ops.pointwise("multiply", gate, ops.plain(ops.tensor(other.elements), [other]))
        if function.startswith("gated_"):
            return ops.pointwise("multiply", ops.pointwise(function.removeprefix("gated_"), x[0]), x[1])
        n = min(v.elements for v in x)
        out = ops.tensor(n)
        if function == "add":
            return ops.sum(out, x)
        return ops.plain(out, x, (out.storage,) if function in _OF_RESULT else tuple(v.storage for v in x))


class PointwiseEachOp(BlockOp):
    """Pointwise function `functions[i]` of slice i of x along `dim`, such as one per expert or branch."""

    def record(self, ops, functions, x, spec, dim):
        for function in functions:
            _check(function, 1)
        ops.check(x, spec)
        ops.note(self.kind, *functions, spec)
        return x

    def run(self, ops, found, functions, x, spec, dim):
        """Apply a pointwise function of its own to each slice along `dim` of this rank's block of x."""
        import torch

        i, known = spec.dims.index(dim), _functions()
        first, n = ops.blocks[spec][i]
        mine = functions[first : first + n]
        return torch.stack([known[f](part) for f, part in zip(mine, x.unbind(i), strict=True)], i)

    def meter(self, ops, found, functions, x, spec, dim):
        """Count the memory of pointwise functions per slice, as on the rank whose functions save most."""
        shape = dict(zip(spec.dims, ops.plan.local_shape(spec), strict=True))
        n, slices = shape[dim], range(0, len(functions), shape[dim])
        most = max(sum(f in _OF_RESULT for f in functions[i : i + n]) for i in slices)
        saved = [x.storage] if set(functions) - _OF_RESULT - {"identity"} else []
        saved += [ops.new(x.elements // n) for _ in range(most)]
        return ops.plain(ops.block(spec), [x], tuple(saved), x.elements)


class ScaleOp(BlockOp):
    """Activation x times `factor`, a number."""

    def record(self, ops, x, spec, factor):
        ops.check(x, spec)
        ops.note(self.kind, spec)
        return x

    def run(self, ops, found, x, spec, factor):
        """Multiply this rank's block of x by the number `factor`."""
        return x * factor

    def meter(self, ops, found, x, spec, factor):
        """Count the memory of x times a number, of which nothing is kept for the backward pass."""
        return ops.plain(ops.block(spec), [x])


def _check(function: str, arguments: int) -> None:
    """Raise ModelMistake for an unknown pointwise function, or one that takes another number of activations."""
    if function not in POINTWISE:
        raise ModelMistake(function, "no such pointwise function", POINTWISE)
    if POINTWISE[function] != arguments:
        raise ModelMistake(function, f"takes {POINTWISE[function]} activations, not {arguments}")
