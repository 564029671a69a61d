"""Losses and feed-forward layers, chunk by chunk of tokens, so that the widest tensors exist one chunk at a time.

Losses are over a vocab that may be split over ranks: of given logits (`cross_entropy`), or of a product that makes them
(`linear_cross_entropy`). Logits are never gathered, and are in the type of statistics only one chunk at a time. A loss
is cross-entropy, or any function of three numbers per label (`Likelihood`), which all ranks have in common. Its
gradient by logit y_v is then whole * softmax(y)_v + every, and at the label + label (`LogitDerivatives`). A loss of
pairs of answers (`LossOfPairs`) is a function of sums over the labels of both.

`TwoLayerWeights` are the two products of a feed-forward layer with a function between them; `compute_by_chunks`
computes the hidden rows again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from platform.plan.operation_plan import loss_chunk_rows
from platform.runtime.communicator import ArrivedCollective, Communicator
from platform.runtime.conversion import convert, is_absent_block
from platform.runtime.einsum import Deferred
from platform.runtime.products import add_product, local_einsum_function
from platform.runtime.residency import Operands
from platform.runtime.residual import Region
from platform.runtime.statistics import (
    AddPart,
    add_gradient,
    add_local_gradient_sum,
    can_accumulate,
    cap_softly,
    compute_and_add_gradient,
    open_gradient_adder,
    slope_of_cap,
    widen_dtype,
)
from platform.runtime.teacher_loss import VocabularyColumns, measure_divergences
from platform.runtime.traced_collectives import read_again


@dataclass(frozen=True)
class Likelihood:
    """Statements of a model about labels, of which a loss is a function: three tensors of one number per label."""

    log_probability: Tensor  # of the label
    log_sum_exp: Tensor  # of all logits
    mean_log_probability: Tensor  # over vocab


TokenLoss = Callable[[Likelihood], Tensor]  # one number per label, each a function of this label's numbers alone


@dataclass(frozen=True)
class AnswerSums:
    """Sums over the labels of answers, of which a loss of pairs is a function: tensors of one number per answer."""

    log_probability: Tensor
    reference: Tensor  # log-probability that the reference model gives the answer
    labels: Tensor  # their number


PairLoss = Callable[[AnswerSums, AnswerSums], Tensor]  # of chosen and rejected answers: one number per pair


@dataclass(frozen=True)
class LossOfPairs:
    """Loss of pairs of answers: `loss` of each pair; `axes`: mesh axes that split a sequence's tokens, over which the
    sums of its answers are added up; `slots`: answers that a sequence is planned for (`answer_slots`)."""

    loss: PairLoss
    axes: tuple[str, ...]
    slots: int


@dataclass(frozen=True)
class LogitDerivatives:
    """Derivatives of losses, per label, that make up their gradients by logits: a factor of all probabilities (None:
    1), a summand at the label, and a summand everywhere (None: 0)."""

    whole: Tensor | None
    label: Tensor | float
    every: Tensor | float | None

    def multiply_by_weights(self, weights: Tensor) -> LogitDerivatives:
        """Return the logits' derivatives for losses multiplied by `weights`, one number per label."""
        every = None if self.every is None else self.every * weights
        return LogitDerivatives(weights if self.whole is None else self.whole * weights, self.label * weights, every)


@dataclass(frozen=True)
class LossClasses(VocabularyColumns):
    """Columns of the logits among which a token's label is one: `vocab` in all, split over the axes `over`, of which
    this rank has those from `first` on; its further columns are padding. `smoothing`: the share of the target that is
    spread evenly over vocab; `loss`: a loss in place of cross-entropy, without smoothing; `region`: wrapper that
    compiles a function (`platform.runtime.compilation.compile_region`), None: all run eagerly, on a chunk of rows at a
    time; `pairs`: a loss of pairs of answers in place of cross-entropy; `teacher`: weights of a teacher's classes;
    `cap`: soft cap of the logits, 0: none."""

    smoothing: float = 0.0
    loss: TokenLoss | None = None
    region: Region | None = None
    pairs: LossOfPairs | None = None
    cap: float = 0.0

    @property
    def needs_logit_sums(self) -> bool:
        """Return True if the loss, for its label smoothing or a user's function, needs each token's sum of logits."""
        return self.loss is not None or self.smoothing > 0


