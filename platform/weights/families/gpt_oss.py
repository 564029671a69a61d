"""GPT-OSS (OpenAI 2025): experts with biases, windows in every second layer, and sinks of attention."""

from __future__ import annotations

from platform.weights.families.family import Family, TensorRow, modules, special_tokens
from platform.weights.families.keys import Free, LayerWindows, Only, Renamed, Rotary
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
        LayerWindows("sliding_window layer_types", 128),
        Renamed("num_local_experts num_experts", "experts", 128),
        Renamed("num_experts_per_tok experts_per_token", "experts_per_token", 4),
        Only("swiglu_alpha", (1.702,)),
        Only("swiglu_limit", (7.0, 7)),
        Only("quantization_config", (None,), written=False, why=_QUANTISED),
        Free("initial_context_length", {**_FREE, **special_tokens(None, None)}),
    ],
    **llama_names(_ROWS),
)
