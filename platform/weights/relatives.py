"""Families that are Llama's layers with norms, rotations and factors of their own: OLMo 2 and 3 (Walsh et al. 2025),
Phi 3 and 4 (Abdin et al. 2024), Gemma 2 to 4 (Gemma Team 2024, 2025, 2026), SmolLM3 (Bakouch et al. 2025), Granite
(Granite Team 2024), GLM 4 and GLM 4.5 with experts (GLM Team 2024, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from platform.config.fields import Model
from platform.weights.config_keys import (
    LAYER_KINDS,
    MOST_LAYERS,
    NEEDED,
    ConfigJson,
    Family,
    Free,
    FunctionRule,
    Inexpressible,
    LayerRotaryRule,
    LayerWindowRule,
    Only,
    Renamed,
    RotaryRule,
    Rule,
    TensorRow,
    Words,
    module_rows,
    read_value,
    resolve_sizes,
    special_token_defaults,
)
from platform.weights.deepseek import add_prediction_names, build_expert_rules
from platform.weights.llama import (
    FUSED,
    HEAD_DIM,
    LLAMA_FIXED,
    BiasRule,
    build_expert_rows,
    build_llama_rules,
    llama_names,
)

_RANGE = {"initializer_range": 0.02}
_OUTPUT_NORMS = {"post_attention_layernorm": "attention.output_norm", "post_feedforward_layernorm": "mlp.output_norm"}
_OLMO = {**LLAMA_FIXED, "input_norm": False, "output_norm": True}
_OLMO |= {"query_key_norm": True, "query_key_norm_over": "heads"}
_OLMO_RULES = [BiasRule("attention_bias"), Free("", {**_RANGE, **special_token_defaults(None, 50279, 1)})]
_OLMO2_RULES = [*build_llama_rules(50304, 11008, 2048, None, eps=1e-5), *_OLMO_RULES]
_BY_LAYER = LayerRotaryRule("", LayerWindowRule("sliding_window layer_types", 4096, 4), RotaryRule(theta=5e5), 5e5)
_OLMO3_RULES = [*build_llama_rules(50304, 11008, 2048, None, eps=1e-5, rotary=_BY_LAYER), *_OLMO_RULES]
_OLMO_NAMES = llama_names(of_layer=_OUTPUT_NORMS)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _OLMO, _OLMO2_RULES, **_OLMO_NAMES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _OLMO, _OLMO3_RULES, **_OLMO_NAMES)

_FUSED_GATE = {"mlp.gate_up_proj": "mlp.gate mlp.up"}
_FUSED_QUERY = {"self_attn.qkv_proj": "attention.query attention.key attention.value"}
_LONG = RotaryRule(share=1.0, original=4096)
_PHI3_RULES = [
    *build_llama_rules(32064, 8192, 4096, None, d_model=3072, eps=1e-5, rotary=_LONG),
    *(Only(name, (0.0, 0)) for name in ("resid_pdrop", "embd_pdrop")),
    *(Only(f"{part}_bias", (False,), written=False) for part in ("attention", "mlp", "lm_head")),
    Renamed("sliding_window", "window", None, null=0, written=lambda m: m.window or None),
    Free("auto_map full_attn_mod interpolate_factor", {**_RANGE, **special_token_defaults(1, 32000, 32000)}),
]
PHI3 = Family(
    "phi3", "Phi3ForCausalLM", LLAMA_FIXED, _PHI3_RULES, **llama_names(of_layer={**_FUSED_QUERY, **_FUSED_GATE})
)  # fmt: skip


def _read_score_width(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for what a Gemma config.json scales by widths: scores, embeddings. Raises Inexpressible."""
    width = read_value(config_json, "query_pre_attn_scalar", 256, (int, float))
    if width <= 0:
        raise Inexpressible("query_pre_attn_scalar", width, "must be > 0")
    d_model = read_value(config_json, "hidden_size", 2304, (int,))
    return {"attention_scale": width**-0.5, "embedding_scale": sqrt(max(0, d_model))}


def _write_score_width(m: Model) -> dict[str, Any]:
    """Return the width by which a model's scores are scaled for a Gemma config.json, in whole numbers."""
    return {"query_pre_attn_scalar": max(1, round(_score_scale(m) ** -2))}


def _score_scale(m: Model) -> float:
    """Return the factor on a model's attention scores, also where our 0 stands for it."""
    return m.attention_scale or resolve_sizes(m)["d_kv"] ** -0.5


