"""The families of models that transformers and we know, as data: keys of their config.json, names of their tensors.

A tensor of theirs is one of ours, flattened to a matrix [what its product adds, what it contracts], or several of ours
one after another; GPT-2's are stored the other way round (`turned`). `{i}` is the number of a layer. Rows are in the
order in which transformers writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isclose, sqrt
from typing import Any, NamedTuple

from platform.config.fields import Model
from platform.weights.keys import (
    Copy,
    Dropouts,
    Found,
    Free,
    Inexpressible,
    LayerWindows,
    Only,
    Rotary,
    Rule,
    Window,
    Words,
    value_of,
)


class Row(NamedTuple):
    """Name of a tensor of theirs, and of those of ours that it holds, one after another. `turned`: it is stored as
    [what it contracts, what it adds]; `gated`: it is there only where feed-forward layers have a gate (True), or none
    (False)."""

    theirs: str
    ours: tuple[str, ...]
    turned: bool = False
    gated: bool | None = None


@dataclass(frozen=True)
class Family:
    """Family of models: `architecture` is the class that has all tensors, others that may be `read` have more or fewer.

    `fixed`: our model keys that are alike in the whole family; `rules`: of the keys of config.json; `rows`: of tensors;
    `prefix`: that begins names and may be missing, as where the class without a head was saved; `same`: names that
    repeat another tensor (tied); `buffers`: names of what is no parameter, which is not read.
    """

    name: str
    architecture: str
    read: Sequence[str]
    fixed: Mapping[str, Any]
    rules: Sequence[Rule]
    rows: Sequence[Row]
    prefix: str
    same: Mapping[str, str] = field(default_factory=dict)
    buffers: Sequence[str] = ()


# Keys that any config.json may have, and that matter to neither logits nor gradients.
_ANY = """
    _name_or_path architectures begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_factor initializer_range label2id length_penalty
    max_length min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id prefix problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16 use_cache