@dataclass(frozen=True)
class Targets:
    """Labels of tokens, int64 [rows], of which -1 does not count; and what the others count, [rows], None: 1. Of pairs
    of answers also: the number of each label's answer in its sequence, int64 [rows], and what it adds to the answer's
    reference log-probability, [rows]. `batch`: sequences, of which each has a token in so many rows in turn. `classes`
    [rows, 2 classes]: the likeliest ones of a teacher, then their log-probabilities."""

    labels: Tensor
    weights: Tensor | None = None
    answers: Tensor | None = None
    references: Tensor | None = None
    batch: int = 1
    classes: Tensor | None = None

    def __getitem__(self, rows: slice) -> Targets:
        """Return the labels, weights and classes of the tokens `rows`, of a loss without pairs."""
        weights, classes = (x if x is None else x[rows] for x in (self.weights, self.classes))
        return Targets(self.labels[rows], weights, classes=classes)


def _row_statistics(logits: Tensor, label_column: Tensor, with_sums: bool) -> Tensor:
    """Compute the statistics of the loss per row of the logits [rows, columns]: log-sum-exp, the logit at
    `label_column` [rows, 1] and, with `with_sums`, the sum; stacked [2 or 3, rows], in the type of statistics."""
    wide = widen_dtype(logits)
    if not wide.shape[1]:  # a block of nothing but padding
        nothing = wide.new_zeros(1 + with_sums, len(wide))
        return torch.cat((wide.new_full((1, len(wide)), -torch.inf), nothing))
    logs = torch.log_softmax(wide, -1)
    target = wide.gather(1, label_column)
    row_numbers = [(target - logs.gather(1, label_column)).squeeze(1), target.squeeze(1)]
    return torch.stack([*row_numbers, wide.sum(1)] if with_sums else row_numbers)


def _differentiate_compiled(
    logits: Tensor,
    shift: Tensor,
    column: Tensor,
    added_at_label: Tensor,
    probability_factor: Tensor | None,
    added_everywhere: Tensor | None,
    cap: float,
) -> None:
    """Replace `logits` by the loss's gradient as `_overwrite_logits_with_gradient` does, in one kernel if compiled."""
    exponential = (widen_dtype(logits) - shift).exp()
    p = exponential if probability_factor is None else exponential * probability_factor
    target = torch.arange(logits.shape[1], device=logits.device) == column
    gradient = torch.where(target, p + added_at_label, p if added_everywhere is None else p + added_everywhere)
    logits.copy_(gradient * (1 - (widen_dtype(logits) / cap).square()) if cap else gradient)


