"""What a worker holds: bytes of parameters, gradients and optimizer state, and what autograd saves for the backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

from platform.plan.chunks import Model
from platform.plan.layout import at_zero
from platform.plan.ops import Ops, Parameter, Spec
from platform.plan.plan import Plan
from platform.plan.planned import PlannedOperation
from platform.plan.rule import APPEAR, VANISH, Conversion, Step

Coordinates = Mapping[str, int]  # of a worker: mesh axis -> index


def weight_bytes(plan: Plan, moments: int, at: Coordinates | None = None) -> dict[str, int]:
    """Bytes of the worker at `at`, default: of one that has a block of every tensor of the first stage. The optimizer
    keeps `moments` numbers of the master's type per parameter."""
    at = at or plan.mesh.coordinates(0)
    stored, masters = plan.parameters_at(at), plan.masters_at(at)
    compute, master = plan.itemsize["compute"], plan.itemsize["master"]
    shared = compute == master and plan.sharded == plan.storage
    return {
        "parameters": masters * master + (0 if shared else stored * compute),
        "gradients": stored * master,
        "optimizer": masters * master * moments,
    }


@dataclass(frozen=True)
class Saved:
    """Elements of distinct tensors, per worker and microbatch: `activations`, and copies of parameters that were
    gathered for an operation (`gathered`)."""

    activations: int
    gathered: int

    @property
    def total(self) -> int:
        return self.activations + self.gathered


def saved_for_backward(plan: Plan, model: Model, dropout: float = 0.0, at: Coordinates | None = None) -> Saved:
    """What autograd saves in one forward pass of `model` under `plan`, beside the parameters themselves, on the worker
    at `at`, default: on one that has a block of every tensor of the first stage. Of several chunks it is the sum.

    It is what `platform.parallel.ops` and torch's CPU kernels keep in fp32 and fp64; index and mask tensors of integers
    and booleans do not count, nor do copies that torch.einsum makes of permuted operands.
    """
    at = at or plan.mesh.coordinates(0)
    meter, inputs = _Meter(plan, dropout, at), {name: name for name in model.inputs}
    for chunk in plan.at(at["stage"]).chunks:
        if chunk.units:
            flow = {name: meter._at(spec) for name, spec in chunk.receives}
            model.part(meter, inputs, flow, chunk.units)  # type: ignore[attr-defined]
        else:
            model.forward(meter, inputs)
    activations = sum(s.elements for s in meter.saved if not s.parameter)
    return Saved(activations, sum(s.elements for s in meter.saved if s.parameter))


_OF_RESULT = {"relu", "tanh"}  # functions that save what they give, not what they were given


@dataclass(frozen=True)
class _Storage:
    """Memory under one or more tensors. `parameter`: a copy of one, gathered."""

    number: int
    elements: int
    parameter: bool = False


