"""The operations that a model is written in, and the recorder that turns a forward pass into a list of them.

A model's forward is written once against `Ops`. Run with `Recorder` it yields the operations with their dims, which
become part of the plan; run with `platform.parallel.ops.ParallelOps` it computes. The type of an activation is its
`Spec`: region and dims, from which a scheme gives its layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from platform.plan.scheme import Scheme


@dataclass(frozen=True)
class Spec:
    """The type of an activation: its region and its dims in memory order."""

    region: str
    dims: tuple[str, ...]

    @classmethod
    def of(cls, region: str, dims: str) -> Spec:
        return cls(region, tuple(dims.split()))

    def __str__(self) -> str:
        return f"{self.region}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class Parameter:
    """A parameter by its global name and dims.

    `role` picks the scheme's table: `in` contracts d_model, `out` produces it, `vector` is a norm, bias or position
    of d_model. `init` is zeros, ones or normal (with `std`). `decay`: weight decay applies.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    init: str = "normal"
    std: float = 0.0
    decay: bool = False


READERS = ("lookup", "features")  # kinds of operations that read the token ids
LOSSES = ("cross_entropy", "squared_error")  # kinds that read the labels and end the forward pass


@dataclass(frozen=True)
class Operation:
    """One operation of a recorded forward pass. `name` is unique within its kind."""

    kind: str
    name: str
    inputs: tuple[Spec | Parameter, ...]
    outputs: tuple[Spec, ...]
    attributes: tuple[tuple[str, Any], ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(t for t in self.inputs if isinstance(t, Parameter))

    def __getitem__(self, attribute: str) -> Any:
        return dict(self.attributes)[attribute]


class Ops(ABC):
    """The language of models. Tensors are opaque here: symbols in the recorder, plain local tensors at run time."""

    dropout_rate: float = 0.0

    @abstractmethod
    def lookup(self, table: Parameter, tokens: Any, out: Spec) -> Any:
        """Rows of `table` [vocab, ...] at `tokens` [length, batch]: an einsum with an unmaterialised one-hot."""

    @abstractmethod
    def features(self, name: str, ids: Any, out: Spec) -> Any:
        """Fixed standard normal features [length, batch, one dim] of the ids [length, batch]: random, not learned.

        They take a gradient, as if layers lay below."""

    @abstractmethod
    def project(
        self,
        x: Any,
        spec: Spec,
        weights: Sequence[Parameter],
        outs: Sequence[Spec],
        biases: Sequence[Parameter] = (),
    ) -> tuple[Any, ...]:
        """Einsums of one activation with several weights; those with one compute layout share one gather of x and one
        reduction of its gradient. `biases`, one per weight or none, are added once, in the output layout."""

    @abstractmethod
    def einsum(self, name: str, x: Any, x_spec: Spec, y: Any, y_spec: Spec, out: Spec) -> Any:
        """An einsum of two activations."""

    @abstractmethod
    def shift(self, x: Any, spec: Spec, parameter: Parameter) -> Any:
        """Adds a parameter (a bias, a position table), broadcast over the dims that it lacks."""

    @abstractmethod
    def norm(self, x: Any, spec: Spec, kind: str, gain: Parameter, bias: Parameter | None) -> Any:
        """LayerNorm or RMSNorm over d_model."""

    @abstractmethod
    def rotate(self, name: str, x: Any, spec: Spec, theta: float) -> Any:
        """Rotary position embedding over d_kv, at global positions along length (RoFormer; half-split pairs)."""

    @abstractmethod
    def expand_kv(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Grouped queries: repeats kv_heads so that every rank has the ones that its heads attend to."""

    @abstractmethod
    def softmax(self, name: str, x: Any, spec: Spec, dim: str, *, scale: float, causal: bool) -> Any:
        """Softmax of scale * x over `dim`; causal: positions memory_length > length are masked out."""

    @abstractmethod
    def fused_attention(self, name: str, q: Any, k: Any, v: Any, spec: Spec, *, scale: float, causal: bool) -> Any:
        """scaled_dot_product_attention of local heads [length batch heads d_kv]."""

    @abstractmethod
    def can_fuse_attention(self, spec: Spec) -> bool:
        """Whether length, memory_length and d_kv are whole locally in the region, so that one kernel does it."""

    @abstractmethod
    def relayout(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Moves an activation to another region, or renames dims (length -> memory_length), position by position."""

    @abstractmethod
    def pointwise(self, function: str, *x: Any) -> Any:
        """gelu, silu, relu, absolute, add, multiply of activations that share a layout."""

    @abstractmethod
    def dropout(self, name: str, x: Any, spec: Spec) -> Any:
        """Zeroes elements with `dropout_rate`, by a mask of the global element: the same under every plan."""

    @abstractmethod
    def cross_entropy(self, name: str, logits: Any, spec: Spec, labels: Any) -> Any:
        """The sum over this rank's tokens of -log softmax(logits)[label] over vocab; never gathers logits."""

    @abstractmethod
    def squared_error(self, name: str, y: Any, target: Any, spec: Spec) -> Any:
        """Half the sum of (y - target)^2 over this rank's elements; the target takes no gradient."""

    def attention(self, name: str, q: Any, k: Any, v: Any, spec: Spec, kv: Spec, *, scale: float, causal: bool) -> Any:
        """softmax(scale q k^T) v in the region of `spec` [length batch heads d_kv]; k and v come as `kv`.

        One fused kernel where length, memory_length and d_kv are whole locally and no dropout mask must be drawn,
        else two einsums and a softmax over split dims.
        """
        if kv.dims != spec.dims:
            k = self.expand_kv(f"{name}.key", k, kv, spec)
            v = self.expand_kv(f"{name}.value", v, kv, spec)
        if not self.dropout_rate and self.can_fuse_attention(spec):
            return self.fused_attention(name, q, k, v, spec, scale=scale, causal=causal)
        memory = Spec(spec.region, tuple("memory_length" if d == "length" else d for d in spec.dims))
        scores = Spec(spec.region, ("batch", "heads", "length", "memory_length"))
        k = self.relayout(f"{name}.key", k, spec, memory)
        v = self.relayout(f"{name}.value", v, spec, memory)
        s = self.einsum(f"{name}.scores", q, spec, k, memory, scores)
        p = self.softmax(name, s, scores, "memory_length", scale=scale, causal=causal)
        p = self.dropout(f"{name}.probabilities", p, scores)
        return self.einsum(f"{name}.context", p, scores, v, memory, spec)


@dataclass(frozen=True)
class Symbol:
    """What flows through a recorded forward pass."""

    spec: Spec


@dataclass
class Recorder(Ops):
    """Records the operations of a forward pass under a scheme, which decides `can_fuse_attention`."""

    scheme: Scheme
    dropout_rate: float = 0.0
    operations: list[Operation] = field(default_factory=list)

    def _record(self, kind: str, name: str, inputs: Sequence, outputs: Sequence[Spec], **attributes: Any) -> Any:
        self.operations.append(Operation(kind, name, tuple(inputs), tuple(outputs), tuple(sorted(attributes.items()))))
        symbols = tuple(Symbol(s) for s in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def _check(self, x: Symbol, spec: Spec) -> None:
        assert x.spec == spec, f"the model passes {x.spec} where it declares {spec}"

    def lookup(self, table, tokens, out):
        return self._record("lookup", table.name, [table], [out])

    def features(self, name, ids, out):
        return self._record("features", name, [], [out])

    def project(self, x, spec, weights, outs, biases=()):
        self._check(x, spec)
        self._record("project", weights[0].name, [spec, *weights], outs)
        for bias, out in zip(biases, outs, strict=bool(biases)):
            self.shift(Symbol(out), out, bias)
        return tuple(Symbol(s) for s in outs)

    def einsum(self, name, x, x_spec, y, y_spec, out):
        self._check(x, x_spec)
        self._check(y, y_spec)
        return self._record("einsum", name, [x_spec, y_spec], [out])

    def shift(self, x, spec, parameter):
        self._check(x, spec)
        return self._record("shift", parameter.name, [spec, parameter], [spec])

    def norm(self, x, spec, kind, gain, bias):
        self._check(x, spec)
        parameters = [gain] if bias is None else [gain, bias]
        return self._record("norm", gain.name, [spec, *parameters], [spec], norm=kind)

    def rotate(self, name, x, spec, theta):
        self._check(x, spec)
        return self._record("rotate", name, [spec], [spec], theta=theta)

    def expand_kv(self, name, x, spec, out):
        self._check(x, spec)
        return self._record("expand_kv", name, [spec], [out])

    def softmax(self, name, x, spec, dim, *, scale, causal):
        self._check(x, spec)
        return self._record("softmax", name, [spec], [spec], dim=dim, scale=scale, causal=causal)

    def fused_attention(self, name, q, k, v, spec, *, scale, causal):
        for x in (q, k, v):
            self._check(x, spec)
        return self._record("fused_attention", name, [spec, spec, spec], [spec], scale=scale, causal=causal)

    def can_fuse_attention(self, spec):
        return self.scheme.fuses_attention(spec.region)

    def relayout(self, name, x, spec, out):
        self._check(x, spec)
        return x if spec == out else self._record("relayout", name, [spec], [out])

    def pointwise(self, function, *x):
        for other in x[1:]:
            self._check(other, x[0].spec)
        return x[0]

    def dropout(self, name, x, spec):
        self._check(x, spec)
        return self._record("dropout", name, [spec], [spec]) if self.dropout_rate else x

    def cross_entropy(self, name, logits, spec, labels):
        self._check(logits, spec)
        return self._record("cross_entropy", name, [spec], [])

    def squared_error(self, name, y, target, spec):
        self._check(y, spec)
        self._check(target, spec)
        return self._record("squared_error", name, [spec], [])