def _all_reduce_loss_statistics(
    statistics: Tensor, has_label: Tensor, communicator: Communicator, over: Sequence[str]
) -> Tensor:
    """Merge the statistics of the loss [2 or 3, rows], as `_row_statistics` gives them, of the ranks along the axes
    `over`, which split the vocabulary, by two all-reduces; `has_label` [rows]: True where this rank has the label's
    column."""
    top = communicator.launch("all_reduce", statistics[0], over, reduce="max").wait()
    sums = torch.stack(((statistics[0] - top).exp(), statistics[1].where(has_label, 0.0), *statistics[2:]))
    sums = communicator.launch("all_reduce", sums, over, owned=True).wait()
    return torch.cat(((top + sums[0].log())[None], sums[1:]))


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield slices that divide the rows of `logits`, a token each, into chunks for the loss."""
    rows, columns = logits.shape
    size = loss_chunk_rows(rows, columns)
    return (slice(i, i + size) for i in range(0, rows, size))


def _compute_token_losses(
    statistics: Tensor, classes: LossClasses, with_derivatives: bool
) -> tuple[Tensor, LogitDerivatives]:
    """Compute the loss of each token, a row of logits: [rows], from `statistics`, the rows' statistics
    (`_row_statistics`) over the whole vocab; and, with `with_derivatives`, the loss's derivatives by the logits as
    `LogitDerivatives`."""
    (logsumexp, target), smoothing, vocab = statistics[:2], classes.smoothing, classes.vocab
    if not classes.loss:
        losses = logsumexp - (1 - smoothing) * target
        if smoothing:
            losses = losses - smoothing / vocab * statistics[2]
        return losses, LogitDerivatives(None, smoothing - 1, -smoothing / vocab if smoothing else None)
    terms = target - logsumexp, logsumexp, statistics[2] / vocab - logsumexp
    likelihoods = [x.detach().requires_grad_(with_derivatives) for x in terms]
    with torch.set_grad_enabled(with_derivatives):
        losses = classes.loss(Likelihood(*likelihoods))
    if not with_derivatives:
        return losses, LogitDerivatives(None, 0.0, None)
    ones = torch.ones_like(losses)
    label, whole, mean = torch.autograd.grad(losses, likelihoods, ones, allow_unused=True, materialize_grads=True)
    return losses.detach(), LogitDerivatives(whole - label - mean, label, mean / vocab)


def _compute_pair_losses(
    statistics: Tensor, targets: Targets, communicator: Communicator, pairs: LossOfPairs, with_derivatives: bool
) -> tuple[Tensor, LogitDerivatives]:
    """Compute of each label, a row of `statistics` as in `_compute_token_losses`, the loss of the pair whose answer it
    belongs to, [rows], and that loss's derivatives by the logits of the row. An answer's labels are added up in fp64,
    over all ranks that have some of its tokens."""
    assert targets.answers is not None and targets.references is not None
    batch, counts = targets.batch, targets.labels >= 0
    sequence = torch.arange(len(counts), device=counts.device) % batch
    slot = (targets.answers + sequence * pairs.slots).where(counts, 0)
    numbers = torch.stack((statistics[1] - statistics[0], targets.references, counts)).double().where(counts, 0.0)
    rows = torch.arange(len(numbers), device=slot.device).unsqueeze(1)
    sums = numbers.new_zeros(len(numbers), batch * pairs.slots).index_put_((rows, slot), numbers, accumulate=True)
    if pairs.axes:
        sums = communicator.launch("all_reduce", sums, pairs.axes, owned=True).wait()
    sides = sums.view(len(numbers), -1, 2).unbind(-1)
    is_pair = (sides[0][2] > 0) & (sides[1][2] > 0)
    logs = [side[0].where(is_pair, -1.0).requires_grad_(with_derivatives) for side in sides]  # a number where is none
    chosen, rejected = (AnswerSums(log, s[1], s[2].clamp(min=1.0)) for log, s in zip(logs, sides, strict=True))
    with torch.set_grad_enabled(with_derivatives):
        losses = pairs.loss(chosen, rejected).where(is_pair, 0.0)
    losses_of_labels = losses.detach()[slot // 2].to(statistics.dtype)
    if not with_derivatives:
        return losses_of_labels, LogitDerivatives(None, 0.0, None)
    slopes = torch.stack(torch.autograd.grad(losses, logs, torch.ones_like(losses)), -1)
    # a pair's loss counts at each of its labels by the label's weight; its gradient is whole at each
    by_label = -slopes.flatten()[slot].to(statistics.dtype)
    return losses_of_labels, LogitDerivatives(None, -1.0, None).multiply_by_weights(by_label)


def compute_loss_and_gradient(
    logits: Tensor, targets: Targets, communicator: Communicator, classes: LossClasses, with_gradient: bool
) -> Tensor:
    """Return the sum of the loss, -log softmax(logits)[label] or `classes.loss`, over this rank's tokens as an fp64
    scalar; with `with_gradient`, replace the logits [rows, columns] by the gradient of that sum; a cap replaces them
    anyway. Rows with the label -1 do not count."""
    real = min(max(classes.vocab - classes.first, 0), logits.shape[1])  # columns that are not padding
    labels, known = targets.labels, logits[:, :real]
    column = labels - classes.first
    mine = (column >= 0) & (column < real)
    column = column.clamp(0, max(real - 1, 0)).unsqueeze(1)
    statistics, differentiate, chunks = _row_statistics, _overwrite_logits_with_gradient, list(_row_chunks(logits))
    if classes.region and real and not classes.teacher:  # nothing in the type of statistics is kept: all rows at once
        statistics, differentiate = classes.region(_row_statistics), classes.region(_differentiate_compiled)
        chunks = [slice(None)]
    for at in chunks:
        cap_softly(known[at], classes.cap)
    merged_statistics = torch.cat([statistics(known[at], column[at], classes.needs_logit_sums) for at in chunks], 1)
    if classes.over:
        merged_statistics = _all_reduce_loss_statistics(merged_statistics, mine, communicator, classes.over)
    if classes.pairs:
        pairs = classes.pairs
        losses, derivatives = _compute_pair_losses(merged_statistics, targets, communicator, pairs, with_gradient)
    else:
        losses, derivatives = _compute_token_losses(merged_statistics, classes, with_gradient)
    counts, divergences = labels >= 0, None
    if (teacher := classes.teacher) and targets.classes is not None:
        divergences = measure_divergences(known, targets.classes, chunks, communicator, classes, with_gradient)
        losses = teacher.label * losses + divergences.losses
        derivatives = derivatives.multiply_by_weights(torch.full_like(losses, teacher.label))
    if targets.weights is not None:
        weights = targets.weights.to(losses.dtype)
        losses = losses * weights
        derivatives = derivatives if classes.pairs else derivatives.multiply_by_weights(weights)
    if with_gradient:
        logits[:, real:] = 0

        def mask_uncounted_rows(derivative: Tensor | float, where: Tensor = counts) -> Tensor:
            """Return `derivative` in the rows of logits that count in the loss, 0 elsewhere, as a column."""
            return torch.where(where, derivative, merged_statistics.new_zeros(())).unsqueeze(1)

        shift = merged_statistics[0].where(counts, torch.inf).unsqueeze(1)  # rows that do not count get the gradient 0
        whole = None if derivatives.whole is None else mask_uncounted_rows(derivatives.whole)
        every = None if derivatives.every is None else mask_uncounted_rows(derivatives.every)
        share = mask_uncounted_rows(derivatives.label, mine & counts)
        share = share if every is None else share + every
        if divergences:
            row_weights = (torch.ones_like(losses) if targets.weights is None else weights).where(counts, 0.0)
        for at in chunks:
            factor, added = (x if x is None else x[at] for x in (whole, every))
            more = divergences.compute_gradient(known[at], at, row_weights[at]) if divergences else None
            if more is not None and classes.cap:
                more *= slope_of_cap(known[at].to(more.dtype, copy=True), classes.cap)
            differentiate(known[at], shift[at], column[at], share[at], factor, added, classes.cap)
            if more is not None:
                known[at] += more
    return losses.where(counts, 0.0).double().sum()


def _overwrite_logits_with_gradient(
    logits: Tensor,
    shift: Tensor,
    column: Tensor,
    added_at_label: Tensor,
    probability_factor: Tensor | None,
    added_everywhere: Tensor | None,
    cap: float,
) -> None:
    """Replace `logits` [rows, columns] by the gradient of the loss: p = whole * exp(logits - shift) + every, and at the
    label's `column` p - every + share; times the slope of their soft `cap`. The other tensors are [rows, 1], in the
    type of statistics, in which it is computed."""
    if not logits.shape[1]:
        return
    slope = slope_of_cap(logits.to(shift.dtype, copy=True), cap) if cap else None
    target = (logits.gather(1, column) - shift).exp()
    target = (target if probability_factor is None else target * probability_factor) + added_at_label
    gradient = (logits.sub_(shift) if logits.dtype == shift.dtype else logits - shift).exp_()
    if probability_factor is not None:
        gradient *= probability_factor
    if added_everywhere is not None:
        gradient += added_everywhere
    gradient.scatter_(1, column, target)
    if slope is not None:
        gradient *= slope
    if gradient is not logits:
        logits.copy_(gradient)


class _CrossEntropy(torch.autograd.Function):
    """Loss of given logits [rows, columns], which it leaves as they are, see `cross_entropy`."""

    @staticmethod
    def forward(ctx, logits, targets, communicator, classes):
        """Return the summed loss of the logits, computing their gradient at the same time, which is saved."""
        gradient = logits.clone()
        ctx.save_for_backward(gradient)
        return compute_loss_and_gradient(gradient, targets, communicator, classes, True)

    @staticmethod
    def backward(ctx, dloss):
        """Return the gradient of the logits, saved in the forward pass, times the loss's."""
        (gradient,) = ctx.saved_tensors
        return gradient * dloss, None, None, None


