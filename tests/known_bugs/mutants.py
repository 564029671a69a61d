"""Mutants of our code: each computes as a peer's bug did, on ranks that are more than one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytest import MonkeyPatch

from platform.config.ramps import step_sample_range
from platform.plan import step_collectives
from platform.plan.layout import Stretch
from platform.plan.operations.pointwise import ShiftOp
from platform.plan.plan import Plan
from platform.runtime import chunked_loss, communicator, panels, residual
from platform.runtime.communicator import ArrivedCollective, Communicator
from platform.runtime.flat_buffers import FlatBucket
from platform.runtime.parallel_ops import ParallelOps
from platform.train import trainer
from platform.train.stage_passes import StagePasses
from platform.train.training_state import RankTrainingState

Mutant = Callable[[MonkeyPatch], None]
OUT = ("output_bias", "down_bias")  # of products whose contracted dim ranks split


def mutant(owner: object, name: str) -> Callable[[Callable[..., object]], Mutant]:
    """Make a mutant of a function of `owner` out of one that takes the original and then its arguments."""

    def build_mutant(change: Callable[..., object]) -> Mutant:
        def put(patch: MonkeyPatch) -> None:
            before = getattr(owner, name)
            patch.setattr(owner, name, lambda *arguments, **more: change(before, *arguments, **more))

        return put

    return build_mutant


@mutant(chunked_loss, "_all_reduce_loss_statistics")
def smoothing_of_a_shard(merged, statistics, mine, communicator, over):
    return torch.cat(
        (merged(statistics, mine, communicator, over)[:2], statistics[2:] * communicator.mesh.count_ranks(over))
    )


@mutant(chunked_loss, "_all_reduce_loss_statistics")
def vocab_counted_by_every_rank(merged, statistics, mine, communicator, over):
    out = merged(statistics, mine, communicator, over)
    return torch.cat((out[:1] + torch.tensor(communicator.mesh.count_ranks(over)).log(), out[1:]))


@mutant(chunked_loss, "compute_loss_and_gradient")
def gradient_of_the_label_s_shard_alone(compute, logits, targets, communicator, classes, gradient):
    out = compute(logits, targets, communicator, classes, gradient)
    if classes.over and gradient:
        column = targets.labels - classes.first
        logits[(column < 0) | (column >= logits.shape[1])] = 0
    return out


@mutant(chunked_loss, "compute_loss_and_gradient")
def mean_of_each_rank_s_tokens(compute, logits, targets, communicator, classes, gradient):
    out = compute(logits, targets, communicator, classes, gradient)
    if communicator.mesh.world_size == 1:
        return out
    weight = len(targets.labels) / max(1, int((targets.labels >= 0).sum()))
    logits *= weight
    return out * weight


@mutant(StagePasses, "run_chunk")
def mean_of_each_microbatch_s_tokens(run, self, chunk, flow, split, first, end):
    out, step = run(self, chunk, flow, split, first, end), step_sample_range(self.config.train, self.ops.position.step)
    size, count = self.plan.sizes["batch"], self.corpus.predicted
    own = count(split, first, min(first + size, end))
    return {n: x * count(split, *step) / (self.plan.microbatches * own) if n == "loss" else x for n, x in out.items()}


@mutant(StagePasses, "run_chunk")
def loss_times_the_ranks_of_a_sequence(run, self, *arguments):
    out = run(self, *arguments)
    factor = self.plan.mesh.count_ranks(self.plan.loss_layout["length"])
    return {n: x * factor if n == "loss" else x for n, x in out.items()}


def ranks_before(ops, parameter) -> int:
    """Return over how many ranks the product was summed to which a bias is added."""
    planned = ops.plan.operations.get(("project", parameter.removesuffix("_bias"))) if parameter.endswith(OUT) else None
    outputs = [e.output for g in (planned.groups if planned else ()) for e in g.einsums]
    return max([1, *(ops.plan.mesh.count_ranks(s.axes) for c in outputs for s in c.forward if s.op == "all_reduce")])


@mutant(ShiftOp, "run_on_blocks")
def bias_added_by_every_rank(run, self, ops, planned, x, spec, parameter, *more):
    return run(self, ops, planned, x, spec, parameter * ranks_before(ops, planned.operation.name), *more)


@mutant(ShiftOp, "run_on_blocks")
def gradient_of_a_share_of_the_bias(run, self, ops, planned, x, spec, parameter, *more):
    share = parameter / ranks_before(ops, planned.operation.name)
    return run(self, ops, planned, x, spec, share + (parameter - share).detach(), *more)


@mutant(Plan, "master_split_axes")
def norm_of_the_first_sinks(split_over, self, p):
    return () if p.name.endswith("attention.sink") else split_over(self, p)


@mutant(Plan, "master_split_axes")
def norm_over_one_axis_of_two(split_over, self, p):
    return split_over(self, p)[:1]


@mutant(Plan, "master_split_axes")
def norm_counts_replicas(split_over, self, p):
    others = [a for a, n in self.mesh.axes.items() if n > 1 and a not in ("stage", "data", *self.layout(p).only)]
    return (*split_over(self, p), *others) if p.role == "vector" else split_over(self, p)


@mutant(ParallelOps, "row_widths")
def rows_as_wide_as_this_rank_s(widths, ops, *arguments):
    sizes = widths(ops, *arguments)
    return [sizes[ops.communicator.group_index(arguments[-1])]] * len(sizes)


@mutant(communicator, "drop_block_padding")
def blocks_as_long_as_of_the_last_rank(closed, x, dim, parts):
    return closed(x, dim, parts._replace(extents=parts.extents[::-1]))


@mutant(step_collectives, "counts_gradient")
def norm_counts_tied_copies(counts, plan, at, p):
    return counts(plan, at, p) or (
        p.name in plan.stages_of_tied_parameters and step_collectives.counts_at(at, plan.master_split_axes(p))
    )


@mutant(trainer, "sum_tied_gradients")
def tied_copies_on_their_own(sum_tied, *arguments):
    return None


@mutant(FlatBucket, "gradient_memory")
def last_microbatch_alone(sum_of, self, *names):
    return sum_of(self, *names)[0], True


@mutant(ParallelOps, "random_drawing")
def masks_of_the_first_block(drawing, self, name, spec, device, *more, **rate):
    extents = dict(zip(spec.dims, (n for _, n in self.blocks[spec]), strict=True))
    self.block_stretches, self._counters = lambda _, dim: [Stretch(0, extents[dim])], {}
    try:
        return drawing(self, name, spec, device, *more, **rate)
    finally:
        del self.block_stretches


def another_mask_in_the_backward_pass(patch: MonkeyPatch) -> None:
    def backward(ctx, gradient):
        counters, start, rate = ctx.drawing
        return ctx.draw(gradient, counters, start + 1, rate), None, None

    patch.setattr(residual._Dropout, "backward", staticmethod(backward))


@mutant(RankTrainingState, "restore_checkpoint")
def moments_dropped(restore, self, *arguments, **more):
    restore(self, *arguments, **more)
    for moments in self._trainer.optimizer.state.values():
        for value in moments.values():
            if torch.is_tensor(value) and value.dim():
                value.zero_()


@mutant(StagePasses, "load_input_blocks")
def samples_by_replica(load, self, split, first, end=None, chunk=None):
    return load(self, split, first + (split == "train" and self.plan.num_replicas == 3), end, chunk)


@mutant(panels, "merge_attention")
def merged_without_the_maximum(merge, out, lse, other, of_other):
    mine, others = lse.exp(), of_other.exp()
    out.lerp_(other, (others / (mine + others)).nan_to_num_(0).unsqueeze(-1))
    lse.copy_((mine + others).log())


@mutant(panels, "pair_queries_with_keys")
def keys_of_the_next_rank_s_positions(pairs, queries, keys, *arguments):
    return pairs(queries, [key._replace(first=key.first + key.size) for key in keys], *arguments)


def _kept(which: str) -> Mutant:
    """A mutant in which messages of a ring of one name are sent, but their sender goes on with its own."""

    @mutant(Communicator, "launch")
    def kept(launch, self, op, x, axes, *arguments, name="", **more):
        handle = launch(self, op, x, axes, *arguments, name=name, **more)
        return (handle.wait(), ArrivedCollective(x))[1] if name == which else handle

    return kept


own_keys_in_the_backward_pass = _kept(panels.AGAIN)
gradients_of_keys_where_they_are_made = _kept(panels.GRADIENTS)


@mutant(Communicator, "sum_numbers")
def labels_ahead_of_a_rank(summed, rank, numbers):
    """Of a rank's share of the samples, as if all had as many: the ratio to the labels of the head is another."""
    return [*summed(rank, numbers)[:1], *(rank.mesh.world_size * n for n in numbers[1:])]
