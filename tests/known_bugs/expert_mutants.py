"""Mutants of experts: their routers, slots, gradients, norms and files as peers' bugs had them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from platform.plan.model_types import Router
from platform.plan.operations.einsums import ProjectOp
from platform.plan.operations.experts import CombineOp, CombineRowsOp, DispatchOp, RouteOp
from platform.plan.operations.pointwise import ShiftOp
from platform.plan.plan import Plan
from platform.runtime import expert_rows
from platform.runtime.parallel_ops import ParallelOps
from platform.train import rank_parameters
from platform.train.trainer import Trainer
from platform.train.training_state import RankTrainingState
from platform.weights import tensor_names
from tests.known_bugs.mutants import Mutant, mutant

Routed = Callable[..., tuple[Tensor, ...]]


class OfRanks(Router):
    """A router that knows how many ranks split the tokens and, of these, their sequences."""

    tokens: int = 1
    length: int = 1
    batch: int = 1


def on_ranks(change: Callable[..., tuple[Tensor, ...]]) -> Mutant:
    """Make a mutant of routing, where several ranks split the tokens, of a function that takes the original, scores,
    which tokens are real, an `OfRanks` router and the slots."""

    def run_route(run, self, ops, name, scores, spec, tokens, router, *states):
        of_ranks = OfRanks(*vars(router).values())
        layout = ops.plan.layout(spec)
        for key, axes in {"tokens": layout.axes, "length": layout["length"], "batch": layout["batch"]}.items():
            object.__setattr__(of_ranks, key, ops.plan.mesh.count_ranks(axes))
        return run(self, ops, name, scores, spec, tokens, of_ranks, *states)

    def routed(compute, scores, real, router, *more):
        several = isinstance(router, OfRanks) and router.tokens > 1
        return (change if several else _unchanged)(compute, scores, real, router, *more)

    def put(patch: MonkeyPatch) -> None:
        mutant(RouteOp, "run_on_blocks")(run_route)(patch)
        mutant(expert_rows, "_compute_routing")(routed)(patch)

    return put


def _unchanged(compute: Routed, *arguments: Any) -> tuple[Tensor, ...]:
    return compute(*arguments)


def scaled(by: Callable[[OfRanks], float], **fields: Any) -> Mutant:
    """Multiply by some number of ranks what a router adds to the loss; `fields`: factors of parts of it."""

    @on_ranks
    def change(compute, scores, real, router, *more):
        weights, auxiliary, counts = compute(scores, real, router, *more)
        _, part, _ = compute(scores, real, replace(router, **fields), *more)
        return weights, auxiliary + part * (by(router) - 1), counts

    return change


losses_times_ranks_of_the_length = scaled(lambda router: router.length)
balance_over_replicas = scaled(lambda router: 1 / router.batch, z=0.0)
z_loss_over_tokens_of_ranks = scaled(lambda router: 1 / router.tokens, balance=0.0)


@on_ranks
def load_of_all_sequences_of_a_rank(compute, scores, real, router, *more):
    """Return what is routed, where the balance is of the rank's sequences together."""
    weights, auxiliary, counts = compute(scores, real, replace(router, balance=0.0), *more)
    *more, best = more
    *joined, best = (t.transpose(0, 1).flatten(0, 1).unsqueeze(1) for t in (scores, real, best))
    _, balance, _ = compute(*joined, replace(router, z=0.0), *more, best)
    return weights, auxiliary + balance.view(real.shape[::-1]).t(), counts


@on_ranks
def capacity_of_all_sequences_of_a_rank(compute, scores, real, *more):
    """Return what is routed, where an expert takes the first tokens of the rank, and not of each sequence."""
    _, auxiliary, _ = compute(scores, real, *more)
    *more, best = more
    *joined, best = (t.transpose(0, 1).flatten(0, 1).unsqueeze(1) for t in (scores, real, best))
    weights, _, counts = compute(*joined, *more, best)
    return weights.view(real.shape[1], real.shape[0], -1).transpose(0, 1).contiguous(), auxiliary, counts