"""
COMMON: tuple[Rule, ...] = (
    Free({}, _ANY.split()),
    Only("pruned_heads", ({}, None), written=False),
    Only("tie_encoder_decoder", (False,), written=False),
    Only("bad_words_ids", (None,), written=False),
)

_ONE_STACK = Only("is_encoder_decoder", (False,), written=False)

_PLAIN = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
_PLAIN |= {"gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
_GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "relu": "reglu"}
_GATED |= {"swish": "swiglu", "gelu_python": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_fast": "geglu_tanh"}


def _d_ff(m: Model) -> int:
    return m.d_ff or 4 * m.d_model


def _d_kv(m: Model) -> int:
    return m.d_kv or m.d_model // m.heads


def _tokens(begin: int | None, end: int | None, pad: int | None = None) -> dict[str, Any]:
    return {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "use_cache": True}


# GPT-2 (Radford et al. 2019)

_PRE_NORM = {"post_norm": False, "embedding_norm": False}
_NO_HEAD = {"head_transform": False, "head_bias": False}
_SEES_ALL = {"window": 0, "window_layers": []}
_OWN_SCALE = {"attention_scale": 0.0, "logit_scale": 1.0}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    ["GPT2LMHeadModel"],
    {"kind": "decoder", "norm": "layernorm", "positions": "learned", "bias": True, "attention_bias": "", "kv_heads": 0,
     "d_kv": 0, "query_key_norm": False, "segments": 0, "logit_scale": 1.0, **_PRE_NORM, **_NO_HEAD, **_SEES_ALL},
    [
        Copy("vocab_size", "vocab", 50257),
        Copy("n_positions", "length", 1024),
        Copy("n_embd", "d_model", 768),
        Copy("n_layer", "layers", 12),
        Copy("n_head", "heads", 12),
        Copy("n_inner", "d_ff", None, null=0, written=lambda m: m.d_ff if m.d_ff not in (0, 4 * m.d_model) else None),
        Words("activation_function", "activation", {**_PLAIN, "gelu_new": "gelu_tanh"}, "gelu_new"),
        Copy("layer_norm_epsilon", "norm_eps", 1e-5),
        Words("scale_attn_weights", "attention_scale", {True: 0.0, False: 1.0}, True),
        Copy("tie_word_embeddings", "tied", True),
        Dropouts(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.1),
        Only("scale_attn_by_inverse_layer_idx", (False,)),
        Only("reorder_and_upcast_attn", (False,)),
        Only("add_cross_attention", (False,)),
        _ONE_STACK,
        Free(
            {
                "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None,
                "summary_proj_to_labels": True, "summary_first_dropout": 0.1, "initializer_range": 0.02,
                **_tokens(50256, 50256),
            },
            ("n_ctx", "is_decoder"),
        ),
    ],
    [
        Row("transformer.wte.weight", ("embedding",)),
        Row("transformer.wpe.weight", ("position",)),
        Row("transformer.h.{i}.ln_1.weight", ("layers.{i}.attention.norm.gain",)),
        Row("transformer.h.{i}.ln_1.bias", ("layers.{i}.attention.norm.bias",)),
        Row("transformer.h.{i}.attn.c_attn.weight",
            ("layers.{i}.attention.query", "layers.{i}.attention.key", "layers.{i}.attention.value"), turned=True),
        Row("transformer.h.{i}.attn.c_attn.bias",
            ("layers.{i}.attention.query_bias", "layers.{i}.attention.key_bias", "layers.{i}.attention.value_bias")),
        Row("transformer.h.{i}.attn.c_proj.weight", ("layers.{i}.attention.output",), turned=True),
        Row("transformer.h.{i}.attn.c_proj.bias", ("layers.{i}.attention.output_bias",)),
        Row("transformer.h.{i}.ln_2.weight", ("layers.{i}.mlp.norm.gain",)),
        Row("transformer.h.{i}.ln_2.bias", ("layers.{i}.mlp.norm.bias",)),
        Row("transformer.h.{i}.mlp.c_fc.weight", ("layers.{i}.mlp.up",), turned=True),
        Row("transformer.h.{i}.mlp.c_fc.bias", ("layers.{i}.mlp.up_bias",)),
        Row("transformer.h.{i}.mlp.c_proj.weight", ("layers.{i}.mlp.down",), turned=True),
        Row("transformer.h.{i}.mlp.c_proj.bias", ("layers.{i}.mlp.down_bias",)),
        Row("transformer.ln_f.weight", ("norm.gain",)),
        Row("transformer.ln_f.bias", ("norm.bias",)),
        Row("lm_head.weight", ("head",)),
    ],
    "transformer.",
    {"lm_head.weight": "transformer.wte.weight"},
    ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)  # fmt: skip

# Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023), Qwen2 and Qwen3 (Yang et al. 2024, 2025)

_LLAMA_FIXED = {
    "kind": "decoder", "norm": "rmsnorm", "positions": "rope", "query_key_norm": False, "bias": False,
    "attention_bias": "", "segments": 0, **_PRE_NORM, **_NO_HEAD, **_SEES_ALL, **_OWN_SCALE,
}  # fmt: skip


def _llama_rules(vocab: int, d_ff: int, length: int, heads: int | None) -> list[Rule]:
    """Return the rules that these families share, with the defaults in which they differ; `heads`: of keys and
    values."""
    return [
        Copy("vocab_size", "vocab", vocab),
        Copy("hidden_size", "d_model", 4096),
        Copy("intermediate_size", "d_ff", d_ff, written=_d_ff),
        Copy("num_hidden_layers", "layers", 32),
        Copy("num_attention_heads", "heads", 32),
        Copy("num_key_value_heads", "kv_heads", heads, null=0, written=lambda m: m.kv_heads or m.heads),
        Words("hidden_act", "activation", _GATED, "silu"),
        Copy("max_position_embeddings", "length", length),
        Copy("rms_norm_eps", "norm_eps", 1e-6),
        Copy("tie_word_embeddings", "tied", False),
        Rotary(),
        Only("attention_dropout", (0.0, 0)),
        _ONE_STACK,
    ]


_LLAMA_ROWS = [
    Row("model.embed_tokens.weight", ("embedding",)),
    *(
        Row(f"model.layers.{{i}}.self_attn.{theirs}_proj.{kind}", (f"layers.{{i}}.attention.{ours}{ending}",))
        for theirs, ours in {"q": "query", "k": "key", "v": "value", "o": "output"}.items()
        for kind, ending in {"weight": "", "bias": "_bias"}.items()
    ),
    Row("model.layers.{i}.self_attn.q_norm.weight", ("layers.{i}.attention.query_norm.gain",)),
    Row("model.layers.{i}.self_attn.k_norm.weight", ("layers.{i}.attention.key_norm.gain",)),
    *(
        Row(f"model.layers.{{i}}.mlp.{name}_proj.{kind}", (f"layers.{{i}}.mlp.{name}{ending}",))
        for name in ("gate", "up", "down")
        for kind, ending in {"weight": "", "bias": "_bias"}.items()
    ),
    Row("model.layers.{i}.input_layernorm.weight", ("layers.{i}.attention.norm.gain",)),
    Row("model.layers.{i}.post_attention_layernorm.weight", ("layers.{i}.mlp.norm.gain",)),
    Row("model.norm.weight", ("norm.gain",)),
    Row("lm_head.weight", ("head",)),
]
_LLAMA_NAMES: dict[str, Any] = {
    "rows": _LLAMA_ROWS,
    "prefix": "model.",
    "same": {"lm_head.weight": "model.embed_tokens.weight"},
    "buffers": ("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
}


@dataclass(frozen=True)
class _Biases:
    """Rule of the keys that say which linear layers have biases: those of attention, and of others where there is a
    key `mlp_bias`."""

    names: tuple[str, ...] = ("attention_bias", "mlp_bias")

    def read(self, found: Found) -> dict[str, Any]:
        attention, mlp = (name in self.names and value_of(found, name, False, (bool,)) for name in _BIASES)
        return {"bias": mlp, "attention_bias": "" if attention == mlp else "all" if attention else "none"}

    def write(self, m: Model) -> dict[str, Any]:
        attention = (m.attention_bias or ("all" if m.bias else "none")) == "all"
        return {name: value for name, value in zip(_BIASES, (attention, m.bias), strict=True) if name in self.names}


_BIASES = ("attention_bias", "mlp_bias")


_HEAD_DIM = Copy("head_dim", "d_kv", None, null=0, written=_d_kv)

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    ["LlamaForCausalLM"],
    {key: value for key, value in _LLAMA_FIXED.items() if key not in ("bias", "attention_bias")},
    [
        *_llama_rules(32000, 11008, 2048, None),
        _HEAD_DIM,
        _Biases(),
        Free({"initializer_range": 0.02, **_tokens(1, 2), "pretraining_tp": 1}),
    ],
    **_LLAMA_NAMES,
)  # fmt: skip

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    ["MistralForCausalLM"],
    {key: value for key, value in _LLAMA_FIXED.items() if key not in _SEES_ALL},
    [
        *_llama_rules(32000, 14336, 4096 * 32, 8),
        _HEAD_DIM,
        Window(4096),
        Free({"initializer_range": 0.02, **_tokens(1, 2)}),
    ],
    **_LLAMA_NAMES,
)

_QWEN_FREE = Free({"initializer_range": 0.02, **_tokens(None, None)}, ("use_mrope",))

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    ["Qwen2ForCausalLM"],
    {key: value for key, value in _LLAMA_FIXED.items() if key not in _SEES_ALL} | {"attention_bias": "qkv", "d_kv": 0},
    [*_llama_rules(151936, 22016, 32768, 32), LayerWindows("num_hidden_layers"), _QWEN_FREE],
    **_LLAMA_NAMES,
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    ["Qwen3ForCausalLM"],
    {key: value for key, value in _LLAMA_FIXED.items() if key not in (*_SEES_ALL, "bias", "attention_bias")}
    | {"query_key_norm": True},
    [
        *_llama_rules(151936, 22016, 32768, 32),
        Copy("head_dim", "d_kv", 128, written=_d_kv),
        _Biases(_BIASES[:1]),
        LayerWindows("num_hidden_layers"),
        _QWEN_FREE,
    ],
    **_LLAMA_NAMES,
)

# BERT (Devlin et al. 2018)

BERT = Family(
    "bert",
    "BertForMaskedLM",
    ["BertForMaskedLM", "BertForPreTraining"],
    {"kind": "encoder", "norm": "layernorm", "post_norm": True, "embedding_norm": True, "positions": "learned",
     "bias": True, "attention_bias": "", "kv_heads": 0, "d_kv": 0, "query_key_norm": False, "head_transform": True,
     "head_bias": True, "tied": True, **_SEES_ALL, **_OWN_SCALE},
    [
        Copy("vocab_size", "vocab", 30522),
        Copy("hidden_size", "d_model", 768),
        Copy("num_hidden_layers", "layers", 12),
        Copy("num_attention_heads", "heads", 12),
        Copy("intermediate_size", "d_ff", 3072, written=_d_ff),
        Words("hidden_act", "activation", _PLAIN, "gelu"),
        Copy("max_position_embeddings", "length", 512),
        Copy("type_vocab_size", "segments", 2),
        Copy("layer_norm_eps", "norm_eps", 1e-12),
        Only("tie_word_embeddings", (True,)),
        Dropouts(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.1),
        Only("is_decoder", (False,)),
        Only("add_cross_attention", (False,)),
        Only("position_embedding_type", ("absolute",), written=False),
        _ONE_STACK,
        Free(
            {"initializer_range": 0.02, **_tokens(None, None, 0), "classifier_dropout": None},
            (
                "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                "pooler_size_per_head", "pooler_type",
            ),
        ),
    ],
    [
        Row("bert.embeddings.word_embeddings.weight", ("embedding",)),
        Row("bert.embeddings.position_embeddings.weight", ("position",)),
        Row("bert.embeddings.token_type_embeddings.weight", ("segment",)),
        Row("bert.embeddings.LayerNorm.weight", ("embedding.norm.gain",)),
        Row("bert.embeddings.LayerNorm.bias", ("embedding.norm.bias",)),
        *(
            Row(f"bert.encoder.layer.{{i}}.attention.self.{name}.{kind}", (f"layers.{{i}}.attention.{name}{ending}",))
            for name in ("query", "key", "value")
            for kind, ending in {"weight": "", "bias": "_bias"}.items()
        ),
        Row("bert.encoder.layer.{i}.attention.output.dense.weight", ("layers.{i}.attention.output",)),
        Row("bert.encoder.layer.{i}.attention.output.dense.bias", ("layers.{i}.attention.output_bias",)),
        Row("bert.encoder.layer.{i}.attention.output.LayerNorm.weight", ("layers.{i}.attention.norm.gain",)),
        Row("bert.encoder.layer.{i}.attention.output.LayerNorm.bias", ("layers.{i}.attention.norm.bias",)),
        Row("bert.encoder.layer.{i}.intermediate.dense.weight", ("layers.{i}.mlp.up",)),
        Row("bert.encoder.layer.{i}.intermediate.dense.bias", ("layers.{i}.mlp.up_bias",)),
        Row("bert.encoder.layer.{i}.output.dense.weight", ("layers.{i}.mlp.down",)),
        Row("bert.encoder.layer.{i}.output.dense.bias", ("layers.{i}.mlp.down_bias",)),
        Row("bert.encoder.layer.{i}.output.LayerNorm.weight", ("layers.{i}.mlp.norm.gain",)),
        Row("bert.encoder.layer.{i}.output.LayerNorm.bias", ("layers.{i}.mlp.norm.bias",)),
        Row("cls.predictions.bias", ("head_bias",)),
        Row("cls.predictions.transform.dense.weight", ("head_transform",)),
        Row("cls.predictions.transform.dense.bias", ("head_transform_bias",)),
        Row("cls.predictions.transform.LayerNorm.weight", ("head_transform.norm.gain",)),
        Row("cls.predictions.transform.LayerNorm.bias", ("head_transform.norm.bias",)),
    ],
    "bert.",
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ("bert.embeddings.position_ids",),
)  # fmt: skip

# T5 (Raffel et al. 2020), of both versions


@dataclass(frozen=True)
class _FeedForward:
    """Rule of T5's `feed_forward_proj`; in gated-gelu, gelu is its approximation."""

    names = ("feed_forward_proj", "dense_act_fn", "is_gated_act")
    words = {**_PLAIN, **{f"gated-{name}": word for name, word in _GATED.items()}, "gated-gelu": "geglu_tanh"}

    def read(self, found: Found) -> dict[str, Any]:
        given = value_of(found, "feed_forward_proj", "relu", (str,))
        if given not in self.words:
            raise Inexpressible("feed_forward_proj", given, f"our words express {', '.join(self.words)}")
        for name, value in self._parts(given).items():
            if found.get(name, value) != value:
                raise Inexpressible(name, found[name], f"feed_forward_proj={given} says {value}")
        return {"activation": self.words[given]}

    def write(self, m: Model) -> dict[str, Any]:
        names = {word: name for name, word in reversed(self.words.items())} | {"geglu_tanh": "gated-gelu"}
        given = names.get(m.activation)
        return {"feed_forward_proj": given, **(self._parts(given) if given else {})}

    @staticmethod
    def _parts(given: str) -> dict[str, Any]:
        kind = given.removeprefix("gated-")
        return {"dense_act_fn": "gelu_new" if given == "gated-gelu" else kind, "is_gated_act": kind != given}


