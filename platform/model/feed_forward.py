"""Feed-forward layers of Transformers, and layers of experts in their place."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.layers import STD, Layer, Norm, Residual, StackSpecs, expert_width
from platform.plan.model_types import Parameter, Router, Spec
from platform.plan.operations.registry import Ops

# activation -> (pointwise function, True if it gates a second projection (Shazeer 2020))
ACTIVATIONS = {
    "gelu": ("gelu", False),
    "gelu_tanh": ("gelu_tanh", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
    "swiglu": ("gated_silu", True),
    "swiglu_clamped": ("gated_clamped", True),
    "geglu": ("gated_gelu", True),
    "geglu_tanh": ("gated_gelu_tanh", True),
    "reglu": ("gated_relu", True),
}


class Products(Layer):
    """Products of a feed-forward layer: down(f(up(x))), or down(f(gate(x)) * up(x)) with a gated activation. Experts
    have these Parameters one after the other, along a first dim experts."""

    def __init__(self, name: str, c: ModelConfig, spec: Spec, hidden: Spec, bias: bool, output: Spec | None = None):
        """Construct the up, gate (of a gated activation) and down Parameters of products called `name`, of activations
        of type `spec`, as which they make others of type `output` (None: the same type); `hidden`: the type of
        what lies between up and down."""
        self.spec, self.hidden, self.made = spec, hidden, output or spec
        self.function, gated = ACTIVATIONS[c.activation]
        names, of_experts = ["up", "gate"] if gated else ["up"], ("experts",) if spec.region == "experts" else ()
        more: dict[str, Any] = {"decay": True, "sizes": tuple(pair for pair in hidden.sizes if pair[0] == "d_ff")}
        dims = (*of_experts, "d_ff", "d_model")
        self.inner = [Parameter(f"{name}.{n}", dims, "in", std=STD, turned=True, **more) for n in names]
        out = STD / sqrt(2 * c.layers)
        self.down = Parameter(f"{name}.down", (*of_experts, "d_model", "d_ff"), "out", std=out, **more)
        biases = [Parameter(f"{p.name}_bias", p.dims[:-1], "in", "zeros", sizes=p.sizes) for p in self.inner]
        self.inner_biases = biases if bias else []
        last = Parameter(f"{name}.down_bias", self.down.dims[:-1], "out" if of_experts else "vector", "zeros")
        self.down_bias = [last] if bias else []

    def __call__(self, ops: Ops, x: Any, counts: Any = None) -> Any:
        """Return the feed-forward products of the activation x; `counts`: the numbers of experts' rows in x."""
        inner, last = (self.inner, self.hidden, self.inner_biases), (self.down, self.made, self.down_bias)
        return ops.mlp(self.function, x, self.spec, *inner, *last, counts)


class FeedForward(Residual):
    """Feed-forward layer (a Residual layer) of one `Products`."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the up, gate (of a gated activation) and down weights of a feed-forward layer called `name`."""
        super().__init__(name, c, shapes)
        self.products = Products(name, c, shapes.stream, shapes.hidden, c.bias)

    def __call__(self, ops: Ops, x: Any, entered: Any = None, tokens: Any = None) -> tuple[Any, Any]:
        """Apply norm, layer and residual connection to x; return it, no auxiliary loss. `entered`: see `Attention`."""
        entered = self.prepare_input(ops, x) if entered is None else entered
        return self.add_to_stream(ops, x, self.products(ops, entered)), None


