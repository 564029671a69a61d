"""The operations that a model is written in.

A model's forward is written once against `Ops`. Run with `platform.plan.language.recorder.Recorder` it yields the
operations with their dims, which become part of the plan; run with `platform.parallel.parallel_ops.ParallelOps` it
computes. The type of an activation is its `Spec`: its region and dims, from which a scheme derives its layout.

Data tensors (token ids, labels) are named tensors of integers [length, batch] whose negative entries are padding.
Every rank loads the block that an operation needs, so data never travels between ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from platform.plan.language.functions import EPS, RotaryScaling
from platform.plan.language.memory import Memory


@dataclass(frozen=True)
class Spec:
    """Type of an activation: its region and its dims in memory order.

    `sizes`: sizes of the dims that differ from the model's, such as the length of an encoder's input. A layout
    depends on the name of a dim alone, as in Mesh-TensorFlow.
    """

    region: str
    dims: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, region: str, dims: str, sizes: tuple[tuple[str, int], ...] = ()) -> Spec:
        return cls(region, tuple(dims.split()), sizes)

    def renamed(self, old: str, new: str) -> Spec:
        """Return the type of the same activation with dim `old` called `new`."""
        sizes = tuple((new if d == old else d, n) for d, n in self.sizes)
        return Spec(self.region, tuple(new if d == old else d for d in self.dims), sizes)

    def __str__(self) -> str:
        return f"{self.region}[{' '.join(self.dims)}]"


@dataclass(frozen=True)
class Parameter:
    """Declaration of a parameter: its global name, dims and initialisation.

    `role` selects the scheme's layout: `in` contracts d_model, `out` produces it, `vector` is a norm, bias or position
    of d_model. `init` is zeros, ones or normal (with `std`). `decay`: weight decay applies. `sizes` as in Spec.
    `turned`: checkpoints of format 1 have its last dim first.
    """

    name: str
    dims: tuple[str, ...]
    role: str
    init: str = "normal"
    std: float = 0.0
    decay: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    turned: bool = False


LOSSES = ("cross_entropy", "squared_error")  # kinds of operations that end the forward pass


@dataclass(frozen=True)
class Operation:
    """Operation of a model's recorded forward pass. `name` is unique within its kind; `reads` names the data tensors
    that it takes beside its inputs, in one layout; `recomputed`: it runs again in the backward pass."""

    kind: str
    name: str
    inputs: tuple[Spec | Parameter, ...]
    outputs: tuple[Spec, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    reads: tuple[str, ...] = ()
    recomputed: bool = False

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(t for t in self.inputs if isinstance(t, Parameter))

    @property
    def anonymous(self) -> tuple:
        """Return a key of everything on which the plan of an operation depends, without names, so that equal layers are
        planned and checked once."""
        inputs = ((t.dims, t.role, t.sizes) if isinstance(t, Parameter) else t for t in self.inputs)
        return self.kind, tuple(inputs), self.outputs, self.attributes

    def __getitem__(self, attribute: str) -> Any:
        return dict(self.attributes)[attribute]


@dataclass(frozen=True)
class Recompute:
    """Selects the activations that the backward pass computes again instead of keeping: `none`; `selective`, the inside
    of attention, whose memory grows with length^2 and whose work does not (Korthikanti et al. 2022); `full`, everything
    between the inputs of every `every` blocks."""

    kind: str = "none"
    every: int = 1


NO_RECOMPUTATION = Recompute()


class Ops(Memory, ABC):
    """Interface that a model is written against. Tensors are opaque to it: symbols in the recorder, else local ones."""

    dropout_rate: float = 0.0
    recompute: Recompute = NO_RECOMPUTATION

    def recomputed(self, kind: str, function: Callable[..., Any], spec: Spec, x: Any, *more: Any) -> Any:
        """Return function(x, *more), one activation, computed with activation checkpointing if `self.recompute` is of
        this `kind`, "selective" or "full": then only the arguments are kept, and the backward pass calls `function`
        again. x is of type `spec`; n ranks that replicate it keep 1/n of it each."""
        return function(x, *more)

    @abstractmethod
    def lookup(self, name: str, table: Parameter, tokens: Any, out: Spec) -> Any:
        """Return the rows of the parameter `table` [vocab, ...] that the data tensor `tokens` [length, batch] of ids
        selects, as an embedding does: `out` [length batch ...], an einsum with a one-hot that is never materialised,
        over the table's first dim, whatever its name. At negative ids, which are padding, a row is finite."""

    @abstractmethod
    def one_hot(self, name: str, ids: Any, out: Spec) -> Any:
        """Return the activation `out` [length batch dim] that is 1 where the index along `dim` equals the data tensor
        `ids` [length, batch], else 0; where `ids` is padding it is 0 everywhere.

        An einsum with it selects rows of an activation; `lookup` does so of a parameter without materialising it. Like
        every activation of the plan, it takes a gradient.
        """

    @abstractmethod
    def features(self, name: str, ids: Any, out: Spec) -> Any:
        """Return the activation `out` [length, batch, one dim] of standard normal numbers, fixed by the ids in the data
        tensor `ids` [length, batch] and not learned, as an input for models without an embedding table.

        It takes a gradient, as if there were layers below.
        """

    @abstractmethod
    def project(
        self, x: Any, spec: Spec, weights: Sequence[Parameter], outs: Sequence[Spec], biases: Sequence[Parameter] = ()
    ) -> tuple[Any, ...]:
        """Return the einsums of activation x with several weights, one result per weight and its type in `outs`; those
        with equal compute layouts share one gather of x and one reduction of its gradient. `biases`, one per weight or
        none, are added once, in the output layout."""

    @abstractmethod
    def einsum(self, name: str, x: Any, x_spec: Spec, y: Any, y_spec: Spec, out: Spec) -> Any:
        """Return the einsum of two activations as `out`. A dim that `out` lacks is contracted: both have it."""

    @abstractmethod
    def reduce(self, name: str, function: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Return the sum, mean or max (`function`) of activation x over those of its dims that `out`, the result's
        type, lacks; the other dims may be reordered and the region may change. If a reduced dim is split over ranks,
        their partial results are combined as an einsum's are. Elements that share the maximum share its gradient
        equally."""

    @abstractmethod
    def concatenate(self, name: str, x: Sequence[Any], specs: Sequence[Spec], out: Spec, dim: str) -> Any:
        """Join activations of the same dims along `dim`, whose size in `out` is the sum of theirs.

        A split `dim` is gathered first and the result is split again: blocks of the parts are not blocks of the result.
        """

    @abstractmethod
    def reshape(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Split one dim of an activation into two adjacent dims, the major one first, or merge two adjacent dims into
        one; `out`, its new type, tells which.

        Axes that split the major dim need not be gathered, nor the minor's if a block's extent along the major is 1.
        """

    @abstractmethod
    def shift(self, x: Any, spec: Spec, parameter: Parameter) -> Any:
        """Add a parameter (a bias, a position table) to an activation, broadcast over the dims that the parameter
        lacks."""

    @abstractmethod
    def norm(self, x: Any, spec: Spec, kind: str, gain: Parameter, bias: Parameter | None, eps: float = EPS) -> Any:
        """Apply the normalisation `kind`, LayerNorm or RMSNorm, to an activation over its last dim (d_model in
        Transformers), the only dim of the parameters `gain` and `bias`. `eps` is added to the variance."""

    @abstractmethod
    def rotate(self, name: str, x: Any, spec: Spec, theta: float, scaling: RotaryScaling | None = None) -> Any:
        """Apply rotary position embedding with base `theta` to queries or keys, over d_kv at global positions along
        length (RoFormer; half-split pairs), with angles scaled as `scaling` says."""

    @abstractmethod
    def sinusoid(self, name: str, x: Any, spec: Spec, scale: float, positions: Any = None) -> Any:
        """Return scale * x plus the sinusoidal encoding ("Attention Is All You Need", 3.5) of the index along length,
        or the data tensor `positions` [length, batch]: sines at even indices of d_model, cosines at odd ones."""

    @abstractmethod
    def relative_bias(self, table: Parameter, scores: Spec, *, bidirectional: bool, distance: int) -> Any:
        """Return T5's learned position bias of `table` [buckets, heads], which any number of layers add to scores.

        It has the dims of `scores` without batch; the scores' axes leave the table's gradient partial. All offsets
        memory_length - length of one bucket share an entry, and the buckets widen up to `distance`.
        """

    @abstractmethod
    def expand_kv(self, name: str, x: Any, spec: Spec, out: Spec, *, grouped: bool = False) -> Any:
        """Repeat the keys or values of grouped-query attention, from kv_heads to heads, so that every rank has the KV
        heads to which its query heads attend. `grouped`: for a kernel that repeats them itself; a rank that has whole
        groups of heads then passes its KV heads on as they are."""

    @abstractmethod
    def softmax(
        self,
        name: str,
        x: Any,
        spec: Spec,
        *,
        dim: str = "memory_length",
        scale: float = 1.0,
        causal: bool = False,
        window: int = 0,
        mask: Any = None,
        begins: Any = None,
        bias: Any = None,
    ) -> Any:
        """Return softmax(scale * x + bias) of an activation over `dim`. For attention scores [... length memory_length]
        only: `causal` hides positions memory_length > length, and with it `window`, if not 0, those at or before
        length - window (Beltagy et al. 2020), and `begins`, a data tensor [length, batch], those before the position
        that it gives; `mask` is a data tensor [memory_length, batch] whose padding is hidden; `bias` comes from
        `relative_bias`. It reads `mask` or `begins`, not both."""

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
        window: int = 0,
        mask: Any = None,
        begins: Any = None,
        bias: Any = None,
    ) -> Any:
        """Return scaled_dot_product_attention of local heads: q is [length batch heads d_kv], k and v have the
        same dims with a length of their own; what hides scores, and `bias`, as in softmax. Dropout of its probabilities
        is drawn by the kernel itself."""

    @abstractmethod
    def fuses_attention(self, name: str, spec: Spec) -> bool:
        """Return True if one fused kernel does the attention `name` of type `spec`: the scheme leaves length,
        memory_length and d_kv whole there, and there is no dropout, or the kernel draws its masks."""

    @abstractmethod
    def relayout(self, name: str, x: Any, spec: Spec, out: Spec) -> Any:
        """Move an activation to another region, hence another layout, or rename dims (length -> memory_length), matched
        by position; `out`: its new type."""

    @abstractmethod
    def pointwise(self, function: str, *x: Any) -> Any:
        """Apply a pointwise function by name (gelu, gelu_tanh, relu, silu, tanh, identity, absolute; add, multiply, or
        gated_ and one of the first four, whose gate is first) to one or two activations that share a layout."""

    @abstractmethod
    def scale(self, x: Any, spec: Spec, factor: float) -> Any:
        """Return the activation x times `factor`, a number."""

    @abstractmethod
    def pointwise_each(self, functions: Sequence[str], x: Any, spec: Spec, dim: str) -> Any:
        """Apply the pointwise function `functions[i]` to slice i of x along `dim`, such as one per expert or branch."""

    @abstractmethod
    def dropout(self, name: str, x: Any, spec: Spec) -> Any:
        """Drop elements of an activation with probability `dropout_rate`, by masks that do not depend on the plan."""

    def watch(self, name: str, x: Any, spec: Spec) -> Any:
        """Return the activation x, the output of the layer `name`, which those who follow a run may see."""
        return x

    def residual(self, name: str, x: Any, y: Any, spec: Spec) -> Any:
        """Return x plus y, both of type `spec`, with dropout `name` of y: a residual connection."""
        return self.pointwise("add", x, self.dropout(name, y, spec))

    def residual_norm(
        self, name: str, x: Any, y: Any, spec: Spec, kind: str, gain: Parameter, bias: Parameter | None, eps: float
    ) -> tuple[Any, Any]:
        """Return the `residual` of x and y, and the `norm` of it, which the next layer reads."""
        total = self.residual(name, x, y, spec)
        return total, self.norm(total, spec, kind, gain, bias, eps)

    @abstractmethod
    def cross_entropy(self, name: str, logits: Any, spec: Spec, labels: Any, smoothing: float = 0.0) -> Any:
        """Return the sum over this rank's tokens of -log softmax(logits)[label] over vocab; never gathers logits. In
        training the plan may name another loss, and weights of labels. Padding in the data tensor `labels` does not
        count. `smoothing`: the share of the target spread evenly over vocab, in training (Szegedy et al. 2016)."""

    def linear_cross_entropy(
        self,
        name: str,
        x: Any,
        x_spec: Spec,
        table: Parameter,
        spec: Spec,
        labels: Any,
        smoothing: float = 0.0,
        bias: Parameter | None = None,
    ) -> Any:
        """Return the `cross_entropy` of the logits of type `spec` [... vocab] to which `project` maps the activation x
        [... d_model] by `table` [vocab, d_model] and `bias` [vocab]. It is planned as these two; computed as one, it
        need not hold all logits."""
        (logits,) = self.project(x, x_spec, (table,), (spec,), (bias,) if bias else ())
        return self.cross_entropy(name, logits, spec, labels, smoothing)

    @abstractmethod
    def squared_error(self, name: str, y: Any, target: Any, spec: Spec, ids: Any) -> Any:
        """Return the loss half the sum of (y - target)^2 over this rank's elements; the target takes no gradient.

        Positions at which the data tensor `ids` is padding do not count.
        """

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
        window: int = 0,
        mask: Any = None,
        begins: Any = None,
        bias: Any = None,
    ) -> Any:
        """Return softmax(scale q k^T + bias) v in the region of `spec` [length batch heads d_kv]; k and v are of type
        `kv`, of a length of their own in cross-attention. What hides scores, and `bias`, as in softmax.

        Runs one fused kernel (`fuses_attention`), or two einsums and a softmax over split dims; `remember`s if causal.
        """
        if causal:
            k, v, kv = self.remember(name, k, v, kv)
        heads = replace(kv, dims=spec.dims)
        fused = self.fuses_attention(name, spec)
        masks = bool(window) or not all(t is None for t in (mask, begins, bias))
        grouped = fused and not masks  # kernels that take masks want every head

        def core(q: Any, k: Any, v: Any, bias: Any) -> Any:
            if kv.dims != spec.dims:
                k = self.expand_kv(f"{name}.key", k, kv, heads, grouped=grouped)
                v = self.expand_kv(f"{name}.value", v, kv, heads, grouped=grouped)
            hidden: dict[str, Any] = {"causal": causal, "window": window, "mask": mask, "begins": begins, "bias": bias}
            if fused:
                return self.fused_attention(name, q, k, v, spec, heads, scale=scale, **hidden)
            memory, scores = heads.renamed("length", "memory_length"), scores_of(spec, heads)
            k = self.relayout(f"{name}.key", k, heads, memory)
            v = self.relayout(f"{name}.value", v, heads, memory)
            s = self.einsum(f"{name}.scores", q, spec, k, memory, scores)
            p = self.softmax(name, s, scores, scale=scale, **hidden)
            p = self.dropout(f"{name}.probabilities", p, scores)
            return self.einsum(f"{name}.context", p, scores, v, memory, spec)

        return self.recomputed("selective", core, spec, q, k, v, bias)

    def product(self, name: str, x: Any, spec: Spec, others: Sequence[tuple[Any, Spec] | Parameter], out: Spec) -> Any:
        """Return the einsum of activation x with any number of other operands, (activation, its type) or parameters,
        computed pairwise from the left: each intermediate product is in the region of `out` and has the dims that are
        still needed. A good order contracts early.

        Every dim that `out` lacks must be in two or more operands; `reduce` sums over a dim of a single one.
        """
        for i, y in enumerate(others):
            y_dims, y_sizes = (y.dims, y.sizes) if isinstance(y, Parameter) else (y[1].dims, y[1].sizes)
            later = [t.dims if isinstance(t, Parameter) else t[1].dims for t in others[i + 1 :]]
            needed = {*out.dims, *(d for dims in later for d in dims)}
            dims = tuple(d for d in dict.fromkeys((*spec.dims, *y_dims)) if d in needed)
            sizes = tuple((d, n) for d, n in dict((*spec.sizes, *y_sizes)).items() if d in dims)
            made = Spec(out.region, dims, sizes) if later else out
            if isinstance(y, Parameter):
                (x,) = self.project(x, spec, (y,), (made,))
            else:
                x = self.einsum(f"{name}.{i}", x, spec, *y, made)
            spec = made
        return x


def scores_of(query: Spec, key: Spec) -> Spec:
    """Return the type of the attention scores [batch heads length memory_length] of queries and keys of these types,
    both of which have dim length."""
    sizes = (*query.sizes, *key.renamed("length", "memory_length").sizes)
    return Spec(query.region, ("batch", "heads", "length", "memory_length"), sizes)
