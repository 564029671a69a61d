"""T5 (Raffel et al. 2020), of both versions, BERT (Devlin et al. 2018) and GPT-2 (Radford et al. 2019), as transformers
saves them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from platform.config.fields import Model
from platform.weights.config_keys import (
    GATED,
    ONE_STACK,
    PLAIN,
    ConfigJson,
    DropoutRule,
    Family,
    Free,
    Inexpressible,
    Only,
    Renamed,
    Rule,
    TensorRow,
    Words,
    module_rows,
    read_value,
    special_token_defaults,
)

_WORDS = {**PLAIN, **{f"gated-{name}": word for name, word in GATED.items()}, "gated-gelu": "geglu_tanh"}


@dataclass(frozen=True)
class _FeedForwardRule(Rule):
    """Rule of T5's `feed_forward_proj`; in gated-gelu, gelu is its approximation."""

    theirs: str = "feed_forward_proj dense_act_fn is_gated_act"

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key activation for a config.json of T5. Raises Inexpressible if it is unknown or a derived
        key contradicts it."""
        projection = read_value(config_json, "feed_forward_proj", "relu", (str,))
        if projection not in _WORDS:
            raise Inexpressible("feed_forward_proj", projection, f"our words express {', '.join(_WORDS)}")
        for name, value in self._activation_keys(projection).items():
            if config_json.get(name, value) != value:
                raise Inexpressible(name, config_json[name], f"feed_forward_proj={projection} says {value}")
        return {"activation": _WORDS[projection]}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json key `feed_forward_proj`, None without a name for our activation, and derived keys."""
        names = {word: name for name, word in reversed(_WORDS.items())} | {"geglu_tanh": "gated-gelu"}
        projection = names.get(m.activation)
        return {"feed_forward_proj": projection, **(self._activation_keys(projection) if projection else {})}

    @staticmethod
    def _activation_keys(projection: str) -> dict[str, Any]:
        """Return the keys of T5's config.json that follow from `feed_forward_proj`: dense_act_fn, is_gated_act."""
        kind = projection.removeprefix("gated-")
        return {"dense_act_fn": "gelu_new" if projection == "gated-gelu" else kind, "is_gated_act": kind != projection}


@dataclass(frozen=True)
class _LogitScaleRule(Rule):
    """Rule that T5's logits are scaled by d_model^-1/2: `scale_decoder_outputs`, else if embeddings are tied. Whether
    they are, their names say."""

    theirs: str = "scale_decoder_outputs tie_word_embeddings"

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key logit_scale for a config.json of T5: d_model^-1/2, or 1."""
        tied = read_value(config_json, "tie_word_embeddings", True, (bool,))
        width = read_value(config_json, "d_model", 512, (int,))
        scaled = read_value(config_json, "scale_decoder_outputs", tied, (bool,))
        return {"logit_scale": width**-0.5 if scaled and width > 0 else 1.0}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json keys that say whether the logits are scaled by d_model^-1/2."""
        return {"scale_decoder_outputs": isclose(m.logit_scale, 1 / sqrt(m.d_model)), "tie_word_embeddings": True}


