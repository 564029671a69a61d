"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from platform.config.fields import Model
from platform.weights.families.family import GATED, ONE_STACK, Family, TensorRow, modules, special_tokens
from platform.weights.families.keys import (
    Found,
    Free,
    LayerWindows,
    Only,
    Renamed,
    Rotary,
    Rule,
    Words,
    value_of,
)

LLAMA_FIXED = {"kind": "decoder", "norm": "rmsnorm", "positions": "rope", "bias": False}
ROTARY = Rotary()


def llama_rules(
    vocab: int,
    d_ff: int,
    length: int,
    kv_heads: int | None,
    *,
    d_model: int = 4096,
    layers: int = 32,
    heads: int = 32,
    eps: float = 1e-6,
    width: str = "d_ff",
    activations: Mapping[str, str] = GATED,
    rotary: Rule = ROTARY,
) -> list[Rule]:
    """Return the rules for a config.json that Llama, Mistral and Qwen share, with the defaults in which they differ;
    `kv_heads`: number of heads of keys and values; `width`: our key for `intermediate_size`."""
    return [
        Renamed("vocab_size", "vocab", vocab),
        Renamed("hidden_size", "d_model", d_model),
        Renamed("intermediate_size", width, d_ff),
        Renamed("num_hidden_layers", "layers", layers),
        Renamed("num_attention_heads", "heads", heads),
        Renamed("num_key_value_heads", "kv_heads", kv_heads, null=0),
        Words("hidden_act", "activation", activations, "silu"),
        Renamed("max_position_embeddings", "length", length),
        Renamed("rms_norm_eps", "norm_eps", eps),
        Renamed("tie_word_embeddings", "tied", False),
        rotary,
        Only("attention_dropout", (0.0, 0)),
        ONE_STACK,
    ]


_OF_LAYERS = {
    "model.layers.{i}.self_attn.q_proj": "layers.{i}.attention.query",
    "model.layers.{i}.self_attn.k_proj": "layers.{i}.attention.key",
    "model.layers.{i}.self_attn.v_proj": "layers.{i}.attention.value",
    "model.layers.{i}.self_attn.o_proj": "layers.{i}.attention.output",
    "model.layers.{i}.self_attn.q_norm": "layers.{i}.attention.query_norm",
    "model.layers.{i}.self_attn.k_norm": "layers.{i}.attention.key_norm",
    "model.layers.{i}.mlp.gate_proj": "layers.{i}.mlp.gate",
    "model.layers.{i}.mlp.up_proj": "layers.{i}.mlp.up",
    "model.layers.{i}.mlp.down_proj": "layers.{i}.mlp.down",
    "model.layers.{i}.input_layernorm": "layers.{i}.attention.norm",
    "model.layers.{i}.post_attention_layernorm": "layers.{i}.mlp.norm",
}


def llama_names(experts: Sequence[TensorRow] = (), fused: Sequence[TensorRow] = ()) -> dict[str, Any]:
    """Return what a family's table says of the names of Llama's tensors; `experts`: rows of a layer's experts and what
    else it has; `fused`: rows of the same in stacks."""
    forms = [
        [
            *modules({"model.embed_tokens": "embedding"}),
            *of_experts,
            *modules(_OF_LAYERS),
            *modules({"model.norm": "norm", "lm_head": "head"}),
        ]
        for of_experts in (experts, fused)
    ]
    return {
        "rows": forms[0],
        "prefix": "model.",
        "same": {"lm_head.weight": "model.embed_tokens.weight"},
        "buffers": ("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
        "fused": forms[1] if fused else (),
    }


@dataclass(frozen=True)
class Biases(Rule):
    """Rule of the keys that say which linear layers have biases: in attention, and elsewhere if there is a key
    `mlp_bias`; `default`: the value where one is missing."""

    theirs: str = "attention_bias mlp_bias"
    default: bool = False

    def read(self, found: Found) -> dict[str, Any]:
        """Return our model keys on biases for a config.json of Llama, Mistral or Qwen. Raises Inexpressible."""
        attention, mlp = (name in self.names and value_of(found, name, self.default, (bool,)) for name in _BIASES)
        return {"bias": mlp, "attention_bias": "" if attention == mlp else "all" if attention else "none"}

    def write(self, m: Model) -> dict[str, Any]:
        """Return the keys of a Llama, Mistral or Qwen config.json that say which layers of a model have biases."""
        attention = (m.attention_bias or ("all" if m.bias else "none")) == "all"
        return {name: value for name, value in zip(_BIASES, (attention, m.bias), strict=True) if name in self.names}


_BIASES = ("attention_bias", "mlp_bias")


HEAD_DIM = Renamed("head_dim", "d_kv", None, null=0)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ["LlamaForCausalLM"],
    LLAMA_FIXED,
    [
        *llama_rules(32000, 11008, 2048, None),
        HEAD_DIM,
        Biases(),
        Free("", {"initializer_range": 0.02, **special_tokens(1, 2), "pretraining_tp": 1}),
    ],
    **llama_names(),
)  # fmt: skip

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ["MistralForCausalLM"],
    LLAMA_FIXED,
    [
        *llama_rules(32000, 14336, 4096 * 32, 8),
        HEAD_DIM,
        Renamed("sliding_window", "window", 4096, null=0, written=lambda m: m.window or None),
        Free("", {"initializer_range": 0.02, **special_tokens(1, 2)}),
    ],
    **llama_names(),
)

_QWEN_FREE = Free("use_mrope", {"initializer_range": 0.02, **special_tokens(None, None)})

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ["Qwen2ForCausalLM"],
    {**LLAMA_FIXED, "attention_bias": "qkv"},
    [*llama_rules(151936, 22016, 32768, 32), LayerWindows(), _QWEN_FREE],
    **llama_names(),
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    ["Qwen3ForCausalLM"],
    {**LLAMA_FIXED, "query_key_norm": True},
    [
        *llama_rules(151936, 22016, 32768, 32),
        Renamed("head_dim", "d_kv", 128),
        Biases("attention_bias"),
        LayerWindows(),
        _QWEN_FREE,
    ],
    **llama_names(),
)