@dataclass(frozen=True)
class _Scaled:
    """Rule that T5's logits are scaled by d_model^-1/2: `scale_decoder_outputs`, else if embeddings are tied. Whether
    they are, their names say."""

    names = ("scale_decoder_outputs", "tie_word_embeddings")

    def read(self, found: Found) -> dict[str, Any]:
        tied = value_of(found, "tie_word_embeddings", True, (bool,))
        width = value_of(found, "d_model", 512, (int,))
        scaled = value_of(found, "scale_decoder_outputs", tied, (bool,))
        return {"logit_scale": width**-0.5 if scaled and width > 0 else 1.0}

    def write(self, m: Model) -> dict[str, Any]:
        return {"scale_decoder_outputs": isclose(m.logit_scale, 1 / sqrt(m.d_model)), "tie_word_embeddings": True}


@dataclass(frozen=True)
class _Layers:
    """Rule that both stacks of T5 have as many layers."""

    names = ("num_layers", "num_decoder_layers")

    def read(self, found: Found) -> dict[str, Any]:
        layers = value_of(found, "num_layers", 6, (int,))
        decoder = value_of(found, "num_decoder_layers", None, (int, type(None)))
        if decoder not in (None, layers):
            raise Inexpressible("num_decoder_layers", decoder, f"num_layers is {layers}, and our model.layers is one")
        return {"layers": layers}

    def write(self, m: Model) -> dict[str, Any]:
        return dict.fromkeys(self.names, m.layers)


