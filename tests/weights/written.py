"""Folders as transformers writes them, without transformers: random tensors under the names of a family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from platform.config.fields import Model
from platform.weights.families import FAMILIES
from platform.weights.tensor_names import build_config_json, list_stored_tensors

SMALL: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "length": 12, "vocab": 61}
LLAMA: dict[str, Any] = {**SMALL, "kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rope",
                         "bias": False, "tied": False, "d_ff": 40}  # fmt: skip
LATENT: dict[str, Any] = {**LLAMA, "kv_heads": 0, "d_kv": 6, "kv_latent": 8, "q_latent": 10, "d_rope": 2, "d_value": 4,
                          "rope_pairs": "neighbours", "experts": 4, "expert_d_ff": 12, "shared_experts": 1,
                          "dense_layers": [0]}  # fmt: skip
NEXT: dict[str, Any] = {**LLAMA, "norm": "rmsnorm_centred", "query_key_norm": True, "attention_gate": True, "d_kv": 8,
                        "rope_share": 0.25, "linear_layers": [0], "linear_key_heads": 2, "linear_value_heads": 4,
                        "linear_d_key": 6, "linear_d_value": 5}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "gpt2": {**SMALL, "activation": "gelu_tanh"},
    "llama": LLAMA,
    "mistral": {**LLAMA, "window": 4},
    "qwen2": {**LLAMA, "attention_bias": "qkv", "window": 4, "window_layers": [1]},
    "qwen3": {**LLAMA, "query_key_norm": True, "d_kv": 6, "window": 4},
    "olmo3": {**LLAMA, "input_norm": False, "output_norm": True, "query_key_norm": True,
              "query_key_norm_over": "heads", "window": 4, "window_layers": [1], "window_rope_theta": 10.0},
    "gemma3_text": {**LLAMA, "norm": "rmsnorm_centred", "output_norm": True, "query_key_norm": True, "window": 4,
                    "window_layers": [1], "window_rope_theta": 10.0, "embedding_scale": 4.0, "d_kv": 6},
    "gemma4_text": {**LLAMA, "layers": 3, "output_norm": True, "query_key_norm": True, "value_norm": True, "window": 4,
                    "window_layers": [0, 1], "window_rope_theta": 10.0, "embedding_scale": 4.0, "d_kv": 6,
                    "global_d_kv": 8, "global_kv_heads": 1, "values_are_keys": True, "rope_scaling": "proportional",
                    "rope_share": 0.25, "attention_scale": 1.0, "stored_scale": True},
    "gemma2": {**LLAMA, "norm": "rmsnorm_centred", "output_norm": True, "window": 4, "window_layers": [0],
               "embedding_scale": 4.0, "d_kv": 6, "attention_cap": 0.7, "logit_cap": 2.0},
    "vaultgemma": {**LLAMA, "norm": "rmsnorm_centred", "embedding_scale": 4.0, "d_kv": 6, "attention_cap": 0.7},
    "smollm3": {**LLAMA, "no_rope_layers": [1], "window": 4, "window_layers": [1]},
    "granite": {**LLAMA, "embedding_scale": 3.0, "residual_scale": 0.5, "attention_scale": 0.3, "logit_scale": 0.5},
    "glm4": {**LLAMA, "rope_share": 0.5, "rope_pairs": "neighbours", "output_norm": True, "attention_bias": "qkv"},
    "glm4_moe": {**LLAMA, "rope_share": 0.5, "attention_bias": "qkv", "experts": 4, "expert_d_ff": 12,
                 "shared_experts": 1, "dense_layers": [0], "router": "sigmoid", "router_bias": True,
                 "router_groups": 2, "router_group_best": 2},
    "phi3": {**LLAMA, "window": 4, "rope_share": 0.5},
    "olmo2": {**LLAMA, "input_norm": False, "output_norm": True, "query_key_norm": True,
              "query_key_norm_over": "heads"},
    "mixtral": {**LLAMA, "d_ff": 0, "expert_d_ff": 24, "experts": 4, "window": 4},
    "qwen3_moe": {**LLAMA, "query_key_norm": True, "d_kv": 6, "expert_d_ff": 12, "experts": 4, "experts_every": 2,
                  "window": 4},
    "qwen3_next": {**NEXT, "experts": 4, "expert_d_ff": 12, "shared_experts": 1, "shared_expert_gate": True,
                   "dense_layers": [0]},
    "qwen3_5_text": NEXT,
    "qwen3_5_moe_text": {**NEXT, "d_ff": 0, "experts": 4, "expert_d_ff": 12, "shared_experts": 1,
                         "shared_expert_gate": True},
    "olmoe": {**LLAMA, "query_key_norm": True, "query_key_norm_over": "heads", "d_ff": 0, "expert_d_ff": 12,
              "experts": 4, "router_normalised": False},
    "gpt_oss": {**LLAMA, "activation": "swiglu_clamped", "d_ff": 0, "expert_d_ff": 12, "experts": 4,
                "expert_bias": True, "attention_sinks": True, "attention_bias": "all", "window": 4,
                "window_layers": [1]},
    "deepseek_v2": {**LATENT, "router_normalised": False, "router_groups": 2},
    "deepseek_v3": {**LATENT, "router": "sigmoid", "router_bias": True, "router_groups": 2, "router_group_best": 2},
    "bert": {**SMALL, "kind": "encoder", "post_norm": True, "embedding_norm": True, "segments": 2,
             "head_transform": True, "head_bias": True},
    "t5": {**SMALL, "kind": "encoder_decoder", "norm": "rmsnorm", "positions": "relative", "bias": False,
           "activation": "relu", "attention_scale": 1.0, "logit_scale": 0.25},
}  # fmt: skip


def tensors_of(name: str, fused: bool = False, **more: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = list_stored_tensors(Model(**{**OURS[name], **more}), FAMILIES[name], fused)
    return {t.name: torch.randn(t.shape, generator=generator) for t in tensors}


def written(
    folder: Path, name: str, tensors: dict[str, Tensor] | None = None, ours: dict[str, Any] | None = None, **config: Any
) -> Path:
    """Write a model of the family `name`, with other keys of `ours`: its tensors, or others, and its config.json with
    more keys."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = ours or {}
    config_json = build_config_json(Model(**{**OURS[name], **keys}), FAMILIES[name]) | config
    (folder / "config.json").write_text(json.dumps(config_json))
    save_file(tensors_of(name, **keys) if tensors is None else tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