def cross_entropy(logits: Tensor, targets: Targets, communicator: Communicator, classes: LossClasses) -> Tensor:
    """Return the sum of the local tokens' losses, an fp64 scalar: -log softmax(logits)[label], or another that
    `classes` names with its label smoothing. `logits`: this rank's columns of the vocabulary, [..., columns], with as
    many rows as `targets`, never gathered; tokens with label -1 do not count."""
    logits = logits.flatten(0, -2)
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(logits, targets, communicator, classes)
    logits = logits.clone() if classes.cap else logits
    return compute_loss_and_gradient(logits, targets, communicator, classes, False)


class _AtOnce(torch.autograd.Function):
    """Loss of x [rows, width] times `table` [columns, width] plus `bias` [columns], if there is one, whose
    gradients its forward pass computes with it, chunk by chunk, for a loss whose own gradient is 1."""

    @staticmethod
    def forward(ctx, x, table, bias, targets, communicator, classes):
        """Return the loss of x times the vocabulary table, chunk by chunk, and save the gradients of all."""
        wide = torch.empty_like(table, dtype=widen_dtype(table[:0]).dtype) if ctx.needs_input_grad[1] else None
        gradients = torch.empty_like(x), wide, None if bias is None else torch.zeros_like(bias)
        ctx.leaf = table if can_accumulate(table) else None
        ctx.save_for_backward(*gradients)
        return _compute_loss_by_chunks(x, table, bias, targets, communicator, classes, gradients)

    @staticmethod
    def backward(ctx, dloss):
        """Return the gradients of x, table and bias, saved in the forward pass, times the loss's."""
        dx, dtable, dbias = ctx.saved_tensors
        if dbias is not None:
            dbias = dbias.mul_(dloss)
        if dtable is None or ctx.leaf is None:
            dtable = dtable if dtable is None else dtable.mul_(dloss).to(dx.dtype)
            return dx.mul_(dloss), dtable, dbias, None, None, None
        compute_and_add_gradient(ctx.leaf, partial(_add_scaled_gradient, dtable, dloss.to(dtable.dtype)))
        return dx.mul_(dloss), None, dbias, None, None, None


