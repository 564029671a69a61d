"""Bugs of peers that concern what we have, each as a mutant of our code or of a plan, with the test that kills it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from platform.runtime.residual import apply_draw_in_pieces
from tests.harness.plan_mutants import other, twice, without
from tests.known_bugs import mutants
from tests.known_bugs.expert_bugs import EXPERT_BUGS
from tests.known_bugs.known_bug import KnownBug, not_summed, steps, summed_over

SCHEMES = "runtime/oracle/test_schemes.py::test_equals_one_process"
MODELS = "runtime/oracle/test_models.py::test_equals_one_process"
AHEAD = "runtime/oracle/test_multi_token.py::test_equals_one_process"
EXPERTS = "runtime/oracle/test_experts.py::test_equals_one_process"
PIPELINES = "runtime/oracle/test_pipelines.py::test_equals_one_process"
SURVIVORS = "runtime/oracle/test_any_replicas.py::test_fewer_workers_keep_samples_and_losses"
HEADS = "runtime/oracle/test_schemes.py::test_key_value_heads_fewer_than_axes"
UNEVEN = "runtime/oracle/test_uneven.py::test_equals_one_process"
ONE_AXIS = "runtime/oracle/test_every_layout.py::test_one_axis"
RINGS = "runtime/oracle/test_rings.py::test_equals_one_process"
PANELS = "runtime/kernels/test_panels.py::test_a_ring_equals_one_softmax"
MASKS = "runtime/kernels/test_dropout.py::test_the_gradient_has_the_mask_and_nothing_is_saved"

ROWS_COLS = {"scheme": "layout rows,cols", "model": "gpt"}
SEQUENCE = {"scheme": "1d_sp t2", "model": "llama"}
SEQUENCE_OF_REPLICAS = {"scheme": "1d_sp t2", "data": 2}

BUGS = (
    KnownBug(
        "Megatron-LM #7452 (1), #737, #7464", "label smoothing takes the mean over a rank's part of the vocabulary",
        "the sum of logits is of one shard", MODELS, {"model": "original"}, mutants.smoothing_of_a_shard),
    KnownBug(
        "Megatron-LM #7452 (2)", "gathered logits are taken for split ones: the loss is too large by log(TP)",
        "each rank counts the whole vocabulary", SCHEMES, SEQUENCE, mutants.vocab_counted_by_every_rank),
    KnownBug(
        "Megatron-LM #7452 (3), #2417", "the loss of a token further on is divided by a rank's own number of tokens",
        "each rank's own share of the labels counts as all", AHEAD, {"kind": "documents", "data": 2},
        mutants.labels_ahead_of_a_rank),
    KnownBug(
        "Megatron-LM #7452 (7), (4)", "activations are scattered and gathered over the wrong group of equal size",
        "the embedding's result is scattered over another axis", MODELS, {"scheme": "2d_gather"},
        change=steps("lookup", "embedding", "1", "forward", other("reduce_scatter", axes=("r",))),
        line="reduce_scatter takes what is partial, and it is"),
    KnownBug(
        "Megatron-LM #7452 (8), #7530", "attention sinks, split by heads, are counted on one rank in the clip norm",
        "sinks count as if replicated", EXPERTS, {"kind": "gpt_oss", "scheme": "1d_sp"},
        mutants.norm_of_the_first_sinks, line="the norm counts it as split over no axis, and it is over t"),
    KnownBug(
        "Megatron-LM #7452 (9), #7513; torchtitan #2206", "each rank divides its loss by its own number of tokens",
        "the loss is a mean over the rank's labels", MODELS, {"model": "whole_bert"},
        mutants.mean_of_each_rank_s_tokens),
    KnownBug(
        "Megatron-LM #7452 (11)", "a replicated weight that ranks use on their own heads or tokens"
        " keeps the gradient of one rank", "the gains of norms of queries are not summed over the heads' axis", MODELS,
        {"model": "modern", "scheme": "1d_sp"}, change=not_summed("*.query_norm.gain", "t"),
        line="is partial over t, and never summed there"),
    KnownBug(
        "Megatron-LM #1446, #474; gpt-neox #1257", "norms of a split sequence have other gradients on every rank",
        "the last norm's gain is not summed over the sequence's axis", SCHEMES, SEQUENCE,
        change=not_summed("norm.gain", "t"), line="gradient of norm.gain is partial over t, and never summed there"),
    KnownBug(
        "Megatron-LM #1528", "the gradient of a norm's weight is TP times too large", "a whole gradient is summed",
        SCHEMES, ROWS_COLS, change=summed_over("norm.gain", "cols"),
        line="gradient of norm.gain is whole over cols, and summed there at the end of the step"),
    KnownBug(
        "Megatron-LM #5916", "the norm undercounts gradients that two axes (of experts, of tensors) split",
        "the norm knows the first axis alone", SCHEMES, {"scheme": "3d 2,1,2"}, mutants.norm_over_one_axis_of_two,
        line="the norm counts it as split over"),
    KnownBug(
        "NeMo RL #3788; hyper-parallel #526; ROCm TransformerEngine #715", "replicated gradients count once per rank"
        " in the norm", "gains count on every rank", SCHEMES, ROWS_COLS, mutants.norm_counts_replicas,
        line="the norm counts it as split over"),
    KnownBug(
        "Megatron-LM #7228; DeepSpeed #1252", "a tied table counts twice in the norm, once per stage",
        "both stages count it", PIPELINES, {"model": "gpt"}, mutants.norm_counts_tied_copies),
    KnownBug(
        "Megatron-LM #656; NeMo Speech #6958", "tied tables of the first and the last stage go apart",
        "their gradients are not added", PIPELINES, {"model": "gpt"}, mutants.tied_copies_on_their_own),
    KnownBug(
        "PyTorch #162692", "a mean over a dim that ranks do not divide is the mean of their means",
        "a norm over heads takes every rank's for as many as its own", UNEVEN, {"name": "norms of all heads"},
        mutants.rows_as_wide_as_this_rank_s),
    KnownBug(
        "PyTorch #103306, #144109", "a gathered tensor of uneven blocks has padding inside",
        "blocks are taken out of the buffer as if the last ones were the longest", UNEVEN,
        {"name": "sequences of a microbatch"}, mutants.blocks_as_long_as_of_the_last_rank),
    KnownBug(
        "Megatron-LM #1012", "gradients are reduced before the last pass has added to them",
        "one microbatch's gradient takes the place of the sum", SCHEMES, SEQUENCE, mutants.last_microbatch_alone),
    KnownBug(
        "Megatron-LM #1685", "gradients are never synchronised over replicas", "no sum over data", SCHEMES,
        SEQUENCE_OF_REPLICAS, change=not_summed("*", "data"), line="is partial over data, and never summed there"),
    KnownBug(
        "Megatron-LM #1464", "gradients of keys and values are of a rank's own queries, where a sequence is split",
        "a slice in place of the reduce-scatter of the gradients of keys and values", ONE_AXIS,
        change=steps("relayout", "*.attention.*", "0", "backward", other("reduce_scatter", op="slice")),
        line="takes what is whole, and it is partial"),
    KnownBug(
        "diffusers #14265", "the backward pass of a ring reads a rank's own keys and values in place of the others'",
        "a rank goes on with the keys and values that it has sent", RINGS, {"ring": "llama"},
        mutants.own_keys_in_the_backward_pass),
    KnownBug(
        "", "gradients of keys and values that have gone around stay where they are made",
        "a rank goes on with the gradients that it has sent", RINGS, {"ring": "llama"},
        mutants.gradients_of_keys_where_they_are_made),
    KnownBug(
        "", "keys of another rank are hidden by a rank's own positions", "keys have the positions of the next rank's",
        RINGS, {"ring": "llama"}, mutants.keys_of_the_next_rank_s_positions),
    KnownBug(
        "", "softmaxes over parts of the keys are merged by exponentials that overflow",
        "a merge of log-sum-exps without their maximum", PANELS, {"name": "large scores"},
        mutants.merged_without_the_maximum),
    KnownBug(
        "Megatron-LM of BigCode #11", "the gradients of shared keys and values are not summed over the ranks that"
        " share them", "no sum behind repeated heads", HEADS,
        change=steps("expand_kv", "*", "0", "backward", without("all_reduce")), line="is partial over t"),
    KnownBug(
        "Megatron-LM #673; verl #6609", "the loss is multiplied by the ranks that split a sequence",
        "each loss is scaled once more", MODELS, {"scheme": "3d"},
        mutants.loss_times_the_ranks_of_a_sequence),
    KnownBug(
        "Megatron-LM #1256, #26", "ranks that split a sequence draw one mask of dropout",
        "masks of the first block everywhere", SCHEMES, {"scheme": "1d_sp t2", "dropout": 0.2},
        mutants.masks_of_the_first_block),
    KnownBug(
        "PyTorch #190717", "the backward pass draws another mask than the forward pass", "the mask of the next element",
        MASKS, {"draw": apply_draw_in_pieces}, mutants.another_mask_in_the_backward_pass),
    KnownBug(
        "torchtitan #1878, #1805", "the gradient of a split product's input stays one rank's summand",
        "no all-reduce behind the products of a layer", SCHEMES, ROWS_COLS,
        change=steps("project", "*.mlp.up", "0 x", "backward", without("all_reduce")),
        line="is partial over cols, and has to be whole"),
    KnownBug(
        "torchtitan #3412, #3418", "the gradient of the head's input is taken for a sum that it is not yet",
        "a slice of the summand, in place of the sum", SCHEMES, SEQUENCE_OF_REPLICAS,
        change=steps("project", "head", "0 x", "backward", other("reduce_scatter", op="slice")),
        line="slice takes what is whole, and it is partial over t"),
    KnownBug(
        "torchtitan #2106", "a complete gradient is summed again: TP times too large",
        "the all-reduce of the gradient twice", SCHEMES, ROWS_COLS,
        change=steps("project", "*.mlp.up", "0 x", "backward", twice("all_reduce")),
        line="all_reduce takes what is partial, and it is whole over cols"),
    KnownBug(
        "text-generation-inference #1036", "a bias is added by every rank before their sum",
        "the bias times the ranks", SCHEMES, ROWS_COLS, mutants.bias_added_by_every_rank),
    KnownBug(
        "torchtitan #4332", "the gradient of such a bias is divided by the ranks",
        "the gradient of a share of the bias", SCHEMES, ROWS_COLS, mutants.gradient_of_a_share_of_the_bias),
    KnownBug(
        "ms-swift #9947", "only the shard that has the label gets a gradient of the logits",
        "rows of other shards get none", SCHEMES, SEQUENCE, mutants.gradient_of_the_label_s_shard_alone),
    KnownBug(
        "mlx-lm #1413; torchtune #1875; OpenNMT-py #2209", "each microbatch's loss is a mean, whatever labels it has",
        "the mean of means", MODELS, {"model": "original", "data": 1}, mutants.mean_of_each_microbatch_s_tokens),
    KnownBug(
        "AReaL #1468", "the optimizer's moments are silently dropped on resume", "moments are zero after a restore",
        SURVIVORS, {}, mutants.moments_dropped),
    KnownBug(
        "Accelerate #4195, #4203", "a resume on several processes goes on in another order of samples",
        "three replicas begin one sample later", SURVIVORS, {}, mutants.samples_by_replica),
    *EXPERT_BUGS,
)  # fmt: skip


def cases_that_kill(killer: str) -> list[Mapping[str, Any]]:
    """Return the values of the cases in which a test, said as path::name, kills a bug each."""
    return [bug.case for bug in BUGS if bug.killer == killer and bug.case]
