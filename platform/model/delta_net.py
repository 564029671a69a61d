"""Layers with a gated delta rule in place of attention (Yang et al. 2025), as Qwen3-Next has them."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.layers import STD, Norm, Residual, StackSpecs, linear_head_sizes
from platform.plan.model_types import Parameter, Spec, resize_dim
from platform.plan.operations.registry import Ops
from platform.plan.scheme import SEQUENCE


class DeltaNet(Residual):
    """Layer of a gated delta rule (a Residual layer): queries, keys and values are convolved along the sequence, what
    heads read of their states is normalised, and gated by a projection of the input. It sees the past alone, down to
    where a document begins; attention's options do not concern it."""

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs, *, causal: bool, window: int = 0):
        """Construct the projections, taps and norm of a layer called `name`; arguments as of `Attention`."""
        super().__init__(name, c, shapes)
        key_heads, value_heads, d_key, d_value = linear_head_sizes(c).values()

        def type_of_heads(heads: int, width: int) -> Spec:
            """Return the type of an activation of so many heads of a `width`."""
            return resize_dim(resize_dim(shapes.query, "heads", heads), "d_kv", width)

        self.key, self.value = type_of_heads(key_heads, d_key), type_of_heads(value_heads, d_value)
        self.number = replace(self.value, dims=self.value.dims[:-1], sizes=self.value.sizes[:-1])
        types = {"query": self.key, "key": self.key, "value": self.value, "gate": self.value}
        self.types = {**types, "strength": self.number, "decay": self.number}
        self.weights = [
            Parameter(f"{name}.{part}", (*t.dims[2:], "d_model"), "in", "normal", STD, True, t.sizes, turned=True)
            for part, t in self.types.items()
        ]
        taps, dims = (("taps", c.linear_taps),), ("heads", "d_kv", "taps")
        self.taps = [
            Parameter(f"{w.name}_taps", dims, "in", "uniform", 1 / sqrt(3 * c.linear_taps), True, (*w.sizes, *taps))
            for w in self.weights[:3]
        ]
        self.rate = Parameter(f"{name}.rate", ("heads",), "in", "normal", 1.0, sizes=self.number.sizes)
        self.shift = Parameter(f"{name}.shift", ("heads",), "in", "ones", sizes=self.number.sizes)
        gain = Parameter(f"{name}.head_norm.gain", ("d_kv",), "in", "ones", sizes=self.value.sizes[-1:])
        self.head_norm = Norm("rmsnorm", c.norm_eps, gain, None)
        dims, out = ("d_model", "heads", "d_kv"), STD / sqrt(2 * c.layers)
        self.output = Parameter(f"{name}.output", dims, "out", std=out, decay=True, sizes=self.value.sizes)

    def __call__(
        self, ops: Ops, x: Any, *, mask: Any = None, begins: Any = None, bias: Any = None, following: Any = None
    ) -> Any:
        """Apply the layer, with norm and residual connection, to the stream x; see `Attention` for the
        arguments and the result."""
        name, entered, specs = self.name, self.prepare_input(ops, x), [*self.types.values()]
        *parts, gate, strength, decay = ops.project(entered, self.shapes.stream, self.weights, specs)
        key, value, number = (replace(spec, region=SEQUENCE) for spec in (self.key, self.value, self.number))
        moved, goals = [*parts, strength, decay], [key, key, value, number, number]
        moves = zip(
            [part for part in self.types if part != "gate"], moved, [*specs[:3], *specs[4:]], goals, strict=True
        )
        *parts, strength, decay = ops.relayout_each(*((f"{name}.{part}_core", *move) for part, *move in moves))
        triples = zip(parts, goals, self.taps, strict=False)
        q, k, v = (ops.convolve(taps.name, t, spec, taps, begins=begins) for t, spec, taps in triples)
        types = key, value, number
        y = ops.delta_rule(name, q, k, v, strength, decay, *types, self.rate, self.shift, begins=begins)
        y = ops.relayout(f"{name}.context", y, value, self.value)
        y = ops.pointwise("gated_silu", gate, self.head_norm(ops, y, self.value))
        (y,) = ops.project(y, self.value, (self.output,), (self.shapes.stream,))
        return self.add_to_stream(ops, x, y, following)
