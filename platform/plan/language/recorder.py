"""The recorder, which turns a model's forward pass into the list of its operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from platform.plan.language.attention_kernels import AUTO
from platform.plan.language.functions import EPS, LABEL_WEIGHTS, PLAIN, POINTWISE, LabelLoss
from platform.plan.language.mistakes import ModelMistake, check_specs
from platform.plan.language.ops import (
    NO_RECOMPUTATION,
    Operation,
    Ops,
    Parameter,
    Recompute,
    Spec,
    scores_of,
)
from platform.plan.language.scheme import Scheme


@dataclass(frozen=True)
class Symbol:
    """Stand-in for an activation while a model's forward pass is recorded; it carries only the type."""

    spec: Spec


@dataclass
class Recorder(Ops):
    """Records the operations of a model's forward pass as data, without computing anything; the scheme decides
    `fuses_attention`. A data tensor is represented by its name. `loss`: what cross-entropy is in training."""

    scheme: Scheme
    dropout_rate: float = 0.0
    recompute: Recompute = NO_RECOMPUTATION
    fused_dropout: bool = False
    attention_kernel: str = AUTO
    loss: LabelLoss = PLAIN
    operations: list[Operation] = field(default_factory=list)
    kept: list[Spec] = field(default_factory=list)  # type of x of every recomputed function
    sizes: Mapping[str, int] = field(default_factory=dict)  # dim -> size; {}: dims are not checked
    declared: Mapping[str, Parameter] = field(default_factory=dict)  # by name; {}: parameters are not checked
    span: int = 0  # stretch of the forward pass under way: odd in a block, even between blocks
    spans: list[int] = field(default_factory=list)  # by operation
    _names: set[tuple[str, str]] = field(default_factory=set)
    _recomputing: bool = False

    def recomputed(self, kind, function, spec, x, *more):
        if kind == "full":
            self.span += 1
            out = self._recomputed(kind, function, spec, x, *more)
            self.span += 1
            return out
        return self._recomputed(kind, function, spec, x, *more)

    def _recomputed(self, kind, function, spec, x, *more):
        """Record `function` as recomputed if activations of this `kind` are, as `recomputed` says."""
        if kind != self.recompute.kind:
            return function(x, *more)
        self._check(x, spec)
        self.kept.append(spec)
        self._recomputing = True
        out = function(x, *more)
        self._recomputing = False
        return out

    def _record(
        self,
        kind: str,
        name: str,
        x: Sequence,
        inputs: Sequence,
        outputs: Sequence[Spec],
        reads: Sequence[str | None] = (),
        **more: Any,
    ) -> Any:
        """Append an operation of a model to the list; return the symbol of its result, or a tuple of several. `x`: the
        activations, checked against the types with which `inputs` starts; `reads`: the data tensors that it reads,
        if not None; `more`: its attributes."""
        for activation, declared in zip(x, inputs, strict=False):
            self._check(activation, declared)
        self._judge(kind, name, inputs, outputs)
        attributes = tuple(sorted(more.items()))
        read = tuple(name for name in reads if name)
        operation = Operation(kind, name, tuple(inputs), tuple(outputs), attributes, read, self._recomputing)
        self.operations.append(operation)
        self.spans.append(self.span)
        symbols = tuple(Symbol(s) for s in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def _judge(self, kind: str, name: str, inputs: Sequence, outputs: Sequence[Spec]) -> None:
        """Refuse a recorded operation `kind` `name` of a model with ModelMistake if its inputs or outputs have an
        unknown region or dim, if a parameter is not declared or declared otherwise, or if an operation of the same kind
        already has the name."""
        if self.sizes:
            check_specs(f"{kind} {name}", [*inputs, *outputs], self.sizes)
        for p in (t for t in inputs if isinstance(t, Parameter)):
            if self.declared and self.declared.get(p.name) != p:
                known = "is declared otherwise" if p.name in self.declared else "is not declared"
                legal = self.declared if p.name not in self.declared else ()
                raise ModelMistake(p.name, f"a parameter that {known}, in {kind} {name}", legal)
        if (kind, name) in self._names:
            raise ModelMistake(name, f"several operations {kind} have this name")
        self._names.add((kind, name))

    def _check(self, x: Symbol, spec: Spec) -> None:
        """Raise ModelMistake if a model passes something other than an activation, or one of another type than the
        `spec` that it declares."""
        if not isinstance(x, Symbol):
            raise ModelMistake(type(x).__name__, f"what flows is what an operation returned, as {spec}")
        if x.spec != spec:
            raise ModelMistake(str(x.spec), f"the model passes it where it declares {spec}", [str(spec)])

    def lookup(self, name, table, tokens, out):
        return self._record("lookup", name, [], [table], [out], [tokens])

    def features(self, name, ids, out):
        return self._record("features", name, [], [], [out], [ids])

    def one_hot(self, name, ids, out):
        return self._record("one_hot", name, [], [], [out], [ids])

    def project(self, x, spec, weights, outs, biases=()):
        self._record("project", weights[0].name, [x], [spec, *weights], outs)
        for bias, out in zip(biases, outs, strict=bool(biases)):
            self.shift(Symbol(out), out, bias)
        return tuple(Symbol(s) for s in outs)

    def einsum(self, name, x, x_spec, y, y_spec, out):
        return self._record("einsum", name, [x, y], [x_spec, y_spec], [out])

    def reduce(self, name, function, x, spec, out):
        return self._record("reduce", name, [x], [spec], [out], function=function)

    def concatenate(self, name, x, specs, out, dim):
        if len(x) != len(specs):
            raise ModelMistake(name, f"concatenates {len(x)} activations of {len(specs)} declared types")
        return self._record("concatenate", name, x, specs, [out], dim=dim)

    def reshape(self, name, x, spec, out):
        return self._record("reshape", name, [x], [spec], [out])

    def shift(self, x, spec, parameter):
        return self._record("shift", parameter.name, [x], [spec, parameter], [spec])

    def norm(self, x, spec, kind, gain, bias, eps=EPS):
        parameters = [gain] if bias is None else [gain, bias]
        return self._record("norm", gain.name, [x], [spec, *parameters], [spec], norm=kind, eps=eps)

    def rotate(self, name, x, spec, theta, scaling=None):
        return self._record("rotate", name, [x], [spec], [spec], theta=theta, scaling=scaling)

    def sinusoid(self, name, x, spec, scale, positions=None):
        return self._record("sinusoid", name, [x], [spec], [spec], [positions], scale=scale)

    def relative_bias(self, table, scores, *, bidirectional, distance):
        more = {"bidirectional": bidirectional, "distance": distance}
        return self._record("relative_bias", table.name, [], [scores, table], [scores], **more)

    def expand_kv(self, name, x, spec, out, *, grouped=False):
        return self._record("expand_kv", name, [x], [spec], [out], grouped=grouped)

    def softmax(
        self,
        name,
        x,
        spec,
        *,
        dim="memory_length",
        scale=1.0,
        causal=False,
        window=0,
        mask=None,
        begins=None,
        bias=None,
    ):
        self._check(bias or x, spec)
        hides = self._hides(name, causal, window, mask, begins)
        return self._record("softmax", name, [x], [spec], [spec], [mask, begins], dim=dim, scale=scale, **hides)

    def fused_attention(self, name, q, k, v, spec, kv, *, scale, causal, window=0, mask=None, begins=None, bias=None):
        if bias:
            self._check(bias, scores_of(spec, kv))
        hides = self._hides(name, causal, window, mask, begins)
        more = {"scale": scale, "biased": bias is not None, "kernel": self.attention_kernel}
        specs = [spec, kv, kv]
        return self._record("fused_attention", name, [q, k, v], specs, [spec], [mask, begins], **more, **hides)

    def _hides(self, name: str, causal: bool, window: int, mask: str | None, begins: str | None) -> dict[str, Any]:
        """Return the attributes of an attention that say what hides its scores. Raises ModelMistake for a window or
        beginnings without causality, and for two data tensors."""
        if (window or begins) and not causal:
            raise ModelMistake(name, "a window, or where documents begin, hides what lies behind: with causal=True")
        if mask and begins:
            raise ModelMistake(name, "an attention reads one data tensor: a mask, or where documents begin")
        return {"causal": causal, "window": window, "begins": begins is not None}

    def fuses_attention(self, name, spec):
        return (self.fused_dropout or not self.dropout_rate) and self.scheme.fuses_attention(spec.region)

    def relayout(self, name, x, spec, out):
        if spec == out:
            self._check(x, spec)
            return x
        return self._record("relayout", name, [x], [spec], [out])

    def pointwise(self, function, *x):
        self._check_word(function, len(x))
        for other in x[1:]:
            self._check(other, x[0].spec)
        return x[0]

    def scale(self, x, spec, factor):
        self._check(x, spec)
        return x

    def pointwise_each(self, functions, x, spec, dim):
        for function in functions:
            self._check_word(function, 1)
        self._check(x, spec)
        return x

    def _check_word(self, function: str, arguments: int) -> None:
        if function not in POINTWISE:
            raise ModelMistake(function, "no such pointwise function", POINTWISE)
        if POINTWISE[function] != arguments:
            raise ModelMistake(function, f"takes {POINTWISE[function]} activations, not {arguments}")

    def dropout(self, name, x, spec):
        if not self.dropout_rate:
            self._check(x, spec)
            return x
        return self._record("dropout", name, [x], [spec], [spec])

    def cross_entropy(self, name, logits, spec, labels, smoothing=0.0):
        reads, more = [labels, LABEL_WEIGHTS if self.loss.weighted else None], {"loss": self.loss.name}
        return self._record("cross_entropy", name, [logits], [spec], [], reads, smoothing=smoothing, **more)

    def squared_error(self, name, y, target, spec, ids):
        self._check(target, spec)
        return self._record("squared_error", name, [y], [spec], [], [ids])