class _Meter(Ops):
    """Runs a model's forward on storages: which ones does each operation create, and which does it save?

    None stands for a parameter in place, which is not counted. A storage without elements stands for an absent block,
    which operations hand on.
    """

    def __init__(self, plan: Plan, dropout: float, at: Coordinates):
        self.plan, self.dropout_rate, self.recompute, self.at = plan, dropout, plan.recompute, at
        self.saved: dict[_Storage, None] = {}
        self._numbers = count()

    def _new(self, elements: int, parameter: bool = False) -> _Storage:
        return _Storage(next(self._numbers), elements, parameter)

    def recomputed(self, kind, function, spec, x, *more):
        if kind != self.recompute.kind:
            return function(x, *more)
        before = dict(self.saved)
        out = function(x, *more)
        self.saved = before
        axes = self.plan.kept_axes(spec)
        self._save(self._new(self.plan.shared_elements(spec, axes)) if axes else x, *more)
        return out

    def _at(self, spec: Spec) -> _Storage:
        """A new local block of an activation."""
        return self._new(prod(self.plan.local_shape(spec)) if self.plan.present(spec, self.at) else 0)

    def _save(self, *storages: _Storage | None) -> None:
        self.saved.update((s, None) for s in storages if s)

    def _planned(self, kind: str, name: str) -> PlannedOperation:
        return self.plan.operations[kind, name]

    def _convert(self, x: _Storage | None, shape: Sequence[int], steps: Sequence[Step], parameter: bool = False) -> Any:
        """A slice is a view of the same memory, and so is a block without its padding; a collective writes anew, but a
        broadcast does not where it starts."""
        elements = prod(shape)
        for step in steps:
            n, index = self.plan.mesh.extent(step.axes), self.plan.mesh.index(self.at, step.axes)
            if step.op in ("all_gather", "gather", "pad"):
                elements *= n
            elif step.op in ("slice", "reduce_scatter"):
                elements //= n
            elif step.op in APPEAR or step.op == "unflatten":
                elements = prod(step.shape)
            if not at_zero(step.only, self.at):
                continue
            if step.op in VANISH and index:
                x = self._new(0, parameter)
            elif step.op not in ("slice", "drop", "unflatten") and (step.op != "broadcast" or index):
                x = self._new(elements, parameter)
        return x

    def _parameter(self, p: Parameter, conversion: Conversion) -> _Storage | None:
        return self._convert(None, self.plan.stored_shape(p), conversion.forward, parameter=True)

    def lookup(self, name, table, tokens, out):
        planned = self._planned("lookup", name)
        leave = planned.conversions[1]
        sizes = self.plan.planner.sizes_of(out)
        rows = [sizes[d] // self.plan.mesh.extent(planned.tokens[d]) for d in ("length", "batch")]
        if planned.over:
            self._save(self._new(prod(rows)))  # which rows are this rank's
        return self._leave(planned, out, leave)

    def _leave(self, planned: PlannedOperation, out: Spec, leave: Conversion, x: _Storage | None = None) -> Any:
        """The result of an operation, converted; before, `x` or a new storage as wide as the steps say."""
        elements = self._inner(planned, out, leave)
        return self._convert(x or self._new(elements), (elements,), leave.forward)

    def _inner(self, planned: PlannedOperation, out: Spec, leave: Conversion) -> int:
        """Elements of an operation's local result, which is wider than its layout where it is split on leaving."""
        splits = (s.axes for s in leave.forward if s.op in ("slice", "reduce_scatter"))
        there = at_zero(planned.only, self.at)
        return there * prod(self.plan.local_shape(out)) * prod(self.plan.mesh.extent(axes) for axes in splits)

    def features(self, name, ids, out):
        return self._at(out)

    def one_hot(self, name, ids, out):
        return self._at(out)

    def project(self, x, spec, weights, outs, biases=()):
        planned = self._planned("project", weights[0].name)
        shapes = [self.plan.stored_shape(w) for w in weights]
        results = self._einsums(planned, x, spec, [None] * len(weights), shapes, outs, parameters=True)
        return tuple(self._at(out) for out in outs) if biases and planned.collectives else results

    def einsum(self, name, x, x_spec, y, y_spec, out):
        planned = self._planned("einsum", name)
        return self._einsums(planned, x, x_spec, [y], [self.plan.local_shape(y_spec)], [out], parameters=False)[0]

    def _einsums(self, planned, x, spec, operands, shapes, outs, *, parameters):
        for group in planned.groups:
            self._save(x if group.again else self._convert(x, self.plan.local_shape(spec), group.x.forward))
            for m in group.members:
                operand = operands[m.index]
                if not m.again:
                    operand = self._convert(operand, shapes[m.index], m.operand.forward, parameters)
                self._save(operand)
        return tuple(self._at(out) for out in outs)

    def reduce(self, name, function, x, spec, out):
        planned = self._planned("reduce", name)
        into, leave = planned.conversions
        x = self._convert(x, self.plan.local_shape(spec), into.forward)
        y = self._new(self._inner(planned, out, leave))
        if function == "max":
            self._save(*([self._new(x.elements)] if planned.over else [x, y]))  # shares of the gradient; or both ends
        return self._leave(planned, out, leave, y)

    def concatenate(self, name, x, specs, out, dim):
        planned = self._planned("concatenate", name)
        return self._leave(planned, out, planned.conversions[-1])

    def reshape(self, name, x, spec, out):
        for conversion in self._planned("reshape", name).conversions:
            x = self._convert(x, (x.elements,), conversion.forward)
        return x

    def shift(self, x, spec, parameter):
        return self._at(spec)

    def norm(self, x, spec, kind, gain, bias):
        if not x.elements:
            return x
        planned = self._planned("norm", gain.name)
        vectors = [self._parameter(p, c) for p, c in zip((gain, bias), planned.conversions, strict=False)]
        elements = prod(self.plan.local_shape(spec))
        rows = elements // self.plan.local_shape(spec)[-1]
        if planned.over:
            self._save(self._new(elements), self._new(rows), vectors[0])  # normal, rstd, gain
        elif kind == "layernorm":
            self._save(x, self._new(2 * rows), *vectors)  # mean and rstd
        else:
            self._save(x, self._new(elements), self._new(rows), vectors[0])  # normal, rstd, gain
        return self._new(elements)

    def rotate(self, name, x, spec, theta):
        if not x.elements:
            return x
        into, leave = self._planned("rotate", name).conversions
        length = self.plan.local_shape(spec)[spec.dims.index("length")]
        self._save(self._new(length * self.plan.sizes["d_kv"]))  # cosines and sines of d_kv / 2 angles each
        whole = prod(self.plan.local_shape(spec)) * prod(self.plan.mesh.extent(s.axes) for s in into.forward)
        return self._convert(self._new(whole), (whole,), leave.forward)

    def sinusoid(self, name, x, spec, scale):
        return self._at(spec)

    def relative_bias(self, table, scores, *, bidirectional, distance):
        return self._new(prod(self.plan.local_shape(scores)) // self.plan.local_shape(scores)[0])

    def expand_kv(self, name, x, spec, out):
        return self._at(out)

    def softmax(self, name, x, spec, *, dim="memory_length", scale=1.0, causal=False, mask=None, bias=None):
        out = self._at(spec)
        self._save(out)
        return out

    def fused_attention(self, name, q, k, v, spec, kv, *, scale, causal, mask=None, bias=None):
        out = self._at(spec)
        if not out.elements:
            return out
        query, key = (dict(zip(s.dims, self.plan.local_shape(s), strict=True)) for s in (spec, kv))
        rows = out.elements // query["d_kv"]
        if bias is not None:  # no kernel gives a gradient to a bias: torch computes the probabilities
            scaled = self._new(prod(query.values())), self._new(prod(key.values()))
            self._save(*scaled, v, self._new(rows * key["length"]))
            return out
        self._save(q, k, v, out, self._new(rows))  # and the log of each row's sum
        if mask is not None:  # as numbers that are added to the scores
            self._save(self._new(key["batch"] * key["length"] * (query["length"] if causal else 1)))
        return out

    def can_fuse_attention(self, spec):
        return self.plan.scheme.fuses_attention(spec.region)

    def relayout(self, name, x, spec, out):
        if spec == out:
            return x
        (conversion,) = self._planned("relayout", name).conversions
        return self._convert(x, self.plan.local_shape(spec), conversion.forward)

    def pointwise(self, function, *x):
        if function == "identity":
            return x[0]
        out = self._new(min(s.elements for s in x))  # the memory under a view may be larger than the view
        self._save(*{"add": ()}.get(function, (out,) if function in _OF_RESULT else x))
        return out

    def pointwise_each(self, functions, x, spec, dim):
        """Of the rank whose functions keep most, where they differ."""
        if not x.elements:
            return x
        shape = dict(zip(spec.dims, self.plan.local_shape(spec), strict=True))
        n, slices = shape[dim], range(0, len(functions), shape[dim])
        most = max(sum(f in _OF_RESULT for f in functions[i : i + n]) for i in slices)
        if set(functions) - _OF_RESULT - {"identity"}:
            self._save(x)
        for _ in range(most):
            self._save(self._new(prod(shape.values()) // n))
        return self._at(spec)

    def dropout(self, name, x, spec):
        if not self.dropout_rate:
            return x
        out = self._at(spec)
        self._save(self._new(out.elements))  # the mask, scaled
        return out

    def cross_entropy(self, name, logits, spec, labels, smoothing=0.0):
        if not logits.elements:
            return
        planned = self._planned("cross_entropy", name)
        *rows, columns = self.plan.local_shape(spec)
        if planned.over:
            self._save(self._new(prod(rows) * columns))  # probabilities
        else:
            self._save(self._new(prod(rows) * self.plan.sizes["vocab"]), self._new(1))  # log-probabilities; the divisor

    def squared_error(self, name, y, target, spec, ids):
        self._save(self._at(spec))