def _add_scaled_gradient(gradient: Tensor, factor: Tensor, into: Tensor | None, fresh: bool) -> Tensor:
    """Add gradient * factor to `into`, or overwrite it if `fresh`, in one pass over the vocabulary table."""
    if into is None or fresh:
        return torch.mul(gradient, factor, out=into)
    return into.addcmul_(gradient, factor)


def _compute_loss_by_chunks(
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Targets,
    communicator: Communicator,
    classes: LossClasses,
    gradients: tuple[Tensor, Tensor | None, Tensor | None] | None,
) -> Tensor:
    """Return the loss of x [rows, width] times `table` [columns, width] plus `bias` [columns] against `targets` [rows],
    and fill `gradients`, shaped as these, with its gradients (the bias's is added to zeros; None: unwanted). One chunk
    of the logits exists at a time."""
    size = loss_chunk_rows(len(x), len(table))
    logits = x.new_empty(size, len(table))
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for i in range(0, len(x), size):
        chunk, at = x[i : i + size], slice(i, i + size)
        y = torch.mm(chunk, table.t(), out=logits[: len(chunk)])
        if bias is not None:
            y += bias
        total += compute_loss_and_gradient(y, targets[at], communicator, classes, gradients is not None)
        if gradients:
            dx, dtable, dbias = gradients
            torch.mm(y, table, out=dx[at])
            if dtable is not None:
                add_product(dtable, y.t(), chunk, i == 0)
            if dbias is not None:
                dbias += y.sum(0)
    return total


