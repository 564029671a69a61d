"""Parts of Transformers, written in named dims: norms, attention, feed-forward layers, stacks of blocks.

They are written against `Ops` and name neither collectives nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil, log, sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.plan.language.functions import RotaryScaling, Router
from platform.plan.language.ops import Parameter, Spec
from platform.plan.operations.words import Ops

Activations = dict[str, Any]  # name -> activation that one unit of a model passes to the next

STD = 0.02  # standard deviation of normal initialisations; residual projections: / sqrt(2 layers) (GPT-2)

# activation -> (pointwise function, True if it gates a second projection (Shazeer 2020))
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "swiglu": ("gated_silu", True),
    "geglu": ("gated_gelu", True),
    "geglu_tanh": ("gated_gelu_tanh", True),
    "reglu": ("gated_relu", True),
}


class StackSpecs:
    """Holds the Specs (region, dims) of the activations in one stack of blocks. `length`: tokens per sequence in this
    stack; None: the model's length."""

    def __init__(self, length: int | None = None):
        """Construct the Specs of a Transformer stack's activations: regions, dims. `length`: its tokens a sequence."""
        sizes = () if length is None else (("length", length),)
        self.stream = Spec.of("stream", "length batch d_model", sizes)
        self.query = Spec.of("attention", "length batch heads d_kv", sizes)
        self.key = Spec.of("attention", "length batch kv_heads d_kv", sizes)
        self.core_query, self.core_key = replace(self.query, region="core"), replace(self.key, region="core")
        self.hidden = Spec.of("mlp", "length batch d_ff", sizes)
        self.scores = Spec.of("stream", "length batch experts", sizes, "accumulate")
        self.places = Spec.of("experts", "experts batch slots d_model")


def dim_sizes(c: ModelConfig) -> dict[str, int]:
    """Return dim name -> global size (such as d_model, heads, vocab) for every dim of a Transformer's tensors, from the
    model configuration; its zeros (kv_heads, d_kv, d_ff) are replaced by the defaults that they stand for."""
    return {
        "length": c.length,
        "d_model": c.d_model,
        "heads": c.heads,
        "kv_heads": c.kv_heads or c.heads,
        "d_kv": c.d_kv or c.d_model // c.heads,
        "d_ff": c.d_ff or 4 * c.d_model,
        "vocab": c.vocab,
        "buckets": c.buckets,
        **({"experts": c.experts, "slots": slots_of(c)} if c.experts else {}),
        **({"segments": c.segments} if c.segments else {}),
        **({"positions": c.length} if c.within_documents else {}),
    }


def expert_width(c: ModelConfig) -> int:
    """Return the width (d_ff) of an expert, as the model configuration says: by default d_ff of the other layers."""
    return c.expert_d_ff or dim_sizes(c)["d_ff"]


def slots_of(c: ModelConfig) -> int:
    """Return how many tokens of a sequence an expert takes, as the model configuration says: at most all."""
    even = c.length * c.experts_per_token / c.experts
    return min(c.length, ceil(c.capacity_factor * even)) if c.capacity_factor else c.length


def rotary_scaling(c: ModelConfig) -> RotaryScaling | None:
    """Return how a model scales the angles of its rotary positions, by its configuration; None if it does not."""
    if c.rope_scaling == "none":
        return None
    magnitude = (c.rope_magnitude or 0.1 * log(c.rope_factor) + 1) if c.rope_scaling == "yarn" else 1.0
    return RotaryScaling(c.rope_scaling, c.rope_factor, c.rope_original_length, c.rope_low, c.rope_high, magnitude)


class Layer:
    """Base of a model and its layers. Its parameters are the ones among its attributes and in its layers, each once, in
    the order in which they were set."""

    def parameters(self) -> list[Parameter]:
        """Return the declared weights of this model layer and of the layers inside it, each once, in order."""
        return list(dict.fromkeys(_parameters_in(vars(self).values())))


