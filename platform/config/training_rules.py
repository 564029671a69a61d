"""Rules that refuse the keys of groups model, train, loss_scale, eval, optimizer and data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from platform.boundary.refusals import closest_values, format_violation
from platform.boundary.schema import fits_type
from platform.config.fields import (
    OBJECTIVES,
    PREFERENCE,
    WEIGHTED,
    Config,
    Data,
    Model,
    Tune,
    choose_quantisation,
    is_open_key,
    training_loss_name,
    training_objective_name,
)
from platform.config.key import violation_of_key
from platform.config.ramps import parse_length_ramp
from platform.plan.layout import find_divisors, format_count
from platform.plan.model_types import CROSS_ENTROPY, DISTILL, PAIR_LOSSES
from platform.plan.quantisation import EXACT


def _violations_of_attention(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured number of heads that does not divide what it must (model width, query
    heads), for an odd width per head under rotary positions, and for the span of a norm that there is not."""
    m = config.model
    rope = "model.positions=rope needs an even d_kv"
    if not m.d_kv and m.d_model % m.heads:
        constraint = f"must divide model.d_model={m.d_model} where model.d_kv is not given"
        yield violation_of_key(config, "model.heads", constraint, closest_values(m.heads, find_divisors(m.d_model)))
    elif m.kv_latent or (m.rope_share < 1 and m.rope_scaling != "proportional"):
        pass  # what rotates is d_rope, or a share
    elif m.positions == "rope" and m.d_kv % 2:
        yield violation_of_key(config, "model.d_kv", rope, [m.d_kv - 1, m.d_kv + 1])
    elif m.positions == "rope" and not m.d_kv and m.d_model // m.heads % 2:
        legal = closest_values(m.heads, [h for h in find_divisors(m.d_model) if m.d_model // h % 2 == 0])
        constraint = f"{rope}, not model.d_model / model.heads = {m.d_model // m.heads}"
        yield violation_of_key(config, "model.heads", constraint, legal)
    if m.kv_heads and m.heads % m.kv_heads:
        legal = closest_values(m.kv_heads, find_divisors(m.heads))
        yield violation_of_key(config, "model.kv_heads", f"must divide model.heads={m.heads}", legal)
    if m.query_key_norm_over != "head" and not m.query_key_norm:
        yield violation_of_key(config, "model.query_key_norm_over", "model.query_key_norm=false is no norm", ["head"])


def _violations_of_layers_that_see_all(config: Config) -> Iterator[str]:
    """Yield a refusal line for heads of layers without a window that do not fit, and where no layer has such heads, or
    no attention what concerns its values."""
    m = config.model
    for key in ("global_d_kv", "global_kv_heads"):
        if getattr(m, key) and not m.window:
            yield violation_of_key(config, f"model.{key}", "model.window=0: all layers are alike", [0])
    for key in ("global_d_kv", "global_kv_heads", "values_are_keys", "value_norm"):
        reason = f"model.kv_latent={m.kv_latent} makes keys and values" if m.kv_latent else f"model.kind={m.kind}"
        if getattr(m, key) and (m.kv_latent or m.kind in ("encoder_decoder", "two_layer")):
            yield violation_of_key(config, f"model.{key}", f"{reason} has no such attention", [getattr(Model(), key)])
    if m.global_kv_heads and m.heads % m.global_kv_heads:
        legal = closest_values(m.global_kv_heads, find_divisors(m.heads))
        yield violation_of_key(config, "model.global_kv_heads", f"must divide model.heads={m.heads}", legal)
    if m.global_d_kv and m.rope_scaling == "longrope":
        constraint = "model.rope_scaling=longrope has a divisor for each pair of model.d_kv"
        yield violation_of_key(config, "model.global_d_kv", constraint, [0])
    share = 1.0 if m.rope_scaling == "proportional" else m.rope_share
    if m.positions == "rope" and ((turned := int(m.global_d_kv * share)) % 2 or turned == 0 < m.global_d_kv):
        legal = [n for n in range(2, 2 * m.global_d_kv + 2, 2) if int(n * share) % 2 == 0 < int(n * share)]
        constraint = f"model.positions=rope rotates pairs of elements, not {turned}"
        yield violation_of_key(config, "model.global_d_kv", constraint, closest_values(m.global_d_kv, legal))


def _violations_of_latent_attention(config: Config) -> Iterator[str]:
    """Yield a refusal line for keys of multi-head latent attention without it, for a part of a model that it does not
    go with, and for a width that rotates which is none, odd or all of d_kv."""
    m = config.model
    if not m.kv_latent:
        for key in ("q_latent", "d_rope", "d_value"):
            if getattr(m, key):
                yield violation_of_key(config, f"model.{key}", "model.kv_latent=0 is no latent attention", [0])
        return
    latent = f"model.kv_latent={m.kv_latent}"
    if m.kind in ("encoder_decoder", "two_layer"):
        yield violation_of_key(config, "model.kv_latent", f"model.kind={m.kind} has no latent attention", [0])
    if m.positions != "rope":
        yield violation_of_key(config, "model.positions", f"{latent} rotates a part of queries and keys", ["rope"])
    if m.kv_heads not in (0, m.heads):
        yield violation_of_key(config, "model.kv_heads", f"{latent} makes keys and values of every head", [0, m.heads])
    for key, plain in (("no_rope_layers", []), ("rope_share", 1.0)):
        if getattr(m, key) != plain:
            yield violation_of_key(config, f"model.{key}", f"{latent} rotates model.d_rope elements", [plain])
    if m.query_key_norm:
        yield violation_of_key(config, "model.query_key_norm", f"{latent} has norms of the latents", [False])
    if m.attention_sinks:
        yield violation_of_key(config, "model.attention_sinks", f"{latent} has no sinks", [False])
    if (biases := m.attention_bias or ("all" if m.bias else "none")) != "none":
        yield format_violation("model.attention_bias", biases, f"{latent} has no biases", ["none"])
    d_kv = m.d_kv or m.d_model // m.heads
    if not 0 < m.d_rope < d_kv or m.d_rope % 2:
        constraint = f"must be even, > 0 and < {d_kv}, the width of a head, with {latent}"
        yield violation_of_key(config, "model.d_rope", constraint, closest_values(m.d_rope, range(2, d_kv, 2)))


def _violations_of_delta_rules(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of layers with a gated delta rule, and of gates."""
    m = config.model
    if m.shared_expert_gate and not (m.experts and m.shared_experts):
        yield violation_of_key(config, "model.shared_expert_gate", "there are no shared experts", [False])
    if m.shared_d_ff and not (m.experts and m.shared_experts):
        yield violation_of_key(config, "model.shared_d_ff", "there are no shared experts", [0])
    if m.attention_gate and m.kv_latent:
        yield violation_of_key(config, "model.attention_gate", f"model.kv_latent={m.kv_latent} has no gate", [False])
    if not m.linear_layers:
        return
    if beyond := [n for n in m.linear_layers if n >= m.layers]:
        yield format_violation("model.linear_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])
    if m.kind != "decoder":
        yield violation_of_key(config, "model.linear_layers", f"model.kind={m.kind}: a rule reads the past", [[]])
    keys = m.linear_key_heads or m.heads
    if m.linear_value_heads % keys:
        constraint, below = f"must be a multiple of {keys}, the heads of keys", m.linear_value_heads // keys * keys
        yield violation_of_key(config, "model.linear_value_heads", constraint, [below or keys, below + keys])


def _violations_of_rotary_positions(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of rotary positions, perhaps scaled."""
    m, kind = config.model, f"model.rope_scaling={config.model.rope_scaling}"
    unrotated = f"model.positions={m.positions} has no rotations"
    if m.rope_pairs != "halves" and m.positions != "rope":
        yield violation_of_key(config, "model.rope_pairs", unrotated, ["halves"])
    for key in ("rope_share", "no_rope_layers", "window_rope_theta"):
        if m.positions != "rope" and getattr(m, key) != (plain := getattr(Model(), key)):
            yield violation_of_key(config, f"model.{key}", unrotated, [plain])
    if m.window_rope_theta and not m.window:
        yield violation_of_key(config, "model.window_rope_theta", "model.window=0 is no window", [0])
    if beyond := [n for n in m.no_rope_layers if n >= m.layers]:
        yield format_violation("model.no_rope_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])
    d_kv = m.d_kv or m.d_model // m.heads
    turned = m.d_rope if m.kv_latent else int(d_kv * m.rope_share)
    if m.rope_share < 1 and m.rope_scaling != "proportional" and (turned % 2 or not turned):
        legal = closest_values(m.rope_share, [n / d_kv for n in range(2, d_kv + 1, 2)])
        yield violation_of_key(config, "model.rope_share", f"rotates {turned} of {d_kv} elements: needs pairs", legal)
    pairs = turned // 2 if m.rope_scaling == "longrope" else 0
    for key in ("rope_short", "rope_long"):
        if len(numbers := getattr(m, key)) != pairs:
            constraint = f"has {len(numbers)} numbers; {kind} has one for each of {pairs} pairs"
            yield format_violation(f"model.{key}", numbers, constraint, [[1.0] * pairs] if pairs < 9 else ())
    if m.rope_scaling == "none":
        return
    if m.positions != "rope":
        yield violation_of_key(config, "model.rope_scaling", unrotated, ["none"])
    if m.rope_scaling in ("linear", "proportional"):
        return
    if not m.rope_original_length:
        yield violation_of_key(config, "model.rope_original_length", f"{kind} needs the length before", [m.length])
    if m.rope_high <= m.rope_low:
        yield violation_of_key(config, "model.rope_high", f"must be > model.rope_low={m.rope_low:g}", [m.rope_low * 4])


def _violations_of_attention_masks(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured mask of attention (window, documents, ...) that the kind of model does
    not know, and for layers with a window that the model lacks."""
    m, constraint = config.model, f"model.kind={config.model.kind} has no such attention"
    if m.kind in ("encoder", "encoder_decoder", "two_layer"):
        if m.window:
            yield violation_of_key(config, "model.window", constraint, [0])
        if config.data.document_mask:
            yield violation_of_key(config, "data.document_mask", constraint, [False])
    if m.segments and m.kind in ("decoder", "encoder_decoder", "two_layer"):
        yield violation_of_key(config, "model.segments", f"model.kind={m.kind} has no segments", [0])
    if m.window_layers and not m.window:
        yield violation_of_key(config, "model.window_layers", "model.window=0 is no window", [[]])
    elif beyond := [n for n in m.window_layers if n >= m.layers]:
        yield format_violation("model.window_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])


def _violations_of_norms(config: Config) -> Iterator[str]:
    """Yield a refusal line for each place of norms, or of layers, that does not go with `post_norm` or the kind."""
    m, reason = config.model, "model.post_norm=true has one norm a layer, after its sum"
    for key, plain in (("input_norm", True), ("output_norm", False), ("parallel_residual", False)):
        if m.post_norm and getattr(m, key) != plain:
            yield violation_of_key(config, f"model.{key}", reason, [plain])
    if m.parallel_residual and m.kind == "encoder_decoder":
        yield violation_of_key(config, "model.parallel_residual", f"model.kind={m.kind} reads its memory", [False])


def _violations_of_head_transform(config: Config) -> Iterator[str]:
    """Yield a refusal line if a gated activation is configured for the transform before the model's output."""
    m, gated = config.model, ("swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu")
    if m.head_transform and m.activation in gated:
        constraint = "model.head_transform=true has no gate"
        yield violation_of_key(config, "model.activation", constraint, ["gelu", "gelu_tanh"])


def _violations_of_position_buckets(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configured buckets of relative positions do not fit the largest distance."""
    m = config.model
    if m.positions == "relative" and m.distance <= m.buckets // 2:
        constraint = f"must be more than half of model.buckets={m.buckets}"
        yield violation_of_key(config, "model.distance", constraint, [m.buckets // 2 + 1])


def _violations_of_multi_token_prediction(config: Config) -> Iterator[str]:
    """Yield a refusal line for each part of a model, and each way of training it, beside which it has no modules of
    multi-token prediction."""
    m, key, loss = config.model, "model.predict_ahead", training_loss_name(config)
    if not m.predict_ahead:
        return
    if m.predict_ahead >= m.length:
        yield violation_of_key(config, key, f"must be < model.length={m.length}, tokens further on", [m.length - 1])
    objective = training_objective_name(config)
    reasons = {
        f"model.kind={m.kind} has no such modules": m.kind != "decoder",
        f"not built yet beside model.positions={m.positions}": m.positions == "relative",
        "not built yet beside model.head_transform=true": m.head_transform,
        "not built yet beside model.head_bias=true": m.head_bias,
        f"not built yet beside the loss {loss}": loss in (*PAIR_LOSSES, DISTILL),
        f"not built yet beside data.objective={objective}": objective in WEIGHTED and loss not in PAIR_LOSSES,
    }
    for reason in (reason for reason, is_given in reasons.items() if is_given):
        yield violation_of_key(config, key, reason, [0])


def _violations_of_label_smoothing(config: Config) -> Iterator[str]:
    """Yield a refusal line if label smoothing is configured with a loss that says itself what a label costs."""
    smoothing, loss = config.model.label_smoothing, training_loss_name(config)
    if smoothing and loss != CROSS_ENTROPY:
        constraint = f"the loss {loss} says itself what a label costs"
        yield format_violation("model.label_smoothing", smoothing, constraint, [0, f"train.loss={CROSS_ENTROPY}"])


def _violations_of_experts(config: Config) -> Iterator[str]:
    """Yield a refusal line for experts in a kind of model that has none, more per token than there are, or in no layer,
    and for keys of experts without any."""
    m = config.model
    if not m.experts:
        expert_keys = "expert_d_ff expert_bias shared_experts experts_every dense_layers"
        expert_keys += " expert_norms expert_factors router_groups router_bias router_jitter balance_over"
        for key in expert_keys.split():
            if getattr(m, key) != (nothing := getattr(Model(), key)):
                yield violation_of_key(config, f"model.{key}", "model.experts=0: the model has no experts", [nothing])
        return
    if m.expert_norms and (m.parallel_residual or not m.shared_experts):
        constraint = "model.shared_experts=0: nothing else reads the layer's own norm"
        constraint = "model.parallel_residual=true has one norm for a block" if m.parallel_residual else constraint
        yield violation_of_key(config, "model.expert_norms", constraint, [False])
    if m.kind == "two_layer":
        yield violation_of_key(config, "model.experts", f"model.kind={m.kind} has no layers of experts", [0])
    if m.experts_per_token > m.experts:
        yield violation_of_key(config, "model.experts_per_token", f"must be <= model.experts={m.experts}", [m.experts])
    if m.experts_every > m.layers:
        constraint = f"must be <= model.layers={m.layers}, so that a layer has experts"
        yield violation_of_key(config, "model.experts_every", constraint, [m.layers])
    elif beyond := [n for n in m.dense_layers if n >= m.layers]:
        yield format_violation("model.dense_layers", beyond[0], f"layers are 0 to {m.layers - 1}", [m.layers - 1])
    elif {*m.dense_layers} >= {*range(m.experts_every - 1, m.layers, m.experts_every)}:
        yield violation_of_key(config, "model.dense_layers", "leaves no layer with experts", [m.dense_layers[:-1]])


def _violations_of_router_groups(config: Config) -> Iterator[str]:
    """Yield a refusal line for groups of experts that do not divide them, for more kept groups than there are, for too
    few to hold the experts of a token, and for a score of more experts than a group has."""
    m = config.model
    if not m.experts:
        return
    if m.experts % m.router_groups:
        legal = closest_values(m.router_groups, find_divisors(m.experts))
        yield violation_of_key(config, "model.router_groups", f"must divide model.experts={m.experts}", legal)
        return
    experts_per_group, kept = m.experts // m.router_groups, m.router_groups_kept
    least = -(-m.experts_per_token // experts_per_group)
    if kept > m.router_groups:
        constraint = f"must be <= model.router_groups={m.router_groups}"
        yield violation_of_key(config, "model.router_groups_kept", constraint, [m.router_groups])
    elif least > kept and m.experts_per_token <= m.experts:
        constraint = f"has {kept * experts_per_group} experts, model.experts_per_token={m.experts_per_token}"
        yield violation_of_key(config, "model.router_groups_kept", constraint, [least])
    if m.router_group_best > experts_per_group:
        constraint = f"must be <= {experts_per_group}, the experts of each of model.router_groups={m.router_groups}"
        yield violation_of_key(config, "model.router_group_best", constraint, [experts_per_group])


MODEL_RULES = (
    _violations_of_attention,
    _violations_of_latent_attention,
    _violations_of_layers_that_see_all,
    _violations_of_delta_rules,
    _violations_of_rotary_positions,
    _violations_of_attention_masks,
    _violations_of_norms,
    _violations_of_head_transform,
    _violations_of_position_buckets,
    _violations_of_label_smoothing,
    _violations_of_multi_token_prediction,
    _violations_of_experts,
    _violations_of_router_groups,
)


def _violations_of_batch_ramp(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of a growing batch (`batch_phases`)."""
    t = config.train
    if not t.ramp_from:
        if t.ramp_samples:
            yield violation_of_key(config, "train.ramp_samples", "train.ramp_from=0: the batch does not grow", [0])
        return
    if t.ramp_from >= t.global_batch:
        constraint = f"must be < train.global_batch={t.global_batch}"
        yield format_violation("train.ramp_from", t.ramp_from, constraint, [t.global_batch // 2, 0])
    elif (grows := t.global_batch - t.ramp_from) % t.ramp_by:
        constraint = f"must divide train.global_batch - train.ramp_from = {grows}"
        yield format_violation("train.ramp_by", t.ramp_by, constraint, closest_values(t.ramp_by, find_divisors(grows)))
    elif not t.ramp_samples:
        constraint = "train.ramp_from needs the samples over which it grows"
        yield format_violation("train.ramp_samples", 0, constraint, [grows])
    if config.pipeline.kind == "file":
        constraint = "a schedule from a file has one number of microbatches"
        yield format_violation("train.ramp_from", t.ramp_from, constraint, [0])


CUT = ("causal", "masked")  # objectives whose samples can be cut: each token has its own place in all data tensors


def _violations_of_length_ramp(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the configuration of sequences that grow (`length_phases`)."""
    key, most, ramp = "train.length_ramp", config.model.length, parse_length_ramp(config.train)
    for number, (entry, (step, length)) in enumerate(zip(config.train.length_ramp, ramp, strict=True)):
        before, after = (ramp[number - 1] if number else None), ramp[number + 1 :]
        if not before and step != 1:
            yield format_violation(key, entry, "the first length is that of the first steps", [f"0:{length}"])
        if before and step <= before.step:
            constraint = f"must begin after {config.train.length_ramp[number - 1]} does"
            yield format_violation(key, entry, constraint, [f"{before.step}:{length}"])
        if not length or most % length:
            legal = closest_values(length, [n for n in find_divisors(most) if n < most or not after])
            constraint = f"must divide model.length={most}, so that pieces of samples are sequences"
            yield format_violation(key, entry, constraint, [f"{step - 1}:{n}" for n in legal])
        elif before and length <= before.length:
            legal = closest_values(length, [n for n in find_divisors(most) if n > before.length])
            constraint = f"must be longer than the {before.length} tokens before"
            yield format_violation(key, entry, constraint, [f"{step - 1}:{n}" for n in legal])
        elif not after and length != most:
            constraint = f"the last length must be model.length={most}"
            yield format_violation(key, entry, constraint, [f"{step - 1}:{most}", f"model.length={length}"])
    if ramp and config.model.kind == "encoder_decoder":
        constraint = "an encoder-decoder has two lengths, which do not grow"
        yield format_violation(key, config.train.length_ramp[0], constraint, [[]])
    elif ramp and (objective := training_objective_name(config)) not in CUT:
        constraint = f"samples of data.objective={objective} cannot be cut into shorter ones"
        yield format_violation(key, config.train.length_ramp[0], constraint, [[]])


def _violations_of_position_rows(config: Config) -> Iterator[str]:
    """Yield a refusal line if a configured table of learned positions has not the rows that sequences need."""
    m, ramp = config.model, bool(config.train.length_ramp)
    learned = m.positions == "learned" and m.kind != "encoder_decoder"
    legal = [m.length] if learned and ramp else [0, m.length] if learned else [0]
    if m.position_rows not in legal:
        constraint = f"the longest sequences have model.length={m.length}" if learned else "there is no such table"
        yield violation_of_key(config, "model.position_rows", constraint, legal)


def _violations_of_init_averaged(config: Config) -> Iterator[str]:
    """Yield a refusal line if averaged weights of no saved model are configured to begin with (train.init_averaged)."""
    if config.train.init_averaged and config.train.init in ("", "random"):
        constraint = "train.init names no run whose averages could be taken"
        yield format_violation("train.init_averaged", True, constraint, [False])


def _violations_of_evaluation(config: Config) -> Iterator[str]:
    """Yield a refusal line for each configured key of evaluations that never take place, or averages not kept."""
    e = config.eval
    if config.checkpoint.best and not e.every:
        yield format_violation("checkpoint.best", True, "eval.every=0: there are no evaluations", [False])
    if e.patience and not e.every:
        yield format_violation("eval.patience", e.patience, "eval.every=0: there are no evaluations", [0])
    for key, values, fault in (("prompts", e.prompts, "generates no text"), ("tasks", e.tasks, "answers no texts")):
        if values and not e.every:
            yield format_violation(f"eval.{key}", values[0], "eval.every=0: there are no evaluations", [[]])
        elif values and config.model.kind in ("encoder", "two_layer"):
            yield format_violation(f"eval.{key}", values[0], f"model.kind={config.model.kind} {fault}", [[]])
    for name, value, none in (("task_folder", e.task_folder, ""), ("task_samples", e.task_samples, 0)):
        if value and not e.tasks:
            yield format_violation(f"eval.{name}", value, "only eval.tasks reads it", [none])
    if e.least_gain and not e.patience:
        yield format_violation("eval.least_gain", e.least_gain, "only eval.patience reads it", [0])
    if e.averaged and not config.train.ema:
        yield format_violation("eval.averaged", True, "train.ema=0: no averages are kept", [False])


def _violations_of_stop_step(config: Config) -> Iterator[str]:
    """Yield a refusal line if the run is to stop (train.stop_at) after its last step."""
    steps = config.train.steps
    if config.train.stop_at > steps:
        yield violation_of_key(config, "train.stop_at", f"must be <= train.steps={steps}", [steps])


def _violations_of_verify_every(config: Config) -> Iterator[str]:
    """Yield a refusal line if replicas are to be compared (train.verify_every) where there are none."""
    if config.train.verify_every and config.parallel.zero == 3:
        constraint = "parallel.zero=3 keeps each weight once: there are no replicas to compare"
        yield violation_of_key(config, "train.verify_every", constraint, [0])


def _violations_of_loss_scale(config: Config) -> Iterator[str]:
    """Yield a refusal line if the fp16 loss scale begins below its least value."""
    if config.loss_scale.least > config.loss_scale.initial:
        constraint = f"must be <= loss_scale.initial={config.loss_scale.initial:g}"
        yield violation_of_key(config, "loss_scale.least", constraint, [config.loss_scale.initial])


def _violations_of_offload(config: Config) -> Iterator[str]:
    """Yield a refusal line if inputs of blocks are to be kept in host memory, but other activations are kept."""
    if config.recompute_offload and config.recompute != "full" and not is_open_key(config, "recompute"):
        constraint = f"recompute={config.recompute} keeps more than the inputs of blocks, recompute=full these alone"
        yield violation_of_key(config, "recompute_offload", constraint, [False])


def _violations_of_eight_bits(config: Config) -> Iterator[str]:
    """Yield a refusal line for each key that does not go with products in 8 bits, as they are configured."""
    how = choose_quantisation(config)
    if how and config.train.mlp_chunks > 1:
        constraint = f"products in 8 bits (precision={config.precision}) scale the tokens of a microbatch together"
        yield violation_of_key(config, "train.mlp_chunks", constraint, [1])
    if how and how.scale == "mx" and not how.powers:
        yield violation_of_key(config, "quantise.powers", "scales of MX are powers of two", ["on", "auto"])
    if config.quantise.gather == "on" and not (how and how.has_equal_tiles and config.parallel.zero == 3):
        constraint = "weights keep their numbers under parallel.zero=3, with powers of two of blocks or tensors"
        yield violation_of_key(config, "quantise.gather", constraint, ["auto"])
    if how and how.scale not in EXACT and config.parallel.lent_experts:
        constraint = f"experts are lent without the scale of their {how.scale}"
        yield violation_of_key(config, "parallel.lent_experts", constraint, [0])


def _violations_of_tuning(config: Config) -> Iterator[str]:
    """Yield a refusal line for each key of adapters that nothing reads without them, and for patterns of frozen weights
    beside them: they leave all weights as they are."""
    if config.tune.kind != "none":
        if config.train.freeze:
            yield violation_of_key(config, "train.freeze", f"tune={config.tune.kind} trains adapters alone", [[]])
        if config.tune.double and config.tune.kind != "qlora":
            yield violation_of_key(config, "tune.double", "tune=lora has no scales", [False, "tune=qlora"])
        return
    for name, default in vars(Tune()).items():
        if getattr(config.tune, name) != default:
            yield violation_of_key(config, f"tune.{name}", "tune=none has no adapters", [default, "tune=lora"])


TRAIN_RULES = (
    _violations_of_offload,
    _violations_of_batch_ramp,
    _violations_of_length_ramp,
    _violations_of_position_rows,
    _violations_of_init_averaged,
    _violations_of_evaluation,
    _violations_of_stop_step,
    _violations_of_verify_every,
    _violations_of_loss_scale,
    _violations_of_eight_bits,
    _violations_of_tuning,
)


def _violations_of_optimizer(config: Config) -> Iterator[str]:
    """Yield a refusal line for each mistake in the optimizer's configuration: numbers, patterns, parameter groups."""
    o = config.optimizer
    if len(o.betas) != 2:
        yield format_violation("optimizer.betas", o.betas, "must be two numbers", [[0.9, 0.95]])
    if o.kind == "sgd" and o.nesterov and not o.momentum:
        yield format_violation("optimizer.nesterov", True, "optimizer.momentum=0: there is none to look ahead", [False])
    left = config.train.steps - o.warmup_steps
    for schedule, name, most in (("wsd", "decay_steps", left), ("cosine_restarts", "cycles", max(1, left))):
        if o.schedule == schedule and getattr(o, name) > most:
            constraint = f"after warm-up come {format_count(most, 'update')}"
            yield violation_of_key(config, f"optimizer.{name}", constraint, [most])
    yield from _violations_of_pattern("optimizer.matrices", o.matrices)
    for i, group in enumerate(o.groups):
        group_key = f"optimizer.groups.{i}"
        if "match" not in group or (unknown := sorted(group.keys() - {"match", "lr", "weight_decay"})):
            need = f"no {', '.join(unknown)}" if "match" in group else "a regular expression of names"
            legal = ["{match: embedding, lr: 0.1, weight_decay: 0}"]
            yield format_violation(group_key, group, f"needs match, {need}", legal)
            continue
        yield from _violations_of_pattern(f"{group_key}.match", group["match"])
        for name in group.keys() - {"match"}:
            value = group[name]
            if not fits_type(value, float) or not 0 <= value <= 1e6:
                yield format_violation(f"{group_key}.{name}", value, "must be a factor, 0 to 1,000,000", [1])


def _violations_of_pattern(key: str, pattern: object) -> Iterator[str]:
    """Yield a refusal line if the value of a key is no regular expression."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        yield format_violation(key, pattern, f"must be a regular expression: {error}")


OPTIMIZER_RULES = (_violations_of_optimizer,)


_PAIRED = {"pairs": "pairs", "preferences": PREFERENCE}  # kind of data -> the one objective that reads it
WHOLE = ("masked", "span_denoising", "pairs")  # objectives that read no documents apart, and learn of all tokens


def _violations_of_data(config: Config) -> Iterator[str]:
    """Yield a refusal line for a configuration of data without a path, sources that nothing reads, and an evaluation
    without a held-out split."""
    data = config.data
    if data.kind == "text" and not data.path:
        yield format_violation("data.path", "", "data=text needs a file, a folder or a glob", ["data.path=FILE"])
    if data.tokenizer in ("", "train"):
        for name in ("tokenizer_words", "end_token", "begin_token"):
            if value := getattr(data, name):
                constraint = "says something of a tokenizer that data.tokenizer names, and there is none"
                yield format_violation(f"data.{name}", value, constraint, ["data.tokenizer=PATH"])
    for name, neutral in (("input_field", '""'), ("unread", "[]")):
        if (value := getattr(data, name)) and not {"instructions", "preferences"} & _list_source_kinds(data):
            yield format_violation(f"data.{name}", value, "only data=instructions reads it", [neutral])
    if data.sources and data.kind != "mixture":
        names = ", ".join(data.sources)
        yield format_violation("data.sources", names, "only data=mixture reads them", ["data=mixture"])
    is_split = data.validation or data.validation_path or any(map(_has_validation_split, data.sources.values()))
    if config.eval.every and not is_split:
        reason = f"eval.every={config.eval.every} needs a held-out split"
        held = "data.validation_path=FILE" if data.streaming else 0.05  # a stream has no part to hold out
        yield format_violation("data.validation", 0, reason, [held, "eval.every=0"])


def _has_validation_split(source: Any) -> bool:
    """Return True if the configuration of a mixture's source holds a part of it out for validation."""
    return isinstance(source, dict) and bool(source.get("validation") or source.get("validation_path"))


def _list_source_kinds(data: Data) -> set[str]:
    """Return the kinds (text, records, tokens, ...) of all sources that the configuration group `data` names."""
    if data.kind != "mixture":
        return {data.kind}
    return {str(source.get("kind", "text")) for source in data.sources.values() if isinstance(source, dict)}


def _violations_of_objective(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configured training objective does not go with the model's kind, the data or the
    sequence lengths, or if a model other than an encoder-decoder has a source length."""
    data, m = config.data, config.model
    objective, legal = training_objective_name(config), OBJECTIVES[m.kind]
    kinds = _list_source_kinds(data)
    wanted = {_PAIRED.get(kind, "") for kind in kinds}  # "": any objective that _PAIRED does not name
    by_objective = {o: o if o in _PAIRED.values() else "" for o in (*legal, objective)}
    if objective not in legal or wanted != {by_objective[objective]}:
        only = next(filter(None, sorted(wanted, reverse=True)), "")
        fitting = [o for o in legal if by_objective[o] == only]
        fitting = fitting or [f"model.kind={kind}" for kind, known in OBJECTIVES.items() if only in known]
        if only and len(wanted) > 1:
            fitting = [
                f"sources that are all of kind: {', '.join(k for k, o in _PAIRED.items() if o == only)}, or none"
            ]
        constraint = f"model.kind={m.kind} and data={data.kind} do not go with it"
        yield format_violation("data.objective", objective, constraint, fitting)
    elif objective == "span_denoising" and (m.length < 3 or m.source_length == 1):
        yield format_violation("model.length", m.length, "span denoising needs at least 3, and a source of 2", [3])
    elif objective in WHOLE and "instructions" in kinds:
        fitting = [o for o in legal if o not in WHOLE and o != "pairs"] or ["data=text"]
        constraint = "learns of prompts too, which data=instructions has"
        yield format_violation("data.objective", objective, constraint, fitting)
    if m.source_length and m.kind != "encoder_decoder":
        yield format_violation("model.source_length", m.source_length, f"model.kind={m.kind} has one length", [0])


def _violations_of_documents(config: Config) -> Iterator[str]:
    """Yield a refusal line if the configuration keeps documents apart or whole where they have no boundaries, or if its
    model and data do not agree about that."""
    data, keeps_within = config.data, config.model.within_documents
    if keeps_within != data.document_mask:
        constraint = f"is what data.document_mask={str(data.document_mask).lower()} says"
        legal = [data.document_mask, f"data.document_mask={str(keeps_within).lower()}"]
        yield format_violation("model.within_documents", keeps_within, constraint, legal)
    if data.overlong != "split" and data.packing == "cut":
        constraint = "data.packing=cut cuts rows from the tokens end to end"
        also = [] if training_objective_name(config) == PREFERENCE else ["split"]
        yield format_violation("data.overlong", data.overlong, constraint, [*also, "data.packing=best_fit"])
    for name, neutral in (("document_mask", False), ("packing", "cut")):
        if (value := getattr(data, name)) == neutral:
            continue
        if data.kind == "synthetic":
            yield format_violation(f"data.{name}", value, "data=synthetic has no documents", [neutral])
        elif (objective := training_objective_name(config)) in WHOLE:
            yield format_violation(f"data.{name}", value, f"data.objective={objective} does not read it", [neutral])


_WHOLE_PAIRS: dict[str, Any] = {  # key -> the value under which both answers of a pair lie in one row
    "data.document_mask": True,
    "data.packing": "best_fit",
    "data.overlong": "drop",
    "train.length_ramp": [],
}


def _violations_of_preferences(config: Config) -> Iterator[str]:
    """Yield a refusal line for each setting under which a model does not learn from whole pairs of answers, and for a
    loss of pairs without any."""
    loss, is_paired = training_loss_name(config), training_objective_name(config) == PREFERENCE
    if is_paired != (loss in PAIR_LOSSES):
        legal = PAIR_LOSSES if is_paired else ["", CROSS_ENTROPY, "data=preferences"]
        constraint = f"data.objective={training_objective_name(config)} does not go with it"
        yield format_violation("train.loss", config.train.loss, constraint, legal)
    if not is_paired:
        return
    whole = "data=preferences keeps the two answers of a pair whole"
    for name, legal_value in _WHOLE_PAIRS.items():
        if attrgetter(name)(config) != legal_value:
            yield violation_of_key(config, name, whole, [legal_value])
    yield from _violations_of_streams(config, "data=preferences is scored before the first step, as a whole")


def _violations_of_teacher(config: Config) -> Iterator[str]:
    """Yield a refusal line for each setting under which a model does not learn from a teacher, and for a teacher that
    no loss asks."""
    train, model = config.train, config.model
    if training_loss_name(config) != DISTILL:
        if train.teacher:
            constraint = f"train.loss={training_loss_name(config)} asks no teacher"
            yield violation_of_key(config, "train.teacher", constraint, ['""', f"train.loss={DISTILL}"])
        return
    if training_objective_name(config) not in ("causal", PREFERENCE) or model.kind != "decoder":
        constraint = f"data.objective={training_objective_name(config)} of model.kind={model.kind} does not go with it"
        yield format_violation("train.loss", train.loss, constraint, ["", CROSS_ENTROPY])
    if type(top := train.loss_settings.get("top")) is int and top > model.vocab:
        constraint = f"must be <= model.vocab={model.vocab}"
        yield format_violation("train.loss_settings.top", top, constraint, [model.vocab, 0])
    if config.data.kind == "synthetic":
        yield format_violation("data.kind", "synthetic", "has no samples with a place in teacher.bin", ["stdlib"])
    yield from _violations_of_streams(config, f"train.loss={DISTILL}: a teacher reads the data before the first step")


def _violations_of_streams(config: Config, reason: str) -> Iterator[str]:
    """Yield a refusal line for each configured source of data that is streamed, for a `reason`."""
    sources = {f"data.sources.{name}": source for name, source in config.data.sources.items()}
    streamed = {place: isinstance(source, dict) and source.get("streaming") for place, source in sources.items()}
    for place, is_streamed in {"data": config.data.streaming, **streamed}.items():
        if is_streamed:
            yield format_violation(f"{place}.streaming", True, reason, [False])


DATA_RULES = (
    _violations_of_data,
    _violations_of_objective,
    _violations_of_documents,
    _violations_of_preferences,
    _violations_of_teacher,
)
