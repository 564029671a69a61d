"""Loss of labels by what a teacher says of them: the Kullback-Leibler divergence between the probabilities of two
models, over the classes that the teacher ranks highest, and all others as one more.

A teacher's classes and their log-probabilities are known. The model's follow from its logits, whose columns axes may
split: only their log-sum-exp and the logits of these classes are communicated. The gradient by logit
y_v, at temperature T, is then (slope_v - softmax(y / T)_v sum of slopes) / T, where v has a slope if it is a class of
the teacher's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from platform.runtime.communicator import Communicator
from platform.runtime.statistics import widen_dtype

_MOST_LOG = -1e-7  # of all known classes together, so that the others have a probability (as in trl)


@dataclass(frozen=True)
class Distillation:
    """Loss of a label: `label` times its cross-entropy, and `teacher` times the divergence of the probabilities of both
    models at a `temperature`: KL(teacher, model) or, if `reverse`, KL(model, teacher). `measures`: it is the loss in
    evaluations too."""

    label: float
    teacher: float
    temperature: float
    reverse: bool
    measures: bool = False

    def sum_divergence(self, teacher: Tensor, model: Tensor) -> Tensor:
        """Return the divergence by label from log-probabilities [rows, classes] of a teacher and of a model."""
        of, other = (model, teacher) if self.reverse else (teacher, model)
        return (of.exp() * (of - other)).sum(1)


@dataclass(frozen=True)
class VocabularyColumns:
    """Columns of logits that a rank has of all `vocab`, which axes `over` split: those from `first` on. `teacher`:
    weights of a teacher's classes in the loss of these logits."""

    over: tuple[str, ...]
    first: int
    vocab: int
    teacher: Distillation | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Divergences:
    """Divergences of a model from its teacher by label, times their weight: `losses` [rows], and what their gradient is
    made of. By row: `log_sum_exp` of logits / `temperature`, and of each class its `column` here, whether it `is_here`,
    and its slope."""

    losses: Tensor
    temperature: float
    log_sum_exp: Tensor
    column: Tensor
    is_here: Tensor
    slope: Tensor

    def compute_gradient(self, logits: Tensor, at: slice, factor: Tensor) -> Tensor:
        """Return the gradient of the teacher's divergences in the rows `at`, times a `factor` by row, by `logits`."""
        gradient = (widen_dtype(logits) / self.temperature - self.log_sum_exp[at].unsqueeze(1)).exp_()
        if not logits.shape[1]:
            return gradient
        slope = self.slope[at] * (factor / self.temperature).unsqueeze(1)
        gradient *= -slope.sum(1, keepdim=True)
        return gradient.scatter_add_(1, self.column[at], slope.where(self.is_here[at], 0.0))


def _append_rest(logs: Tensor, vocab: int) -> Tensor:
    """Return log-probabilities [rows, classes] of a teacher's classes and, last, of all others as one class."""
    if logs.shape[1] == vocab:
        return logs
    known = logs.logsumexp(1, keepdim=True).clamp(max=_MOST_LOG)
    return torch.cat((logs, (-torch.expm1(known)).log()), 1)


def _gather_class_statistics(logits: Tensor, column: Tensor, is_here: Tensor, temperature: float) -> Tensor:
    """Return of each row of logits / temperature the log-sum-exp, and a teacher's classes: [1 + classes, rows]."""
    wide = widen_dtype(logits) / temperature
    if not wide.shape[1]:  # a block of nothing but padding
        return torch.cat((wide.new_full((1, len(wide)), -torch.inf), wide.new_zeros(column.shape).t()))
    return torch.cat((wide.logsumexp(1).unsqueeze(0), wide.gather(1, column).where(is_here, 0.0).t()))


def measure_divergences(
    logits: Tensor,
    classes: Tensor,
    chunks: Sequence[slice],
    communicator: Communicator,
    columns: VocabularyColumns,
    with_gradient: bool,
) -> Divergences:
    """Measure the divergence of the model with these `logits` [rows, columns] from its teacher by label. `classes`
    [rows, 2 classes]: the teacher's likeliest, and then their log-probabilities; `chunks`: rows that are read at once.
    """
    assert columns.teacher
    temperature, (ids, logs) = columns.teacher.temperature, classes.chunk(2, 1)
    column = ids.long() - columns.first
    is_here = (column >= 0) & (column < logits.shape[1])
    column = column.clamp(0, max(logits.shape[1] - 1, 0))
    parts = [_gather_class_statistics(logits[at], column[at], is_here[at], temperature) for at in chunks]
    statistics = torch.cat(parts, 1)
    if columns.over:
        top = communicator.launch("all_reduce", statistics[0], columns.over, reduce="max").wait()
        sums = torch.cat(((statistics[:1] - top).exp(), statistics[1:]))
        sums = communicator.launch("all_reduce", sums, columns.over, owned=True).wait()
        statistics = torch.cat(((top + sums[0].log()).unsqueeze(0), sums[1:]))
    model = (statistics[1:] - statistics[0]).t().detach().requires_grad_(with_gradient)
    with torch.set_grad_enabled(with_gradient):
        teacher_logs, model_logs = (_append_rest(x, columns.vocab) for x in (logs.to(model.dtype), model))
        losses = columns.teacher.teacher * columns.teacher.sum_divergence(teacher_logs, model_logs)
    slope = torch.autograd.grad(losses, model, torch.ones_like(losses))[0] if with_gradient else model
    return Divergences(losses.detach(), temperature, statistics[0], column, is_here, slope)
