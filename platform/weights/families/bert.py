"""BERT (Devlin et al. 2018)."""

from __future__ import annotations

from platform.weights.families.family import ONE_STACK, PLAIN, Family, modules, special_tokens
from platform.weights.families.keys import Dropouts, Free, Only, Renamed, Words

BERT = Family(
    "bert",
    "BertForMaskedLM",
    ["BertForMaskedLM", "BertForPreTraining"],
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
        Dropouts("hidden_dropout_prob attention_probs_dropout_prob", 0.1),
        Only("is_decoder", (False,)),
        Only("add_cross_attention", (False,)),
        Only("position_embedding_type", ("absolute",), written=False),
        ONE_STACK,
        Free(
            "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head"
            " pooler_type",
            {"initializer_range": 0.02, **special_tokens(None, None, 0), "classifier_dropout": None},
        ),
    ],
    [*modules({
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
)  # fmt: skip
