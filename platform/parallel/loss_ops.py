"""The losses among the `Ops` of run time, on one rank's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from platform.parallel.communicator.base import Communicator
from platform.parallel.kernels import loss, statistics
from platform.parallel.kernels.einsum import Deferred
from platform.parallel.sharding.convert import Pending, absent, apply
from platform.parallel.sharding.operands import Operands
from platform.plan.communication.loss_chunks import gradients_at_once
from platform.plan.communication.planned import PlannedOperation
from platform.plan.core.ahead import Ahead
from platform.plan.core.plan import Plan
from platform.plan.language.ops import Ops, Spec


@dataclass
class PassPosition:
    """Place of a forward pass in the run: all that dropout masks depend on besides the operation's name and the global
    element. `masks`: what its layers share, made as they ask."""

    seed: int = 0
    step: int = 0
    first_sequence: int = 0  # index in the global batch of the first sequence of this microbatch (of all replicas)
    training: bool = True
    masks: dict[tuple, Tensor] = field(default_factory=dict)


class LossOps(Ops):
    """Executes a plan's losses on the rank of `communicator`; `platform.parallel.parallel_ops.ParallelOps` adds the
    other operations. `deferred`: collects weight gradient computations that a schedule runs later, if not None.
    `losses`: what a plan may name in place of cross-entropy; `label_weights`: of the pass, by operation."""

    plan: Plan
    communicator: Communicator
    tensors: Mapping[str, Tensor]
    position: PassPosition
    deferred: Deferred | None
    ahead: Ahead[Pending]  # conversions of parameters
    losses: Mapping[str, loss.TokenLoss | None]
    label_weights: Mapping[tuple[str, str], Tensor]
    _blocks: Mapping[Spec, Sequence[tuple[int, int]]]  # activation -> (offset, extent) per dim of this rank's block

    def _planned(self, kind: str, name: str) -> PlannedOperation:
        """Return the plan's entry of the model operation `name` of `kind`, such as ("lookup", "embedding")."""
        return self.plan.operations[kind, name]

    def _coming(self, planned: PlannedOperation, number: int) -> Operands:
        """Return the operands of a planned operation's group of einsums on their way."""
        use, group = (planned.operation.kind, planned.operation.name, number), planned.groups[number]
        ahead = use in self.ahead and not torch.compiler.is_compiling()
        return Operands(self.communicator, group, self.ahead, use) if ahead else Operands(self.communicator, group)

    def _converted(self, planned: PlannedOperation) -> list[Tensor]:
        """Return the parameters of a planned operation without einsums, converted for it."""
        operation = planned.operation
        use, parameters = (operation.kind, operation.name, 0), operation.parameters
        ahead = use in self.ahead and not torch.compiler.is_compiling()
        coming = self.ahead.take(use) if ahead else [None] * len(parameters)
        triples = zip(parameters, planned.conversions, coming, strict=False)
        return [apply(self.communicator, self.tensors[p.name], conversion, c) for p, conversion, c in triples]

    def linear_cross_entropy(self, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        product, planned = self._planned("project", table.name), self._planned("cross_entropy", name)
        if product.groups[0].panels:  # SUMMA never has a whole operand: it multiplies, the loss follows
            return super().linear_cross_entropy(name, x, x_spec, table, spec, labels, smoothing, bias)
        *rows, columns = self.plan.local_shape(spec)
        wide = statistics.widened(x).dtype == x.dtype
        return loss.linear_cross_entropy(
            x,
            self.tensors[table.name],
            self._converted(self._planned("shift", bias.name))[0] if bias else None,
            self._targets(planned, labels),
            self._coming(product, 0),
            self._classes(planned, spec, smoothing),
            at_once=not absent(x) and gradients_at_once(product, planned, prod(rows), columns, x.shape[-1], wide),
            deferred=self.deferred,
        )

    def cross_entropy(self, name, logits, spec, labels, smoothing=0.0):
        planned = self._planned("cross_entropy", name)
        if absent(logits):
            return logits.sum()
        targets, classes = self._targets(planned, labels), self._classes(planned, spec, smoothing)
        return loss.cross_entropy(logits, targets, self.communicator, classes)

    def _targets(self, planned: PlannedOperation, labels: Mapping[tuple[str, str], Tensor]) -> loss.Targets:
        """Return what a planned cross_entropy operation is to predict, by `labels`; weights are for training."""
        use = planned.operation.kind, planned.operation.name
        weights = self.label_weights.get(use) if self.position.training else None
        return loss.Targets(labels[use].flatten(), None if weights is None else weights.flatten())

    def _classes(self, planned: PlannedOperation, spec: Spec, smoothing: float) -> loss.Classes:
        """Return the classes of a planned cross_entropy operation of the logits `spec`; smoothing is for training, and
        so is a loss that takes the place of cross-entropy."""
        first, _ = self._blocks[spec][spec.dims.index("vocab")]
        vocab = self.plan.sizes["vocab"]
        if not self.position.training:
            return loss.Classes(planned.over, first, vocab)
        return loss.Classes(planned.over, first, vocab, smoothing, self.losses[planned.operation["loss"]])

    def squared_error(self, name, y, target, spec, ids):
        padding = ids["squared_error", name] < 0
        error = statistics.widened(y) - statistics.widened(target.detach())
        if not absent(y):
            kept = [d for d in spec.dims if d in ("length", "batch")]
            rows = padding if kept == ["length", "batch"] else padding.t()
            shape = dict(zip(spec.dims, y.shape, strict=True))
            error = error.masked_fill(rows.reshape([shape[d] if d in kept else 1 for d in spec.dims]), 0)
        return error.square().double().sum() / 2