class Experts(Residual):
    """Layer of experts (a Residual layer) in place of a feed-forward layer: a router scores them, the best compute each
    token, and shared experts compute all (Shazeer et al. 2017; Dai et al. 2024)."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs):
        """Construct the router, the experts and the shared experts of a layer called `name`."""
        super().__init__(name, c, shapes)
        width = expert_width(c)
        places = shapes.places if c.capacity_factor else shapes.rows
        of_experts = replace(places, dims=(*places.dims[:-1], "d_ff"), sizes=(*places.sizes, ("d_ff", width)))
        # sums over ranks are left to tokens, which are fewer; but a bias is added to what is complete
        self.given, self.made = replace(places, open="gradient"), replace(places, open="" if c.expert_bias else "value")
        of_shared = ("d_ff", c.shared_d_ff or width * c.shared_experts)
        shared_hidden = replace(shapes.hidden, sizes=(*shapes.hidden.sizes, of_shared))
        self.router = Parameter(f"{name}.router", ("experts", "d_model"), "vector", std=STD, decay=True)
        biased = c.expert_bias
        bias = Parameter(f"{name}.router_bias", ("experts",), "vector", "zeros")
        self.score_bias = [bias] if biased else []
        self.experts = Products(f"{name}.experts", c, self.given, of_experts, biased, self.made)
        shared = Products(f"{name}.shared", c, shapes.stream, shared_hidden, biased) if c.shared_experts else None
        self.shared = shared
        names = "expert_norm", "router_norm", "expert_output_norm", "shared_output_norm"
        self.norms = {n: Norm.build_model_norm(f"{name}.{n}", c) for n in names if c.expert_norms}
        factor = Parameter(f"{name}.expert_factor", ("experts",), "vector", "ones")
        self.factor = [factor] if c.expert_factors else []
        one = (("gates", 1),)
        gate = Parameter(f"{name}.shared_gate", ("gates", "d_model"), "vector", std=STD, decay=True, sizes=one)
        self.shared_gate = [gate] if c.shared_expert_gate else []
        self.gates = Spec("stream", ("length", "batch", "gates"), (*shapes.stream.sizes, *one))
        weights = c.router, c.experts_per_token, c.router_normalised, c.router_scale
        groups = c.router_groups, c.router_groups_kept, c.router_group_best
        rate = c.balance_rate if c.router_bias else 0.0
        self.rules = Router(*weights, c.balance_loss, c.z_loss, *groups, rate)
        self.states = []
        if c.router_bias:
            self.states.append(Parameter(f"{name}.choice_bias", ("experts",), "choice", "zeros"))
        if c.balance_over == "batch":
            self.states.append(Parameter(f"{name}.load", ("experts",), "load", "ones"))

    def __call__(self, ops: Ops, x: Any, entered: Any = None, tokens: Any = None) -> tuple[Any, Any]:
        """Apply norm, experts and residual connection to the stream x; return it, and the auxiliary loss of each token
        [length, batch], None in generation. `tokens`: a data tensor whose padding goes to no expert; `entered`: see
        `Attention`."""
        s, name = self.shapes, self.name
        entered = self.prepare_input(ops, x) if entered is None else entered
        y, auxiliary = self.compute_experts(ops, x if self.norms else entered, tokens)
        if self.shared:
            more = self.shared(ops, entered)
            if self.shared_gate:
                (gate,) = ops.project(entered, s.stream, self.shared_gate, (self.gates,))
                gate = ops.pointwise("sigmoid", gate)
                more = ops.einsum(f"{name}.shared_gated", more, s.stream, gate, self.gates, s.stream)
            y = ops.pointwise("add", y, self.normalise(ops, "shared_output_norm", more))
        return self.add_to_stream(ops, x, y), auxiliary

    def normalise(self, ops: Ops, norm: str, x: Any) -> Any:
        """Return an activation x of the stream by the layer's own `norm`; as it is, in a model without these."""
        return self.norms[norm](ops, x, self.shapes.stream) if norm in self.norms else x

    def compute_experts(self, ops: Ops, x: Any, tokens: Any) -> tuple[Any, Any]:
        """Return what the experts of each token make of x [length, batch, d_model], and the auxiliary losses."""
        s, name, chosen = self.shapes, self.name, self.rules.chosen
        entered, seen = self.normalise(ops, "expert_norm", x), self.normalise(ops, "router_norm", x)
        seen = ops.scale(seen, s.stream, self.config.d_model**-0.5) if self.norms else seen
        seen = ops.jitter(f"{name}.jitter", seen, s.stream, self.config.router_jitter)
        (scores,) = ops.project(seen, s.stream, (self.router,), (s.scores,), self.score_bias)
        weights, auxiliary = ops.route(name, scores, s.scores, tokens, self.rules, self.states)
        if "rows" in self.given.dims:
            weights = self.weigh(ops, weights)  # before they are sent, with copies of tokens
            rows, counts = ops.dispatch_rows(name, entered, s.stream, weights, s.scores, self.given, chosen)
            expert_output = self.experts(ops, rows, counts)
            y = ops.combine_rows(name, expert_output, self.made, counts, weights, s.scores, s.stream, chosen)
        else:
            slots = ops.dispatch(name, entered, s.stream, weights, s.scores, self.given, chosen)
            expert_output, weights = self.experts(ops, slots), self.weigh(ops, weights)
            y = ops.combine(name, expert_output, self.made, weights, s.scores, s.stream, chosen)
        return self.normalise(ops, "expert_output_norm", y), auxiliary

    def weigh(self, ops: Ops, weights: Any) -> Any:
        """Return the weights [length, batch, experts] times the factor of each expert, if the layer has such."""
        return ops.multiply_by(weights, self.shapes.scores, *self.factor) if self.factor else weights