@dataclass(frozen=True)
class _EqualStacksRule(Rule):
    """Rule that both stacks of T5 have as many layers."""

    theirs: str = "num_layers num_decoder_layers"

    def read_model_keys(self, config_json: ConfigJson) -> dict[str, Any]:
        """Return our model key layers for T5's config.json. Raises Inexpressible if its two stacks differ in theirs."""
        layers = read_value(config_json, "num_layers", 6, (int,))
        decoder = read_value(config_json, "num_decoder_layers", None, (int, type(None)))
        if decoder not in (None, layers):
            raise Inexpressible("num_decoder_layers", decoder, f"num_layers is {layers}, and our model.layers is one")
        return {"layers": layers}

    def write_config_keys(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json keys for the numbers of layers of its two stacks, which our model has alike."""
        return dict.fromkeys(self.key_names, m.layers)


_PARTS = {  # of our layers, by their sublayer: their module -> our weight
    "SelfAttention": ("attention", {"q": "query", "k": "key", "v": "value", "o": "output"}),
    "EncDecAttention": ("cross", {"q": "query", "k": "key", "v": "value", "o": "output"}),
    "DenseReluDense": ("mlp", {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}),
}


def _t5_rows(stack: str, sublayers: Sequence[str]) -> list[TensorRow]:
    """Return the names of the tensors of T5's encoder or decoder (`stack`) at transformers, with our parameters in
    them. `sublayers`: transformers' names of the sublayers of a layer, in order."""
    names: dict[str, str] = {}
    for number, name in enumerate(sublayers):
        part, weights = _PARTS[name]
        sublayer_prefix, ours = f"{stack}.block.{{i}}.layer.{number}", f"{stack}.layers.{{i}}.{part}"
        names |= {f"{sublayer_prefix}.{name}.{theirs}": f"{ours}.{weight}" for theirs, weight in weights.items()}
        if name == "SelfAttention":  # in the first layer, for all
            names[f"{sublayer_prefix}.{name}.relative_attention_bias"] = f"{stack}.relative_bias"
        names[f"{sublayer_prefix}.layer_norm"] = f"{ours}.norm"
    names[f"{stack}.final_layer_norm"] = f"{stack}.norm"
    gated = {"wi": False, "wi_1": True}
    return [row._replace(gated=gated.get(row.theirs.split(".")[-2])) for row in module_rows(names)]


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    {"kind": "encoder_decoder", "norm": "rmsnorm", "positions": "relative", "bias": False, "attention_scale": 1.0},
    [
        Renamed("vocab_size", "vocab", 32128),
        Renamed("d_model", "d_model", 512),
        Renamed("d_kv", "d_kv", 64),
        Renamed("d_ff", "d_ff", 2048),
        _EqualStacksRule(),
        Renamed("num_heads", "heads", 8),
        Renamed("relative_attention_num_buckets", "buckets", 32),
        Renamed("relative_attention_max_distance", "distance", 128),
        Renamed("layer_norm_epsilon", "norm_eps", 1e-6),
        DropoutRule("dropout_rate", 0.1),
        _FeedForwardRule(),
        _LogitScaleRule(),
        Only("is_encoder_decoder", (True,)),
        Free(
            "n_positions",
            {"initializer_factor": 1.0, "classifier_dropout": 0.0, "eos_token_id": 1, "pad_token_id": 0,
             "use_cache": True, "is_decoder": False},
        ),
    ],
    [
        *module_rows({"shared": "embedding"}),
        *_t5_rows("encoder", ["SelfAttention", "DenseReluDense"]),
        *_t5_rows("decoder", ["SelfAttention", "EncDecAttention", "DenseReluDense"]),
        *module_rows({"lm_head": "head"}),
    ],
    "",
    {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)  # fmt: skip


BERT = Family(
    "bert",
    "BertForMaskedLM",
    {"kind": "encoder", "norm": "layernorm", "post_norm": True, "embedding_norm": True, "positions": "learned",
     "bias": True, "head_transform": True, "head_bias": True, "tied": True},
    [
        Renamed("vocab_size", "vocab", 30522),
        Renamed("hidden_size", "d_model", 768),
        Renamed("num_hidden_layers", "layers", 12),
        Renamed("num_attention_heads", "heads", 12),
        Renamed("intermediate_size", "d_ff", 3072),
        Words("hidden_act", "activation", PLAIN, "gelu"),
        Renamed("max_position_embeddings", "length", 512),
        Renamed("type_vocab_size", "segments", 2),
        Renamed("layer_norm_eps", "norm_eps", 1e-12),
        Only("tie_word_embeddings", (True,)),
        DropoutRule("hidden_dropout_prob attention_probs_dropout_prob", 0.1),
        Only("is_decoder", (False,)),
        Only("add_cross_attention", (False,)),
        Only("position_embedding_type", ("absolute",), written=False),
        ONE_STACK,
        Free(
            "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head"
            " pooler_type",
            {"initializer_range": 0.02, **special_token_defaults(None, None, 0), "classifier_dropout": None},
        ),
    ],
    [*module_rows({
        "bert.embeddings.word_embeddings": "embedding",
        "bert.embeddings.position_embeddings": "position",
        "bert.embeddings.token_type_embeddings": "segment",
        "bert.embeddings.LayerNorm": "embedding.norm",
        "bert.encoder.layer.{i}.attention.self.query": "layers.{i}.attention.query",
        "bert.encoder.layer.{i}.attention.self.key": "layers.{i}.attention.key",
        "bert.encoder.layer.{i}.attention.self.value": "layers.{i}.attention.value",
        "bert.encoder.layer.{i}.attention.output.dense": "layers.{i}.attention.output",
        "bert.encoder.layer.{i}.attention.output.LayerNorm": "layers.{i}.attention.norm",
        "bert.encoder.layer.{i}.intermediate.dense": "layers.{i}.mlp.up",
        "bert.encoder.layer.{i}.output.dense": "layers.{i}.mlp.down",
        "bert.encoder.layer.{i}.output.LayerNorm": "layers.{i}.mlp.norm",
        "cls.predictions": "head",  # its bias alone: the weight is that of the embedding
        "cls.predictions.transform.dense": "head_transform",
        "cls.predictions.transform.LayerNorm": "head_transform.norm",
    })],
    "bert.",
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ("bert.embeddings.position_ids",),
    read=("BertForMaskedLM", "BertForPreTraining"),
)  # fmt: skip


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
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
        DropoutRule("resid_pdrop embd_pdrop attn_pdrop", 0.1),
        Only("scale_attn_by_inverse_layer_idx", (False,)),
        Only("reorder_and_upcast_attn", (False,)),
        Only("add_cross_attention", (False,)),
        ONE_STACK,
        Free(
            "n_ctx is_decoder",
            {
                "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None,
                "summary_proj_to_labels": True, "summary_first_dropout": 0.1, "initializer_range": 0.02,
                **special_token_defaults(50256, 50256),
            },
        ),
    ],
    [
        *module_rows({
            "transformer.wte": "embedding",
            "transformer.wpe": "position",
            "transformer.h.{i}.ln_1": "layers.{i}.attention.norm",
        }),
        *module_rows({
            "transformer.h.{i}.attn.c_attn":
                "layers.{i}.attention.query layers.{i}.attention.key layers.{i}.attention.value",
            "transformer.h.{i}.attn.c_proj": "layers.{i}.attention.output",
        }, turned=True),
        *module_rows({"transformer.h.{i}.ln_2": "layers.{i}.mlp.norm"}),
        *module_rows({
            "transformer.h.{i}.mlp.c_fc": "layers.{i}.mlp.up",
            "transformer.h.{i}.mlp.c_proj": "layers.{i}.mlp.down",
        }, turned=True),
        *module_rows({"transformer.ln_f": "norm", "lm_head": "head"}),
    ],
    "transformer.",
    {"lm_head.weight": "transformer.wte.weight"},
    ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
)  # fmt: skip
