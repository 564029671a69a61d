"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025), and their
relatives with experts, as transformers saves them.

Mixtral (Jiang et al. 2024), Qwen3-MoE (Yang et al. 2025) and OLMoE (Muennighoff et al. 2024) are Llama's layers, with
experts. GPT-OSS (OpenAI 2025) has experts with biases, windows in every second layer, and sinks of attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from platform.config.fields import Model
from platform.weights.config_keys import (
    GATED,
    ONE_STACK,
    ConfigJson,
    Family,
    Free,
    FunctionRule,
    Inexpressible,
    LayerWindowRule,
    Only,
    Renamed,
    RotaryRule,
    Rule,
    TensorRow,
    Words,
    module_rows,
    read_value,
    special_token_defaults,
)

LLAMA_FIXED = {"kind": "decoder", "norm": "rmsnorm", "positions": "rope", "bias": False}
ROTARY = RotaryRule()


def build_llama_rules(
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
    activation_key: tuple[str, str] = ("hidden_act", "silu"),
    tied: bool = False,
    rotary: Rule = ROTARY,
) -> list[Rule]:
    """Return the rules for a config.json that Llama, Mistral and Qwen share, with the defaults in which they differ;
    `kv_heads`: number of heads of keys and values; `width`: our key for `intermediate_size`; `activation_key`: the key
    of the activation, and its default."""
    return [
        Renamed("vocab_size", "vocab", vocab),
        Renamed("hidden_size", "d_model", d_model),
        Renamed("intermediate_size", width, d_ff),
        Renamed("num_hidden_layers", "layers", layers),
        Renamed("num_attention_heads", "heads", heads),
        Renamed("num_key_value_heads", "kv_heads", kv_heads, null=0),
        Words(activation_key[0], "activation", activations, activation_key[1]),
        Renamed("max_position_embeddings", "length", length),
        Renamed("rms_norm_eps", "norm_eps", eps),
        Renamed("tie_word_embeddings", "tied", tied),
        rotary,
        Only("attention_dropout", (0.0, 0)),
        ONE_STACK,
    ]


_LAYER = "model.layers.{i}"
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


def llama_names(
    experts: Sequence[TensorRow] = (), fused: Sequence[TensorRow] = (), of_layer: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a family's table says of the names of Llama's tensors; `experts`: rows of a layer's experts and what
    else it has; `fused`: rows of the same in stacks; `of_layer`: modules of a layer by what they hold of ours, where
    they are not Llama's."""
    other_modules = {
        f"{_LAYER}.{theirs}": " ".join(f"layers.{{i}}.{name}" for name in ours.split())
        for theirs, ours in (of_layer or {}).items()
    }
    modules = other_modules | _OF_LAYERS | other_modules  # those come first, and take what both would
    first = [*module_rows({"model.embed_tokens": "embedding"})]
    last = [*module_rows({"model.norm": "norm", "lm_head": "head"})]
    forms = [[*first, *of_experts, *module_rows(modules), *last] for of_experts in (experts, fused)]
    return {
        "rows": forms[0],
        "prefix": "model.",
        "same": {"lm_head.weight": "model.embed_tokens.weight"},
        "buffers": ("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
        "fused": forms[1] if fused else (),
    }


@dataclass(frozen=True)
class BiasRule(Rule):
    """Rule of the keys that say which linear layers have biases: in attention, and elsewhere if there is a key
    `mlp_bias`; `default`: the value where one is missing."""

    theirs: str = "attention_bias mlp_bias"
    default: bool = False

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model keys on biases for a config.json of Llama, Mistral or Qwen. Raises Inexpressible."""
        attention, mlp = (n in self.key_names and read_value(config_json, n, self.default, (bool,)) for n in _BIASES)
        return {"bias": mlp, "attention_bias": "" if attention == mlp else "all" if attention else "none"}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a Llama, Mistral or Qwen config.json that say which layers of a model have biases."""
        attention = (m.attention_bias or ("all" if m.bias else "none")) == "all"
        return {name: value for name, value in zip(_BIASES, (attention, m.bias), strict=True) if name in self.key_names}


_BIASES = ("attention_bias", "mlp_bias")


HEAD_DIM = Renamed("head_dim", "d_kv", None, null=0)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_FIXED,
    [
        *build_llama_rules(32000, 11008, 2048, None),
        HEAD_DIM,
        BiasRule(),
        Free("", {"initializer_range": 0.02, **special_token_defaults(1, 2), "pretraining_tp": 1}),
    ],
    **llama_names(),
)  # fmt: skip

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    LLAMA_FIXED,
    [
        *build_llama_rules(32000, 14336, 4096 * 32, 8),
        HEAD_DIM,
        Renamed("sliding_window", "window", 4096, null=0, written=lambda m: m.window or None),
        Free("", {"initializer_range": 0.02, **special_token_defaults(1, 2)}),
    ],
    **llama_names(),
)

