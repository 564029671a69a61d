"""Rules that refuse the keys of group model."""

from __future__ import annotations

from collections.abc import Iterator

from platform.boundary.refusals import closest, violation
from platform.config.fields import Config, Model, loss_of
from platform.config.key import refused
from platform.plan.language.functions import CROSS_ENTROPY
from platform.plan.language.numbers import divisors


def _attention(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured number of heads that does not divide what it must (model width, query
    heads), for an odd width per head under rotary positions, and for the span of a norm that there is not."""
    m = config.model
    rope = "model.positions=rope needs an even d_kv"
    if not m.d_kv and m.d_model % m.heads:
        constraint = f"must divide model.d_model={m.d_model} where model.d_kv is not given"
        yield refused(config, "model.heads", constraint, closest(m.heads, divisors(m.d_model)))
    elif m.kv_latent:
        pass  # what rotates is d_rope
    elif m.positions == "rope" and m.d_kv % 2:
        yield refused(config, "model.d_kv", rope, [m.d_kv - 1, m.d_kv + 1])
    elif m.positions == "rope" and not m.d_kv and m.d_model // m.heads % 2:
        legal = closest(m.heads, [h for h in divisors(m.d_model) if m.d_model // h % 2 == 0])
        constraint = f"{rope}, not model.d_model / model.heads = {m.d_model // m.heads}"
        yield refused(config, "model.heads", constraint, legal)
    if m.kv_heads and m.heads % m.kv_heads:
        legal = closest(m.kv_heads, divisors(m.heads))
        yield refused(config, "model.kv_heads", f"must divide model.heads={m.heads}", legal)
    if m.query_key_norm_over != "head" and not m.query_key_norm:
        yield refused(config, "model.query_key_norm_over", "model.query_key_norm=false is no norm", ["head"])


def _latent(config: Config) -> Iterator[str]:
    """Yield a refusal line for keys of multi-head latent attention without it, for a part of a model that it does not
    go with, and for a width that rotates which is none, odd or all of d_kv."""
    m = config.model
    if not m.kv_latent:
        for key in ("q_latent", "d_rope", "d_value"):
            if getattr(m, key):
                yield refused(config, f"model.{key}", "model.kv_latent=0 is no latent attention", [0])
        return
    latent = f"model.kv_latent={m.kv_latent}"
    if m.kind in ("encoder_decoder", "two_layer"):
        yield refused(config, "model.kv_latent", f"model.kind={m.kind} has no latent attention", [0])
    if m.positions != "rope":
        yield refused(config, "model.positions", f"{latent} rotates a part of queries and keys", ["rope"])
    if m.kv_heads not in (0, m.heads):
        yield refused(config, "model.kv_heads", f"{latent} makes keys and values of every head", [0, m.heads])
    if m.query_key_norm:
        yield refused(config, "model.query_key_norm", f"{latent} has norms of the latents", [False])
    if m.attention_sinks:
        yield refused(config, "model.attention_sinks", f"{latent} has no sinks", [False])
    if (biases := m.attention_bias or ("all" if m.bias else "none")) != "none":
        yield violation("model.attention_bias", biases, f"{latent} has no biases", ["none"])
    d_kv = m.d_kv or m.d_model // m.heads
    if not 0 < m.d_rope < d_kv or m.d_rope % 2:
        constraint = f"must be even, > 0 and < {d_kv}, the width of a head, with {latent}"
        yield refused(config, "model.d_rope", constraint, closest(m.d_rope, range(2, d_kv, 2)))


def _rotary(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of rotary positions, perhaps scaled."""
    m, kind = config.model, f"model.rope_scaling={config.model.rope_scaling}"
    if m.rope_pairs != "halves" and m.positions != "rope":
        yield refused(config, "model.rope_pairs", f"model.positions={m.positions} has no rotations", ["halves"])
    if m.rope_scaling == "none":
        return
    if m.positions != "rope":
        yield refused(config, "model.rope_scaling", f"model.positions={m.positions} has no rotations", ["none"])
    if m.rope_scaling == "linear":
        return
    if not m.rope_original_length:
        yield refused(config, "model.rope_original_length", f"{kind} needs the length before", [m.length])
    if m.rope_high <= m.rope_low:
        yield refused(config, "model.rope_high", f"must be > model.rope_low={m.rope_low:g}", [m.rope_low * 4])


def _seen(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured mask of attention (window, documents, ...) that the kind of model does
    not know, and for layers with a window that the model lacks."""
    m, wrong = config.model, f"model.kind={config.model.kind} has no such attention"
    if m.kind in ("encoder", "encoder_decoder", "two_layer"):
        if m.window:
            yield refused(config, "model.window", wrong, [0])
        if config.data.document_mask:
            yield refused(config, "data.document_mask", wrong, [False])
    if m.segments and m.kind in ("decoder", "encoder_decoder", "two_layer"):
        yield refused(config, "model.segments", f"model.kind={m.kind} has no segments", [0])
    if m.window_layers and not m.window:
        yield refused(config, "model.window_layers", "model.window=0 is no window", [[]])
    elif beyond := [n for n in m.window_layers if n >= m.layers]:
        yield violation("model.window_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])


def _head(config: Config) -> Iterator[str]:
    """Yield a refusal line if a gated activation is configured for the transform before the model's output."""
    m, gated = config.model, ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu")
    if m.head_transform and m.activation in gated:
        yield refused(config, "model.activation", "model.head_transform=true has no gate", ["gelu", "gelu_tanh"])


def _buckets(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configured buckets of relative positions do not fit the largest distance."""
    m = config.model
    if m.positions == "relative" and m.distance <= m.buckets // 2:
        constraint = f"must be more than half of model.buckets={m.buckets}"
        yield refused(config, "model.distance", constraint, [m.buckets // 2 + 1])


def _smoothing(config: Config) -> Iterator[str]:
    """Yield a refusal line if label smoothing is configured with a loss that says itself what a label costs."""
    smoothing, loss = config.model.label_smoothing, loss_of(config)
    if smoothing and loss != CROSS_ENTROPY:
        constraint = f"the loss {loss} says itself what a label costs"
        yield violation("model.label_smoothing", smoothing, constraint, [0, f"train.loss={CROSS_ENTROPY}"])


def _experts(config: Config) -> Iterator[str]:
    """Yield a refusal line for experts in a kind of model that has none, more per token than there are, or in no layer,
    and for keys of experts without any."""
    m = config.model
    if not m.experts:
        needing = "expert_d_ff expert_bias shared_experts experts_every dense_layers"
        needing += " router_groups router_bias router_jitter balance_over"
        for key in needing.split():
            if getattr(m, key) != (nothing := getattr(Model(), key)):
                yield refused(config, f"model.{key}", "model.experts=0: the model has no experts", [nothing])
        return
    if m.kind == "two_layer":
        yield refused(config, "model.experts", f"model.kind={m.kind} has no layers of experts", [0])
    if m.experts_per_token > m.experts:
        yield refused(config, "model.experts_per_token", f"must be <= model.experts={m.experts}", [m.experts])
    if m.experts_every > m.layers:
        constraint = f"must be <= model.layers={m.layers}, so that a layer has experts"
        yield refused(config, "model.experts_every", constraint, [m.layers])
    elif beyond := [n for n in m.dense_layers if n >= m.layers]:
        yield violation("model.dense_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])
    elif {*m.dense_layers} >= {*range(m.experts_every - 1, m.layers, m.experts_every)}:
        yield refused(config, "model.dense_layers", "leaves no layer with experts", [m.dense_layers[:-1]])


def _groups(config: Config) -> Iterator[str]:
    """Yield a refusal line for groups of experts that do not divide them, for more kept groups than there are, for too
    few to hold the experts of a token, and for a score of more experts than a group has."""
    m = config.model
    if not m.experts:
        return
    if m.experts % m.router_groups:
        constraint = f"must divide model.experts={m.experts}"
        yield refused(config, "model.router_groups", constraint, closest(m.router_groups, divisors(m.experts)))
        return
    each = m.experts // m.router_groups
    least = -(-m.experts_per_token // each)
    if m.router_groups_kept > m.router_groups:
        constraint = f"must be <= model.router_groups={m.router_groups}"
        yield refused(config, "model.router_groups_kept", constraint, [m.router_groups])
    elif least > m.router_groups_kept and m.experts_per_token <= m.experts:
        constraint = f"has {m.router_groups_kept * each} experts, model.experts_per_token={m.experts_per_token}"
        yield refused(config, "model.router_groups_kept", constraint, [least])
    if m.router_group_best > each:
        constraint = f"must be <= {each}, the experts of each of model.router_groups={m.router_groups}"
        yield refused(config, "model.router_group_best", constraint, [each])


RULES = (_attention, _latent, _rotary, _seen, _head, _buckets, _smoothing, _experts, _groups)
