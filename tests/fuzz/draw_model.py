"""Draw models: sizes are small odd multiples of what the layouts of their plans need, so that most are legal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm
from random import Random

from platform.config.fields import Model
from platform.plan.layout import find_divisors
from platform.plan.model_types import NF4_BLOCK

LONG = [1.5], [3.0]  # divisors of a pair's angle in sequences of the length before, and in longer ones


def draw_model(r: Random, need: Mapping[str, int], chunks: int, one_token: bool, experts: float) -> Model:
    """Draw a model whose sizes are small odd multiples of what the layouts need. `chunks`: of the whole pipeline;
    `experts`: the share of models that have some."""

    def size(dim: str, *factors: int) -> int:
        return need.get(dim, 1) * r.choice(factors)

    kinds = ("decoder", "decoder", "decoder", "encoder", "encoder_decoder") + ("two_layer",) * (chunks == 1)
    has_experts = r.random() < experts
    m = Model(kind=r.choice(kinds[:5] if has_experts else kinds), layers=max(1, chunks - 2 + r.choice((0, 0, 1))))
    if m.kind == "encoder_decoder":
        m.layers = max(1, -(-(chunks - 3) // 2))
    length = lcm(need.get("length", 1), need.get("memory_length", 1))
    m.length = length * (1 if one_token else r.choice((1, 1, 2, 3, 5)))
    if m.kind == "encoder_decoder" and r.random() < 0.5:
        m.source_length = length * r.choice((1, 2, 3))
    m.heads = size("heads", 1, 2, 3)
    m.kv_heads = r.choice((0, 0, *(k for k in range(1, m.heads + 1) if m.heads % k == 0)))
    m.positions = r.choice(("learned", "learned", "rope", "sinusoidal", "relative"))
    m.d_kv = size("d_kv", 2, 4) if m.positions == "rope" else size("d_kv", 1, 2, 3)
    m.d_kv *= 2 if m.positions == "rope" and m.d_kv % 2 else 1
    m.d_model, m.d_ff = size("d_model", 2, 3, 5, 6), size("d_ff", 1, 2, 3, 5)
    m.io, m.hidden, m.vocab = size("io", 1, 3), size("hidden", 1, 2, 3), r.randint(5, 23)
    m.buckets, m.distance = r.choice(((4, 3), (8, 12)))
    m.norm, m.post_norm = r.choice(("layernorm", "rmsnorm")), r.random() < 0.25
    m.activation = r.choice(("gelu", "relu", "swiglu", "swiglu_clamped", "geglu"))
    m.bias, m.tied = r.random() < 0.75, r.random() < 0.6
    m.label_smoothing, m.dropout = r.choice((0.0, 0.0, 0.1)), r.choice((0.0, 0.0, 0.0, 0.2))
    if m.kind != "two_layer" and r.random() < 0.4:
        draw_parts(r, m)
    if m.kind in ("decoder", "encoder") and r.random() < 0.2:
        draw_latents(r, m, size)
    if m.positions == "rope":
        m.rope_pairs = r.choice(("halves", "neighbours"))
        draw_rotations(Random(repr(m)), m)
    if has_experts:
        m.experts = size("experts", *((1, 1, 2, 3) if need.get("experts", 1) > 1 else (2, 3, 4, 6)))
        m.expert_d_ff = r.choice((0, size("d_ff", 1, 2, 3)))
        draw_experts(r, m, size)
    if m.kind == "decoder" and need.get("d_kv", 1) == 1:
        draw_delta_rules(Random(repr(m)), m, need)
    if m.kind in ("decoder", "encoder"):
        draw_layers_that_see_all(Random(repr(m)), m, size)
    if m.kind == "decoder" and m.positions != "relative" and not (m.head_transform or m.head_bias):
        draw_modules_ahead(Random(repr(m)), m)
    return m


def draw_layers_that_see_all(r: Random, m: Model, size: Callable[..., int]) -> None:
    """Draw heads of layers without a window, and what concerns values; and stored factors of blocks. `size`: see
    `draw_latents`."""
    m.stored_scale = r.random() < 0.15
    if m.kv_latent:
        return
    if m.positions == "rope" and r.random() < 0.3:
        m.rope_scaling, m.rope_factor, m.rope_share = "proportional", r.choice((1.0, 2.0)), r.choice((0.25, 0.5, 1.0))
        m.rope_short, m.rope_long = [], []
    if r.random() < 0.7:
        return
    m.values_are_keys, m.value_norm = r.random() < 0.6, r.random() < 0.6
    if m.window and r.random() < 0.8:
        m.global_kv_heads = r.choice((0, *find_divisors(m.heads)))
        m.global_d_kv = 0 if m.rope_scaling == "longrope" else r.choice((0, 2 * m.d_kv, 3 * m.d_kv))


def draw_modules_ahead(r: Random, m: Model) -> None:
    """Draw modules of multi-token prediction."""
    if r.random() < 0.4 and m.length > 2:
        m.predict_ahead, m.predict_ahead_weight = r.choice((1, 1, 2)), r.choice((0.1, 0.7))


def draw_delta_rules(r: Random, m: Model, need: Mapping[str, int]) -> None:
    """Draw layers with a delta rule in place of attention, and the gates of models that have them."""
    m.attention_gate = not m.kv_latent and r.random() < 0.2
    m.shared_expert_gate = bool(m.experts and m.shared_experts) and r.random() < 0.4
    if r.random() < 0.3:
        m.linear_layers = r.choice(([0], [m.layers - 1], [*range(m.layers)]))
        # ranks that share sequences divide the heads further
        m.linear_key_heads = need.get("heads", 1) * need.get("length", 1) * r.choice((1, 2))
        m.linear_value_heads = m.linear_key_heads * r.choice((1, 2, 3))
        m.linear_d_key, m.linear_d_value, m.linear_taps = r.choice((2, 3)), r.choice((0, 4)), r.choice((1, 2, 4))


def draw_uneven(r: Random, m: Model, need: Mapping[str, int]) -> None:
    """Draw sizes that the layouts cut into blocks which differ."""

    def size(dim: str) -> int:
        least = max(2, need.get(dim, 1))
        return r.randint(least, 2 * least + 1)

    m.heads, m.d_ff, m.hidden, m.linear_layers = size("heads"), size("d_ff"), size("hidden"), []
    if not m.kv_latent:
        m.kv_heads = r.choice((0, *(k for k in range(1, m.heads + 1) if m.heads % k == 0)))
        if r.random() < 0.3:
            m.kv_heads, m.heads = m.heads, 2 * m.heads
        m.global_kv_heads = m.global_kv_heads and Random(repr(m)).choice(find_divisors(m.heads))
    if m.expert_d_ff:
        m.expert_d_ff = size("d_ff")
    m.shared_d_ff = 0
    if m.experts and m.capacity_factor:
        m.experts = size("experts")
        m.experts_per_token = min(m.experts_per_token, m.experts)
        m.router_groups, m.router_groups_kept, m.router_group_best = 1, 1, 1


def draw_latents(r: Random, m: Model, size: Callable[..., int]) -> None:
    """Draw latents of which keys and values, and perhaps queries, are made; `size`: draws a multiple of what layouts
    need of a dim."""
    m.positions = "rope"
    m.kv_latent, m.q_latent = size("kv_latent", 2, 3), r.choice((0, size("q_latent", 2, 3)))
    m.d_rope = size("d_kv", 2)
    m.d_kv, m.d_value = m.d_rope + size("d_kv", 1, 2), r.choice((0, size("d_kv", 1, 3)))
    m.kv_heads, m.query_key_norm, m.query_key_norm_over, m.attention_bias = 0, False, "head", "none"


def draw_experts(r: Random, m: Model, size: Callable[..., int]) -> None:
    """Draw how a model's experts are chosen, what they add to the loss, and what lies beside them; `size`: see
    `draw_latents`."""
    m.shared_experts = r.choice((0, 0, 1, 2))
    m.experts_per_token, m.experts_every = r.randint(1, min(3, m.experts)), min(m.layers, r.choice((1, 1, 2)))
    m.capacity_factor = r.choice((0.0, 0.5, 1.0, 1.25))
    if m.layers > 1 and m.experts_every == 1 and r.random() < 0.6:
        m.dense_layers = [r.randrange(m.layers)]
    m.router, m.router_normalised = r.choice(("softmax", "sigmoid")), r.random() < 0.7
    m.router_groups = r.choice(find_divisors(m.experts))
    each = m.experts // m.router_groups
    m.router_groups_kept = r.randint(-(-m.experts_per_token // each), m.router_groups)
    m.router_group_best = r.randint(1, each)
    m.expert_bias = r.random() < 0.5
    m.router_bias, m.balance_rate = r.random() < 0.3, r.choice((0.0, 0.05, 0.3))
    m.balance_over = r.choice(("sequence", "batch"))
    m.router_jitter = Random(repr(m)).choice((0.0, 0.0, 0.1))
    more = Random(repr(m))  # all else is drawn as without it
    if more.random() < 0.25:
        m.expert_norms = bool(m.shared_experts) and not m.parallel_residual
        m.expert_factors, m.shared_d_ff = more.random() < 0.7, m.shared_experts and size("d_ff", 1, 2)
    m.router_scale, m.balance_loss, m.z_loss = r.choice((1.0, 2.5)), r.choice((0.0, 0.3)), r.choice((0.0, 0.05))


def draw_parts(r: Random, m: Model) -> None:
    """Draw the parts of a model that most do without."""
    m.query_key_norm, m.head_bias, m.embedding_norm = (r.random() < 0.4 for _ in range(3))
    m.head_transform = m.activation in ("gelu", "relu") and r.random() < 0.4
    m.attention_bias = r.choice(("", "all", "qkv", "none"))
    m.attention_scale, m.logit_scale = r.choice((0.0, 0.0, 1.0)), r.choice((1.0, 1.0, 0.25))
    if m.kind == "encoder":
        m.segments = r.choice((0, 2, 3))
    if m.kind == "decoder":
        m.window = r.choice((0, 1, 2, 3))
        m.window_layers = [] if not m.window else r.choice(([], [0], [m.layers - 1]))
    m.attention_sinks = Random(repr(m)).random() < 0.5
    draw_norm_places(Random(repr(m)), m)
    if m.query_key_norm:
        m.query_key_norm_over = Random(repr(m)).choice(("head", "heads"))


def draw_norm_places(r: Random, m: Model) -> None:
    """Draw where a layer's norms stand, of which kind they are, and the factors on what is added."""
    if m.norm == "rmsnorm" and r.random() < 0.4:
        m.norm = "rmsnorm_centred"
    m.norm_eps = Random(repr(m)).choice((1e-5, 1e-2))
    m.embedding_scale, m.residual_scale = r.choice((1.0, 3.0)), r.choice((1.0, 0.5))
    m.parallel_residual = not m.post_norm and m.kind != "encoder_decoder" and r.random() < 0.3
    m.attention_cap, m.logit_cap = r.choice((0.0, 0.0, 0.02)), r.choice((0.0, 0.0, 0.5))
    if not m.post_norm:
        m.input_norm, m.output_norm = r.choice(((True, False), (False, True), (True, True)))


