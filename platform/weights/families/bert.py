"""BERT (Devlin et al. 2018)."""

from __future__ import annotations

from platform.weights.families.family import (
    ONE_STACK,
    OWN_SCALE,
    PLAIN,
    SEES_ALL,
    Family,
    TensorRow,
    d_ff_of,
    special_tokens,
)
from platform.weights.families.keys import Dropouts, Free, Only, Renamed, Words

BERT = Family(
    "bert",
    "BertForMaskedLM",
    ["BertForMaskedLM", "BertForPreTraining"],
    {"kind": "encoder", "norm": "layernorm", "post_norm": True, "embedding_norm": True, "positions": "learned",
     "bias": True, "attention_bias": "", "kv_heads": 0, "d_kv": 0, "query_key_norm": False, "head_transform": True,
     "head_bias": True, "tied": True, **SEES_ALL, **OWN_SCALE},
    [
        Renamed("vocab_size", "vocab", 30522),
        Renamed("hidden_size", "d_model", 768),
        Renamed("num_hidden_layers", "layers", 12),
        Renamed("num_attention_heads", "heads", 12),
        Renamed("intermediate_size", "d_ff", 3072, written=d_ff_of),
        Words("hidden_act", "activation", PLAIN, "gelu"),
        Renamed("max_position_embeddings", "length", 512),
        Renamed("type_vocab_size", "segments", 2),
        Renamed("layer_norm_eps", "norm_eps", 1e-12),
        Only("tie_word_embeddings", (True,)),
        Dropouts(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0.1),
        Only("is_decoder", (False,)),
        Only("add_cross_attention", (False,)),
        Only("position_embedding_type", ("absolute",), written=False),
        ONE_STACK,
        Free(
            {"initializer_range": 0.02, **special_tokens(None, None, 0), "classifier_dropout": None},
            (
                "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                "pooler_size_per_head", "pooler_type",
            ),
        ),
    ],
    [
        TensorRow("bert.embeddings.word_embeddings.weight", ("embedding",)),
        TensorRow("bert.embeddings.position_embeddings.weight", ("position",)),
        TensorRow("bert.embeddings.token_type_embeddings.weight", ("segment",)),
        TensorRow("bert.embeddings.LayerNorm.weight", ("embedding.norm.gain",)),
        TensorRow("bert.embeddings.LayerNorm.bias", ("embedding.norm.bias",)),
        *(
            TensorRow(f"bert.encoder.layer.{{i}}.attention.self.{name}.{kind}",
                      (f"layers.{{i}}.attention.{name}{ending}",))
            for name in ("query", "key", "value")
            for kind, ending in {"weight": "", "bias": "_bias"}.items()
        ),
        TensorRow("bert.encoder.layer.{i}.attention.output.dense.weight", ("layers.{i}.attention.output",)),
        TensorRow("bert.encoder.layer.{i}.attention.output.dense.bias", ("layers.{i}.attention.output_bias",)),
        TensorRow("bert.encoder.layer.{i}.attention.output.LayerNorm.weight", ("layers.{i}.attention.norm.gain",)),
        TensorRow("bert.encoder.layer.{i}.attention.output.LayerNorm.bias", ("layers.{i}.attention.norm.bias",)),
        TensorRow("bert.encoder.layer.{i}.intermediate.dense.weight", ("layers.{i}.mlp.up",)),
        TensorRow("bert.encoder.layer.{i}.intermediate.dense.bias", ("layers.{i}.mlp.up_bias",)),
        TensorRow("bert.encoder.layer.{i}.output.dense.weight", ("layers.{i}.mlp.down",)),
        TensorRow("bert.encoder.layer.{i}.output.dense.bias", ("layers.{i}.mlp.down_bias",)),
        TensorRow("bert.encoder.layer.{i}.output.LayerNorm.weight", ("layers.{i}.mlp.norm.gain",)),
        TensorRow("bert.encoder.layer.{i}.output.LayerNorm.bias", ("layers.{i}.mlp.norm.bias",)),
        TensorRow("cls.predictions.bias", ("head_bias",)),
        TensorRow("cls.predictions.transform.dense.weight", ("head_transform",)),
        TensorRow("cls.predictions.transform.dense.bias", ("head_transform_bias",)),
        TensorRow("cls.predictions.transform.LayerNorm.weight", ("head_transform.norm.gain",)),
        TensorRow("cls.predictions.transform.LayerNorm.bias", ("head_transform.norm.bias",)),
    ],
    "bert.",
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ("bert.embeddings.position_ids",),
)  # fmt: skip
