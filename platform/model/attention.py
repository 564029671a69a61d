"""Attention, multi-head latent attention (keys and values, and perhaps queries, made from narrow latents), and stacks
of Transformer blocks, written in named dims.

They are written against `Ops` and name neither collectives nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from platform.config.fields import Model as ModelConfig
from platform.model.delta_net import DeltaNet
from platform.model.feed_forward import Experts, FeedForward
from platform.model.layers import (
    STD,
    Layer,
    Norm,
    Residual,
    StackSpecs,
    dim_sizes,
    rotary_scaling,
    rotary_width,
    select_sizes,
)
from platform.plan.model_types import Parameter, resize_dim, scores_spec
from platform.plan.operations.registry import Ops


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
        latents = (replace(shapes.stream, dims=(*outer, dim)) for dim in ("q_latent", "kv_latent", "d_kv"))
        self.q_latent, self.kv_latent, shared = latents
        self.shared = resize_dim(shared, "d_kv", c.d_rope)
        self.key, self.value = (resize_dim(shapes.query, "d_kv", n) for n in (d_kv - c.d_rope, self.width))

        def down_projection(part: str, dim: str, sizes: tuple[tuple[str, int], ...] = ()) -> Parameter:
            """Return a projection of the stream to `dim`, laid out as the stream along d_model: its result is a sum
            over ranks, where the stream would be gathered."""
            return Parameter(f"{name}.{part}", (dim, "d_model"), "vector", std=STD, decay=True, sizes=sizes)

        def up_projection(part: str, dim: str, sizes: tuple[tuple[str, int], ...] = ()) -> Parameter:
            """Return a projection of `dim` to heads."""
            dims = (*heads, dim)
            return Parameter(f"{name}.{part}", dims, "in", std=STD, decay=True, sizes=sizes, turned=True)

        self.kv_down = down_projection("kv_down", "kv_latent")
        self.rotary = down_projection("rotary_key", "d_kv", self.shared.sizes[-1:])
        self.query_down = down_projection("query_down", "q_latent") if c.q_latent else None
        self.query = up_projection("query_up", "q_latent") if c.q_latent else up_projection("query", "d_model")
        self.key_up = up_projection("key_up", "kv_latent", self.key.sizes[-1:])
        self.value_up = up_projection("value_up", "kv_latent", self.value.sizes[-1:])
        out, dims = STD / sqrt(2 * c.layers), ("d_model", *heads)
        self.output = Parameter(f"{name}.output", dims, "out", std=out, decay=True, sizes=self.value.sizes[-1:])
        self.query_norm = Norm.build_latent_norm(f"{name}.q_latent_norm", "q_latent") if c.q_latent else None
        self.kv_norm = Norm.build_latent_norm(f"{name}.kv_latent_norm", "kv_latent")

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
        q, k, v = self.project_heads(ops, self.prepare_input(ops, x))
        q, k, v = ops.relayout_each(
            (f"{name}.query_core", q, s.query, s.core_query),
            (f"{name}.key_core", k, s.query, s.core_query),
            (f"{name}.value_core", v, value, core),
        )
        more: dict[str, Any] = {"causal": self.causal, "window": self.window, "mask": mask, "begins": begins}
        more |= {"scale": self.scale, "bias": bias, "width": self.width, "cap": self.config.attention_cap}
        a = ops.attention(name, q, k, v, s.core_query, s.core_query, **more)
        a = ops.relayout(f"{name}.context", a, core, value)
        (y,) = ops.project(a, value, (self.output,), (s.stream,))
        return self.add_to_stream(ops, x, y, following)

    def project_heads(self, ops: Ops, entered: Any) -> tuple[Any, Any, Any]:
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
        turned = rotary_width(c)
        self.turned_part = {"width": turned, "leading": True} if turned < dim_sizes(c)["d_kv"] else {}
        own, out = shapes.head_sizes, STD / sqrt(2 * c.layers)

        def weight(part: str, heads: str) -> Parameter:
            """Return the weight of what the product of the layer's input has for each of the `heads`."""
            dims = heads, "d_kv", "d_model"
            sizes = select_sizes(own, dims)
            return Parameter(f"{name}.{part}", dims, "in", std=STD, decay=True, turned=True, sizes=sizes)

        self.query, self.key = weight("query", "heads"), weight("key", "kv_heads")
        self.value = self.key if c.values_are_keys else weight("value", "kv_heads")
        dims = "d_model", "heads", "d_kv"
        self.output = Parameter(f"{name}.output", dims, "out", std=out, decay=True, sizes=select_sizes(own, dims))
        gate = [weight("gate", "heads")] if c.attention_gate else []
        self.inner = [*dict.fromkeys((self.query, self.key, self.value)), *gate]
        biases = c.attention_bias or ("all" if c.bias else "none")
        inner = [Parameter(f"{p.name}_bias", p.dims[:-1], "in", "zeros", sizes=p.sizes) for p in self.inner]
        self.inner_biases = [] if biases == "none" else inner
        bias = Parameter(f"{name}.output_bias", ("d_model",), "vector", "zeros")
        self.output_bias = [bias] if biases == "all" else []
        self.sink = Parameter(f"{name}.sink", ("heads",), "in", std=STD) if c.attention_sinks else None
        self.query_norm = Norm.build_head_norm(f"{name}.query_norm", c, "heads", own) if c.query_key_norm else None
        self.key_norm = Norm.build_head_norm(f"{name}.key_norm", c, "kv_heads", own) if c.query_key_norm else None

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
        cross-attention, from `project_keys_and_values`, both None if an earlier pass of generation has cached them;
        None for self-attention. `mask`, `begins`, `bias`: arguments of `Ops.attention` (padding, first positions of
        documents, relative bias). `entered`: the result of `enter`, if it has been computed already; `following`: the
        next layer."""
        s, m = self.shapes, self.memory
        entered = self.prepare_input(ops, x) if entered is None else entered
        weights, biases = self.inner, self.inner_biases
        specs = [s.key if w.dims[0] == "kv_heads" else s.query for w in weights]
        if self.cross:  # of which queries and gate alone are made here
            q, *gate = ops.project(entered, s.stream, weights[::3], specs[::3], biases[::3])
            k, v = memory
        else:
            q, k, *gate = ops.project(entered, s.stream, weights, specs, biases)
            v = k if self.value is self.key else gate.pop(0)
            v = ops.normalise(f"{self.name}.value", v, s.key, self.config.norm_eps) if self.config.value_norm else v
        q = self.query_norm(ops, q, s.query) if self.query_norm else q
        if self.key_norm and not self.cross:  # that of a memory is in `project_keys_and_values`
            k = self.key_norm(ops, k, s.key)
        if self.config.positions == "rope" and not self.cross:
            turn: dict[str, Any] = {"theta": self.config.rope_theta, "scaling": self.scaling}
            turn |= {"pairs": self.config.rope_pairs, **self.turned_part}
            q = ops.rotate(f"{self.name}.query", q, s.query, **turn)
            k = ops.rotate(f"{self.name}.key", k, s.key, **turn)
            # in memory of its own, as that of the product of all three would be kept with it
            v = v if self.key_norm or self.config.value_norm else ops.scale(v, s.key, 1.0)
        moves = [(f"{self.name}.query_core", q, s.query, s.core_query)]
        if k is not None:
            moves += [(f"{self.name}.{x}_core", t, m.key, m.core_key) for x, t in (("key", k), ("value", v))]
        q, *pair = ops.relayout_each(*moves)
        k, v = pair or (None, None)
        if self.cross:
            k, v = ops.recall(self.name, k, v, m.core_key)
        hides: dict[str, Any] = {"causal": self.causal, "window": self.window, "mask": mask, "begins": begins}
        hides |= {"cap": self.config.attention_cap}
        a = ops.attention(self.name, q, k, v, s.core_query, m.core_key, self.sink, scale=self.scale, bias=bias, **hides)
        a = ops.relayout(f"{self.name}.context", a, s.core_query, s.query)
        a = ops.pointwise("multiply", a, ops.pointwise("sigmoid", *gate)) if gate else a
        (y,) = ops.project(a, s.query, (self.output,), (s.stream,), self.output_bias)
        return self.add_to_stream(ops, x, y, following)


def project_keys_and_values(ops: Ops, layers: list[Attention], memory: Any) -> list[tuple[Any, Any]]:
    """Compute the (key, value) of every cross-attention layer of a decoder from the encoder's output `memory`, in one
    group of einsums: the memory is converted once, and its gradient, summed over the layers, is reduced once."""
    shapes = layers[0].memory
    weights = [w for layer in layers for w in (layer.key, layer.value)]
    biases = [b for layer in layers for b in layer.inner_biases[1:3]]
    products = ops.project(memory, shapes.stream, weights, [shapes.key] * len(weights), biases)
    pairs = zip(layers, products[::2], products[1::2], strict=True)
    return [(layer.key_norm(ops, k, shapes.key) if layer.key_norm else k, v) for layer, k, v in pairs]


class TransformerBlock(Layer):
    """Transformer block: self-attention, cross-attention if `memory` is given, and a feed-forward layer or experts, one
    after another; with `parallel_residual` side by side."""

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
        linear: bool = False,
    ):
        """Construct a Transformer block, with cross-attention to an encoder's stack if its Specs, `memory`, are set;
        `linear`: True for a block with a delta rule in place of self-attention."""
        self.name, self.parallel = name, c.parallel_residual
        kind: Any = DeltaNet if linear else LatentAttention if c.kv_latent else Attention
        self.attention = kind(f"{name}.{'delta' if linear else 'attention'}", c, shapes, causal=causal, window=window)
        self.cross = Attention(f"{name}.cross", c, shapes, causal=False, memory=memory) if memory else None
        self.mlp = (Experts if experts else FeedForward)(f"{name}.mlp", c, shapes)
        factor = Parameter(f"{name}.scale", ("gates",), "factor", "ones", sizes=(("gates", 1),))
        self.factor, self.stream = [factor] if c.stored_scale else [], shapes.stream

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
        if self.parallel:
            h = self.mlp.prepare_input(ops, x)
            x = self.attention(ops, x, mask=mask, begins=begins, bias=bias)
        else:
            x, h = self.attention(ops, x, mask=mask, begins=begins, bias=bias, following=self.cross or self.mlp)
        if self.cross:
            x, h = self.cross(ops, x, pair, mask=memory_mask, entered=h, following=self.mlp)
        x, auxiliary = self.mlp(ops, x, h, tokens)
        return ops.scale_by(self.name, x, self.stream, self.factor) if self.factor else x, auxiliary


class Stack(Layer):
    """Sequence of Transformer blocks with what they share: the relative position bias (T5) and the final norm, which a
    post-norm stack lacks because every layer ends with a norm. `units`: the names of the blocks."""

    def __init__(
        self,
        prefix: str,
        c: ModelConfig,
        shapes: StackSpecs,
        *,
        causal: bool,
        memory: StackSpecs | None = None,
        only: int | None = None,
    ):
        """Construct the c.layers Transformer blocks of a stack, whose weights' names start with `prefix`. `shapes`:
        the Specs of its activations; `causal`: True if a token sees only earlier ones; `memory`: the Specs of the
        encoder's stack that the blocks attend to, or None; `only`: the number of its one block, which has the norm."""
        self.config, self.shapes, self.causal = c, shapes, causal
        names = {f"{prefix}layers.{i}": i for i in (range(c.layers) if only is None else [only])}
        more: dict[str, Any] = {"causal": causal, "memory": memory}
        self.blocks = {
            n: TransformerBlock(n, configure_layer(c, i), resize_layer(c, i, shapes), **more, **layer_kind(c, i))
            for n, i in names.items()
        }
        table = Parameter(f"{prefix}relative_bias", ("buckets", "heads"), "in", std=STD)
        self.relative = table if c.positions == "relative" and _attend(self.blocks.values()) else None
        self.units = tuple(names)
        norm = f"{prefix}norm" if only is None else f"{self.units[0]}.norm"
        self.norm = None if c.post_norm else Norm.build_model_norm(norm, c)

    def __call__(
        self,
        ops: Ops,
        x: Any,
        units: Sequence[str],
        *,
        mask: Any = None,
        begins: Any = None,
        memory: Any = None,
        memory_mask: Any = None,
        tokens: Any = None,
        auxiliary: Any = None,
    ) -> tuple[Any, Any]:
        """Run the Transformer blocks of this stack that are named in `units` on the residual stream x, and the final
        norm after the stack's last block; x is returned unchanged if `units` names none of its blocks. `mask` hides the
        padding of x, `begins` what lies before a document, `memory_mask` the padding of the encoder's output `memory`;
        all are data tensors. Without a `memory` cross-attention recalls the memory of an earlier pass.

        Return the stream, and the sum [length, batch] of `auxiliary`, the tokens' losses in the blocks before, and of
        those in these blocks; None for none. `tokens`: see `Experts`."""
        s, blocks = self.shapes, [block for name, block in self.blocks.items() if name in units]
        if not blocks:
            return x, auxiliary
        bias = None
        if self.relative and _attend(blocks):
            options: Mapping[str, Any] = {"bidirectional": not self.causal, "distance": self.config.distance}
            keys = ops.remembered(s.core_query) if self.causal else s.core_query
            bias = ops.relative_bias(self.relative, scores_spec(s.core_query, keys), **options)
        crossing = [block.cross for block in blocks if block.cross and memory is not None]
        pairs = project_keys_and_values(ops, crossing, memory) if crossing else [(None, None)] * len(blocks)
        group_size = ops.recompute.every
        for i in range(0, len(blocks), group_size):
            block_group = blocks[i : i + group_size]

            def run_blocks(x: Any, bias: Any, *kv: Any, group: Sequence[TransformerBlock] = block_group) -> Any:
                """Run the blocks of the `group` on the stream x; return it, beside the sum of their auxiliary losses if
                there are any. `kv`: keys and values of their cross-attention."""
                total = None
                for block, pair in zip(group, zip(kv[::2], kv[1::2], strict=True), strict=True):
                    x, loss = block(
                        ops, x, pair, mask=mask, begins=begins, bias=bias, memory_mask=memory_mask, tokens=tokens
                    )
                    x, total = ops.watch(block.name, x, s.stream), _add_optional(ops, total, loss)
                return x if total is None else (x, total)

            kv = [x for pair in pairs[i : i + group_size] for x in pair]
            output = ops.recomputed("full", block_group[0].name, run_blocks, s.stream, x, bias, *kv)
            x, loss = output if isinstance(output, tuple) else (output, None)
            auxiliary = _add_optional(ops, auxiliary, loss)
        return self.norm(ops, x, s.stream) if self.norm and self.units[-1] in units else x, auxiliary