def _build_cap_rule(part: str, ours: str, default: float | None) -> Rule:
    """Return the rule of a soft cap in a Gemma config.json, which is null where our key `ours` is 0."""
    theirs = f"{part}_logit_softcapping"
    return Renamed(theirs, ours, default, null=0.0, written=lambda m: getattr(m, ours) or None)


_GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"}
_GEMMA_WINDOWS = LayerWindowRule("sliding_window layer_types sliding_window_pattern", 4096, 6)
_GEMMA_RULES = [
    *build_llama_rules(
        262208, 9216, 131072, 4, d_model=2304, layers=26, heads=8, tied=True, activations=_GATES,
        activation_key=("hidden_activation", "gelu_pytorch_tanh"),
        rotary=LayerRotaryRule("", _GEMMA_WINDOWS, RotaryRule(theta=1e6), 1e4),
    ),
    Renamed("head_dim", "d_kv", 256),
    BiasRule("attention_bias"),
    FunctionRule("query_pre_attn_scalar", _read_score_width, _write_score_width),
    Only("attn_logit_softcapping", (None,), why="transformers does not read it in this family"),
    _build_cap_rule("final", "logit_cap", None),
    Only("use_bidirectional_attention", (False, None)),
    Free("cache_implementation", {**_RANGE, "_sliding_window_pattern": 6, **special_token_defaults(2, 1, 0)}),
]  # fmt: skip
_GEMMA = {**LLAMA_FIXED, "norm": "rmsnorm_centred", "output_norm": True, "query_key_norm": True}
_GEMMA_NAMES = llama_names(of_layer={**_OUTPUT_NORMS, "pre_feedforward_layernorm": "mlp.norm"})
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _GEMMA, _GEMMA_RULES, **_GEMMA_NAMES)

_GEMMA2_RULES = [
    *build_llama_rules(
        256000, 9216, 8192, 4, d_model=2304, layers=26, heads=8, tied=True, activations=_GATES,
        activation_key=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    Renamed("head_dim", "d_kv", 256),
    BiasRule("attention_bias"),
    FunctionRule("query_pre_attn_scalar", _read_score_width, _write_score_width),
    LayerWindowRule("sliding_window layer_types"),
    _build_cap_rule("attn", "attention_cap", 50.0),
    _build_cap_rule("final", "logit_cap", 30.0),
    Free("cache_implementation hidden_act", {**_RANGE, **special_token_defaults(2, 1, 0)}),
]  # fmt: skip
_GEMMA2 = {**LLAMA_FIXED, "norm": "rmsnorm_centred", "output_norm": True}
_CAUSAL = Only("use_bidirectional_attention", (None, False))
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _GEMMA2, [*_GEMMA2_RULES, _CAUSAL], **_GEMMA_NAMES)
_VAULT_NAMES = llama_names(of_layer={"pre_feedforward_layernorm": "mlp.norm"})
_VAULT = {**_GEMMA2, "output_norm": False}
VAULTGEMMA = Family("vaultgemma", "VaultGemmaForCausalLM", _VAULT, _GEMMA2_RULES, **_VAULT_NAMES)

_HEADS_KEY = "per_layer_config"
_OTHER_HEADS = {"head_dim": "d_kv", "num_key_value_heads": "kv_heads"}