_QWEN_FREE = Free("use_mrope", {"initializer_range": 0.02, **special_token_defaults(None, None)})

_QWEN = build_llama_rules(151936, 22016, 32768, 32)
_QWEN2_RULES = [*_QWEN, LayerWindowRule(), _QWEN_FREE]
_QWEN3_RULES = [*_QWEN, Renamed("head_dim", "d_kv", 128), BiasRule("attention_bias"), LayerWindowRule(), _QWEN_FREE]
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", {**LLAMA_FIXED, "attention_bias": "qkv"}, _QWEN2_RULES, **llama_names())
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", {**LLAMA_FIXED, "query_key_norm": True}, _QWEN3_RULES, **llama_names())


_GATE, _UP, _DOWN = (f"layers.{{i}}.mlp.experts.{name}" for name in ("gate", "up", "down"))
FUSED = [  # the names of version 5, which it saves only with save_original_format=False
    *module_rows({f"{_LAYER}.mlp.gate": "layers.{i}.mlp.router"}),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP)),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj", (_DOWN,)),
]


def build_expert_rows(place: str, gate: str, up: str, down: str) -> list[TensorRow]:
    """Return the rows of names of a family whose experts, at `place` in a layer, are a tensor for each matrix."""
    each = {f"{_LAYER}.{place}.experts.{{e}}.{name}": ours for name, ours in ((down, _DOWN), (gate, _GATE), (up, _UP))}
    return [*module_rows({**each, f"{_LAYER}.{place}.gate": "layers.{i}.mlp.router"})]


def _read_windows(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key window for a Qwen3-MoE config.json, in which all layers have one, or none. Raises
    Inexpressible for `max_window_layers`, which transformers 5 does not read, and 4 does."""
    if not read_value(config_json, "use_sliding_window", False, (bool,)):
        return {"window": 0}
    width = read_value(config_json, "sliding_window", 4096, (int, type(None))) or 0
    first = read_value(config_json, "max_window_layers", 0, (int,))
    if width and first:
        why = "use_sliding_window=true means all layers in transformers 5, those from here on in 4; leave it out"
        raise Inexpressible("max_window_layers", first, why)
    return {"window": width}


def _write_windows(m: Model) -> dict[str, Any]:
    """Return the keys of a Qwen3-MoE config.json that say whether all layers of a model have a window."""
    return {"use_sliding_window": bool(m.window), "sliding_window": m.window or None}


def read_listed_dense_layers(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key for the layers without experts in a Qwen3-MoE config.json. Raises Inexpressible."""
    numbers = read_value(config_json, "mlp_only_layers", None, (list, type(None))) or []
    if not all(type(n) is int for n in numbers):
        raise Inexpressible("mlp_only_layers", numbers, "are no numbers of layers")
    return {"dense_layers": sorted(set(numbers))}


_FREE = {"initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": 0.001}
_DROPLESS = {**LLAMA_FIXED, "capacity_factor": 0.0}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _DROPLESS,
    [
        *build_llama_rules(32000, 14336, 4096 * 32, 8, eps=1e-5, width="expert_d_ff"),
        HEAD_DIM,
        Renamed("sliding_window", "window", None, null=0, written=lambda m: m.window or None),
        Renamed("num_local_experts", "experts", 8),
        Renamed("num_experts_per_tok", "experts_per_token", 2),
        Renamed("router_jitter_noise", "router_jitter", 0.0),
        Free("", {**_FREE, **special_token_defaults(1, 2)}),
    ],
    **llama_names(build_expert_rows("block_sparse_moe", "w1", "w3", "w2"), FUSED),
)

QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**_DROPLESS, "query_key_norm": True},
    [
        *build_llama_rules(151936, 6144, 32768, 4, d_model=2048, layers=24),
        HEAD_DIM,
        BiasRule("attention_bias"),
        Renamed("num_local_experts num_experts", "experts", 128),
        Renamed("num_experts_per_tok", "experts_per_token", 8),
        Renamed("moe_intermediate_size", "expert_d_ff", 768),
        Renamed("decoder_sparse_step", "experts_every", 1),
        FunctionRule("mlp_only_layers", read_listed_dense_layers, lambda m: {"mlp_only_layers": m.dense_layers}),
        Renamed("norm_topk_prob", "router_normalised", False),
        FunctionRule("use_sliding_window sliding_window max_window_layers", _read_windows, _write_windows),
        Free("", {**_FREE, **special_token_defaults(None, None)}),
    ],
    **llama_names(build_expert_rows("mlp", "gate_proj", "up_proj", "down_proj"), FUSED),
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    {**_DROPLESS, "query_key_norm": True, "query_key_norm_over": "heads"},
    [
        *build_llama_rules(50304, 2048, 4096, None, d_model=2048, layers=16, heads=16, eps=1e-5, width="expert_d_ff"),
        BiasRule("attention_bias"),
        Renamed("num_experts num_local_experts", "experts", 64),
        Renamed("num_experts_per_tok", "experts_per_token", 8),
        Renamed("norm_topk_prob", "router_normalised", False),
        Only("clip_qkv", (None,)),
        Free("", {**_FREE, "router_aux_loss_coef": 0.01, **special_token_defaults(None, 50279, 1)}),
    ],
    **llama_names(build_expert_rows("mlp", "gate_proj", "up_proj", "down_proj"), FUSED),
)


_ROWS = [
    TensorRow(f"{_LAYER}.self_attn.sinks", ("layers.{i}.attention.sink",)),
    *module_rows({f"{_LAYER}.mlp.router": "layers.{i}.mlp.router"}),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP), turned=True, alternate=True),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj_bias", (f"{_GATE}_bias", f"{_UP}_bias"), alternate=True),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj", (_DOWN,), turned=True),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj_bias", (f"{_DOWN}_bias",)),
]
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}

GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    {**LLAMA_FIXED, "capacity_factor": 0.0, "attention_sinks": True, "expert_bias": True},
    [
        *build_llama_rules(
            *(201088, 2880, 131072, 8),
            d_model=2880,
            layers=36,
            heads=64,
            eps=1e-5,
            width="expert_d_ff",
            activations={"silu": "swiglu_clamped"},
            rotary=RotaryRule(theta=150000.0, scaling=_YARN),
        ),
        Renamed("head_dim", "d_kv", 64, null=0),
        BiasRule("attention_bias", True),
        LayerWindowRule("sliding_window layer_types", 128),
        Renamed("num_local_experts num_experts", "experts", 128),
        Renamed("num_experts_per_tok experts_per_token", "experts_per_token", 4),
        Only("swiglu_alpha", (1.702,)),
        Only("swiglu_limit", (7.0, 7)),
        Free("initial_context_length", {**_FREE, **special_token_defaults(None, None)}),
    ],
    **llama_names(_ROWS),
)