def _t5_rows(stack: str, sublayers: Sequence[str]) -> list[Row]:
    """Return the rows of T5's encoder or decoder (`stack`), of these sublayers."""
    rows = []
    for number, name in enumerate(sublayers):
        here = f"{stack}.block.{{i}}.layer.{number}."
        ours = f"{stack}.layers.{{i}}." + {"SelfAttention": "attention", "EncDecAttention": "cross"}.get(name, "mlp")
        if name == "DenseReluDense":
            parts = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}
        else:
            parts = {"q": "query", "k": "key", "v": "value", "o": "output"}
        gated = {"wi": False, "wi_1": True}
        rows += [
            Row(f"{here}{name}.{theirs}.weight", (f"{ours}.{part}",), gated=gated.get(theirs))
            for theirs, part in parts.items()
        ]
        if name == "SelfAttention":  # in the first layer, for all
            rows.append(Row(f"{here}SelfAttention.relative_attention_bias.weight", (f"{stack}.relative_bias",)))
        rows.append(Row(f"{here}layer_norm.weight", (f"{ours}.norm.gain",)))
    return [*rows, Row(f"{stack}.final_layer_norm.weight", (f"{stack}.norm.gain",))]


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    ["T5ForConditionalGeneration"],
    {"kind": "encoder_decoder", "norm": "rmsnorm", "positions": "relative", "bias": False, "attention_bias": "",
     "kv_heads": 0, "query_key_norm": False, "segments": 0, "attention_scale": 1.0, **_PRE_NORM, **_NO_HEAD,
     **_SEES_ALL},
    [
        Copy("vocab_size", "vocab", 32128),
        Copy("d_model", "d_model", 512),
        Copy("d_kv", "d_kv", 64, written=_d_kv),
        Copy("d_ff", "d_ff", 2048, written=_d_ff),
        _Layers(),
        Copy("num_heads", "heads", 8),
        Copy("relative_attention_num_buckets", "buckets", 32),
        Copy("relative_attention_max_distance", "distance", 128),
        Copy("layer_norm_epsilon", "norm_eps", 1e-6),
        Dropouts(["dropout_rate"], 0.1),
        _FeedForward(),
        _Scaled(),
        Only("is_encoder_decoder", (True,)),
        Free(
            {"initializer_factor": 1.0, "classifier_dropout": 0.0, "eos_token_id": 1, "pad_token_id": 0,
             "use_cache": True, "is_decoder": False},
            ("n_positions",),
        ),
    ],
    [
        Row("shared.weight", ("embedding",)),
        *_t5_rows("encoder", ["SelfAttention", "DenseReluDense"]),
        *_t5_rows("decoder", ["SelfAttention", "EncDecAttention", "DenseReluDense"]),
        Row("lm_head.weight", ("head",)),
    ],
    "",
    {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)  # fmt: skip

FAMILIES = {family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, T5)}