@dataclass(frozen=True)
class Gemma4LayerRule(LayerWindowRule):
    """Rule of the layers of a Gemma 4 config.json: which have a window, never the last; and the heads of the others, in
    per_layer_config or, as published, in two keys of their own."""

    theirs: str = f"sliding_window layer_types {_HEADS_KEY} global_head_dim num_global_key_value_heads"
    width: int = 512
    every: int = 6

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model keys for windows, and for heads of layers without one. Raises Inexpressible."""
        layers = min(read_value(config_json, "num_hidden_layers", NEEDED, (int,)), MOST_LAYERS)
        kinds = read_value(config_json, "layer_types", None, (list, type(None)))
        windowed = [(i + 1) % self.every > 0 for i in range(layers)] if kinds is None else []
        kinds = [LAYER_KINDS[is_windowed] for is_windowed in windowed] if kinds is None else kinds
        model_keys = super().read_model_keys({**config_json, "layer_types": [*kinds[:-1], LAYER_KINDS[0]]})
        windowed = model_keys.get("window_layers", [])
        heads = self._read_heads(config_json, [i for i in range(layers) if i not in windowed])
        return model_keys | {f"global_{ours}" if windowed else ours: n for ours, n in heads.items()}

    def _read_heads(self, config_json: ConfigJson, seeing_all: list[int]) -> dict[str, int]:
        """Return width and number of KV heads, by our keys, that layers `seeing_all` have of their own."""
        of_layers = read_value(config_json, _HEADS_KEY, None, (dict, type(None)))
        if of_layers is None:
            said = {"head_dim": read_value(config_json, "global_head_dim", 512, (int,))}
            groups = read_value(config_json, "num_global_key_value_heads", None, (int, type(None)))
            if groups is not None and config_json.get("attention_k_eq_v"):
                said["num_key_value_heads"] = groups
        else:
            said = of_layers.get(_name_layer(config_json, seeing_all[0])) or {} if seeing_all else {}
            expected = {_name_layer(config_json, i): said for i in seeing_all if said}
            if of_layers != expected or not isinstance(said, dict) or {*said} - {*_OTHER_HEADS}:
                why = f"our words express {' and '.join(_OTHER_HEADS)}, alike in all layers without a window"
                raise Inexpressible(_HEADS_KEY, of_layers, why)
        return {ours: read_value(said, theirs, 0, (int,)) for theirs, ours in _OTHER_HEADS.items() if theirs in said}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return the keys of a Gemma 4 config.json on windows, and on heads of layers without one."""
        sizes, keys = resolve_sizes(m), super().write_config_keys(m)
        pairs = ((theirs, ours, sizes[f"global_{ours}"]) for theirs, ours in _OTHER_HEADS.items())
        others = {theirs: n for theirs, ours, n in pairs if n != sizes[ours] and m.window_layers}
        seeing_all = [i for i in range(m.layers) if keys["layer_types"][i] == LAYER_KINDS[0]]
        named = {_name_layer({"num_hidden_layers": m.layers}, i): others for i in seeing_all if others}
        return {**keys, "sliding_window": m.window or self.width, _HEADS_KEY: named}


def _name_layer(config_json: ConfigJson, layer: int) -> str:
    """Return a layer's number as text, as per_layer_config has it: with as many digits as the last layer's number."""
    return str(layer).zfill(len(str(config_json["num_hidden_layers"] - 1)))


