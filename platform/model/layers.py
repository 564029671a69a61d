"""Base of Transformers' layers: declared weights, norms, the residual connection, and the dims of activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, log, sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.plan.model_types import CENTRED, Parameter, RotaryScaling, Spec
from platform.plan.operations.registry import Ops

Activations = dict[str, Any]  # name -> activation that one unit of a model passes to the next

LATENT_EPS = 1e-6  # of norms of latents, whatever norm_eps is: DeepSeek's code has it
STD = 0.02  # standard deviation of normal initialisations; residual projections: / sqrt(2 layers) (GPT-2)


class StackSpecs:
    """Holds the Specs (region, dims) of the activations in one stack of blocks. `length`: tokens per sequence in this
    stack, None for the model's length; `slots`: tokens of such a sequence that an expert takes."""

    def __init__(self, length: int | None = None, slots: int = 0):
        """Construct the Specs of a Transformer stack's activations: regions, dims. `length`: its tokens a sequence."""
        sizes = () if length is None else (("length", length),)
        slot_sizes = () if length is None else (("slots", slots),)
        self.stream = Spec.of("stream", "length batch d_model", sizes)
        self.query = Spec.of("attention", "length batch heads d_kv", sizes)
        self.key = Spec.of("attention", "length batch kv_heads d_kv", sizes)
        self.core_query, self.core_key = replace(self.query, region="core"), replace(self.key, region="core")
        self.hidden = Spec.of("mlp", "length batch d_ff", sizes)
        self.scores = Spec.of("stream", "length batch experts", (*sizes, *slot_sizes), "accumulate")
        self.places = Spec.of("experts", "experts batch slots d_model", slot_sizes)
        self.rows = Spec.of("experts", "rows d_model", sizes)
        self.head_sizes: dict[str, int] = {}  # of dims that are not as the model has them

    def resize_heads(self, sizes: dict[str, int]) -> StackSpecs:
        """Return these Specs with other numbers or widths of a layer's heads, by dim."""
        resized = copy(self)
        resized.head_sizes = sizes
        for name in ("query", "key", "core_query", "core_key"):
            spec = getattr(self, name)
            more = tuple((d, n) for d, n in sizes.items() if d in spec.dims)
            setattr(resized, name, replace(spec, sizes=(*spec.sizes, *more)))
        return resized


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
        **({"experts": c.experts, **expert_place_sizes(c)} if c.experts else {}),
        **{dim: n for dim, n in (("q_latent", c.q_latent), ("kv_latent", c.kv_latent)) if n},
        **linear_head_sizes(c),
        **({"segments": c.segments} if c.segments else {}),
        **({"positions": c.position_rows or c.length} if c.within_documents or c.position_rows else {}),
    }


def linear_head_sizes(c: ModelConfig) -> dict[str, int]:
    """Return the numbers and widths of heads in a model's delta rules, with the defaults that zeros stand for."""
    keys, width = c.linear_key_heads or c.heads, c.linear_d_key or c.d_kv or c.d_model // c.heads
    sizes = {"linear_key_heads": keys, "linear_value_heads": c.linear_value_heads or keys}
    sizes |= {"linear_d_key": width, "linear_d_value": c.linear_d_value or width}
    return sizes if c.linear_layers else {}


def rotary_scaling(c: ModelConfig) -> RotaryScaling | None:
    """Return how a model scales the angles of its rotary positions, by its configuration; None if it does not."""
    if c.rope_scaling == "none":
        return None
    magnitude = 1.0
    if c.rope_scaling == "yarn":
        magnitude = c.rope_magnitude or 0.1 * log(c.rope_factor) + 1
    elif c.rope_scaling == "longrope":
        magnitude = c.rope_magnitude or sqrt(1 + log(c.rope_factor) / log(max(2, c.rope_original_length)))
    bounds = c.rope_low, c.rope_high, magnitude, c.rope_truncate
    of_pairs = tuple(c.rope_short), tuple(c.rope_long)
    share = c.rope_share if c.rope_scaling == "proportional" else 1.0
    return RotaryScaling(c.rope_scaling, c.rope_factor, c.rope_original_length, *bounds, *of_pairs, share)


def rotary_width(c: ModelConfig) -> int:
    """Return how many elements of a head rotate as a head of their own, by the model configuration."""
    return int(dim_sizes(c)["d_kv"] * (1.0 if c.rope_scaling == "proportional" else c.rope_share))


def expert_width(c: ModelConfig) -> int:
    """Return the width (d_ff) of an expert, as the model configuration says: by default d_ff of the other layers."""
    return c.expert_d_ff or dim_sizes(c)["d_ff"]


def expert_place_sizes(c: ModelConfig) -> dict[str, int]:
    """Return the size of the dim in which a model's tokens lie at experts: slots, or rows that each token has."""
    return {"slots": slots_per_expert(c, c.length)} if c.capacity_factor else {"rows": c.experts_per_token}


def slots_per_expert(c: ModelConfig, length: int) -> int:
    """Return how many tokens of a sequence of `length` an expert takes, by the model configuration: at most all."""
    even = Fraction(length * c.experts_per_token, c.experts)
    factor = Fraction(str(c.capacity_factor))  # as it was typed: 1.1 in binary would give a slot too many
    return min(length, ceil(factor * even)) if factor else length


class Layer:
    """Base of a model and its layers. Its parameters are the ones among its attributes and in its layers, each once, in
    the order in which they were set."""

    def parameters(self) -> list[Parameter]:
        """Return the declared weights of this model layer and of the layers inside it, each once, in order."""
        return list(dict.fromkeys(_iterate_parameters(vars(self).values())))

    def describe(self, name: str) -> tuple:
        """Return all that this model layer, called `name`, is made of, but names: layers that share it are alike."""
        return type(self), *((key, _describe_attribute(value, name)) for key, value in vars(self).items())


