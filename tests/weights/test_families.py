"""Models of transformers in and out: random ones of every family equal it in logits and gradients, and what is exported
is what save_pretrained writes, bit by bit."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from platform.boundary.local_files import LocalStorage
from platform.checkpoint import catalogue
from platform.checkpoint.blocks import Box
from platform.config.fields import Config, Model
from platform.model.layers import rotary_scaling
from platform.predict.make_plan import make_plan
from platform.runtime.communicator import SingleRank
from platform.runtime.parallel_ops import PassPosition
from platform.runtime.positions import rotary_angles
from platform.train.replies import Differences
from platform.train.training_state import RankTrainingState
from platform.weights import families
from platform.weights.exporting import export_model, open_exportable
from platform.weights.importing import import_model, open_importable
from platform.weights.tensor_names import find_family, list_stored_tensors, translate_config_json
from tests.harness.oracle import Tokens, configure, trainer_of
from tests.weights import peer

FAMILIES = list(peer.MODELS)
EVERY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in peer.MORE)]
FORMS = [(name, False) for name in FAMILIES]
FORMS += [(name, True) for name in FAMILIES if families.FAMILIES[name.partition(",")[0]].fused]
FORMS += [
    pytest.param(name, "moe" in name, marks=pytest.mark.full) for name in peer.MORE if not name.endswith(", read")
]  # written as what they come to


def saved(folder: Path, name: str, double: bool = False, fused: bool = False, **more: Any) -> tuple[Path, Any]:
    """A random model, and the folder to which transformers saves it, with its experts in stacks if `fused`."""
    model = peer.build(name, double, **more)
    model.save_pretrained(folder / "theirs", save_original_format=not fused)
    return folder / "theirs", model


def started(folder: Path, precision: str, **more: Any) -> tuple[Config, Any]:
    """A trainer of the model in a folder of transformers, with its weights; `more`: other keys of the model."""
    keys = vars(open_importable(str(folder), "source").model) | {"dropout": 0.0, "balance_loss": 0.0, **more}
    if keys["kind"] == "encoder_decoder":
        keys |= {"length": 12, "source_length": 15}
    c = configure(precision=precision, **keys)
    c.train.init = str(folder)
    plan = make_plan(c)
    trainer = trainer_of(c, plan, SingleRank(plan.mesh), fresh=False)
    RankTrainingState(trainer).load_initial_weights()
    return c, trainer


def data_of(c: Config) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(rows) for n, rows in Tokens(c).batch("train", 0, c.train.global_batch).items()}


def our_logits(trainer: Any) -> torch.Tensor:
    """[batch, length, vocab] of the first global batch."""
    trainer.ops.position = PassPosition(training=False)
    logits = []
    for first in range(0, trainer.config.train.global_batch, trainer.plan.sizes["batch"]):
        inputs = {n: v for n, v in trainer.passes.load_input_blocks("train", first).items() if n != "labels"}
        with torch.no_grad():
            out = trainer.passes.model.part(trainer.ops, inputs, {}, trainer.passes.model.units)
        logits.append(out["logits"].transpose(0, 1))  # whole, in one process
    return torch.cat(logits)


# config.json as released, without what does not matter: Mixtral-8x7B-v0.1, Qwen3-30B-A3B, OLMoE-1B-7B-0924 and, without
# its quantisation, gpt-oss-20b; tensors, parameters
RELEASED: dict[str, tuple[dict[str, Any], int, int]] = {
    "mixtral": ({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1e6,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }, 995, 46_702_792_704),
    "qwen3_moe": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1e6, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    }, 18867, 30_532_122_624),
    "qwen3_next": ({  # Qwen3-Next-80B-A3B-Instruct, without its prediction of further tokens
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }, 74391, 79_674_391_296),
    "olmoe": ({
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "vocab_size": 50304,
    }, 3219, 6_919_161_856),
    "gpt_oss": ({
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    }, 411, 20_914_757_184),
    "deepseek_v2": ({
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    }, 5291, 15_706_484_224),
    "phi3": ({  # Phi-4-mini, whose two lists are longer than this line
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0, "full_attn_mod": 1,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48,
                                                "type": "longrope"},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    }, 194, 3_836_021_760),
    "olmo2": ({  # OLMo-2-1124-7B
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    }, 355, 7_298_617_344),
    "olmo3": ({  # Olmo-3-1025-7B
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
    }, 355, 7_298_011_136),
    "gemma2": ({  # gemma-2-2b
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
    }, 288, 2_614_341_888),
    "gemma3_text": ({  # gemma-3-1b-it
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
        "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
        "sliding_window_pattern": 6, "vocab_size": 262144,
    }, 340, 999_885_952),
    "smollm3": ({  # SmolLM3-3B
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128256,
    }, 326, 3_075_098_624),
    "glm4": ({  # GLM-4-9B-0414
        "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
        "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "vocab_size": 151552,
    }, 523, 9_400_279_040),
    "gemma4_text": ({  # the text of Gemma 4 31B
        "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": None, "num_attention_heads": 32, "num_experts": None,
        "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06, "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 1024,
        "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    }, 832, 30_697_345_340),
    "gemma4_text, experts": ({  # the text of Gemma 4 26B-A4B
        "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816,
        "hidden_size_per_layer_input": 0, "intermediate_size": 2112,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06, "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 1024,
        "tie_word_embeddings": True, "top_k_experts": 8, "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    }, 657, 25_233_141_790),
    "glm4_moe": ({  # GLM-4.5-Air
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False,
        "vocab_size": 151552,
    }, 17925, 106_852_251_264),
    "deepseek_v3": ({  # without quantization_config: its weights are published in fp8
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    }, 45395, 671_026_419_200),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_as_many_tensors_and_parameters(name):
    config, tensors, parameters = RELEASED[name]
    model, family = Model(**translate_config_json(config, ["lm_head.weight"])), families.FAMILIES[config["model_type"]]
    for fused in (False, True) if family.fused else (False,):
        stored = list_stored_tensors(model, family, fused)
        assert sum(prod(t.shape) for t in stored) == parameters
        assert fused or len(stored) == tensors


@pytest.mark.parametrize("name", EVERY)
def test_logits_are_equal(tmp_path, name):
    folder, model = saved(tmp_path, name)
    c, trainer = started(folder, "fp32")
    data = data_of(c)
    with torch.no_grad():
        theirs = peer.logits(model, data)
    real = data["tokens"] >= 0
    assert theirs.std() > 0.1
    assert (our_logits(trainer) - theirs)[real].abs().max() < 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("more", [{"value_norm": False}, {"rope_share": 0.5}, {"window_rope_theta": 900.0}], ids=str)
def test_negative_control_a_word_that_is_another(tmp_path, more):
    folder, model = saved(tmp_path, "gemma4_text")
    c, trainer = started(folder, "fp32", **more)
    data = data_of(c)
    with torch.no_grad():
        theirs = peer.logits(model, data)
    assert (our_logits(trainer) - theirs)[data["tokens"] >= 0].abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_equal(tmp_path, name):
    no_padding = {"pad_token_id": None} if name.startswith(("bert", "olmo")) else {}  # embeddings of it get none
    folder, model = saved(tmp_path, name, double=True, **no_padding)
    c, trainer = started(folder, "fp64")
    data = data_of(c)
    with peer.in_double():
        loss = F.cross_entropy(peer.logits(model, data).flatten(0, 1), data["labels"].flatten(), ignore_index=-1)
        loss.backward()
    ours: dict[str, torch.Tensor] = {}

    def keep() -> Differences:
        ours.update((n, g.clone()) for n, g in trainer.weights.gradients.items())
        return Differences()

    assert trainer.step(1, verify=keep).loss == pytest.approx(loss.item(), rel=1e-10)
    theirs = dict(model.named_parameters())
    family = find_family(json.loads((folder / "config.json").read_text()))
    tensors = list_stored_tensors(c.model, family, stacks_experts=bool(family.fused))  # as transformers computes them
    without = "e_score_correction_bias", "layer_scalar"  # of the choice of experts, and of layers: no gradient
    tensors = [t for t in tensors if not t.name.endswith(without)]
    assert len(tensors) == len({id(p) for p in theirs.values()})
    largest = max(p.grad.abs().max() for p in theirs.values())
    for t in tensors:
        blocks = [ours[part.name][part.box.relative_slices(Box.whole_tensor(part.shape))] for part in t.parts]
        error = (t.join_blocks(blocks) - theirs[t.name].grad).abs().max()
        assert error <= 1e-10 * largest, t.name


def test_positions_beyond_the_original_length_are_those_of_transformers():
    keys = {**peer.LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}
    config = peer.transformers().LlamaConfig(**keys)
    of_llama = importlib.import_module("transformers.models.llama.modeling_llama").LlamaRotaryEmbedding(config)
    theirs = of_llama(torch.zeros(1), torch.arange(50)[None])
    model = Model(**translate_config_json(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    ours = rotary_angles(torch.arange(50), 4, 100.0, torch.float32, rotary_scaling(model), tokens=50)
    for angle, reference in zip(ours, theirs, strict=True):
        assert (angle - reference[0]).abs().max() < 1e-5


@pytest.mark.parametrize(("name", "fused"), FORMS)
def test_a_round_trip_is_equal_in_every_byte(tmp_path, name, fused):
    """By way of a checkpoint; and without what that says of its origin, config.json is still the same."""
    folder, _ = saved(tmp_path, name, fused=fused)
    storage = LocalStorage(tmp_path / "storage")
    directory = import_model(open_importable(str(folder), "source"), storage)
    manifest = catalogue.verify_checkpoint(storage, directory)
    for number, keeps in enumerate((True, False)):
        some = manifest if keeps else replace(manifest, meta=replace(manifest.meta, values={}))
        family = "" if keeps else open_importable(str(folder), "source").saved.config["model_type"]
        export_model(
            open_exportable(storage, directory, some, family, stacks_experts=fused),
            LocalStorage(tmp_path / f"ours{number}"),
        )
        original, exported = (
            {f.name: f.read_bytes() for f in path.iterdir()} for path in (folder, tmp_path / f"ours{number}")
        )
        original.pop("generation_config.json", None)
        assert exported.keys() == original.keys()
        configs = [json.loads(files.pop("config.json")) for files in (exported, original)]
        if not keeps:
            for config in configs:
                for key in ("transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"):
                    config.pop(key, None)
        assert configs[0] == configs[1]
        assert exported == original