def _read_absent_part(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key for the scale of embeddings in a Gemma 4 config.json. Raises Inexpressible."""
    if width := read_value(config_json, "hidden_size_per_layer_input", 256, (int,)):
        raise Inexpressible("hidden_size_per_layer_input", width, "our words express 0 alone, no second table")
    return {"embedding_scale": sqrt(max(0, read_value(config_json, "hidden_size", 2304, (int,))))}


def _read_experts_beside(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for the experts of a Gemma 4 config.json, beside a dense layer. Raises Inexpressible."""
    if not read_value(config_json, "enable_moe_block", False, (bool,)):
        return {}
    names = {"num_experts": "experts", "top_k_experts": "experts_per_token", "moe_intermediate_size": "expert_d_ff"}
    model_keys = {ours: read_value(config_json, theirs, NEEDED, (int,)) for theirs, ours in names.items()}
    width = read_value(config_json, "intermediate_size", 9216, (int,))
    return {**model_keys, "shared_experts": 1, "shared_d_ff": width, "expert_norms": True, "expert_factors": True}


def _write_experts_beside(m: Model) -> dict[str, Any]:
    """Return the keys of a Gemma 4 config.json on a model's experts."""
    if not m.experts:
        return {"enable_moe_block": False, "moe_intermediate_size": None, "num_experts": None, "top_k_experts": None}
    sizes = resolve_sizes(m)
    keys = {"num_experts": m.experts, "top_k_experts": m.experts_per_token, "intermediate_size": sizes["shared_d_ff"]}
    return {"enable_moe_block": True, "moe_intermediate_size": sizes["expert_d_ff"], **keys}


_GEMMA4_SCALING = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
_GEMMA4_RULES = [
    Renamed("head_dim", "d_kv", 256),
    *build_llama_rules(
        262144, 9216, 131072, 4, d_model=2304, layers=30, heads=8, tied=True, activations=_GATES,
        activation_key=("hidden_activation", "gelu_pytorch_tanh"),
        rotary=LayerRotaryRule("", Gemma4LayerRule(), RotaryRule(theta=1e6, scaling=_GEMMA4_SCALING), 1e4),
    ),
    BiasRule("attention_bias"),
    Renamed("attention_k_eq_v", "values_are_keys", False),
    FunctionRule(
        "hidden_size_per_layer_input", _read_absent_part, lambda m: {"hidden_size_per_layer_input": 0}
    ),
    _build_cap_rule("final", "logit_cap", None),
    Only("num_kv_shared_layers", (0,)),
    FunctionRule(
        "enable_moe_block num_experts top_k_experts moe_intermediate_size", _read_experts_beside, _write_experts_beside
    ),
    Only("use_bidirectional_attention", (None, "vision")),  # which concerns images alone
    Free("", {
        **_RANGE, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 262144, **special_token_defaults(2, 1, 0)
    }),
]  # fmt: skip
_GEMMA4 = {**LLAMA_FIXED, "output_norm": True, "query_key_norm": True, "value_norm": True, "stored_scale": True}
_GEMMA4 |= {"attention_scale": 1.0, "capacity_factor": 0.0}
_BLOCK, _OURS = "model.layers.{i}", "layers.{i}.mlp"
_OWN_NORMS = {
    "post_feedforward_layernorm_1": "shared_output_norm",
    "post_feedforward_layernorm_2": "expert_output_norm",
    "pre_feedforward_layernorm_2": "expert_norm",
}
_GEMMA4_NAMES = llama_names(
    [
        TensorRow(f"{_BLOCK}.layer_scalar", ("layers.{i}.scale",)),
        TensorRow(f"{_BLOCK}.experts.gate_up_proj", (f"{_OURS}.experts.gate", f"{_OURS}.experts.up")),
        TensorRow(f"{_BLOCK}.experts.down_proj", (f"{_OURS}.experts.down",)),
        TensorRow(f"{_BLOCK}.router.scale", (f"{_OURS}.router_norm.gain",)),
        TensorRow(f"{_BLOCK}.router.per_expert_scale", (f"{_OURS}.expert_factor",)),
        *module_rows({f"{_BLOCK}.router.proj": f"{_OURS}.router"}),
        *module_rows({f"{_BLOCK}.mlp.{n}_proj": f"{_OURS}.shared.{n}" for n in ("gate", "up", "down")}),
        *module_rows({f"{_BLOCK}.{theirs}": f"{_OURS}.{ours}" for theirs, ours in _OWN_NORMS.items()}),
    ],
    of_layer={**_OUTPUT_NORMS, "pre_feedforward_layernorm": "mlp.norm"},
)
GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", _GEMMA4, _GEMMA4_RULES, **_GEMMA4_NAMES)

_WINDOWS = LayerWindowRule("use_sliding_window sliding_window layer_types")


def _read_unrotated_layers(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for the layers of a SmolLM3 config.json without rotary positions, which alone have a window
    unless it says otherwise. Raises Inexpressible."""
    layers = read_value(config_json, "num_hidden_layers", NEEDED, (int,))
    interval = max(1, read_value(config_json, "no_rope_layer_interval", 4, (int,)))
    rotated = read_value(config_json, "no_rope_layers", None, (list, type(None)))
    if rotated is None:
        rotated = [int((i + 1) % interval > 0) for i in range(min(layers, MOST_LAYERS))]
    if len(rotated) < min(layers, MOST_LAYERS) or not all(type(n) is int and n in (0, 1) for n in rotated):
        raise Inexpressible("no_rope_layers", rotated, "must be 0 or 1 for each layer")
    used = config_json.get("use_sliding_window") and config_json.get("layer_types") is None
    kinds = {"layer_types": [("sliding_attention", "full_attention")[n] for n in rotated[:layers]]} if used else {}
    unrotated = [i for i, n in enumerate(rotated[:layers]) if not n]
    return {"no_rope_layers": unrotated, **_WINDOWS.read_model_keys({**config_json, **kinds})}


def _write_unrotated_layers(m: Model) -> dict[str, Any]:
    """Return the keys of a SmolLM3 config.json for a model's layers without rotary positions, and with a window."""
    rotated = [int(i not in m.no_rope_layers) for i in range(m.layers)]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4, **_WINDOWS.write_config_keys(m)}


_UNROTATED = f"no_rope_layers no_rope_layer_interval {_WINDOWS.theirs}"
_BASE = RotaryRule(theta=2e6)
_SMOLLM3_RULES = [
    *build_llama_rules(128256, 11008, 32768, 4, d_model=2048, layers=36, heads=16, tied=True, rotary=_BASE),
    BiasRule(),
    FunctionRule(_UNROTATED, _read_unrotated_layers, _write_unrotated_layers),
    Free("pretraining_tp max_window_layers", {**_RANGE, **special_token_defaults(128000, 128001, 128004)}),
]
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", LLAMA_FIXED, _SMOLLM3_RULES, **llama_names())


def _read_logit_scale(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key for what divides the logits in a Granite config.json. Raises Inexpressible."""
    if (divisor := read_value(config_json, "logits_scaling", 1.0, (int, float))) <= 0:
        raise Inexpressible("logits_scaling", divisor, "must be > 0")
    return {"logit_scale": 1 / divisor}


def _write_logit_scale(m: Model) -> dict[str, Any]:
    """Return what divides a model's logits for a Granite config.json: a round number, if it means the same."""
    exact, short = 1 / m.logit_scale, float(f"{1 / m.logit_scale:.12g}")
    return {"logits_scaling": short if 1 / short == m.logit_scale else exact}


_GRANITE_RULES = [
    *build_llama_rules(32000, 11008, 2048, None),
    BiasRule(),
    *(Renamed(f"{part}_multiplier", f"{part}_scale", 1.0) for part in ("embedding", "residual")),
    Renamed("attention_multiplier", "attention_scale", 1.0, written=_score_scale),
    FunctionRule("logits_scaling", _read_logit_scale, _write_logit_scale),
    Free("", {**_RANGE, **special_token_defaults(1, 2)}),
]
GRANITE = Family("granite", "GraniteForCausalLM", LLAMA_FIXED, _GRANITE_RULES, **llama_names())

_HALF = RotaryRule(share=0.5)
_BIASES = {True: "qkv", False: "none"}
_AROUND = {"post_self_attn_layernorm": "attention.output_norm", "post_mlp_layernorm": "mlp.output_norm"}
_GLM4 = {**LLAMA_FIXED, "output_norm": True, "rope_pairs": "neighbours"}
_GLM4_RULES = [
    *build_llama_rules(151552, 13696, 131072, 2, layers=40, eps=1.5625e-07, rotary=_HALF),
    Renamed("head_dim", "d_kv", 128),
    Words("attention_bias", "attention_bias", _BIASES, True),
    Free("", {**_RANGE, **special_token_defaults(None, None, 151329)}),
]
GLM4 = Family("glm4", "Glm4ForCausalLM", _GLM4, _GLM4_RULES, **llama_names(of_layer={**_FUSED_GATE, **_AROUND}))

_MLP = "model.layers.{i}.mlp"
_BESIDE = [
    TensorRow(f"{_MLP}.gate.e_score_correction_bias", ("layers.{i}.mlp.choice_bias",)),
    *module_rows({f"{_MLP}.shared_experts.{n}_proj": f"layers.{{i}}.mlp.shared.{n}" for n in ("gate", "up", "down")}),
]
_GLM4_MOE_NAMES = llama_names(
    [*build_expert_rows("mlp", "gate_proj", "up_proj", "down_proj"), *_BESIDE], [*FUSED, *_BESIDE]
)  # fmt: skip
_SIGMOID = {"capacity_factor": 0.0, "router": "sigmoid", "router_bias": True, "router_group_best": 2}
_GLM4_MOE_RULES = [
    *build_llama_rules(151552, 10944, 131072, 8, layers=46, heads=96, eps=1e-5, rotary=_HALF),
    HEAD_DIM,
    Words("attention_bias", "attention_bias", _BIASES, False),
    Renamed("use_qk_norm", "query_key_norm", False),
    *build_expert_rules(128, 1408, 1, 1.0, 1),
    Renamed("num_experts_per_tok", "experts_per_token", 8),
    Renamed("n_group", "router_groups", 1),
    Renamed("topk_group", "router_groups_kept", 1),
    Renamed("norm_topk_prob", "router_normalised", True),
    Free("num_mtp_layers router_aux_loss_coef", {
        **_RANGE, "num_nextn_predict_layers": 1, "output_router_logits": False, **special_token_defaults(None, None)
    }),
]  # fmt: skip
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", {**LLAMA_FIXED, **_SIGMOID}, _GLM4_MOE_RULES,
    **add_prediction_names(_GLM4_MOE_NAMES),
)  # fmt: skip