def _describe_attribute(value: Any, name: str) -> Any:
    """Return an attribute of a model layer called `name` without names, equal for alike layers."""
    if isinstance(value, Parameter):
        return value.name.removeprefix(name), value.dims, value.role, value.sizes
    if isinstance(value, list | tuple):
        return tuple(_describe_attribute(part, name) for part in value)
    if isinstance(value, dict):
        return tuple((key, _describe_attribute(part, name)) for key, part in value.items())
    if isinstance(value, Layer):
        return value.describe(name)
    if isinstance(value, str):
        return value.removeprefix(name)
    return value if value is None or isinstance(value, int | float | RotaryScaling) else id(value)


def _iterate_parameters(values: Iterable[Any]) -> Iterator[Parameter]:
    """Yield the Parameters (declared weights) among the attribute `values` of a model layer, also of the layers, lists
    and dicts among them."""
    for value in values:
        if isinstance(value, Parameter):
            yield value
        elif isinstance(value, Layer):
            yield from value.parameters()
        elif isinstance(value, list | dict):
            yield from _iterate_parameters(value.values() if isinstance(value, dict) else value)


def select_sizes(sizes: dict[str, int], dims: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return a layer's own `sizes` of some `dims`, as a Parameter has them."""
    return tuple((d, sizes[d]) for d in dims if d in sizes)


def initial_gain(c: ModelConfig) -> str:
    """Return how the gains of a model's norms begin, so that they multiply by 1."""
    return "zeros" if c.norm == CENTRED else "ones"


@dataclass(frozen=True)
class Norm(Layer):
    """Normalisation over the dims of its gain: `kind` is layernorm, rmsnorm or rmsnorm_centred, of which the first
    alone has a bias. `eps` is added to the variance."""

    kind: str
    eps: float
    gain: Parameter
    bias: Parameter | None

    @classmethod
    def build_model_norm(cls, name: str, c: ModelConfig) -> Norm:
        """Construct a model's norm over d_model, by its configuration `c`, with the weights NAME.gain and NAME.bias."""
        bias = Parameter(f"{name}.bias", ("d_model",), "vector", "zeros") if c.norm == "layernorm" else None
        return cls(c.norm, c.norm_eps, Parameter(f"{name}.gain", ("d_model",), "vector", initial_gain(c)), bias)

    @classmethod
    def build_latent_norm(cls, name: str, dim: str) -> Norm:
        """Construct the RMSNorm of an attention's latent over its width `dim`, with the weight NAME.gain."""
        return cls("rmsnorm", LATENT_EPS, Parameter(f"{name}.gain", (dim,), "in", "ones"), None)

    @classmethod
    def build_head_norm(cls, name: str, c: ModelConfig, heads: str, sizes: dict[str, int]) -> Norm:
        """Construct the RMSNorm of attention queries or keys, over each head or all `heads`; its gain is NAME.gain."""
        dims = (heads, "d_kv") if c.query_key_norm_over == "heads" else ("d_kv",)
        kind, gain_sizes = CENTRED if c.norm == CENTRED else "rmsnorm", select_sizes(sizes, dims)
        return cls(kind, c.norm_eps, Parameter(f"{name}.gain", dims, "in", initial_gain(c), sizes=gain_sizes), None)

    def __call__(self, ops: Ops, x: Any, spec: Spec) -> Any:
        """Apply a model's LayerNorm or RMSNorm to the activation x over the dims of the gain; `spec`: dims of x."""
        return ops.norm(x, spec, self.kind, self.gain, self.bias, self.eps)

    def add_and_normalise(self, ops: Ops, name: str, x: Any, y: Any, spec: Spec) -> tuple[Any, Any]:
        """Add y, after the dropout `name`, to a Transformer's residual stream x; return the sum, and its norm."""
        return ops.residual_norm(name, x, y, spec, self.kind, self.gain, self.bias, self.eps)


class Residual(Layer):
    """Base of layers with a norm and a residual connection: x + layer(norm(x)), or norm(x + layer(x)) as in the
    original Transformer (`post_norm`). Without `input_norm` the layer reads x; with `output_norm` its result is
    normalised before it is added."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the norms of a Transformer's residual layer `name`; `shapes`: Specs of its stack's activations."""
        self.name, self.config, self.shapes = name, c, shapes
        self.norm = Norm.build_model_norm(f"{name}.norm", c) if c.input_norm else None
        self.output_norm = Norm.build_model_norm(f"{name}.output_norm", c) if c.output_norm else None

    def prepare_input(self, ops: Ops, x: Any) -> Any:
        """Return the layer's input from the Transformer's residual stream x: its norm, or x if norms come after."""
        return x if self.config.post_norm or not self.norm else self.norm(ops, x, self.shapes.stream)

    def add_to_stream(self, ops: Ops, x: Any, y: Any, following: Residual | None = None) -> Any:
        """Add a Transformer layer's output y, with dropout, to the residual stream x; a post-norm model then normalises
        the sum. Return the new stream or, with a `following` layer, a pair: the new stream, and its norm, the input of
        that layer (see `prepare_input`)."""
        name, stream, post = f"{self.name}.residual", self.shapes.stream, self.norm if self.config.post_norm else None
        y = self.output_norm(ops, y, stream) if self.output_norm else y
        y = ops.scale(y, stream, self.config.residual_scale) if self.config.residual_scale != 1 else y
        if following and following.norm and not post:
            return following.norm.add_and_normalise(ops, name, x, y, stream)
        x = post.add_and_normalise(ops, name, x, y, stream)[1] if post else ops.residual(name, x, y, stream)
        return (x, x) if following else x
