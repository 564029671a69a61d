"""The operations that a model is written in, and the recorder that turns a forward pass into a list of them.

A model's forward is written once against `Ops`. Run with `Recorder` it yields the operations with their dims, which
become part of the plan; run with `platform.parallel.ops.ParallelOps` it computes. The type of an activation is its
`Spec`: region and dims, from which a scheme gives its layout.

Data tensors (token ids, labels) are named integers [length, batch], whose negative entries are padding. Every rank
loads the block that an operation needs, so that data never travels between ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from platform.plan.scheme import Scheme


@dataclass(frozen=True)
class Spec:
    """The type of an activation: its region and its dims in memory order.

    `sizes`: those of its dims that are not of the model's size, such as the length of what an encoder reads. A layout
    goes by the name of a dim alone, as in Mesh-TensorFlow.
    """

    region: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, region: str, dims: str, sizes: tuple[tuple[str, int], ...] = ()) -> Spec:
        return cls(region, tuple(dims.split()), sizes)

    def renamed(self, old: str, new: str) -> Spec:
        """The same tensor with dim `old` called `new`."""
        sizes = tuple((new if d == old else d, n) for d, n in self.sizes)
        return Spec(self.region, tuple(new if d == old else d for d in self.dims), sizes)

    def __str__(self) -> str:
        return f"{self.region}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class Parameter:
    """A parameter by its global name and dims.

    `role` picks the scheme's table: `in` contracts d_model, `out` produces it, `vector` is a norm, bias or position
    of d_model. `init` is zeros, ones or normal (with `std`). `decay`: weight decay applies. `sizes` as in Spec.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    init: str = "normal"
    std: float = 0.0
    decay: bool = False
    sizes: tuple[tuple[str, int], ...] = ()


LOSSES = ("cross_entropy", "squared_error")  # kinds of operations that end the forward pass