def _attend(blocks: Iterable[TransformerBlock]) -> bool:
    """Return True if any of the blocks has attention, and no delta rule in its place."""
    return any(not isinstance(block.attention, DeltaNet) for block in blocks)


def _add_optional(ops: Ops, one: Any, other: Any) -> Any:
    """Return the sum of two activations, of which any may be None for nothing."""
    if one is None or other is None:
        return other if one is None else one
    return ops.pointwise("add", one, other)


def has_experts(c: ModelConfig, layer: int) -> bool:
    """Return True if Transformer layer number `layer` has experts, by experts_every and dense_layers of its model."""
    is_dense = layer in c.dense_layers and layer < c.layers  # behind the last, no number of theirs counts
    return c.experts > 0 and (layer + 1) % c.experts_every == 0 and not is_dense


def layer_kind(c: ModelConfig, layer: int) -> dict[str, Any]:
    """Return options of the block of Transformer layer number `layer`: its window, experts, and delta rule."""
    return {"window": layer_window(c, layer), "experts": has_experts(c, layer), "linear": layer in c.linear_layers}


def layer_window(c: ModelConfig, layer: int) -> int:
    """Return the attention window of Transformer layer number `layer`, in tokens; 0 if it sees the whole sequence."""
    return c.window if has_window(c, layer) and c.window < c.length else 0


