"""Mixtral (Jiang et al. 2024), Qwen3-MoE (Yang et al. 2025), OLMoE (Muennighoff et al. 2024): Llama's layers, with
experts."""

from __future__ import annotations

from typing import Any

from platform.config.fields import Model
from platform.weights.families.family import Family, TensorRow, modules, special_tokens
from platform.weights.families.keys import Found, Free, Inexpressible, Only, Renamed, Translated, value_of
from platform.weights.families.llama import HEAD_DIM, LLAMA_FIXED, Biases, llama_names, llama_rules

_LAYER = "model.layers.{i}"
_GATE, _UP, _DOWN = (f"layers.{{i}}.mlp.experts.{name}" for name in ("gate", "up", "down"))
FUSED = [  # the names of version 5, which it saves only with save_original_format=False
    *modules({f"{_LAYER}.mlp.gate": "layers.{i}.mlp.router"}),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP)),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj", (_DOWN,)),
]


def separate(place: str, gate: str, up: str, down: str) -> list[TensorRow]:
    """Return the rows of names of a family whose experts, at `place` in a layer, are a tensor for each matrix."""
    each = {f"{_LAYER}.{place}.experts.{{e}}.{name}": ours for name, ours in ((down, _DOWN), (gate, _GATE), (up, _UP))}
    return [*modules({**each, f"{_LAYER}.{place}.gate": "layers.{i}.mlp.router"})]


def _read_windows(found: Found) -> dict[str, Any]:
    """Return our model key window for a Qwen3-MoE config.json, in which all layers have one, or none. Raises
    Inexpressible for `max_window_layers`, which transformers 5 does not read, and 4 does."""
    if not value_of(found, "use_sliding_window", False, (bool,)):
        return {"window": 0}
    width = value_of(found, "sliding_window", 4096, (int, type(None))) or 0
    first = value_of(found, "max_window_layers", 0, (int,))
    if width and first:
        why = "use_sliding_window=true means all layers in transformers 5, those from here on in 4; leave it out"
        raise Inexpressible("max_window_layers", first, why)
    return {"window": width}


def _write_windows(m: Model) -> dict[str, Any]:
    """Return the keys of a Qwen3-MoE config.json that say whether all layers of a model have a window."""
    return {"use_sliding_window": bool(m.window), "sliding_window": m.window or None}


def _read_dense_layers(found: Found) -> dict[str, Any]:
    """Return our model key for the layers without experts in a Qwen3-MoE config.json. Raises Inexpressible."""
    numbers = value_of(found, "mlp_only_layers", None, (list, type(None))) or []
    if not all(type(n) is int for n in numbers):
        raise Inexpressible("mlp_only_layers", numbers, "are no numbers of layers")
    return {"dense_layers": sorted(set(numbers))}


_FREE = {"initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.001}
_DROPLESS = {**LLAMA_FIXED, "capacity_factor": 0.0}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    ["MixtralForCausalLM"],
    _DROPLESS,
    [
        *llama_rules(32000, 14336, 4096 * 32, 8, eps=1e-5, width="expert_d_ff"),
        HEAD_DIM,
        Renamed("sliding_window", "window", None, null=0, written=lambda m: m.window or None),
        Renamed("num_local_experts", "experts", 8),
        Renamed("num_experts_per_tok", "experts_per_token", 2),
        Renamed("router_jitter_noise", "router_jitter", 0.0),
        Free("", {**_FREE, **special_tokens(1, 2)}),
    ],
    **llama_names(separate("block_sparse_moe", "w1", "w3", "w2"), FUSED),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    ["Qwen3MoeForCausalLM"],
    {**_DROPLESS, "query_key_norm": True},
    [
        *llama_rules(151936, 6144, 32768, 4, d_model=2048, layers=24),
        HEAD_DIM,
        Biases("attention_bias"),
        Renamed("num_local_experts num_experts", "experts", 128),
        Renamed("num_experts_per_tok", "experts_per_token", 8),
        Renamed("moe_intermediate_size", "expert_d_ff", 768),
        Renamed("decoder_sparse_step", "experts_every", 1),
        Translated("mlp_only_layers", _read_dense_layers, lambda m: {"mlp_only_layers": m.dense_layers}),
        Renamed("norm_topk_prob", "router_normalised", False),
        Translated("use_sliding_window sliding_window max_window_layers", _read_windows, _write_windows),
        Free("", {**_FREE, **special_tokens(None, None)}),
    ],
    **llama_names(separate("mlp", "gate_proj", "up_proj", "down_proj"), FUSED),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    ["OlmoeForCausalLM"],
    {**_DROPLESS, "query_key_norm": True, "query_key_norm_over": "heads"},
    [
        *llama_rules(50304, 2048, 4096, None, d_model=2048, layers=16, heads=16, eps=1e-5, width="expert_d_ff"),
        Biases("attention_bias"),
        Renamed("num_experts num_local_experts", "experts", 64),
        Renamed("num_experts_per_tok", "experts_per_token", 8),
        Renamed("norm_topk_prob", "router_normalised", False),
        Only("clip_qkv", (None,)),
        Free("", {**_FREE, "router_aux_loss_coef": 0.01, **special_tokens(None, 50279, 1)}),
    ],
    **llama_names(separate("mlp", "gate_proj", "up_proj", "down_proj"), FUSED),
)
