"""All families that are known, by their model_type, and the rules that hold for every config.json."""

from __future__ import annotations

import re
from dataclasses import fields

from platform.boundary.refusals import ConfigError, closest_values, refuse_all
from platform.config.fields import Model
from platform.weights.config_keys import QUANTISED, Family, Free, FunctionRule, Only, Rule, check_quantisation
from platform.weights.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from platform.weights.encoders import BERT, GPT2, T5
from platform.weights.llama import GPT_OSS, LLAMA, MISTRAL, MIXTRAL, OLMOE, QWEN2, QWEN3, QWEN3_MOE
from platform.weights.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from platform.weights.relatives import (
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM4,
    GLM4_MOE,
    GRANITE,
    OLMO2,
    OLMO3,
    PHI3,
    SMOLLM3,
    VAULTGEMMA,
)

_GEMMAS = (GEMMA2, VAULTGEMMA, GEMMA3, GEMMA4)
_RELATIVES = (OLMO2, OLMO3, PHI3, *_GEMMAS, SMOLLM3, GRANITE, GLM4, GLM4_MOE, QWEN3_5)
_OF_EXPERTS = (MIXTRAL, QWEN3_MOE, QWEN3_NEXT, QWEN3_5_MOE, OLMOE, GPT_OSS, DEEPSEEK_V2, DEEPSEEK_V3)
FAMILIES = {family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, *_RELATIVES, *_OF_EXPERTS, BERT, T5)}

SHIPPED = frozenset(FAMILIES)


def register_family(family: Family) -> None:
    """Register a family of models that transformers saves, for its `model_type`: imports, exports and model=from_hf
    then know it. Raises ConfigError for a name that is none, or is built in, and for a key that our models lack."""
    if not isinstance(family, Family) or not re.fullmatch(r"[\w.-]{1,100}", family.name):
        raise ConfigError("model_type", getattr(family, "name", family), "no platform.weights.config_keys.Family")
    if family.name in SHIPPED:
        raise ConfigError("model_type", family.name, "is built in")
    named = [*family.fixed, *(ours for rule in family.rules if (ours := getattr(rule, "ours", "")))]
    known = {f.name for f in fields(Model)}
    refuse_all(
        f"{family.name}: model.{key}: no key of our models; nearest legal: {', '.join(closest_values(key, known)[:3])}"
        for key in named
        if key not in known
    )
    FAMILIES[family.name] = family


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
    Free(_ANY),
    FunctionRule(QUANTISED, check_quantisation, lambda m: {}),
    Only("pruned_heads", ({}, None), written=False),
    Only("tie_encoder_decoder", (False,), written=False),
    Only("bad_words_ids", (None,), written=False),
)
