"""Keys of group model: kind, sizes and parts of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from platform.config.key import key, own_settings


@dataclass
class Model:
    """Kind, sizes and parts of the model."""

    source: str = key("", "model=from_hf: the folder that transformers saved, or its URL; keys are read from it")
    kind: str = key("decoder", "the model", ("decoder", "encoder", "encoder_decoder", "two_layer"), open=True)
    layers: int = key(2, "Transformer layers; encoder_decoder: in each of its two stacks", ">= 1", most=1000)
    d_model: int = key(64, "width of the residual stream", ">= 1", most=2**20)
    heads: int = key(4, "attention heads", ">= 1", most=2**16)
    kv_heads: int = key(0, "key and value heads of grouped-query attention; 0 = model.heads", ">= 0", most=2**16)
    d_kv: int = key(0, "width of one head; 0 = d_model / heads", ">= 0", most=2**16)
    kv_latent: int = key(
        0, "multi-head latent attention: width of what keys and values are made from; 0 = none", ">= 0", most=2**16
    )
    q_latent: int = key(0, "kv_latent: width of what queries are made from; 0 = d_model itself", ">= 0", most=2**16)
    d_rope: int = key(0, "kv_latent: elements of d_kv that rotate, in a key alike for all heads", ">= 0", most=2**16)
    d_value: int = key(0, "kv_latent: width of one head's values; 0 = d_kv", ">= 0", most=2**16)
    d_ff: int = key(0, "width of the feed-forward layer; 0 = 4 * d_model", ">= 0", most=2**24)
    experts: int = key(0, "experts of a layer, in place of one feed-forward layer; 0 = none", ">= 0", most=2**16)
    experts_per_token: int = key(2, "experts that compute each token", ">= 1", most=2**16)
    experts_every: int = key(1, "1 = experts in all layers, 2 = in every second one, ...", ">= 1")
    dense_layers: list[int] = key([], "layers, from 0, that have no experts all the same", ">= 0", most=1000)
    expert_d_ff: int = key(0, "width of an expert; 0 = as model.d_ff", ">= 0", most=2**24)
    expert_bias: bool = key(False, "experts, and the scores of experts, have biases")
    shared_experts: int = key(0, "further experts that compute every token", ">= 0", most=1000)
    capacity_factor: float = key(
        1.25, "tokens of a sequence that an expert takes, over its even share; 0 = all that come", ">= 0", most=1e6
    )
    router: str = key("softmax", "what makes probabilities of the experts' scores", ("softmax", "sigmoid"))
    router_normalised: bool = key(True, "the weights of a token's experts are divided by their sum")
    router_scale: float = key(1.0, "factor on the weights of a token's experts", "> 0", most=1e6)
    router_groups: int = key(1, "groups of consecutive experts; a token's lie in few", ">= 1", most=2**16)
    router_groups_kept: int = key(1, "groups in which a token's experts lie, at most", ">= 1", most=2**16)
    router_group_best: int = key(
        1, "largest probabilities of a group, the sum of which decides whether it is kept", ">= 1", most=2**16
    )
    router_jitter: float = key(
        0.0, "training: what a router reads is multiplied by uniform numbers in 1 -+ this", ">= 0 and < 1"
    )
    router_bias: bool = key(False, "the choice of experts, not their weights, adds a bias to each probability")
    balance_rate: float = key(
        0.001, "router_bias: what a step adds to the bias of experts below the mean load, and takes from others", ">= 0"
    )
    balance_loss: float = key(0.01, "factor of the loss of experts' uneven load", ">= 0")
    balance_over: str = key(
        "sequence", "load in the balance loss: of the sequence, or of the step before", ("sequence", "batch")
    )
    z_loss: float = key(0.0, "factor of the loss of large scores: of the square of their log-sum-exp", ">= 0")
    length: int = key(64, "tokens per sequence", ">= 1", most=2**24)
    source_length: int = key(0, "encoder_decoder: tokens per encoder sequence; 0 = model.length", ">= 0", most=2**24)
    vocab: int = key(512, "rows of the embedding, before any padding", ">= 1", most=2**24)
    io: int = key(64, "two_layer: width of its input and output", ">= 1", most=2**24)
    hidden: int = key(256, "two_layer: width between its layers", ">= 1", most=2**24)
    dropout: float = key(0.0, "probability that an activation is set to 0; 0 = no dropout", ">= 0 and < 1")
    fused_dropout: bool = key(False, "attention's masks are drawn inside its kernel, per rank: not as other plans do")
    norm: str = key("layernorm", "normalisation", ("layernorm", "rmsnorm"))
    norm_eps: float = key(1e-5, "what norms add to the variance", "> 0 and < 1")
    post_norm: bool = key(False, "normalise after the residual connection, as in the original Transformer")
    embedding_norm: bool = key(False, "normalise the embeddings too, as BERT does")
    activation: str = key(
        "gelu",
        "pointwise function of the feed-forward layer; _tanh: GELU's approximation; swiglu, geglu, reglu: gated;"
        " _clamped: GPT-OSS's",
        ("gelu", "gelu_tanh", "relu", "silu", "swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu"),
    )
    positions: str = key("learned", "how attention knows positions", ("learned", "rope", "sinusoidal", "relative"))
    rope_theta: float = key(10000.0, "positions=rope: base of the rotation frequencies", "> 0")
    rope_pairs: str = key(
        "halves", "positions=rope: what rotates with an element: the one half a head away, or its neighbour",
        ("halves", "neighbours"),
    )  # fmt: skip
    rope_scaling: str = key(
        "none", "positions=rope: how angles are scaled to longer sequences", ("none", "linear", "llama3", "yarn")
    )
    rope_factor: float = key(1.0, "rope_scaling: how much longer the sequences are", ">= 1")
    rope_original_length: int = key(0, "rope_scaling=llama3, yarn: length before", ">= 0", most=2**24)
    rope_low: float = key(1.0, "rope_scaling=llama3, yarn: pairs of fewer turns in that length are all scaled", "> 0")
    rope_high: float = key(4.0, "rope_scaling=llama3, yarn: pairs of more turns are not scaled", "> 0")
    rope_truncate: bool = key(True, "rope_scaling=yarn: the bounds of what is scaled are rounded to whole pairs")
    rope_magnitude: float = key(0.0, "rope_scaling=yarn: factor on queries and keys; 0 = 0.1 ln(factor) + 1", ">= 0")
    buckets: int = key(32, "positions=relative: entries of the bias table per head", ">= 4", most=2**16)
    distance: int = key(128, "positions=relative: positions farther apart than this share one entry", ">= 1")
    window: int = key(0, "attention sees so many tokens back, its own among them; 0 = all", ">= 0", most=2**24)
    window_layers: list[int] = key([], "layers, from 0, with model.window; [] = all", ">= 0", most=1000)
    within_documents: bool = key(False, "no token sees a document before its own: set by data.document_mask")
    position_rows: int = key(
        0, "positions=learned: rows of the table, if sequences are also shorter: set by train.length_ramp", ">= 0"
    )
    attention_scale: float = key(0.0, "factor on attention's scores; 0 = 1 / sqrt(d_kv)", ">= 0", most=1e6)
    attention_sinks: bool = key(False, "each head may attend to nothing, by a learned score of its own")
    query_key_norm: bool = key(False, "RMSNorm of queries and keys")
    query_key_norm_over: str = key("head", "what one such norm spans: a head, or all heads", ("head", "heads"))
    segments: int = key(
        0, "encoder: rows of a second embedding, of each token's document; 0 = none", ">= 0", most=2**16
    )
    bias: bool = key(True, "linear layers have biases")
    attention_bias: str = key(
        "", 'biases of attention: all, none, of Q, K and V; "" = as model.bias', ("", "all", "qkv", "none")
    )
    tied: bool = key(True, "the output projection shares the weights of the embedding")
    head_transform: bool = key(False, "a layer, activation and norm before the output projection, as in BERT")
    head_bias: bool = key(False, "the output projection has a bias")
    logit_scale: float = key(1.0, "factor on the logits", "> 0", most=1e6)
    label_smoothing: float = key(0.0, "share of the target probability spread over the vocabulary", ">= 0 and < 1")
    settings: dict[str, Any] = own_settings("model")
