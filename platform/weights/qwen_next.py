"""Qwen3-Next (Qwen Team 2025) and Qwen 3.5, its text: three of four layers have a gated delta rule, the others
attention with gates; with experts, and Qwen 3.5 also without."""

from __future__ import annotations

from typing import Any

from platform.config.fields import Model
from platform.model.layers import expert_width
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
    module_rows,
    read_value,
    special_token_defaults,
)
from platform.weights.llama import (
    FUSED,
    LLAMA_FIXED,
    BiasRule,
    build_expert_rows,
    build_llama_rules,
    llama_names,
    read_listed_dense_layers,
)

_KINDS = ("full_attention", "linear_attention")


def _read_linear_layers(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model key for the layers of a config.json with a delta rule. Raises Inexpressible."""
    layers = min(read_value(config_json, "num_hidden_layers", NEEDED, (int,)), MOST_LAYERS)
    every = read_value(config_json, "full_attention_interval", 4, (int,))
    if every < 1:
        raise Inexpressible("full_attention_interval", every, "is no number of layers")
    kinds = read_value(config_json, "layer_types", None, (list, type(None)))
    kinds = [_KINDS[(i + 1) % every > 0] for i in range(layers)] if kinds is None else kinds
    if len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise Inexpressible("layer_types", kinds, f"our words express {' and '.join(_KINDS)}, one for each layer")
    return {"linear_layers": [i for i, kind in enumerate(kinds) if kind == _KINDS[1]]}


def _write_linear_layers(m: Model) -> dict[str, Any]:
    """Return the kinds of a model's layers for a config.json."""
    return {"layer_types": [_KINDS[i in m.linear_layers] for i in range(m.layers)]}


def _read_shared_experts(config_json: ConfigJson) -> dict[str, Any]:
    """Return our model keys for the shared experts of a Qwen3-Next config.json. Raises Inexpressible."""
    width = read_value(config_json, _SHARED, 512, (int,))
    each = read_value(config_json, "moe_intermediate_size", 512, (int,))
    if each <= 0 or width <= 0 or width % each:
        raise Inexpressible(_SHARED, width, f"is no multiple of moe_intermediate_size={each}")
    experts = read_value(config_json, "num_experts", 512, (int,)) > 0
    return {"shared_experts": width // each if experts else 0, "shared_expert_gate": experts}


def _write_shared_experts(m: Model) -> dict[str, Any]:
    """Return the width of a model's shared experts for a config.json."""
    return {_SHARED: expert_width(m) * max(1, m.shared_experts)}


_SHARED = "shared_expert_intermediate_size"
_SIZES = {"key_heads": ("num_key_heads", 16), "value_heads": ("num_value_heads", 32), "d_key": ("key_head_dim", 128),
          "d_value": ("value_head_dim", 128), "taps": ("conv_kernel_dim", 4)}  # fmt: skip


def _build_expert_rules(number: int, chosen: int) -> list[Rule]:
    """Return the rules for a config.json on experts, with a family's defaults of their number, and of a token's."""
    return [
        Renamed("num_experts", "experts", number),
        Renamed("num_experts_per_tok", "experts_per_token", chosen),
        Renamed("moe_intermediate_size", "expert_d_ff", 512),
        FunctionRule(_SHARED, _read_shared_experts, _write_shared_experts),
        Free("", {"output_router_logits": False, "router_aux_loss_coef": 0.001}),
    ]


def _build_rules(llama: list[Rule]) -> list[Rule]:
    """Return the rules for a config.json that Qwen3-Next and Qwen 3.5 share; `llama`: rules of their
    sizes, as Llama has them."""
    return [
        *llama,
        Renamed("head_dim", "d_kv", 256),
        BiasRule("attention_bias"),
        *(Renamed(f"linear_{theirs}", f"linear_{ours}", default) for ours, (theirs, default) in _SIZES.items()),
        FunctionRule("layer_types full_attention_interval", _read_linear_layers, _write_linear_layers),
        Only("use_sliding_window", (False,), written=False),
    ]


_LAYER, _DELTA = "model.layers.{i}", "model.layers.{i}.linear_attn"
_ATTENTION, _OURS = "layers.{i}.attention", "layers.{i}.delta"
_FIXED = {**LLAMA_FIXED, "norm": "rmsnorm_centred", "query_key_norm": True, "attention_gate": True}
_DROPLESS = {**_FIXED, "capacity_factor": 0.0}
_ROTARY = RotaryRule(share=0.25)
_GATED_QUERY = tuple(
    TensorRow(
        f"{_LAYER}.self_attn.q_proj.{kind}", (f"{_ATTENTION}.query{end}", f"{_ATTENTION}.gate{end}"), by_head=True
    )
    for kind, end in (("weight", ""), ("bias", "_bias"))
)


def _in_turn(name: str, *parts: str) -> TensorRow:
    """Return the row of a projection that has, for each head of keys in turn, its part of each of ours."""
    ours = tuple(f"{_OURS}.{part}" for part in parts)
    return TensorRow(f"{_DELTA}.{name}.weight", ours, by_head=True, groups="linear_key_heads")


_CONVOLVED = "query", "key", "value"
_RULE = [
    *_GATED_QUERY,
    TensorRow(f"{_LAYER}.input_layernorm.weight", (f"{_OURS}.norm.gain",)),
    TensorRow(f"{_DELTA}.dt_bias", (f"{_OURS}.shift",)),
    TensorRow(f"{_DELTA}.A_log", (f"{_OURS}.rate",)),
    TensorRow(f"{_DELTA}.conv1d.weight", tuple(f"{_OURS}.{part}_taps" for part in _CONVOLVED), channels=True),
    TensorRow(f"{_DELTA}.norm.weight", (f"{_OURS}.head_norm.gain",)),
    TensorRow(f"{_DELTA}.out_proj.weight", (f"{_OURS}.output",)),
]  # fmt: skip
_IN_TURN = [_in_turn("in_proj_qkvz", "query", "key", "value", "gate"), _in_turn("in_proj_ba", "strength", "decay")]
_APART = [*module_rows({
    f"{_DELTA}.in_proj_qkv": " ".join(f"{_OURS}.{part}" for part in _CONVOLVED),
    **{f"{_DELTA}.in_proj_{n}": f"{_OURS}.{part}" for n, part in (("z", "gate"), ("b", "strength"), ("a", "decay"))},
})]  # fmt: skip
_BESIDE = [
    *module_rows({
        f"{_LAYER}.mlp.shared_expert.{n}_proj": f"layers.{{i}}.mlp.shared.{n}" for n in ("gate", "up", "down")
    }),
    TensorRow(f"{_LAYER}.mlp.shared_expert_gate.weight", ("layers.{i}.mlp.shared_gate",)),
]  # fmt: skip
_EXPERTS = build_expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
_FREE = {"initializer_range": 0.02, **special_token_defaults(None, None)}

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _DROPLESS,
    [
        *_build_rules(build_llama_rules(151936, 5632, 32768, 2, d_model=2048, layers=48, heads=16, rotary=_ROTARY)),
        *_build_expert_rules(512, 10),
        Renamed("decoder_sparse_step", "experts_every", 1),
        FunctionRule("mlp_only_layers", read_listed_dense_layers, lambda m: {"mlp_only_layers": m.dense_layers}),
        Renamed("norm_topk_prob", "router_normalised", True),
        Free("", _FREE),
    ],
    **llama_names([*_RULE, *_IN_TURN, *_EXPERTS, *_BESIDE], [*_RULE, *_IN_TURN, *FUSED, *_BESIDE]),
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _FIXED,
    [*_build_rules(build_llama_rules(248320, 12288, 32768, 4, heads=16, rotary=_ROTARY)), Free("", _FREE)],
    **llama_names([*_RULE, *_APART]),
)
_MOE_LLAMA = build_llama_rules(248320, 0, 32768, 2, d_model=2048, layers=40, heads=16, rotary=_ROTARY)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _DROPLESS,
    [
        *_build_rules([rule for rule in _MOE_LLAMA if rule.theirs != "intermediate_size"]),
        *_build_expert_rules(256, 8),
        Free("", _FREE),
    ],
    **llama_names([*_RULE, *_APART, *_EXPERTS, *_BESIDE], [*_RULE, *_APART, *FUSED, *_BESIDE]),
)
