"""Bugs of peers in experts, each as a mutant of our code or of a plan, and mistakes that nobody has reported yet."""

from __future__ import annotations

from dataclasses import replace

from platform.plan.operation_plan import PlannedOperation
from platform.plan.plan import Plan
from tests.harness.plan_mutants import other, with_operations, without
from tests.known_bugs import expert_mutants as mutants
from tests.known_bugs.known_bug import KnownBug, not_summed, steps, summed_over
from tests.runtime.oracle.test_any_replicas import EXPERTS_OF_FOUR

EXPERTS = "runtime/oracle/test_experts.py::test_equals_one_process"
PLAIN = "runtime/oracle/test_experts.py::test_equals_plain_pytorch"
UNEQUAL = "runtime/oracle/test_experts.py::test_replicas_with_unequal_numbers_of_sequences"
PRECISION = "runtime/oracle/test_router_precision.py::test_scores_and_weights_are_those_of_fp32"
ADAPTERS = "runtime/oracle/test_adapters.py::test_special_ones_too"
LATENT = "runtime/oracle/test_latent_attention.py::test_equals_one_process"
LOGITS = "weights/test_families.py::test_logits_are_equal"
STACKS = "weights/test_start.py::test_stacks_and_separate_experts_are_the_same_weights"
SURVIVORS = "runtime/oracle/test_any_replicas.py::test_fewer_workers_keep_samples_and_losses"
MEMORY = "runtime/test_memory.py::test_experts_shared_by_replicas"

SEQUENCE = {"scheme": "1d_sp"}
SHARED = {"scheme": "1d_sp", "split": (2, 2)}
WIDTH = {"scheme": "2d_gather"}


def padding_of_another_axis(plan: Plan) -> Plan:
    """Let routers read which tokens are padding as another axis of equal size splits them."""

    def changed(planned: PlannedOperation) -> PlannedOperation:
        tokens = planned.tokens
        return replace(
            planned,
            tokens=type(tokens).build_canonical({d: ["c" if a == "r" else a for a in tokens[d]] for d in tokens}),
        )

    return with_operations(plan, "route", "*", changed)