def _parameters_in(values: Iterable[Any]) -> Iterator[Parameter]:
    """Yield the Parameters (declared weights) among the attribute `values` of a model layer, also of the layers, lists
    and dicts among them."""
    for value in values:
        if isinstance(value, Parameter):
            yield value
        elif isinstance(value, Layer):
            yield from value.parameters()
        elif isinstance(value, list | dict):
            yield from _parameters_in(value.values() if isinstance(value, dict) else value)


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over the one dim of its gain: `kind` is layernorm or rmsnorm; rmsnorm has no bias. `eps` is added
    to the variance."""

    kind: str
    eps: float
    gain: Parameter
    bias: Parameter | None

    @classmethod
    def of(cls, name: str, c: ModelConfig) -> Norm:
        """Construct a model's norm over d_model, by its configuration `c`, with the weights NAME.gain and NAME.bias."""
        bias = Parameter(f"{name}.bias", ("d_model",), "vector", "zeros") if c.norm == "layernorm" else None
        return cls(c.norm, c.norm_eps, Parameter(f"{name}.gain", ("d_model",), "vector", "ones"), bias)

    @classmethod
    def of_heads(cls, name: str, c: ModelConfig) -> Norm:
        """Construct the RMSNorm of attention queries or keys, over d_kv of each head, with the weight NAME.gain."""
        return cls("rmsnorm", c.norm_eps, Parameter(f"{name}.gain", ("d_kv",), "in", "ones"), None)

    def __call__(self, ops: Ops, x: Any, spec: Spec) -> Any:
        """Apply a model's LayerNorm or RMSNorm to the activation x over the dim of the gain; `spec`: dims of x."""
        return ops.norm(x, spec, self.kind, self.gain, self.bias, self.eps)

    def of_sum(self, ops: Ops, name: str, x: Any, y: Any, spec: Spec) -> tuple[Any, Any]:
        """Add y, after the dropout `name`, to a Transformer's residual stream x; return the sum, and its norm."""
        return ops.residual_norm(name, x, y, spec, self.kind, self.gain, self.bias, self.eps)


class Residual(Layer):
    """Base of layers with a norm and a residual connection: x + layer(norm(x)), or norm(x + layer(x)) as in the
    original Transformer (`post_norm`)."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the norm of a Transformer's residual layer `name`; `shapes`: Specs of its stack's activations."""
        self.name, self.config, self.shapes = name, c, shapes
        self.norm = Norm.of(f"{name}.norm", c)

    def enter(self, ops: Ops, x: Any) -> Any:
        """Return the layer's input from the Transformer's residual stream x: its norm, or x if norms come after."""
        return x if self.config.post_norm else self.norm(ops, x, self.shapes.stream)

    def leave(self, ops: Ops, x: Any, y: Any, following: Residual | None = None) -> Any:
        """Add a Transformer layer's output y, with dropout, to the residual stream x; a post-norm model then normalises
        the sum. Return the new stream or, with a `following` layer, a pair: the new stream, and its norm, the input of
        that layer (see `enter`)."""
        name, stream, post = f"{self.name}.residual", self.shapes.stream, self.config.post_norm
        if following and not post:
            return following.norm.of_sum(ops, name, x, y, stream)
        left = self.norm.of_sum(ops, name, x, y, stream)[1] if post else ops.residual(name, x, y, stream)
        return (left, left) if following else left