@mutant(expert_rows, "_compute_routing")
def padding_is_routed(compute, scores, real, *more):
    return compute(scores, torch.ones_like(real), *more)


@mutant(expert_rows, "_compute_routing")
def losses_without_gradient(compute, *arguments):
    weights, auxiliary, counts = compute(*arguments)
    return weights, auxiliary.detach() + 0 * auxiliary, counts


def _of_router(**fields: Any) -> Mutant:
    return mutant(expert_rows, "_compute_routing")(
        lambda compute, scores, real, router, *more: compute(scores, real, replace(router, **fields), *more)
    )


weights_are_not_normalised = _of_router(normalised=False)
weights_of_the_chosen_alone = _of_router(normalised=True)


@mutant(expert_rows, "_compute_routing")
def scaled_where_not_normalised(compute, scores, real, router, *more):
    return compute(scores, real, replace(router, scale=1.0) if router.normalised else router, *more)


@mutant(expert_rows, "_compute_routing")
def scores_in_16_bits(compute, scores, *more):
    return compute(scores.bfloat16().to(scores.dtype), *more)


class Unmasked(Tensor):
    """Numbers that stay where a mask says that there are none."""

    def masked_fill_(self, mask, value):
        return self.as_subclass(Tensor)


@mutant(expert_rows, "products_of_rows")
def slots_of_no_token_give_a_gradient(products, rows, at, factors):
    return products(rows, at.clamp_min(0), factors).as_subclass(Unmasked)


@mutant(expert_rows, "dispatch_slots")
def empty_slots_are_not_numbers(dispatch, x, weights, *more):
    held, _ = expert_rows._slot_places(weights, *more)
    return dispatch(x, weights, *more).masked_fill((held < 0).unsqueeze(-1), torch.nan)


@mutant(ParallelOps, "count_routed")
def counted_again_when_recomputed(count, self, *arguments):
    again, self.ahead.again = self.ahead.again, False
    try:
        return count(self, *arguments)
    finally:
        self.ahead.again = again


@mutant(ParallelOps, "count_routed")
def counted_on_every_rank(count, self, name, counts, axes):
    return count(self, name, counts, self.plan.mesh.axes)


@mutant(ParallelOps, "count_routed")
def load_of_the_last_microbatch(count, self, name, counts, axes):
    before = self.routed.pop(name, None)
    count(self, name, counts, axes)
    if before is not None:
        self.routed.setdefault(name, before)


@mutant(Trainer, "_sum_over_world")
def load_of_a_rank(sum_over_world, self, loss, squares, counted=False):
    out = sum_over_world(self, loss, squares, counted)
    own = self.ops.routed
    self._loads = {name: own[name][0].to(x) if name in own else 0 * x for name, x in self._loads.items()}
    return out


@mutant(CombineRowsOp, "run_on_blocks")
def biases_without_weights(run, self, ops, name, y, spec, counts, weights, *more):
    bias = ops.tensors[f"{name}.experts.down_bias"]
    left = (weights != 0).to(bias.dtype) - weights.to(bias.dtype)
    return run(self, ops, name, y, spec, counts, weights, *more) + left @ bias


@mutant(ShiftOp, "run_on_blocks")
def biases_times_ranks(run, self, ops, planned, x, spec, parameter, *more):
    times = ops.plan.mesh.count_ranks(ops.plan.scheme.regions["experts"]["d_ff"]) if spec.region == "experts" else 1
    return run(self, ops, planned, x, spec, parameter * times if "d_model" in spec.dims else parameter, *more)


