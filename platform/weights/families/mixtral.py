"""Mixtral (Jiang et al. 2024) and Qwen3-MoE (Yang et al. 2025): Llama's layers, with experts."""

from __future__ import annotations

from collections.abc import Sequence

from platform.weights.families.family import Family, TensorRow, modules, special_tokens
from platform.weights.families.keys import Free, Only, Renamed, Rule
from platform.weights.families.llama import HEAD_DIM, LLAMA_FIXED, Biases, llama_names, llama_rules

_LAYER = "model.layers.{i}"
_GATE, _UP, _DOWN = (f"layers.{{i}}.mlp.experts.{name}" for name in ("gate", "up", "down"))
_FUSED = [  # in every family, where transformers does not save the names of before its version 5
    *modules({f"{_LAYER}.mlp.gate": "layers.{i}.mlp.router"}),
    TensorRow(f"{_LAYER}.mlp.experts.gate_up_proj", (_GATE, _UP)),
    TensorRow(f"{_LAYER}.mlp.experts.down_proj", (_DOWN,)),
]


def _separate(place: str, gate: str, up: str, down: str) -> list[TensorRow]:
    """Return the rows of a family's table of names for experts that are a tensor each; `place`: transformers' name of
    their layer; the others: names of the matrices of each."""
    each = {f"{_LAYER}.{place}.experts.{{e}}.{name}": ours for name, ours in ((down, _DOWN), (gate, _GATE), (up, _UP))}
    return [*modules({**each, f"{_LAYER}.{place}.gate": "layers.{i}.mlp.router"})]


def _of_experts(count: str, number: int, chosen: int, loss: float) -> Sequence[Rule]:
    """Return the rules on experts for a config.json of a family, with its defaults: the keys of how many there are
    (`count`), `number` of them, how many compute a token (`chosen`), and a factor of its auxiliary `loss`."""
    free = {"initializer_range": 0.02, "output_router_logits": False, "router_aux_loss_coef": loss}
    return (
        Renamed(count, "experts", number),
        Renamed("num_experts_per_tok", "experts_per_token", chosen),
        Free("", free),
    )


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
        *_of_experts("num_local_experts", 8, 2, 0.001),
        Only("router_jitter_noise", (0.0, 0)),
        Free("", special_tokens(1, 2)),
    ],
    **llama_names(_separate("block_sparse_moe", "w1", "w3", "w2"), _FUSED),
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
        *_of_experts("num_local_experts num_experts", 128, 8, 0.001),
        Renamed("moe_intermediate_size", "expert_d_ff", 768),
        Renamed("decoder_sparse_step", "experts_every", 1),
        Only("mlp_only_layers", ([], None)),
        Renamed("norm_topk_prob", "router_normalised", False),
        Only("use_sliding_window", (False,)),
        Free("max_window_layers", {"sliding_window": None, **special_tokens(None, None)}),
    ],
    **llama_names(_separate("mlp", "gate_proj", "up_proj", "down_proj"), _FUSED),
)
