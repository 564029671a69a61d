"""Multi-head latent attention: keys and values, and perhaps queries, are made from narrow latents."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.layers import STD, Norm, Residual, StackSpecs, dim_sizes, rotary_scaling
from platform.plan.language.ops import Parameter, resized
from platform.plan.operations.words import Ops


class LatentAttention(Residual):
    """Self-attention of DeepSeek-V2 and V3 (arXiv 2405.04434, 2.1; 2412.19437, 2.1.1), a Residual layer: queries, keys
    and values are projections of latents, and these, after an RMSNorm, of the stream. The last d_rope elements of
    queries and keys alone know positions; in keys they are a projection of the stream, the same for all heads.

    Latents lie in the region of the stream: what splits its length moves them, which are narrower, in its place.
    """

    def __init__(self, name: str, c: ModelConfig, shapes: StackSpecs, *, causal: bool, window: int = 0):
        """Construct the projections and norms of a latent attention called `name`. `shapes`, `causal`, `window`: see
        `Attention`."""
        super().__init__(name, c, shapes)
        d_kv = dim_sizes(c)["d_kv"]
        self.causal, self.window, self.scaling, self.width = causal, window, rotary_scaling(c), c.d_value or d_kv
        self.scale = c.attention_scale or 1 / sqrt(d_kv)
        outer, heads = shapes.stream.dims[:-1], ("heads", "d_kv")
        self.q_latent, self.kv_latent, shared = (
            replace(shapes.stream, dims=(*outer, dim)) for dim in ("q_latent", "kv_latent", "d_kv")
        )
        self.shared = resized(shared, "d_kv", c.d_rope)
        self.key, self.value = (resized(shapes.query, "d_kv", n) for n in (d_kv - c.d_rope, self.width))

        def down(part: str, dim: str, sizes: tuple[tuple[str, int], ...] = ()) -> Parameter:
            """Return a projection of the stream to `dim`, laid out as the stream along d_model: its result is a sum
            over ranks, where the stream would be gathered."""
            return Parameter(f"{name}.{part}", (dim, "d_model"), "vector", std=STD, decay=True, sizes=sizes)

        def up(part: str, dim: str, sizes: tuple[tuple[str, int], ...] = ()) -> Parameter:
            """Return a projection of `dim` to heads."""
            dims = (*heads, dim)
            return Parameter(f"{name}.{part}", dims, "in", std=STD, decay=True, sizes=sizes, turned=True)

        self.kv_down, self.rotary = down("kv_down", "kv_latent"), down("rotary_key", "d_kv", self.shared.sizes[-1:])
        self.query_down = down("query_down", "q_latent") if c.q_latent else None
        self.query = up("query_up", "q_latent") if c.q_latent else up("query", "d_model")
        self.key_up, self.value_up = (
            up(part, "kv_latent", spec.sizes[-1:]) for part, spec in (("key_up", self.key), ("value_up", self.value))
        )
        out, dims = STD / sqrt(2 * c.layers), ("d_model", *heads)
        self.output = Parameter(f"{name}.output", dims, "out", std=out, decay=True, sizes=self.value.sizes[-1:])
        self.query_norm = Norm.of_latent(f"{name}.q_latent_norm", "q_latent") if c.q_latent else None
        self.kv_norm = Norm.of_latent(f"{name}.kv_latent_norm", "kv_latent")

    def __call__(
        self,
        ops: Ops,
        x: Any,
        *,
        mask: Any = None,
        begins: Any = None,
        bias: Any = None,
        following: Residual | None = None,
    ) -> Any:
        """Apply a latent attention, with norm and residual connection, to the stream x; arguments and result as those
        of `Attention`."""
        s, name, value, core = self.shapes, self.name, self.value, replace(self.value, region="core")
        q, k, v = self.heads(ops, self.enter(ops, x))
        q, k, v = ops.relayout_each(
            (f"{name}.query_core", q, s.query, s.core_query),
            (f"{name}.key_core", k, s.query, s.core_query),
            (f"{name}.value_core", v, value, core),
        )
        more: dict[str, Any] = {"causal": self.causal, "window": self.window, "mask": mask, "begins": begins}
        more |= {"scale": self.scale, "bias": bias, "width": self.width}
        a = ops.attention(name, q, k, v, s.core_query, s.core_query, **more)
        a = ops.relayout(f"{name}.context", a, core, value)
        (y,) = ops.project(a, value, (self.output,), (s.stream,))
        return self.leave(ops, x, y, following)

    def heads(self, ops: Ops, entered: Any) -> tuple[Any, Any, Any]:
        """Return the queries, keys and values of all heads, made of the attention's input [length, batch, d_model]."""
        s, name, c = self.shapes, self.name, self.config
        first = (self.query_down, self.q_latent) if self.query_down else (self.query, s.query)
        weights, specs = zip((self.kv_down, self.kv_latent), (self.rotary, self.shared), first, strict=True)
        latent, rotary, q = ops.project(entered, s.stream, weights, specs)
        if self.query_norm:
            (q,) = ops.project(self.query_norm(ops, q, self.q_latent), self.q_latent, (self.query,), (s.query,))
        latent = self.kv_norm(ops, latent, self.kv_latent)
        k, v = ops.project(latent, self.kv_latent, (self.key_up, self.value_up), (self.key, self.value))
        turn = c.rope_theta, self.scaling
        q = ops.rotate(f"{name}.query", q, s.query, *turn, width=c.d_rope, pairs=c.rope_pairs)
        rotary = ops.rotate(f"{name}.key", rotary, self.shared, *turn, pairs=c.rope_pairs)
        return q, ops.concatenate(f"{name}.key", [k, rotary], [self.key, self.shared], s.query, "d_kv"), v