@mutant(ProjectOp, "run_on_blocks")
def gradient_of_experts_times_ranks(run, self, ops, x, spec, weights, *more):
    """Return the products, whose gradient of an expert is once more for each rank that shares the experts."""
    times = ops.plan.mesh.axes.get("expert", 1)
    if weights[0].dims[0] != "experts" or len(weights[0].dims) < 3 or times == 1:
        return run(self, ops, x, spec, weights, *more)
    parameter = ops.parameter_block
    larger = {p.name: parameter(p) for p in weights}
    ops.parameter_block = lambda p: larger[p.name] * times - (larger[p.name] * (times - 1)).detach()
    try:
        return run(self, ops, x, spec, weights, *more)
    finally:
        del ops.parameter_block


def of_experts(p: Any) -> bool:
    return p.dims[0] == "experts" and len(p.dims) > 2


@mutant(Plan, "master_split_axes")
def norm_of_the_first_rank_s_experts(split_over, self, p):
    return tuple(a for a in split_over(self, p) if a != "expert") if of_experts(p) else split_over(self, p)


@mutant(Plan, "master_split_axes")
def norm_of_experts_as_of_the_rest(split_over, self, p):
    """Return the axes that split a parameter, for experts without those of tensors."""
    return tuple(a for a in split_over(self, p) if a in ("expert", "data") or not of_experts(p))


@mutant(Plan, "master_split_axes")
def norm_counts_the_rest_on_every_rank_of_experts(split_over, self, p):
    axes = split_over(self, p)
    return axes if "expert" in axes or "expert" not in self.mesh.axes else (*axes, "expert")


@mutant(rank_parameters, "initialise")
def every_rank_draws_the_first_experts(initialise, plan, communicator, p, seed, out):
    first = SimpleNamespace(coordinates={**communicator.coordinates, "expert": 0})
    return initialise(plan, first if of_experts(p) else communicator, p, seed, out)


@mutant(CombineOp, "run_on_blocks")
def results_come_back_in_another_order(run, self, ops, planned, name, y, *more):
    parts = ops.plan.mesh.axes.get("expert", 1)
    return run(self, ops, planned, name, torch.cat(y.chunk(parts)[::-1]) if parts > 1 else y, *more)


@mutant(DispatchOp, "run_on_blocks")
def tokens_take_slots_on_every_rank(run, self, ops, planned, name, x, spec, weights, *more):
    """Send each token once more for each rank that splits a sequence: those of others are no copies but summands."""
    return run(self, ops, planned, name, x, spec, weights, *more) * ops.plan.mesh.count_ranks(
        ops.plan.layout(spec)["length"]
    )


@mutant(tensor_names, "_describe_one_matrix")
def every_expert_is_the_first(part, p, shape, expert):
    return part(p, shape, 0)


@mutant(tensor_names, "_describe_one_matrix")
def gate_and_up_change_places(part, p, shape, expert):
    matrix, other = part(p, shape, expert), {"gate": "up", "up": "gate"}
    layer, _, last = matrix.name.rpartition(".")
    return replace(matrix, name=f"{layer}.{other.get(last, last)}")


@mutant(RankTrainingState, "load_initial_weights")
def experts_stay_as_they_were_drawn(begin, self, *arguments):
    begin(self, *arguments)
    for name, weight in self._trainer.weights.master.items():
        if ".experts." in name:
            weight.data.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    self._trainer.weights.refresh_copies()


@mutant(RankTrainingState, "restore_checkpoint")
def every_expert_is_the_first_after_a_restore(restore, self, *arguments, **more):
    restore(self, *arguments, **more)
    for name, weight in self._trainer.weights.master.items():
        if ".experts." in name:
            weight.data[1:] = weight.data[:1].clone()
    self._trainer.weights.refresh_copies()


@mutant(CombineOp, "meter_memory")
def memory_of_a_dense_layer(meter, self, ops, planned, name, y, *more):
    """Count nothing of what experts keep but the sum of their results."""
    note = ops.note_operation
    ops.note_operation = lambda outputs, inputs, saved, *rest: note(outputs, inputs, (), *rest)
    try:
        return meter(self, ops, planned, name, y, *more)
    finally:
        del ops.note_operation