def has_window(c: ModelConfig, layer: int) -> bool:
    """Return True if Transformer layer number `layer` has a window, be it longer than the sequence."""
    return c.window > 0 and (not c.window_layers or layer in c.window_layers)


def configure_layer(c: ModelConfig, layer: int) -> ModelConfig:
    """Return the configuration of Transformer layer number `layer`, whose heads and rotary positions may be others."""
    windowed, changes = has_window(c, layer), dict[str, Any]()
    if c.window and not windowed and layer not in c.linear_layers:
        changes |= {"d_kv": c.global_d_kv or c.d_kv, "kv_heads": c.global_kv_heads or c.kv_heads}
    if windowed and c.values_are_keys:
        changes["values_are_keys"] = False
    if layer in c.no_rope_layers:
        changes["positions"] = ""
    elif windowed and c.window_rope_theta:  # a share that is the scaling's goes with it
        share = 1.0 if c.rope_scaling == "proportional" else c.rope_share
        changes |= {"rope_theta": c.window_rope_theta, "rope_scaling": "none", "rope_share": share}
    return replace(c, **changes) if changes else c


def resize_layer(c: ModelConfig, layer: int, shapes: StackSpecs) -> StackSpecs:
    """Return a stack's Specs `shapes` with the heads that Transformer layer number `layer` has."""
    of_model, of_layer = dim_sizes(c), dim_sizes(configure_layer(c, layer))
    sizes = {dim: of_layer[dim] for dim in ("kv_heads", "d_kv") if of_layer[dim] != of_model[dim]}
    return shapes.resize_heads(sizes) if sizes else shapes
