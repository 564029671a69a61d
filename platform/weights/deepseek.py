"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): multi-head latent attention, and experts from the first few layers on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt
from typing import Any

from platform.config.fields import Model
from platform.weights.config_keys import (
    MOST_LAYERS,
    NEEDED,
    ConfigJson,
    Family,
    Free,
    FunctionRule,
    Inexpressible,
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
    yarn_magnitude,
)
from platform.weights.llama import FUSED, LLAMA_FIXED, build_expert_rows, build_llama_rules

_WIDTHS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}  # with their defaults


def _read_head_widths(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for the widths of heads in a config.json. Raises Inexpressible."""
    nope, rope, value = (read_value(config_json, name, default, (int,)) for name, default in _WIDTHS.items())
    for name, derived in (("qk_head_dim", nope + rope), ("head_dim", rope)):
        if (said := config_json.get(name, derived)) != derived:
            raise Inexpressible(name, said, f"transformers derives {derived} of the other widths")
    return {"d_kv": nope + rope, "d_rope": rope, "d_value": value}


def _write_head_widths(m: Model) -> dict[str, Any]:
    """Return the widths of a model's heads for a config.json."""
    sizes = resolve_sizes(m)
    widths = dict(zip(_WIDTHS, (sizes["d_kv"] - m.d_rope, m.d_rope, sizes["d_value"]), strict=True))
    return {**widths, "qk_head_dim": sizes["d_kv"], "head_dim": m.d_rope}


def _read_dense_layers(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key for the layers without experts, the first ones of a config.json. Raises Inexpressible."""
    count = read_value(config_json, "first_k_dense_replace", NEEDED, (int,))
    if not 0 <= count <= MOST_LAYERS:
        raise Inexpressible("first_k_dense_replace", count, f"is no number of layers up to {MOST_LAYERS}")
    return {"dense_layers": list(range(count))}


_WEIGHTS = ("mscale", "mscale_all_dim")


def _read_rotary_positions(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for rotary positions in a config.json, and for YaRN's two weights: `mscale_all_dim` scales
    all scores (model.attention_scale), what remains of `mscale` the part that rotates (model.rope_magnitude). Raises
    Inexpressible."""
    scaling_key = "rope_scaling" if config_json.get("rope_scaling") else "rope_parameters"
    scaling = config_json.get(scaling_key)
    if not isinstance(scaling, Mapping):
        return _POSITIONS.read_model_keys(config_json)
    plain_scaling = {name: value for name, value in scaling.items() if name not in _WEIGHTS}
    top, all_dims_weight = (read_value(scaling, name, None, (int, float, type(None))) or 0 for name in _WEIGHTS)
    model_keys = _POSITIONS.read_model_keys({**config_json, scaling_key: plain_scaling})
    if not top and not all_dims_weight:
        return model_keys
    if model_keys["rope_scaling"] != "yarn":
        raise Inexpressible(f"{scaling_key}.mscale", top or all_dims_weight, "our words express it with yarn alone")
    factor, width = model_keys["rope_factor"], _read_head_widths(config_json)["d_kv"]
    if all_dims_weight:
        model_keys["attention_scale"] = max(width, 1) ** -0.5 * yarn_magnitude(factor, all_dims_weight) ** 2
    if top and all_dims_weight and not model_keys["rope_magnitude"]:
        model_keys["rope_magnitude"] = yarn_magnitude(factor, top) / yarn_magnitude(factor, all_dims_weight)
    return model_keys


def _write_rotary_positions(m: Model) -> dict[str, Any]:
    """Return `rope_parameters` of a model for a config.json, with YaRN's weights if its scores are scaled."""
    parameters = dict(_POSITIONS.write_config_keys(m)["rope_parameters"])
    unit, grown = 0.1 * log(m.rope_factor), m.attention_scale * sqrt(resolve_sizes(m)["d_kv"])
    if m.rope_scaling == "yarn" and unit and grown > 1:
        all_dims_weight = round((sqrt(grown) - 1) / unit, 6)
        magnitude = parameters.pop("attention_factor", 0.0) or yarn_magnitude(m.rope_factor, 1)
        mscale = round((magnitude * yarn_magnitude(m.rope_factor, all_dims_weight) - 1) / unit, 6)
        parameters |= {"mscale": mscale, "mscale_all_dim": all_dims_weight}
    return {"rope_parameters": parameters}


_POSITIONS = RotaryRule()
_LAYER = "model.layers.{i}"
_ATTENTION = {
    "q_proj": "query",
    "q_a_proj": "query_down",
    "q_a_layernorm": "q_latent_norm",
    "q_b_proj": "query_up",
    "kv_a_proj_with_mqa": "kv_down layers.{i}.attention.rotary_key",
    "kv_a_layernorm": "kv_latent_norm",
    "o_proj": "output",
}
_PRODUCTS = {f"{name}_proj": name for name in ("gate", "up", "down")}
_KEYS_AND_VALUES = "layers.{i}.attention.key_up", "layers.{i}.attention.value_up"


def _build_tensor_rows(experts: list[TensorRow]) -> list[TensorRow]:
    """Return the rows of DeepSeek's tensors; `experts`: rows of a layer's experts and their router."""
    products = {f"{_LAYER}.mlp.{theirs}": f"layers.{{i}}.mlp.{ours}" for theirs, ours in _PRODUCTS.items()}
    shared = {f"{_LAYER}.mlp.shared_experts.{t}": f"layers.{{i}}.mlp.shared.{ours}" for t, ours in _PRODUCTS.items()}
    attention = {f"{_LAYER}.self_attn.{t}": f"layers.{{i}}.attention.{ours}" for t, ours in _ATTENTION.items()}
    norms = {"input_layernorm": "attention.norm", "post_attention_layernorm": "mlp.norm"}
    return [
        *module_rows({"model.embed_tokens": "embedding"}),
        *module_rows(attention),
        TensorRow(f"{_LAYER}.self_attn.kv_b_proj.weight", _KEYS_AND_VALUES, by_head=True),
        *module_rows(products),
        *experts,
        TensorRow(f"{_LAYER}.mlp.gate.e_score_correction_bias", ("layers.{i}.mlp.choice_bias",)),
        *module_rows(shared),
        *module_rows({f"{_LAYER}.{theirs}": f"layers.{{i}}.{ours}" for theirs, ours in norms.items()}),
        *module_rows({"model.norm": "norm", "lm_head": "head"}),
    ]


_NAMES: dict[str, Any] = {
    "rows": _build_tensor_rows(build_expert_rows("mlp", "gate_proj", "up_proj", "down_proj")),
    "prefix": "model.",
    "same": {"lm_head.weight": "model.embed_tokens.weight"},
    "fused": _build_tensor_rows(FUSED),
}


# Modules of multi-token prediction, as the layers behind the last, and what they repeat of the model
PREDICTION_ROWS = [
    *module_rows({f"{_LAYER}.enorm": "layers.{i}.embedding_norm", f"{_LAYER}.hnorm": "layers.{i}.hidden_norm"}),
    TensorRow(f"{_LAYER}.eh_proj.weight", ("layers.{i}.merge_embedding", "layers.{i}.merge_hidden"), beside=True),
    *module_rows({f"{_LAYER}.shared_head.norm": "layers.{i}.norm"}),
]
PREDICTION_REPEATS = {
    f"{_LAYER}.embed_tokens.weight": "model.embed_tokens.weight",
    f"{_LAYER}.shared_head.head.weight": "lm_head.weight",
}


def add_prediction_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a `Family`, its names of tensors, with the names of modules of multi-token prediction."""
    fields = dict(names, same={**names["same"], **PREDICTION_REPEATS})
    for key in ("rows", "fused"):
        first = next(i for i, row in enumerate(names[key]) if "{i}" in row.theirs)
        fields[key] = [*names[key][:first], *PREDICTION_ROWS, *names[key][first:]]
    return fields


def build_expert_rules(number: int, width: int, shared: int, scale: float, dense: int) -> list[Rule]:
    """Return the rules for a config.json on a family's experts, with its defaults: their number, width and the number
    of shared ones; the scale of their weights; the number of layers, the first, that have none."""
    key = "first_k_dense_replace"
    return [
        Renamed("n_routed_experts num_local_experts", "experts", number),
        Renamed("moe_intermediate_size", "expert_d_ff", width),
        Renamed("n_shared_experts", "shared_experts", shared),
        Renamed("routed_scaling_factor", "router_scale", scale),
        FunctionRule(
            key, lambda json: _read_dense_layers({key: dense, **json}), lambda m: {key: len(m.dense_layers)}
        ),
    ]  # fmt: skip


def _build_rules_of_both_versions(llama: Sequence[Rule], experts: Sequence[Rule]) -> list[Rule]:
    """Return the rules for a config.json that DeepSeek-V2 and V3 share, with the defaults in which they differ: those
    of `llama`, and of their `experts`."""
    return [
        *(rule for rule in llama if not isinstance(rule, RotaryRule)),
        FunctionRule(_POSITIONS.theirs, _read_rotary_positions, _write_rotary_positions),
        FunctionRule(" ".join((*_WIDTHS, "qk_head_dim", "head_dim")), _read_head_widths, _write_head_widths),
        Renamed("kv_lora_rank", "kv_latent", 512),
        Renamed("q_lora_rank", "q_latent", 1536, null=0, written=lambda m: m.q_latent or None),
        *experts,
        Only("attention_bias", (False,)),
        Only("moe_layer_freq", (1,), written=False),
    ]


def _read_router_groups(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for groups of experts in a DeepSeek-V2 config.json. Raises Inexpressible."""
    method = read_value(config_json, "topk_method", "greedy", (str,))
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise Inexpressible("topk_method", method, "our words express greedy, group_limited_greedy")
    groups, kept = (read_value(config_json, name, NEEDED, (int,)) for name in ("n_group", "topk_group"))
    return {"router_groups": groups, "router_groups_kept": kept}


def _write_router_groups(m: Model) -> dict[str, Any]:
    """Return the keys of a DeepSeek-V2 config.json that say among which groups of experts a model chooses."""
    if m.router_groups_kept >= m.router_groups:
        return {"topk_method": "greedy", "n_group": 1, "topk_group": 1}  # as V2-Lite has it
    return {"topk_method": "group_limited_greedy", "n_group": m.router_groups, "topk_group": m.router_groups_kept}


_FIXED = {**LLAMA_FIXED, "capacity_factor": 0.0}
_FREE = {"initializer_range": 0.02, "output_router_logits": False, "pretraining_tp": 1}
_IGNORED = "auto_map aux_loss_alpha ep_size seq_aux router_aux_loss_coef"

_V2_LLAMA = build_llama_rules(102400, 11008, 2048, None)
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {**_FIXED, "router": "softmax", "router_normalised": False, "rope_pairs": "neighbours"},
    [
        *_build_rules_of_both_versions(_V2_LLAMA, build_expert_rules(64, 1407, 2, 1.0, 0)),
        Renamed("num_experts_per_tok", "experts_per_token"),
        FunctionRule("topk_method n_group topk_group", _read_router_groups, _write_router_groups),
        Only("scoring_func", ("softmax",), written=False),
        Only("norm_topk_prob", (False,)),
        Only("mlp_bias", (False,)),
        Free(_IGNORED, {**_FREE, **special_token_defaults(1, 2)}),
    ],
    **_NAMES,
)

_V3_LLAMA = build_llama_rules(129280, 18432, 4096, None, d_model=7168, layers=61, heads=128)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {**_FIXED, "router": "sigmoid", "router_bias": True, "router_group_best": 2},
    [
        *_build_rules_of_both_versions(_V3_LLAMA, build_expert_rules(256, 2048, 1, 2.5, 3)),
        Renamed("num_experts_per_tok", "experts_per_token", 8),
        Renamed("n_group", "router_groups", 8),
        Renamed("topk_group", "router_groups_kept", 4),
        Renamed("norm_topk_prob", "router_normalised", True),
        Words("rope_interleave", "rope_pairs", {True: "neighbours", False: "halves"}, True),
        Only("scoring_func", ("sigmoid",), written=False),
        Only("topk_method", ("noaux_tc",), written=False),
        Free(f"{_IGNORED} num_mtp_layers", {**_FREE, "num_nextn_predict_layers": 1, **special_token_defaults(0, 1)}),
    ],
    **add_prediction_names(_NAMES),
)
