"""GPT-OSS (OpenAI 2025): experts with biases, windows in every second layer, and sinks of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.fields import Model
from platform.weights.families.family import Family, TensorRow, modules, special_tokens
from platform.weights.families.keys import (
    MOST_LAYERS,
    Absent,
    Found,
    Free,
    Only,
    Renamed,
    Rotary,
    Rule,
    layer_types,
    value_of,
    windows_of,
)
from platform.weights.families.llama import LLAMA_FIXED, Biases, llama_names, llama_rules

_LAYER = "model.layers.{i}"
_GATE, _UP, _DOWN = (f"layers.{{i}}.mlp.experts.{name}" for name in ("gate", "up", "down"))
_ROWS = [
    TensorRow(f"{_LAYER}.self_attn.sinks", ("layers.{i}.attention.sink",)),
    *modules({f"{_LAYER}.mlp.router": "layers.{i}.mlp.router"}),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP), turned=True, alternate=True),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj_bias", (f"{_GATE}_bias", f"{_UP}_bias"), alternate=True),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj", (_DOWN,), turned=True),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj_bias", (f"{_DOWN}_bias",)),
]
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_QUANTISED = (
    "quantised weights are not read; load them with transformers' Mxfp4Config(dequantize=True), and save_pretrained"
)


@dataclass(frozen=True)
class _Windows(Rule):
    """Rule that some layers have a window: as `layer_types` says, by default every second one, from the first."""

    theirs: str = "sliding_window layer_types"

    def read(self, found: Found) -> dict[str, Any]:
        """Return our model keys window and window_layers for a config.json of GPT-OSS. Raises Inexpressible."""
        layers = value_of(found, "num_hidden_layers", 36, (int,))
        if not 0 < layers <= MOST_LAYERS:
            return {}  # refused by the bounds of model.layers
        width = value_of(found, "sliding_window", 128, (int, type(None)))
        kinds = value_of(found, "layer_types", None, (list, type(None)))
        if kinds is None:
            kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        return windows_of(layers, width, kinds, "sliding_window says that there is none")

    def write(self, m: Model) -> dict[str, Any]:
        """Return the two keys of GPT-OSS's config.json on attention windows."""
        return {"sliding_window": m.window or None, "layer_types": layer_types(m)}


_FREE = {"initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.001}

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    ["GptOssForCausalLM"],
    {**LLAMA_FIXED, "capacity_factor": 0.0, "attention_sinks": True, "expert_bias": True},
    [
        *llama_rules(
            *(201088, 2880, 131072, 8),
            d_model=2880,
            layers=36,
            heads=64,
            eps=1e-5,
            width="expert_d_ff",
            activations={"silu": "swiglu_clamped"},
            rotary=Rotary(theta=150000.0, scaling=_YARN),
        ),
        Renamed("head_dim", "d_kv", 64, null=0),
        Biases("attention_bias", True),
        _Windows(),
        Renamed("num_local_experts num_experts", "experts", 128),
        Renamed("num_experts_per_tok experts_per_token", "experts_per_token", 4),
        Only("swiglu_alpha", (1.702,)),
        Only("swiglu_limit", (7.0, 7)),
        Absent("quantization_config", _QUANTISED),
        Free("initial_context_length", {**_FREE, **special_tokens(None, None)}),
    ],
    **llama_names(_ROWS),
)
