"""T5 (Raffel et al. 2020), of both versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from platform.config.fields import Model
from platform.weights.families.family import GATED, PLAIN, Family, TensorRow, modules
from platform.weights.families.keys import Dropouts, Found, Free, Inexpressible, Only, Renamed, Rule, value_of

_WORDS = {**PLAIN, **{f"gated-{name}": word for name, word in GATED.items()}, "gated-gelu": "geglu_tanh"}


@dataclass(frozen=True)
class _FeedForward(Rule):
    """Rule of T5's `feed_forward_proj`; in gated-gelu, gelu is its approximation."""

    theirs: str = "feed_forward_proj dense_act_fn is_gated_act"

    def read(self, found: Found) -> dict[str, Any]:
        """Return our model key activation for a config.json of T5. Raises Inexpressible if it is unknown or a derived
        key contradicts it."""
        given = value_of(found, "feed_forward_proj", "relu", (str,))
        if given not in _WORDS:
            raise Inexpressible("feed_forward_proj", given, f"our words express {', '.join(_WORDS)}")
        for name, value in self._parts(given).items():
            if found.get(name, value) != value:
                raise Inexpressible(name, found[name], f"feed_forward_proj={given} says {value}")
        return {"activation": _WORDS[given]}

    def write(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json key `feed_forward_proj`, None without a name for our activation, and derived keys."""
        names = {word: name for name, word in reversed(_WORDS.items())} | {"geglu_tanh": "gated-gelu"}
        given = names.get(m.activation)
        return {"feed_forward_proj": given, **(self._parts(given) if given else {})}

    @staticmethod
    def _parts(given: str) -> dict[str, Any]:
        """Return the keys of T5's config.json that follow from `feed_forward_proj`: dense_act_fn, is_gated_act."""
        kind = given.removeprefix("gated-")
        return {"dense_act_fn": "gelu_new" if given == "gated-gelu" else kind, "is_gated_act": kind != given}


@dataclass(frozen=True)
class _Scaled(Rule):
    """Rule that T5's logits are scaled by d_model^-1/2: `scale_decoder_outputs`, else if embeddings are tied. Whether
    they are, their names say."""

    theirs: str = "scale_decoder_outputs tie_word_embeddings"

    def read(self, found: Found) -> dict[str, Any]:
        """Return our model key logit_scale for a config.json of T5: d_model^-1/2, or 1."""
        tied = value_of(found, "tie_word_embeddings", True, (bool,))
        width = value_of(found, "d_model", 512, (int,))
        scaled = value_of(found, "scale_decoder_outputs", tied, (bool,))
        return {"logit_scale": width**-0.5 if scaled and width > 0 else 1.0}

    def write(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json keys that say whether the logits are scaled by d_model^-1/2."""
        return {"scale_decoder_outputs": isclose(m.logit_scale, 1 / sqrt(m.d_model)), "tie_word_embeddings": True}


@dataclass(frozen=True)
class _Layers(Rule):
    """Rule that both stacks of T5 have as many layers."""

    theirs: str = "num_layers num_decoder_layers"

    def read(self, found: Found) -> dict[str, Any]:
        """Return our model key layers for T5's config.json. Raises Inexpressible if its two stacks differ in theirs."""
        layers = value_of(found, "num_layers", 6, (int,))
        decoder = value_of(found, "num_decoder_layers", None, (int, type(None)))
        if decoder not in (None, layers):
            raise Inexpressible("num_decoder_layers", decoder, f"num_layers is {layers}, and our model.layers is one")
        return {"layers": layers}

    def write(self, m: Model) -> dict[str, Any]:
        """Return T5's config.json keys for the numbers of layers of its two stacks, which our model has alike."""
        return dict.fromkeys(self.names, m.layers)


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
        here, ours = f"{stack}.block.{{i}}.layer.{number}", f"{stack}.layers.{{i}}.{part}"
        names |= {f"{here}.{name}.{theirs}": f"{ours}.{weight}" for theirs, weight in weights.items()}
        if name == "SelfAttention":  # in the first layer, for all
            names[f"{here}.{name}.relative_attention_bias"] = f"{stack}.relative_bias"
        names[f"{here}.layer_norm"] = f"{ours}.norm"
    names[f"{stack}.final_layer_norm"] = f"{stack}.norm"
    gated = {"wi": False, "wi_1": True}
    return [row._replace(gated=gated.get(row.theirs.split(".")[-2])) for row in modules(names)]


T5 = Family(
    "t5",
    "T5ForConditionalGeneration",
    ["T5ForConditionalGeneration"],
    {"kind": "encoder_decoder", "norm": "rmsnorm", "positions": "relative", "bias": False, "attention_scale": 1.0},
    [
        Renamed("vocab_size", "vocab", 32128),
        Renamed("d_model", "d_model", 512),
        Renamed("d_kv", "d_kv", 64),
        Renamed("d_ff", "d_ff", 2048),
        _Layers(),
        Renamed("num_heads", "heads", 8),
        Renamed("relative_attention_num_buckets", "buckets", 32),
        Renamed("relative_attention_max_distance", "distance", 128),
        Renamed("layer_norm_epsilon", "norm_eps", 1e-6),
        Dropouts("dropout_rate", 0.1),
        _FeedForward(),
        _Scaled(),
        Only("is_encoder_decoder", (True,)),
        Free(
            "n_positions",
            {"initializer_factor": 1.0, "classifier_dropout": 0.0, "eos_token_id": 1, "pad_token_id": 0,
             "use_cache": True, "is_decoder": False},
        ),
    ],
    [
        *modules({"shared": "embedding"}),
        *_t5_rows("encoder", ["SelfAttention", "DenseReluDense"]),
        *_t5_rows("decoder", ["SelfAttention", "EncDecAttention", "DenseReluDense"]),
        *modules({"lm_head": "head"}),
    ],
    "",
    {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)  # fmt: skip