class Attention(Residual):
    """Self-attention, or cross-attention to the output of an encoder whose Specs are `memory`; a Residual layer. The
    dims that a weight's product adds come first: the weights of query, key and value, which lie one after another, are
    one matrix with the dim d_model."""

    def __init__(
        self,
        name: str,
        c: ModelConfig,
        shapes: StackSpecs,
        *,
        causal: bool,
        window: int = 0,
        memory: StackSpecs | None = None,
    ):
        """Construct the query, key, value and output weights of a Transformer's attention layer called `name`.
        `shapes`: the Specs of its own stack's activations; `causal`: True if a token sees only earlier ones; `window`:
        number of latest tokens that it sees, 0 for all; `memory`: the Specs of the encoder's stack for cross-attention,
        None for self-attention."""
        super().__init__(name, c, shapes)
        self.causal, self.window, self.cross, self.memory = causal, window, memory is not None, memory or shapes
        self.scale = c.attention_scale or 1 / sqrt(c.d_kv or c.d_model // c.heads)
        self.scaling = rotary_scaling(c)
        out = STD / sqrt(2 * c.layers)
        q, kv = ("heads", "d_kv", "d_model"), ("kv_heads", "d_kv", "d_model")
        self.query = Parameter(f"{name}.query", q, "in", std=STD, decay=True, turned=True)
        self.key = Parameter(f"{name}.key", kv, "in", std=STD, decay=True, turned=True)
        self.value = Parameter(f"{name}.value", kv, "in", std=STD, decay=True, turned=True)
        self.output = Parameter(f"{name}.output", ("d_model", "heads", "d_kv"), "out", std=out, decay=True)
        biases = c.attention_bias or ("all" if c.bias else "none")
        inner = [Parameter(f"{p.name}_bias", p.dims[:-1], "in", "zeros") for p in (self.query, self.key, self.value)]
        self.inner_biases = [] if biases == "none" else inner
        bias = Parameter(f"{name}.output_bias", ("d_model",), "vector", "zeros")
        self.output_bias = [bias] if biases == "all" else []
        self.query_norm = Norm.of_heads(f"{name}.query_norm", c) if c.query_key_norm else None
        self.key_norm = Norm.of_heads(f"{name}.key_norm", c) if c.query_key_norm else None

    def __call__(
        self,
        ops: Ops,
        x: Any,
        memory: Any = None,
        *,
        mask: Any = None,
        begins: Any = None,
        bias: Any = None,
        entered: Any = None,
        following: Residual | None = None,
    ) -> Any:
        """Apply a Transformer's attention layer, with norm and residual connection, to the stream x [length, batch,
        d_model]; return the new stream (a pair with `following`, see `leave`). `memory`: the (key, value) of
        cross-attention, from `keys_and_values`, both None if an earlier pass of generation has cached them; None for
        self-attention. `mask`, `begins`, `bias`: arguments of `Ops.attention` (padding, first positions of documents,
        relative bias). `entered`: the result of `enter`, if it has been computed already; `following`: the next
        layer."""
        s, m = self.shapes, self.memory
        entered = self.enter(ops, x) if entered is None else entered
        weights, specs, biases = (self.query, self.key, self.value), (s.query, s.key, s.key), self.inner_biases
        if self.cross:
            (q,) = ops.project(entered, s.stream, weights[:1], specs[:1], biases[:1])
            k, v = memory
        else:
            q, k, v = ops.project(entered, s.stream, weights, specs, biases)
        q = self.query_norm(ops, q, s.query) if self.query_norm else q
        if self.key_norm and not self.cross:  # that of a memory is in `keys_and_values`
            k = self.key_norm(ops, k, s.key)
        if self.config.positions == "rope" and not self.cross:
            q = ops.rotate(f"{self.name}.query", q, s.query, self.config.rope_theta, self.scaling)
            k = ops.rotate(f"{self.name}.key", k, s.key, self.config.rope_theta, self.scaling)
        q = ops.relayout(f"{self.name}.query_core", q, s.query, s.core_query)
        if k is not None:
            k = ops.relayout(f"{self.name}.key_core", k, m.key, m.core_key)
            v = ops.relayout(f"{self.name}.value_core", v, m.key, m.core_key)
        if self.cross:
            k, v = ops.recall(self.name, k, v, m.core_key)
        hides: dict[str, Any] = {"causal": self.causal, "window": self.window, "mask": mask, "begins": begins}
        a = ops.attention(self.name, q, k, v, s.core_query, m.core_key, scale=self.scale, bias=bias, **hides)
        a = ops.relayout(f"{self.name}.context", a, s.core_query, s.query)
        (y,) = ops.project(a, s.query, (self.output,), (s.stream,), self.output_bias)
        return self.leave(ops, x, y, following)


def keys_and_values(ops: Ops, layers: list[Attention], memory: Any) -> list[tuple[Any, Any]]:
    """Compute the (key, value) of every cross-attention layer of a decoder from the encoder's output `memory`, in one
    group of einsums: the memory is converted once, and its gradient, summed over the layers, is reduced once."""
    shapes = layers[0].memory
    weights = [w for layer in layers for w in (layer.key, layer.value)]
    biases = [b for layer in layers for b in layer.inner_biases[1:]]
    found = ops.project(memory, shapes.stream, weights, [shapes.key] * len(weights), biases)
    pairs = zip(layers, found[::2], found[1::2], strict=True)
    return [(layer.key_norm(ops, k, shapes.key) if layer.key_norm else k, v) for layer, k, v in pairs]


class Products(Layer):
    """Products of a feed-forward layer: down(f(up(x))), or down(f(gate(x)) * up(x)) with a gated activation. Experts
    have these Parameters one after the other, along a first dim experts, and no biases."""

    def __init__(self, name: str, c: ModelConfig, spec: Spec, hidden: Spec, bias: bool):
        """Construct the up, gate (of a gated activation) and down Parameters of products called `name`, of activations
        of type `spec`; `hidden`: the type of what lies between up and down."""
        self.spec, self.hidden = spec, hidden
        self.function, gated = ACTIVATIONS[c.activation]
        names, of_experts = ["up", "gate"] if gated else ["up"], tuple(d for d in spec.dims if d == "experts")
        more: dict[str, Any] = {"decay": True, "sizes": tuple(pair for pair in hidden.sizes if pair[0] == "d_ff")}
        dims = (*of_experts, "d_ff", "d_model")
        self.inner = [Parameter(f"{name}.{n}", dims, "in", std=STD, turned=True, **more) for n in names]
        out = STD / sqrt(2 * c.layers)
        self.down = Parameter(f"{name}.down", (*of_experts, "d_model", "d_ff"), "out", std=out, **more)
        biases = [Parameter(f"{p.name}_bias", ("d_ff",), "in", "zeros", sizes=p.sizes) for p in self.inner]
        self.inner_biases = biases if bias else []
        self.down_bias = [Parameter(f"{name}.down_bias", ("d_model",), "vector", "zeros")] if bias else []

    def __call__(self, ops: Ops, x: Any) -> Any:
        """Return the feed-forward products of the activation x."""
        h = ops.project(x, self.spec, self.inner, [self.hidden] * len(self.inner), self.inner_biases)
        hidden = ops.pointwise(self.function, *reversed(h))
        return ops.project(hidden, self.hidden, (self.down,), (self.spec,), self.down_bias)[0]


class FeedForward(Residual):
    """Feed-forward layer (a Residual layer) of one `Products`."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the up, gate (of a gated activation) and down weights of a feed-forward layer called `name`."""
        super().__init__(name, c, shapes)
        self.products = Products(name, c, shapes.stream, shapes.hidden, c.bias)

    def __call__(self, ops: Ops, x: Any, entered: Any = None, tokens: Any = None) -> tuple[Any, Any]:
        """Apply norm, feed-forward layer and residual connection to the stream x; return it, and no auxiliary loss.
        `entered`: see `Attention`."""
        return self.leave(ops, x, self.products(ops, self.enter(ops, x) if entered is None else entered)), None


class Experts(Residual):
    """Layer of experts (a Residual layer) in place of a feed-forward layer: a router scores them, the best compute each
    token, and shared experts compute all (Shazeer et al. 2017; Dai et al. 2024)."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the router, the experts and the shared experts of a layer called `name`."""
        super().__init__(name, c, shapes)
        width = expert_width(c)
        of_experts = Spec.of("experts", "experts batch slots d_ff", (("d_ff", width),))
        every = replace(shapes.hidden, sizes=(*shapes.hidden.sizes, ("d_ff", width * c.shared_experts)))
        self.router = Parameter(f"{name}.router", ("experts", "d_model"), "vector", std=STD, decay=True)
        self.experts = Products(f"{name}.experts", c, shapes.places, of_experts, bias=False)
        shared = Products(f"{name}.shared", c, shapes.stream, every, bias=False) if c.shared_experts else None
        self.shared = shared
        weights = c.router, c.experts_per_token, c.router_normalised, c.router_scale
        self.rules = Router(*weights, balance=c.balance_loss, z=c.z_loss)

    def __call__(self, ops: Ops, x: Any, entered: Any = None, tokens: Any = None) -> tuple[Any, Any]:
        """Apply norm, experts and residual connection to the stream x; return it, and the auxiliary loss of each token
        [length, batch], None in generation. `tokens`: a data tensor whose padding goes to no expert; `entered`: see
        `Attention`."""
        s, name, chosen = self.shapes, self.name, self.rules.chosen
        entered = self.enter(ops, x) if entered is None else entered
        (scores,) = ops.project(entered, s.stream, (self.router,), (s.scores,))
        weights, auxiliary = ops.route(name, scores, s.scores, tokens, self.rules)
        given = ops.dispatch(name, entered, s.stream, weights, s.scores, s.places, chosen)
        y = ops.combine(name, self.experts(ops, given), s.places, weights, s.scores, s.stream, chosen)
        y = ops.pointwise("add", y, self.shared(ops, entered)) if self.shared else y
        return self.leave(ops, x, y), auxiliary


class TransformerBlock(Layer):
    """Transformer block: self-attention, cross-attention if `memory` is given, and a feed-forward layer or experts."""

    def __init__(
        self,
        name: str,
        c: ModelConfig,
        shapes: StackSpecs,
        *,
        causal: bool,
        memory: StackSpecs | None,
        window: int = 0,
        experts: bool = False,
    ):
        """Construct a Transformer block, with cross-attention to an encoder's stack if its Specs, `memory`, are set."""
        self.name = name
        self.attention = Attention(f"{name}.attention", c, shapes, causal=causal, window=window)
        self.cross = Attention(f"{name}.cross", c, shapes, causal=False, memory=memory) if memory else None
        self.mlp = (Experts if experts else FeedForward)(f"{name}.mlp", c, shapes)

    def __call__(
        self,
        ops: Ops,
        x: Any,
        pair: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        memory_mask: Any = None,
        begins: Any = None,
        tokens: Any = None,
    ) -> tuple[Any, Any]:
        """Run this Transformer block on the residual stream x; return the new stream, and the auxiliary loss of its
        experts, None without. `pair`: the (key, value) of its cross-attention; `mask`, `begins`, `bias`: arguments of
        its self-attention; `memory_mask`: the mask of its cross-attention; `tokens`: see `Experts`."""
        x, h = self.attention(ops, x, mask=mask, begins=begins, bias=bias, following=self.cross or self.mlp)
        if self.cross:
            x, h = self.cross(ops, x, pair, mask=memory_mask, entered=h, following=self.mlp)
        return self.mlp(ops, x, h, tokens)
