"""Models of transformers, small and random, of every family that we know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.harness.peers import peer

LLAMA: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROTARY: dict[str, Any] = {"rope_theta": 500.0, "original_max_position_embeddings": 8, "factor": 4.0}
BERT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 20,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 61, "n_positions": 20, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

DEEPSEEK: dict[str, Any] = {
    **LLAMA, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 10,
    "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 2.5, 4.0],
}  # fmt: skip
YARN: dict[str, Any] = {**ROTARY, "rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9}

LOCAL = {"rope_type": "default", "rope_theta": 50.0}
GEMMA: dict[str, Any] = {
    **LLAMA, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "pad_token_id": None,
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    **LLAMA, "num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "pad_token_id": None, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "final_logit_softcapping": 1.5,
    "vocab_size_per_layer_input": 262144, "rope_parameters": {"sliding_attention": LOCAL, "full_attention": {
        "rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.25}},
}  # fmt: skip
NEXT: dict[str, Any] = {
    **LLAMA, "num_hidden_layers": 3, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-2,  # the norm of what heads read of a state divides by its size, and so multiplies its rounding
}  # fmt: skip
GLM_MOE: dict[str, Any] = {
    **LLAMA, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 1.5, "attention_bias": True,
}  # fmt: skip

# name -> (class without its ending Config, class of the model, keys)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2", "GPT2LMHeadModel", GPT2),
    "llama": ("Llama", "LlamaForCausalLM", {**LLAMA, "rope_parameters": {**ROTARY, "rope_type": "llama3",
              "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "mistral": ("Mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 7, "head_dim": 10}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 5,
              "max_window_layers": 1}),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", "Olmo3ForCausalLM", {**LLAMA, "num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": None,
              "rope_parameters": {"full_attention": {**ROTARY, "rope_type": "yarn"}, "sliding_attention": LOCAL}}),
    "gemma3_text": ("Gemma3Text", "Gemma3ForCausalLM", {**GEMMA, "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
                    "sliding_attention": LOCAL}}),
    "gemma4_text": ("Gemma4Text", "Gemma4ForCausalLM", GEMMA4),
    "gemma4_text, experts": ("Gemma4Text", "Gemma4ForCausalLM", {**GEMMA4, "enable_moe_block": True, "num_experts": 5,
                             "top_k_experts": 2, "moe_intermediate_size": 12}),
    "gemma2": ("Gemma2", "Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5,
               "layer_types": None}),
    "vaultgemma": ("VaultGemma", "VaultGemmaForCausalLM", {**GEMMA, "attn_logit_softcapping": 0.7,
                   "tie_word_embeddings": False, "num_key_value_heads": 3}),
    "smollm3": ("SmolLM3", "SmolLM3ForCausalLM", {**LLAMA, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1],
                "pad_token_id": None}),
    "granite": ("Granite", "GraniteForCausalLM", {**LLAMA, "embedding_multiplier": 3.0, "residual_multiplier": 0.22,
                "attention_multiplier": 0.4, "logits_scaling": 3.0}),
    "glm4": ("Glm4", "Glm4ForCausalLM", {**LLAMA, "head_dim": 8, "pad_token_id": None}),
    "glm4_moe": ("Glm4Moe", "Glm4MoeForCausalLM", GLM_MOE),
    "phi3": ("Phi3", "Phi3ForCausalLM", {**LLAMA, "pad_token_id": None, "hidden_size": 48, "sliding_window": 7,
             "original_max_position_embeddings": 8, "rope_parameters": LONGROPE}),
    "olmo2": ("Olmo2", "Olmo2ForCausalLM", LLAMA),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {**LLAMA, "head_dim": 10, "num_local_experts": 4,
                "sliding_window": 7}),
    "qwen3_moe": ("Qwen3Moe", "Qwen3MoeForCausalLM", {**LLAMA, "head_dim": 8, "num_experts": 5,
                  "num_experts_per_tok": 3, "moe_intermediate_size": 12, "num_hidden_layers": 4,
                  "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextForCausalLM", {**NEXT, "num_experts": 5, "num_experts_per_tok": 3,
                   "moe_intermediate_size": 12, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen3_5_text": ("Qwen3_5Text", "Qwen3_5ForCausalLM", NEXT),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", {
        **{key: value for key, value in NEXT.items() if key != "intermediate_size"}, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12}),
    "olmoe": ("Olmoe", "OlmoeForCausalLM", {**LLAMA, "num_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", "GptOssForCausalLM", {**LLAMA, "head_dim": 8, "num_local_experts": 5, "sliding_window": 7,
                "num_experts_per_tok": 3, "rope_parameters": {**ROTARY, "rope_type": "yarn", "truncate": False}}),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2ForCausalLM", {**DEEPSEEK, "topk_method": "group_limited_greedy",
                    "rope_parameters": YARN}),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3ForCausalLM", DEEPSEEK),
    "bert": ("Bert", "BertForMaskedLM", BERT),
    "t5": ("T5", "T5ForConditionalGeneration", T5),
}  # fmt: skip
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2, odd": ("GPT2", "GPT2LMHeadModel", {**GPT2, "vocab_size": 53, "n_inner": 33, "n_embd": 21, "n_head": 3,
                  "activation_function": "relu", "scale_attn_weights": False, "layer_norm_epsilon": 1e-2,
                  "tie_word_embeddings": False, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}),
    "gpt2, erf": ("GPT2", "GPT2LMHeadModel", {**GPT2, "activation_function": "gelu"}),
    "llama, biases": ("Llama", "LlamaForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama, attention_bias": ("Llama", "LlamaForCausalLM", {**LLAMA, "attention_bias": True, "head_dim": 6}),
    "llama, mlp_bias": ("Llama", "LlamaForCausalLM", {**LLAMA, "mlp_bias": True, "num_key_value_heads": None}),
    "llama, linear": ("Llama", "LlamaForCausalLM", {**LLAMA, "hidden_act": "gelu", "rope_parameters": {
                      "rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama, yarn": ("Llama", "LlamaForCausalLM", {**LLAMA, "head_dim": 12, "rope_parameters": {
                    **ROTARY, "rope_type": "yarn", "beta_fast": 2.0, "beta_slow": 0.3}}),
    "llama, yarn, factor": ("Llama", "LlamaForCausalLM", {**LLAMA, "head_dim": 12, "rope_parameters": {
                            **ROTARY, "rope_type": "yarn", "attention_factor": 1.5}}),
    "llama, tied": ("Llama", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True, "rms_norm_eps": 1e-2,
                    "hidden_act": "gelu_new", "vocab_size": 53, "num_key_value_heads": 1}),
    "mistral, whole": ("Mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": None, "hidden_act": "relu"}),
    "qwen2, all": ("Qwen2", "Qwen2ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 5,
                   "max_window_layers": 0, "tie_word_embeddings": True}),
    "qwen2, plain": ("Qwen2", "Qwen2ForCausalLM", LLAMA),
    "qwen3, odd": ("Qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 6, "attention_bias": True, "hidden_size": 30,
                   "num_attention_heads": 5, "num_key_value_heads": 5, "use_sliding_window": True,
                   "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}),
    "gemma3_text, plain, read": ("Gemma3Text", "Gemma3ForCausalLM", {**GEMMA, "layer_types": ["full_attention"] * 3,
                           "attention_bias": True, "tie_word_embeddings": False}),
    "gemma3_text, capped": ("Gemma3Text", "Gemma3ForCausalLM", {**GEMMA, "final_logit_softcapping": 1.5}),
    "gemma4_text, alike, read": ("Gemma4Text", "Gemma4ForCausalLM", {**GEMMA4, "layer_types": ["full_attention"] * 3,
                           "global_head_dim": 8, "num_global_key_value_heads": None, "attention_bias": True,
                           "final_logit_softcapping": None, "hidden_activation": "silu"}),
    "gemma4_text, apart": ("Gemma4Text", "Gemma4ForCausalLM", {**GEMMA4, "attention_k_eq_v": False,
                           "num_hidden_layers": 12, "layer_types": None, "global_head_dim": 12, "rms_norm_eps": 1e-2,
                           "tie_word_embeddings": False}),
    "gemma2, plain": ("Gemma2", "Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": None, "attention_bias": True,
                      "final_logit_softcapping": None, "hidden_activation": "gelu"}),
    "smollm3, windows": ("SmolLM3", "SmolLM3ForCausalLM", {**LLAMA, "use_sliding_window": True, "sliding_window": 5,
                         "no_rope_layers": [0, 1], "pad_token_id": None, "attention_bias": True}),
    "granite, odd": ("Granite", "GraniteForCausalLM", {**LLAMA, "attention_bias": True, "mlp_bias": True,
                     "attention_multiplier": 0.4, "tie_word_embeddings": True}),
    "glm4, odd": ("Glm4", "Glm4ForCausalLM", {**LLAMA, "head_dim": 8, "pad_token_id": None, "attention_bias": False,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.75}}),
    "glm4_moe, odd": ("Glm4Moe", "Glm4MoeForCausalLM", {**GLM_MOE, "use_qk_norm": True, "n_shared_experts": 2,
                      "attention_bias": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
    "phi3, plain": ("Phi3", "Phi3ForCausalLM", {**LLAMA, "pad_token_id": None, "num_key_value_heads": None,
                    "tie_word_embeddings": True}),
    "phi3, short": ("Phi3", "Phi3ForCausalLM", {**LLAMA, "pad_token_id": None, "hidden_size": 48,
                    "original_max_position_embeddings": 20, "rope_parameters": LONGROPE}),
    "llama, dynamic": ("Llama", "LlamaForCausalLM", {**LLAMA, "rope_parameters": {
                       "rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    "llama, yarn, read": ("Llama", "LlamaForCausalLM", {**LLAMA, "head_dim": 12, "rope_parameters": YARN}),
    "olmo2, odd": ("Olmo2", "Olmo2ForCausalLM", {**LLAMA, "attention_bias": True, "tie_word_embeddings": True,
                   "num_key_value_heads": None, "hidden_act": "gelu"}),
    "mixtral, odd": ("Mixtral", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 1,
                     "head_dim": 4, "hidden_act": "gelu", "tie_word_embeddings": True, "router_jitter_noise": 0.1}),
    "qwen3_moe, odd": ("Qwen3Moe", "Qwen3MoeForCausalLM", {**LLAMA, "head_dim": 6, "num_experts": 4,
                       "num_experts_per_tok": 4, "norm_topk_prob": True, "attention_bias": True,
                       "mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5}),
    "qwen3_next, moe, odd": ("Qwen3Next", "Qwen3NextForCausalLM", {**NEXT, "num_experts": 4, "num_experts_per_tok": 2,
                             "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "layer_types": None,
                             "norm_topk_prob": False, "attention_bias": True, "linear_num_value_heads": 2,
                             "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "deepseek_v2, greedy": ("DeepseekV2", "DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": None,
                            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "rms_norm_eps": 1e-2,
                            "rope_parameters": {**ROTARY, "rope_type": "yarn", "attention_factor": 1.25}}),
    "deepseek_v3, odd": ("DeepseekV3", "DeepseekV3ForCausalLM", {**DEEPSEEK, "q_lora_rank": None, "v_head_dim": 12,
                         "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False,
                         "rms_norm_eps": 1e-2, "tie_word_embeddings": True, "rope_parameters": {
                         **ROTARY, "rope_type": "yarn"}}),
    "deepseek_v3, mscale": ("DeepseekV3", "DeepseekV3ForCausalLM", {**DEEPSEEK, "rope_parameters": {
                            **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 40.0}}),
    "olmoe, odd": ("Olmoe", "OlmoeForCausalLM", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 3,
                   "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": None, "hidden_act": "gelu",
                   "rms_norm_eps": 1e-2}),
    "gpt_oss, odd": ("GptOss", "GptOssForCausalLM", {**LLAMA, "head_dim": 6, "num_local_experts": 4,
                     "num_experts_per_tok": 4, "attention_bias": False, "num_key_value_heads": 6,
                     "num_hidden_layers": 3, "sliding_window": 3, "tie_word_embeddings": True,
                     "layer_types": ["full_attention"] * 2 + ["sliding_attention"],
                     "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "bert, odd": ("Bert", "BertForMaskedLM", {**BERT, "hidden_act": "gelu_new", "type_vocab_size": 3, "hidden_size": 21,
                  "num_attention_heads": 3, "layer_norm_eps": 1e-2}),
    "t5, 1.1": ("T5", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False}),
    "t5, odd": ("T5", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu", "d_model": 20,
                "num_heads": 3, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
                "layer_norm_epsilon": 1e-2}),
}  # fmt: skip


def transformers() -> Any:
    """Import transformers; skip the test if it cannot be had."""
    library = peer("transformers")
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


class InDouble(TorchFunctionMode):
    """Computes in fp64 what transformers computes in fp32 in whatever type a model is: norms, softmax, rotations."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            return args[0].double()
        swapped = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **swapped)


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(name: str, double: bool = False, **more: Any) -> Any:
    """A random model of transformers; weights large enough, and biases other than zero, that all of it matters."""
    config, kind, keys = (MODELS | MORE)[name]
    library = transformers()
    with in_double() if double else contextlib.nullcontext():
        torch.manual_seed(0)
        model = getattr(library, kind)(getattr(library, f"{config}Config")(**{**keys, **more})).eval()
        if any(getattr(model.config, key, 0) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
            model.set_experts_implementation("eager")  # whose products are there in fp64
        if name == "t5, 1.1":  # as the real ones are: with a head of its own
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        with torch.no_grad():
            for weight in model.parameters():
                noise = torch.randn(weight.shape, dtype=weight.dtype)
                weight.copy_(0.2 * noise if weight.ndim > 1 else weight + 0.1 * noise)
            for label, weight in model.named_parameters():
                if label.endswith("gate_up_proj_bias"):
                    weight.mul_(25)  # beyond the bounds of its activation
                if label.endswith("sinks"):
                    weight.copy_(torch.linspace(-1, 2, len(weight)))  # which was empty
            for bias in (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
                bias.copy_(0.1 * torch.randn(bias.shape))
            for factor in (b for n, b in model.named_buffers() if n.endswith("layer_scalar")):
                factor.copy_(1 + 0.3 * torch.randn(factor.shape))
    return model


def logits(model: Any, data: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[batch, length, vocab] of data tensors [batch, length]."""
    inputs = {"input_ids": data["tokens"].clamp(min=0)}
    if model.config.is_encoder_decoder:
        source = data["source"]
        inputs = {"input_ids": source.clamp(min=0), "attention_mask": (source >= 0).long(),
                 "decoder_input_ids": inputs["input_ids"]}  # fmt: skip
    elif model.config.model_type == "bert":
        inputs |= {"attention_mask": (data["tokens"] >= 0).long(), "token_type_ids": data["segments"]}
    return model(**inputs).logits
