"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from platform.weights.families.family import ONE_STACK, PLAIN, Family, modules, special_tokens
from platform.weights.families.keys import Dropouts, Free, Only, Renamed, Words

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    ["GPT2LMHeadModel"],
    {"kind": "decoder", "norm": "layernorm", "positions": "learned", "bias": True},
    [
        Renamed("vocab_size", "vocab", 50257),
        Renamed("n_positions", "length", 1024),
        Renamed("n_embd", "d_model", 768),
        Renamed("n_layer", "layers", 12),
        Renamed("n_head", "heads", 12),
        Renamed("n_inner", "d_ff", None, null=0,
                written=lambda m: m.d_ff if m.d_ff not in (0, 4 * m.d_model) else None),
        Words("activation_function", "activation", {**PLAIN, "gelu_new": "gelu_tanh"}, "gelu_new"),
        Renamed("layer_norm_epsilon", "norm_eps", 1e-5),
        Words("scale_attn_weights", "attention_scale", {True: 0.0, False: 1.0}, True),
        Renamed("tie_word_embeddings", "tied", True),
        Dropouts("resid_pdrop embd_pdrop attn_pdrop", 0.1),
        Only("scale_attn_by_inverse_layer_idx", (False,)),
        Only("reorder_and_upcast_attn", (False,)),
        Only("add_cross_attention", (False,)),
        ONE_STACK,
        Free(
            "n_ctx is_decoder",
            {
                "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None,
                "summary_proj_to_labels": True, "summary_first_dropout": 0.1, "initializer_range": 0.02,
                **special_tokens(50256, 50256),
            },
        ),
    ],
    [
        *modules({
            "transformer.wte": "embedding",
            "transformer.wpe": "position",
            "transformer.h.{i}.ln_1": "layers.{i}.attention.norm",
        }),
        *modules({
            "transformer.h.{i}.attn.c_attn":
                "layers.{i}.attention.query layers.{i}.attention.key layers.{i}.attention.value",
            "transformer.h.{i}.attn.c_proj": "layers.{i}.attention.output",
        }, turned=True),
        *modules({"transformer.h.{i}.ln_2": "layers.{i}.mlp.norm"}),
        *modules({
            "transformer.h.{i}.mlp.c_fc": "layers.{i}.mlp.up",
            "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down",
        }, turned=True),
        *modules({"transformer.ln_f": "norm", "lm_head": "head"}),
    ],
    "transformer.",
    {"lm_head.weight": "transformer.wte.weight"},
    ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)  # fmt: skip