def draw_rotations(r: Random, m: Model) -> None:
    """Draw how much of a head rotates, and how its angles are scaled."""
    if not m.kv_latent and m.d_kv >= 4 and r.random() < 0.4:
        m.rope_share = r.randrange(2, m.d_kv + 1, 2) / m.d_kv
    if not m.kv_latent and r.random() < 0.3:
        m.no_rope_layers = [r.randrange(m.layers)]
    m.window_rope_theta = r.choice((0.0, 50.0)) if m.window else 0.0
    m.rope_scaling = r.choice(("none", "none", "dynamic", "longrope"))
    more = Random(repr(m))  # all else is drawn as without it
    m.rope_theta = more.choice((1e4, 30.0))
    if m.rope_scaling == "none" and more.random() < 0.5:
        m.rope_scaling = more.choice(("linear", "llama3", "yarn"))
        m.rope_low, m.rope_high = (0.1, 0.5) if m.rope_scaling == "llama3" else (1.0, 4.0)
        m.rope_truncate, m.rope_magnitude = m.rope_scaling != "yarn" or more.random() < 0.5, 0.0
    if m.rope_scaling != "none":
        m.rope_factor, m.rope_original_length = 2.0, r.choice((2, 100))
    divide_angles(m)


def divide_angles(m: Model) -> None:
    """Set a divisor for each pair of a head that longrope scales."""
    pairs = (m.d_rope if m.kv_latent else int(m.d_kv * m.rope_share)) // 2
    m.rope_short, m.rope_long = (of * pairs if m.rope_scaling == "longrope" else [] for of in LONG)


def widen_to_blocks(m: Model, need: Mapping[str, int]) -> None:
    """Widen a model so that no layout that needs `need` cuts a block of its weights in 4 bits."""

    def size(dim: str) -> int:
        return NF4_BLOCK * need.get(dim, 1)

    m.d_model, m.d_ff, m.d_kv, m.rope_share = size("d_model"), size("d_ff"), size("d_kv"), 1.0
    m.expert_d_ff, m.shared_d_ff = m.expert_d_ff and size("d_ff"), m.shared_d_ff and size("d_ff")
    m.global_d_kv = m.global_d_kv and 2 * m.d_kv
    if m.kv_latent:
        m.kv_latent, m.q_latent, m.d_rope = size("kv_latent"), m.q_latent and size("q_latent"), size("d_kv")
        m.d_kv, m.d_value = m.d_rope + size("d_kv"), m.d_value and size("d_kv")
    if m.linear_layers:
        m.linear_d_key, m.linear_d_value = NF4_BLOCK, m.linear_d_value and NF4_BLOCK
    divide_angles(m)