@dataclass(frozen=True)
class Operation:
    """One operation of a recorded forward pass. `name` is unique within its kind; `reads` names the data tensor that it
    takes beside its inputs, if any; `recomputed`: it runs again in the backward pass."""

    kind: str
    name: str
    inputs: tuple[Spec | Parameter, ...]
    outputs: tuple[Spec, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    reads: str | None = None
    recomputed: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(t for t in self.inputs if isinstance(t, Parameter))

    def __getitem__(self, attribute: str) -> Any:
        return dict(self.attributes)[attribute]


@dataclass(frozen=True)
class Recompute:
    """What is not kept for the backward pass but computed again: `none`; `selective`, the inside of attention, whose
    memory grows with length^2 and whose work does not (Korthikanti et al. 2022); `full`, everything between the inputs
    of every `every` blocks."""

    kind: str = "none"
    every: int = 1


KEEP = Recompute()


class Ops(ABC):
    """The language of models. Tensors are opaque here: symbols in the recorder, plain local tensors at run time."""

    dropout_rate: float = 0.0
    recompute: Recompute = KEEP

    def recomputed(self, kind: str, function: Callable[..., Any], spec: Spec, x: Any, *more: Any) -> Any:
        """function(x, *more), one activation. Where this kind of stretch is recomputed, only its arguments are kept for
        the backward pass, x [spec] in 1/n where n ranks replicate it, and what lies between is computed again."""
        return function(x, *more)

    @abstractmethod
    def lookup(self, name: str, table: Parameter, tokens: Any, out: Spec) -> Any:
        """Rows of `table` [vocab, ...] at the data tensor `tokens`: an einsum with an unmaterialised one-hot. Padding
        gives some finite row."""

    @abstractmethod
    def features(self, name: str, ids: Any, out: Spec) -> Any:
        """Fixed standard normal features [length, batch, one dim] of the data tensor `ids`: random, not learned.

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
    def sinusoid(self, name: str, x: Any, spec: Spec, scale: float) -> Any:
        """scale * x plus the sinusoidal position encoding ("Attention Is All You Need", 3.5) at global positions along
        length: sines at the even d_model, cosines at the odd."""

    @abstractmethod
    def relative_bias(self, table: Parameter, scores: Spec, *, bidirectional: bool, distance: int) -> Any:
        """T5's learned bias of `table` [buckets, heads], for adding to attention scores of any number of layers.

        It has the dims of `scores` without batch, whose axes leave the table's gradient partial: all positions
        memory_length - length of one bucket share an entry, and the buckets widen up to `distance`.
        """

    @abstractmethod
    def expand_kv(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Grouped queries: repeats kv_heads so that every rank has the ones that its heads attend to."""

    @abstractmethod
    def softmax(
        self, name: str, x: Any, spec: Spec, *, scale: float, causal: bool, mask: Any = None, bias: Any = None
    ) -> Any:
        """Softmax of scale * x + bias over memory_length, the last dim. causal: positions memory_length > length are
        hidden. `mask`: a data tensor [memory_length, batch] whose padding is hidden; `bias`: of `relative_bias`."""

    @abstractmethod
    def fused_attention(
        self,
        name: str,
        q: Any,
        k: Any,
        v: Any,
        spec: Spec,
        kv: Spec,
        *,
        scale: float,
        causal: bool,
        mask: Any = None,
        bias: Any = None,
    ) -> Any:
        """scaled_dot_product_attention of local heads: q [length batch heads d_kv], k and v alike with a length of
        their own; `mask` and `bias` as in softmax."""

    @abstractmethod
    def can_fuse_attention(self, spec: Spec) -> bool:
        """Whether length, memory_length and d_kv are whole locally in the region, so that one kernel does it."""

    @abstractmethod
    def relayout(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Moves an activation to another region, or renames dims (length -> memory_length), position by position."""

    @abstractmethod
    def pointwise(self, function: str, *x: Any) -> Any:
        """gelu, relu, silu, absolute, add, multiply of activations that share a layout."""

    @abstractmethod
    def dropout(self, name: str, x: Any, spec: Spec) -> Any:
        """Zeroes elements with `dropout_rate`, by a mask of the global element: the same under every plan."""

    @abstractmethod
    def cross_entropy(self, name: str, logits: Any, spec: Spec, labels: Any, smoothing: float = 0.0) -> Any:
        """The sum over this rank's tokens of -log softmax(logits)[label] over vocab; never gathers logits.

        Padding among the data tensor `labels` does not count. `smoothing`: that share of the target is spread evenly
        over vocab, in training (Szegedy et al. 2016).
        """

    @abstractmethod
    def squared_error(self, name: str, y: Any, target: Any, spec: Spec) -> Any:
        """Half the sum of (y - target)^2 over this rank's elements; the target takes no gradient."""

    def attention(
        self,
        name: str,
        q: Any,
        k: Any,
        v: Any,
        spec: Spec,
        kv: Spec,
        *,
        scale: float,
        causal: bool,
        mask: Any = None,
        bias: Any = None,
    ) -> Any:
        """softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v come as `kv`, of a
        length of their own in cross-attention. `mask` and `bias` as in softmax.

        One fused kernel where length, memory_length and d_kv are whole locally and no dropout mask must be drawn,
        else two einsums and a softmax over split dims.
        """
        heads = replace(kv, dims=spec.dims)

        def core(q: Any, k: Any, v: Any, bias: Any) -> Any:
            if kv.dims != spec.dims:
                k = self.expand_kv(f"{name}.key", k, kv, heads)
                v = self.expand_kv(f"{name}.value", v, kv, heads)
            hidden: dict[str, Any] = {"causal": causal, "mask": mask, "bias": bias}
            if not self.dropout_rate and self.can_fuse_attention(spec):
                return self.fused_attention(name, q, k, v, spec, heads, scale=scale, **hidden)
            memory, scores = heads.renamed("length", "memory_length"), scores_of(spec, heads)
            k = self.relayout(f"{name}.key", k, heads, memory)
            v = self.relayout(f"{name}.value", v, heads, memory)
            s = self.einsum(f"{name}.scores", q, spec, k, memory, scores)
            p = self.softmax(name, s, scores, scale=scale, **hidden)
            p = self.dropout(f"{name}.probabilities", p, scores)
            return self.einsum(f"{name}.context", p, scores, v, memory, spec)

        return self.recomputed("selective", core, spec, q, k, v, bias)


def scores_of(query: Spec, key: Spec) -> Spec:
    """The attention scores of queries and keys, which both have length."""
    sizes = (*query.sizes, *key.renamed("length", "memory_length").sizes)
    return Spec(query.region, ("batch", "heads", "length", "memory_length"), sizes)


@dataclass(frozen=True)
class Symbol:
    """What flows through a recorded forward pass."""

    spec: Spec


@dataclass
class Recorder(Ops):
    """Records the operations of a forward pass under a scheme, which decides `can_fuse_attention`. The symbol of a data
    tensor is its name."""

    scheme: Scheme
    dropout_rate: float = 0.0
    recompute: Recompute = KEEP
    operations: list[Operation] = field(default_factory=list)
    kept: list[Spec] = field(default_factory=list)  # the first argument of every stretch that is recomputed
    _again: bool = False

    def recomputed(self, kind, function, spec, x, *more):
        if kind != self.recompute.kind:
            return function(x, *more)
        self._check(x, spec)
        self.kept.append(spec)
        self._again = True
        out = function(x, *more)
        self._again = False
        return out

    def _record(
        self,
        kind: str,
        name: str,
        inputs: Sequence,
        outputs: Sequence[Spec],
        reads: str | None = None,
        **attributes: Any,
    ) -> Any:
        rest = tuple(sorted(attributes.items()))
        self.operations.append(Operation(kind, name, tuple(inputs), tuple(outputs), rest, reads, self._again))
        symbols = tuple(Symbol(s) for s in outputs)
        return symbols[0] if len(symbols) == 1 else symbols

    def _check(self, x: Symbol, spec: Spec) -> None:
        assert x.spec == spec, f"the model passes {x.spec} where it declares {spec}"

    def lookup(self, name, table, tokens, out):
        return self._record("lookup", name, [table], [out], tokens)

    def features(self, name, ids, out):
        return self._record("features", name, [], [out], ids)

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

    def sinusoid(self, name, x, spec, scale):
        self._check(x, spec)
        return self._record("sinusoid", name, [spec], [spec], scale=scale)

    def relative_bias(self, table, scores, *, bidirectional, distance):
        more = {"bidirectional": bidirectional, "distance": distance}
        return self._record("relative_bias", table.name, [scores, table], [scores], **more)

    def expand_kv(self, name, x, spec, out):
        self._check(x, spec)
        return self._record("expand_kv", name, [spec], [out])

    def softmax(self, name, x, spec, *, scale, causal, mask=None, bias=None):
        for scores in (x, bias or x):
            self._check(scores, spec)
        return self._record("softmax", name, [spec], [spec], mask, scale=scale, causal=causal)

    def fused_attention(self, name, q, k, v, spec, kv, *, scale, causal, mask=None, bias=None):
        for x, declared in ((q, spec), (k, kv), (v, kv), (bias, scores_of(spec, kv))):
            if x:
                self._check(x, declared)
        return self._record("fused_attention", name, [spec, kv, kv], [spec], mask, scale=scale, causal=causal)

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

    def cross_entropy(self, name, logits, spec, labels, smoothing=0.0):
        self._check(logits, spec)
        return self._record("cross_entropy", name, [spec], [], labels, smoothing=smoothing)

    def squared_error(self, name, y, target, spec):
        self._check(y, spec)
        self._check(target, spec)
        return self._record("squared_error", name, [spec], [])