EXPERT_BUGS = (
    KnownBug(
        "Megatron-LM #5047", "balance and z-loss weigh more, the more ranks split a sequence",
        "what a router adds to the loss times these ranks", EXPERTS, SEQUENCE,
        mutants.losses_times_ranks_of_the_length),
    KnownBug(
        "Megatron-LM #3672, #3769", "the gradient of the balance loss is divided by the replicas once more",
        "the balance loss over the ranks that split a batch", EXPERTS, {"split": (2, 1)},
        mutants.balance_over_replicas),
    KnownBug(
        "Megatron-LM #7452 (10), #7481", "with padding, the ranks' count of tokens takes the place of a rank's own",
        "the z-loss over the ranks that split the tokens", UNEQUAL, {"data": 3},
        mutants.z_loss_over_tokens_of_ranks),
    KnownBug(
        "Megatron-LM #7452 (5)", "the padding that a router sees is split over the wrong group of equal size",
        "which tokens are padding is read along another axis", EXPERTS, {"kind": "both ways", **WIDTH},
        change=padding_of_another_axis, line="tokens has batch split over"),
    KnownBug(
        "Megatron-LM #1984, #2121; Megatron-Bridge #5470", "padding counts in the balance and the z-loss, and takes"
        " slots", "every token is real", PLAIN, {"padded": True}, mutants.padding_is_routed),
    KnownBug(
        "NeMo Automodel #1408", "the balance loss has no gradient", "it is detached", PLAIN, {"kind": "biased"},
        mutants.losses_without_gradient),
    KnownBug(
        "torchtitan #1448", "the weights of a token's experts are not divided by their sum", "never divided", PLAIN,
        {"kind": "biased"}, mutants.weights_are_not_normalised),
    KnownBug(
        "Megatron-LM #955; mlxcel #391; SGLang #35160", "probabilities are of the chosen experts alone",
        "always divided by their sum", PLAIN, {"kind": "all tokens"}, mutants.weights_of_the_chosen_alone),
    KnownBug(
        "SGLang #31449, sglang-jax #1282", "the factor of the weights is left out, with or without their division",
        "no factor where they are divided", PLAIN, {"kind": "biased"}, mutants.scaled_where_not_normalised),
    KnownBug(
        "vLLM #14027, SGLang #38719, AstrAI #57", "scores are rounded to 16 bits before experts are chosen",
        "bf16 scores", PRECISION, {"precision": "bf16"}, mutants.scores_in_16_bits),
    KnownBug(
        "transformers #48687, #48689", "slots of no token give the router a gradient",
        "their gradient is another token's", PLAIN, {"kind": "biased"},
        mutants.slots_of_no_token_give_a_gradient),
    KnownBug(
        "transformers #48205 (1)", "empty slots hold whatever was in memory, and gradients are not numbers",
        "empty slots are NaN", PLAIN, {"kind": "one of four"}, mutants.empty_slots_are_not_numbers),
    KnownBug(
        "transformers #48205 (2), #48208", "the gradient of the weights is one rank's, and everything below the layer"
        " lacks the rest", "no sum of it where ranks split d_model", EXPERTS, WIDTH,
        change=steps("combine", "*", "1", "backward", without("all_reduce")), line="is partial over c"),
    KnownBug(
        "torchtitan #2387, #2388", "the router is not summed over the ranks that have other tokens, and goes apart",
        "no sum of its gradient over t", EXPERTS, SEQUENCE, change=not_summed("*.router", "t"),
        line="router is partial over t, and never summed there"),
    KnownBug(
        "torchtitan #4054", "gradients below experts whose d_ff ranks split are one rank's",
        "no sum of the gradient of their input", EXPERTS, {"scheme": "1d", "split": (2, 1)},
        change=steps("dispatch", "*", "0", "backward", without("all_reduce")), line="is partial over t"),
    KnownBug(
        "torchtitan #4154", "the bias of a router follows what one rank's tokens choose", "the counts of a rank alone",
        EXPERTS, {"kind": "biased", "split": (2, 2)}, mutants.load_of_a_rank),
    KnownBug(
        "", "ranks that have the same tokens all count them", "every rank counts", EXPERTS, SEQUENCE,
        mutants.counted_on_every_rank),
    KnownBug(
        "Megatron-LM #7213, #7197", "a balance over many microbatches is normalised by the last one's tokens",
        "the last microbatch's load", EXPERTS, {"kind": "every second layer", "split": (2, 2)},
        mutants.load_of_the_last_microbatch),
    KnownBug(
        "Megatron-LM #1330, #1514; torchtitan #1593", "a pass that is computed again counts again", "counted in both",
        EXPERTS, {"recompute": "full", "split": (2, 1)}, mutants.counted_again_when_recomputed),
    KnownBug(
        "Megatron-LM #5956, #5656; DeepSpeed #5259; PyTorch #160285", "gradients of experts are as many times too large"
        " as ranks share them", "each gradient once more per rank", EXPERTS, SHARED,
        mutants.gradient_of_experts_times_ranks),
    KnownBug(
        "Megatron-LM #5916 (ETP > TP)", "gradients of different experts are summed", "a sum over the axis of experts",
        EXPERTS, SHARED, change=summed_over("*.experts.*", "expert"),
        line="is split along experts over expert, and summed"),
    KnownBug(
        "fairseq #4220; Megatron-LM #5916 (TP > ETP)", "replicas of an expert are never summed", "no sum over data",
        EXPERTS, {"split": (4, 2), "zero": 0}, change=not_summed("*.experts.*", "data"),
        line="is partial over data, and never summed"),
    KnownBug(
        "Megatron-LM #6470; Megatron-LM of radixark #80", "the norm counts the experts of one rank of those that share"
        " them", "without the axis of experts", EXPERTS, SHARED, mutants.norm_of_the_first_rank_s_experts,
        line="the norm counts it as split over"),
    KnownBug(
        "Megatron-LM #6099; Megatron-Bridge #4998", "the norm takes experts to be split as the rest is",
        "without the tensors' axes", EXPERTS, SHARED, mutants.norm_of_experts_as_of_the_rest,
        line="the norm counts it as split over"),
    KnownBug(
        "SpecForge #882; Megatron-LM #2263", "what is alike on ranks that share experts counts once for each",
        "with the axis of experts", EXPERTS, {"split": (2, 2), "zero": 0},
        mutants.norm_counts_the_rest_on_every_rank_of_experts, line="the norm counts it as split over"),
    KnownBug(
        "fastmoe #4; DeepSpeed #6589; megablocks #160", "every rank begins with the same experts",
        "those of the first rank", EXPERTS, SHARED, mutants.every_rank_draws_the_first_experts),
    KnownBug(
        "vLLM #37856", "shared experts of split ranks are not summed", "no sum of their result", EXPERTS,
        {"kind": "shared", "scheme": "1d"},
        change=steps("project", "*.shared.down", "0 0 output", "forward", without("all_reduce")),
        line="is partial over t, and has to be whole"),
    KnownBug(
        "Megatron-Bridge #5634, #5635", "an adapter of experts that ranks split adds a part where the whole is due",
        "no sum of what goes down to its rank", ADAPTERS, {"name": "experts, 1d"},
        change=steps("project", "*.experts.down.lora_a", "0 0 output", "forward", without("all_reduce")),
        line="is partial over t, and has to be whole"),
    KnownBug(
        "Megatron-LM #6839", "the part of latent attention's keys that all heads share gets the gradient of one rank's"
        " heads", "no sum of it", LATENT, {"scheme": "1d"},
        change=steps("concatenate", "*.attention.key", "1", "backward", without("all_reduce")),
        line="is partial over t"),
    KnownBug(
        "Megatron-LM #5844", "a conversion leaves experts as they were drawn, and says nothing", "they are drawn after"
        " they were read", LOGITS, {"name": "mixtral"}, mutants.experts_stay_as_they_were_drawn),
    KnownBug(
        "KempnerForge #202", "a checkpoint holds the experts of one rank, and each gets these on resume",
        "each expert is the first after a restore", SURVIVORS, {"before": EXPERTS_OF_FOUR},
        mutants.every_expert_is_the_first_after_a_restore),
    KnownBug(
        "Megatron-Bridge #1871, #1857, #1716", "an export writes one expert in the place of all", "each is the first",
        LOGITS, {"name": "qwen3_moe"}, mutants.every_expert_is_the_first),
    KnownBug(
        "NeMo Automodel #2591", "biases of experts are added without the weights of these", "their sum besides", LOGITS,
        {"name": "gpt_oss"}, mutants.biases_without_weights),
    KnownBug(
        "torchtitan #4245", "a bias of experts is added by every rank that has a part of their d_ff",
        "the bias times the ranks", EXPERTS, {"kind": "gpt_oss", "scheme": "3d"}, mutants.biases_times_ranks),
    KnownBug(
        "TransformerLens #1668; transformers #43524", "a stack of gates and ups is cut the other way round",
        "they change places", STACKS, {"name": "mixtral"}, mutants.gate_and_up_change_places),
    KnownBug(
        "Megatron-LM #1784, #6782", "the forecast of memory takes experts for a dense layer",
        "nothing is kept for the sum of their results", MEMORY, {"scheme": "serial"}, mutants.memory_of_a_dense_layer),
    KnownBug(
        "", "a capacity counts the tokens of a rank", "an expert takes the first tokens of all sequences", EXPERTS,
        {"kind": "one of four", "scheme": "serial"}, mutants.capacity_of_all_sequences_of_a_rank),
    KnownBug(
        "", "the balance is of a rank's sequences together", "they are joined to one", EXPERTS,
        {"split": (2, 2)}, mutants.load_of_all_sequences_of_a_rank),
    KnownBug(
        "", "what experts made comes back in another order", "the parts of ranks, the last one first", EXPERTS,
        SHARED, mutants.results_come_back_in_another_order),
    KnownBug(
        "", "tokens move to the experts of another axis", "an all-to-all over t", EXPERTS, SHARED,
        change=steps("dispatch", "*", "2", "forward", other("all_to_all", axes=("t",))), line="all_to_all"),
    KnownBug(
        "", "shared experts and routers are taken for experts: ranks that share these do not sum them",
        "no sum over the axis of experts", EXPERTS, {"kind": "shared", "split": (2, 2)},
        change=not_summed("*.shared.*", "expert"), line="is partial over expert, and never summed there"),
)  # fmt: skip