def _compute_logits(
    x: Tensor, table: Tensor, bias: Tensor | None, operand_conversions: Operands
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute this rank's logits: the planned product of x and the vocabulary `table`, which `operand_conversions`
    gathers, plus `bias`. Returns x and table as converted, and the logits in new memory."""
    communicator, group, (e,) = (
        operand_conversions.communicator,
        operand_conversions.group,
        operand_conversions.group.einsums,
    )
    (arriving,) = operand_conversions.start_conversions([table])
    converted_x = convert(communicator, x, group.x.forward).wait()
    converted_table = arriving.wait()
    operand_conversions.start_next_conversions()
    product = local_einsum_function(e.x_dims, e.dims, e.out_dims)(converted_x, converted_table)
    y = convert(communicator, product, e.output.forward, owned=True).wait().contiguous()
    if bias is not None and not is_absent_block(y):
        y += bias
    return converted_x, converted_table, y


class _Kept(torch.autograd.Function):
    """Loss of a planned product of x and `table`, plus `bias`, whose gradient of the logits takes their place until the
    backward pass. `deferred`: see `platform.runtime.einsum`."""

    @staticmethod
    def forward(ctx, x, table, bias, targets, coming: Operands, classes, deferred: Deferred | None):
        """Return the loss of x's product with the vocabulary table, saving the gradient of the logits."""
        communicator, group, (e,) = coming.communicator, coming.group, coming.group.einsums
        converted_x, converted_table, y = _compute_logits(x, table, bias, coming)
        ctx.biased = bias if bias is None else bias.shape
        ctx.coming, ctx.deferred = coming, deferred
        ctx.leaf = table if can_accumulate(table) else None
        kept = None if e.frozen else x if group.regathered else converted_x
        ctx.save_for_backward(kept, table if e.regathered else converted_table, y)
        if is_absent_block(y):
            return y.double().sum()
        return compute_loss_and_gradient(y.view(-1, y.shape[-1]), targets, communicator, classes, True)

    @staticmethod
    def backward(ctx, dloss):
        """Return the gradients of x, table and bias from the saved gradient of the logits, or defer the table's."""
        x, table, y = ctx.saved_tensors
        communicator, group, (e,) = ctx.coming.communicator, ctx.coming.group, ctx.coming.group.einsums
        coming = convert(communicator, y, e.output.backward)
        (operand,) = ctx.coming.start_conversions([table], in_backward=True)
        again = convert(communicator, x, group.x.forward) if group.regathered else ArrivedCollective(x)
        dbias = None
        if ctx.biased is not None:
            dbias = y.new_zeros(ctx.biased) if is_absent_block(y) else y.flatten(0, -2).sum(0).mul_(dloss)
        table, dy = operand.wait(), coming.wait()
        ctx.coming.start_next_conversions(in_backward=True)
        dx = local_einsum_function(e.out_dims, e.dims, e.x_dims)(dy, table).mul_(dloss)
        arriving = convert(communicator, dx, group.x.backward, owned=True)
        if e.frozen:
            return arriving.wait(), None, dbias, None, None, None, None
        x = again.wait()  # for the table's gradient alone: it comes while that of x is computed
        leaf, product = ctx.leaf, partial(local_einsum_function(e.x_dims, e.out_dims, e.dims), x * dloss, dy, None)
        if leaf is None:
            leaving = convert(communicator, product(), e.operand.backward, owned=True)
            return arriving.wait(), leaving.wait(), dbias, None, None, None, None

        @torch.no_grad()
        def add_table_gradient() -> None:
            """Compute the table's gradient, reduce it as planned, and add it to the sum of its gradients."""
            if e.operand.backward:
                add_gradient(leaf, convert(communicator, product(), e.operand.backward, owned=True).wait())
            else:
                compute_and_add_gradient(leaf, product)

        if ctx.deferred is not None:
            ctx.deferred.append(add_table_gradient)
        else:
            add_table_gradient()
        return arriving.wait(), None, dbias, None, None, None, None


def linear_cross_entropy(
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    targets: Targets,
    operand_conversions: Operands,
    classes: LossClasses,
    *,
    at_once: bool,
    deferred: Deferred | None,
) -> Tensor:
    """Sum -log softmax(x table + bias)[label] over local tokens, in fp64: the planned product of one einsum, whose
    operand `operand_conversions` brings, and the `cross_entropy` of its result plus `bias`, which is in its layout
    already. `at_once`: see `platform.plan.operation_plan`; `deferred`: see `platform.runtime.einsum`."""
    communicator, (e,) = operand_conversions.communicator, operand_conversions.group.einsums
    training = torch.is_grad_enabled()
    if at_once and deferred is None:
        x, table = x.flatten(0, -2), table if e.dims[-1] == e.x_dims[-1] else table.t()
        if training:
            return _AtOnce.apply(x, table, bias, targets, communicator, classes)
        return _compute_loss_by_chunks(x, table, bias, targets, communicator, classes, None)
    if training:
        return _Kept.apply(x, table, bias, targets, operand_conversions, classes, deferred)
    *_, y = _compute_logits(x, table, bias, operand_conversions)
    if is_absent_block(y):
        return y.double().sum()
    return compute_loss_and_gradient(y.flatten(0, -2), targets, communicator, classes, False)


@dataclass(frozen=True)
class TwoLayerWeights:
    """Weights [hidden, in] and biases (or none) of the products before `function`, and the weight [out, hidden] and the
    bias (or None) of the product after it, as local rows are multiplied by them. `chunk`: rows of a chunk."""

    function: Callable[..., Tensor]
    inner: Sequence[Tensor]
    inner_biases: Sequence[Tensor]
    outer: Tensor
    outer_bias: Tensor | None
    chunk: int

    @property
    def weights_and_biases(self) -> list[Tensor]:
        """Return all weights and biases, for autograd to see."""
        return [*self.inner, *self.inner_biases, self.outer, *([] if self.outer_bias is None else [self.outer_bias])]

    def row_chunks(self, x: Tensor) -> Iterator[slice]:
        """Yield slices that divide the rows of x."""
        return (slice(i, i + self.chunk) for i in range(0, len(x), self.chunk))

    def apply_input_weights(self, x: Tensor) -> list[Tensor]:
        """Return the products of the rows x, without a graph: the arguments of `function`, its gate last."""
        pairs = zip_longest(self.inner, self.inner_biases)
        return [F.linear(x, w.detach(), b if b is None else b.detach()) for w, b in pairs]

    def write_output_product(self, hidden: Tensor, out: Tensor) -> None:
        """Write the product of hidden rows with the outer weight, and its bias, to `out`."""
        if self.outer_bias is None:
            torch.mm(hidden, self.outer.t(), out=out)
        else:
            torch.addmm(self.outer_bias, hidden, self.outer.t(), out=out)

    def compute_chunk_gradients(
        self, x: Tensor, gradient: Tensor, dx: Tensor, gradient_adders: Sequence[AddPart]
    ) -> list[Tensor]:
        """Compute the gradients of one chunk from its rows x and the `gradient` of its results: write the gradient
        of x to `dx`, add the weights' by `gradient_adders`, one each, inner ones first; return the gradients of
        inner products."""
        *inner, outer = gradient_adders
        with torch.enable_grad():
            products = [h.requires_grad_() for h in self.apply_input_weights(x)]
            hidden = self.function(*reversed(products))
        outer(lambda into, fresh: add_product(into, gradient.t(), hidden.detach(), fresh))
        product_gradients = torch.autograd.grad(hidden, products, gradient @ self.outer)
        for i, (w, g, add) in enumerate(zip(self.inner, product_gradients, inner, strict=True)):
            torch.mm(g, w, out=dx) if i == 0 else dx.addmm_(g, w)
            add(lambda into, fresh, g=g: add_product(into, g.t(), x, fresh))  # type: ignore[misc]
        return list(product_gradients)


class _TwoLayersByChunks(torch.autograd.Function):
    """Autograd function of `TwoLayerWeights`, which saves the rows alone. It adds the gradients of weights and biases,
    which are leaves, to their sums."""

    @staticmethod
    def forward(ctx, layer: TwoLayerWeights, x: Tensor, *tensors: Tensor):
        """Return the results [rows, out] of the rows x."""
        ctx.layer = layer
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), len(layer.outer))
        for at in layer.row_chunks(x):
            layer.write_output_product(layer.function(*reversed(layer.apply_input_weights(x[at]))), out[at])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        """Return the gradient of the rows, chunk by chunk."""
        (x,), layer = ctx.saved_tensors, ctx.layer
        gradient, dx = gradient.contiguous(), torch.empty_like(x)
        with ExitStack() as stack:
            adds = [stack.enter_context(open_gradient_adder(w)) for w in (*layer.inner, layer.outer)]
            dbs = [torch.zeros_like(b) for b in layer.inner_biases]
            gradients = [gradient]
            for at in layer.row_chunks(x):
                rows = read_again(x[at], gradients[0])
                gradients = layer.compute_chunk_gradients(rows, gradient[at], dx[at], adds)
                for db, g in zip(dbs, gradients, strict=False):
                    db += g.sum(0)
        for b, db in zip(layer.inner_biases, dbs, strict=True):
            add_local_gradient_sum(b, lambda dtype, db=db: db.to(dtype))
        if layer.outer_bias is not None:
            add_local_gradient_sum(layer.outer_bias, lambda dtype: gradient.sum(0, dtype=dtype))
        return None, dx, *(None for _ in layer.weights_and_biases)


def compute_by_chunks(layer: TwoLayerWeights, x: Tensor) -> Tensor:
    """Return the results [..., out] of a layer for the rows x [..., in]."""
    rows = x.flatten(0, -2)
    return _TwoLayersByChunks.apply(layer, rows, *layer.weights_and_biases).view(*x.shape[:-1], -1)
