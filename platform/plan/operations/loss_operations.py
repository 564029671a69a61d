"""Losses: cross-entropy of logits, or what a run names in its place; a product with a table and its loss, as one; the
squared distance to a target; and losses of tokens, such as of experts' uneven load."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from platform.plan.model_types import CROSS_ENTROPY, LABEL_WEIGHTS, PAIRED, REFERENCES, TEACHER
from platform.plan.operation_plan import (
    ANSWER_SUMS,
    Collective,
    PlannedOperation,
    answer_slots,
    computes_gradients_in_forward,
    count_classes,
    is_paired,
    loss_chunk_rows,
)
from platform.plan.operations.einsums import meter_converted_group
from platform.plan.operations.op import Gradients, Op, Saved, Value, assemble_plan, token_fields


class CrossEntropyOp(Op):
    """Sum over this rank's tokens of -log softmax(logits)[label] over vocab; never gathers logits. In training the plan
    may name another loss, and weights of labels. Padding in the data tensor `labels` does not count. `smoothing`: the
    share of the target spread evenly over vocab, in training (Szegedy et al. 2016); `cap`: soft cap of the logits y,
    cap * tanh(y / cap) in their place, 0 for none."""

    memory_accesses = (9, 2)
    keeps_nothing = is_loss = True
    bias_before = "shift"

    def record_operation(self, ops, name, logits, spec, labels, smoothing=0.0, cap=0.0):
        reads, attributes = [labels, LABEL_WEIGHTS if ops.loss.weighted else None], {"loss": ops.loss.name}
        attributes |= {"cap": cap} if cap else {}
        if ops.loss.paired:
            reads, attributes = [*reads, PAIRED, REFERENCES], {**attributes, "paired": True}
        if ops.loss.classes:
            reads, attributes = [*reads, TEACHER], {**attributes, "classes": ops.loss.classes}
        return ops.record_operation(self.kind, name, [logits], [spec], [], reads, smoothing=smoothing, **attributes)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan a loss that, over a split vocab, all-reduces the maximum and then the sums of each row; it reads the
        labels, and their weights if they have any."""
        spec = operation.inputs[0]
        layout, shape = planner.layout(spec), planner.local_shape(spec)
        over = layout["vocab"]
        rows = prod(shape) // shape[spec.dims.index("vocab")]
        classes = count_classes(operation)
        needs_logit_sums = operation["loss"] != CROSS_ENTROPY and not is_paired(operation) and not classes
        sums = 3 if operation["smoothing"] or needs_logit_sums else 2
        cuts = planner.cuts_among_dims(spec, layout, [d for d in spec.dims if d != "vocab"])
        statistics = [
            *planner.statistics_collectives(over, layout.only, rows, "forward", cuts=cuts),
            *planner.statistics_collectives(over, layout.only, sums * rows, "forward", cuts=cuts),
        ]
        if classes:  # of logits at the temperature: the maximum, then the sum and the logit of each class
            for numbers in (rows, (1 + classes) * rows):
                statistics += planner.statistics_collectives(over, layout.only, numbers, "forward", cuts=cuts)
        if is_paired(operation):
            sequences, apart = rows // shape[spec.dims.index("length")], ["batch"]
            answers = ANSWER_SUMS * sequences * answer_slots(planner.tensor_sizes(spec)["length"])
            cuts, axes = planner.cuts_among_dims(spec, layout, apart), layout["length"]
            collective = Collective("all_reduce", axes, answers, "metrics", "forward", layout.only, 0, cuts)
            statistics += [collective] if axes else []
        labels = token_fields(planner, spec, layout.restrict_dims([d for d in spec.dims if d != "vocab"]))
        return assemble_plan(planner, operation, layout, statistics=statistics, over=over, **labels)

    def run_on_blocks(self, ops, name, logits, spec, labels, smoothing=0.0, cap=0.0):
        """Compute the loss of this rank's logits, of which ranks may split the vocab, summed over its tokens."""
        planned = ops.operation_plan(self.kind, name)
        if ops.absent(logits):
            return logits.sum()
        targets, classes = ops.label_targets(planned, labels), ops.logit_classes(planned, spec, smoothing)
        return ops.kernels.chunked_loss.cross_entropy(logits, targets, ops.communicator, classes)

    def meter_memory(self, ops, name, logits, spec, labels, smoothing=0.0, cap=0.0) -> Value:
        """Count the memory of the logits' gradient, made in the forward pass, and of one chunk's statistics."""
        loss = ops.tensor(1)
        if not logits.elements:
            return ops.plain(loss, [logits])
        *rows, columns = ops.plan.local_shape(spec)
        gradient = ops.new(logits.elements)
        meter_loss_statistics(ops, prod(rows), columns, count_classes(ops.operation_plan(self.kind, name).operation))
        return ops.plain(loss, [logits], (gradient,))


def meter_loss_statistics(ops, rows: int, columns: int, classes: int) -> None:
    """Count the memory that the loss of one chunk of tokens takes for the logarithms of its probabilities, and before,
    if the compute type is another, for the logits in the type of statistics; for the numbers of both models that
    a teacher's `classes` take in all `rows`, and for a gradient of a chunk."""
    elements, of_teacher = loss_chunk_rows(rows, columns) * columns, rows * classes
    kept = ops.integers(of_teacher), ops.integers(of_teacher, 1), ops.new(5 * of_teacher, ops.wide)  # noqa: F841
    more = ops.new(elements * bool(classes), ops.wide)  # noqa: F841
    wide = ops.widened(None, elements)  # noqa: F841  (until the logarithms are allocated)
    ops.new(elements, ops.wide)


class LinearCrossEntropyOp(Op):
    """The `cross_entropy` of the logits of type `spec` [... vocab] to which `project` maps the activation x
    [... d_model] by `table` [vocab, d_model] and `bias` [vocab]. It is planned as these two; computed as one, it need
    not hold all logits."""

    def compose_operation(
        self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None, cap=0.0, product=""
    ):
        """Compose the loss of a product with the vocabulary table from `project` and `cross_entropy`."""
        (logits,) = ops.project(x, x_spec, (table,), (spec,), (bias,) if bias else (), name=product)
        return ops.cross_entropy(name, logits, spec, labels, smoothing, cap)

    def run_on_blocks(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None, cap=0.0, product=""):
        """Compute the loss chunk by chunk of tokens, so that the logits are never whole, unless SUMMA multiplies."""
        planned_product = ops.operation_plan("project", product or table.name)
        planned_loss = ops.operation_plan("cross_entropy", name)
        # SUMMA never has a whole operand, and an adapter adds to the logits: they multiply, and the loss follows
        if planned_product.groups[0].panels or table.name in ops.adapters:
            return self.compose_operation(ops, name, x, x_spec, table, spec, labels, smoothing, bias, cap, product)
        *rows, columns = ops.plan.local_shape(spec)
        wide = ops.kernels.statistics.widen_dtype(x).dtype == x.dtype
        return ops.kernels.chunked_loss.linear_cross_entropy(
            x,
            ops.parameter_block(table),
            ops.convert_parameters(ops.operation_plan("shift", bias.name))[0] if bias else None,
            ops.label_targets(planned_loss, labels),
            ops.group_operands(planned_product, 0),
            ops.logit_classes(planned_loss, spec, smoothing),
            at_once=not ops.absent(x)
            and computes_gradients_in_forward(planned_product, planned_loss, prod(rows), columns, x.shape[-1], wide),
            deferred=ops.deferred,
        )

    def meter_memory(
        self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None, cap=0.0, product=""
    ) -> Value:
        """Count the memory of gradients and one chunk of logits, or of all logits where the loss has to keep them."""
        planned_product = ops.operation_plan("project", product or table.name)
        planned_loss = ops.operation_plan("cross_entropy", name)
        (group, *_), weight = planned_product.groups, ops.parameter_block(table)
        if group.panels or table.name in ops.adapters:
            return self.compose_operation(ops, name, x, x_spec, table, spec, labels, smoothing, bias, cap, product)
        bias_values = ops.convert_parameters(ops.operation_plan("shift", bias.name)) if bias else []
        *rows, columns = ops.plan.local_shape(spec)
        n, width = prod(rows), ops.plan.local_shape(x_spec)[-1]
        wide = ops.wide == ops.plan.itemsize["compute"]
        at_once = computes_gradients_in_forward(planned_product, planned_loss, n, columns, width, wide)
        if not (x.elements and ops.deferred is None and at_once):
            classes = count_classes(planned_loss.operation)
            return _meter_kept_logits(ops, planned_product, x, weight, bias_values, spec, classes)
        columns_gradient = ops.new(weight.elements * ops.takes_gradient(weight), ops.wide)
        gradients = ops.new(x.elements), columns_gradient, *(ops.new(v.elements) for v in bias_values)
        chunk = ops.new(loss_chunk_rows(n, columns) * columns)
        meter_loss_statistics(ops, n, columns, count_classes(planned_loss.operation))
        del chunk
        loss, key = ops.tensor(1), weight.key

        def meter_backward(_: Gradients, saved: Saved) -> Gradients:
            """Return the stand-ins of x's and the table's gradients, which the forward pass has counted already."""
            dx, dtable, *bias_gradients = saved
            return [dx, None if ops.adds_in_place(key) else dtable, *bias_gradients]

        ops.note_operation([loss], [x, weight, *bias_values], gradients, meter_backward)
        return loss


def _meter_kept_logits(
    ops, product: PlannedOperation, x: Value, weight: Value, biases: Sequence[Value], spec, classes: int
) -> Value:
    """Count the memory of a loss that keeps its logits, whose gradient takes their place; `biases`: their bias, if
    there is one; `classes` of a teacher."""
    (logits,) = meter_converted_group(ops, product, 0, x, [weight], (), ops.deferred, scaled=True)
    if logits.elements:
        *rows, columns = ops.plan.local_shape(spec)
        meter_loss_statistics(ops, prod(rows), columns, classes)
    loss, sizes = ops.tensor(1), [v.elements for v in biases]
    ops.note_operation([loss], [logits, *biases], (logits.storage,), lambda _, saved: [*saved, *map(ops.new, sizes)])
    return loss


class SquaredErrorOp(Op):
    """Loss half the sum of (y - target)^2 over this rank's elements; the target takes no gradient. Positions at which
    the data tensor `ids` is padding do not count."""

    is_loss = True

    def record_operation(self, ops, name, y, target, spec, ids):
        ops.check_activation(target, spec)
        return ops.record_operation(self.kind, name, [y], [spec], [], [ids])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan the squared-error loss: ranks sum their own elements, and losses add up over axes that split them."""
        spec = operation.inputs[0]
        layout = planner.layout(spec)
        return assemble_plan(planner, operation, layout, **token_fields(planner, spec, layout))

    def run_on_blocks(self, ops, name, y, target, spec, ids):
        """Compute the sum of squared errors of this rank's elements whose label is not padding."""
        padding, widened = ids[self.kind, name] < 0, ops.kernels.statistics.widen_dtype
        error = widened(y) - widened(target.detach())
        if not ops.absent(y):
            token_dims = [d for d in spec.dims if d in ("length", "batch")]
            rows = padding if token_dims == ["length", "batch"] else padding.t()
            shape = dict(zip(spec.dims, y.shape, strict=True))
            error = error.masked_fill(rows.reshape([shape[d] if d in token_dims else 1 for d in spec.dims]), 0)
        return error.square().double().sum() / 2

    def meter_memory(self, ops, name, y, target, spec, ids) -> Value:
        """Count the bytes of the squared-error loss: the errors, kept for the backward pass, and their squares."""
        n = y.elements
        error, square = ops.new(n, ops.wide), ops.new(n, ops.wide)
        ops.new(n, 8)  # the squares, as they are summed
        del square
        return ops.plain(ops.tensor(1), [y], (error,), 3 * n, ops.wide)


class TokenLossOp(Op):
    """Loss plus, in training, the sum over this rank's tokens of x, of type `spec` [length batch], where the data
    tensor `labels` has a label: one times as much as the label counts. So it is divided by what the labels' loss is."""

    def record_operation(self, ops, name, loss, x, spec, labels):
        reads = [labels, LABEL_WEIGHTS if ops.loss.weighted else None]
        return ops.record_operation(self.kind, name, [x], [spec], [], reads)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan a loss that each rank computes of its own tokens."""
        spec = operation.inputs[0]
        layout = planner.layout(spec)
        return assemble_plan(planner, operation, layout, **token_fields(planner, spec, layout))

    def run_on_blocks(self, ops, name, loss, x, spec, labels):
        """Add the sum of this rank's losses of tokens to the loss of their labels."""
        if ops.absent(x) or not ops.position.training:
            return loss + x.sum() * 0.0
        targets = ops.label_targets(ops.operation_plan(self.kind, name), labels)
        counts = (targets.labels >= 0).to(loss.dtype)
        if targets.weights is not None:
            counts = counts * targets.weights.abs()
        return loss + (x.flatten().to(loss.dtype) * counts).sum()

    def meter_memory(self, ops, name, loss, x, spec, labels) -> Value:
        """Count the memory of what each token counts, which is kept."""
        n = x.elements
        ops.new(2 * n, 8)
        return ops.plain(ops.tensor(1), [loss, x], (ops.new(n, 8),))


class AddLossAheadOp(Op):
    """Loss plus, in training, the loss `more` of the labels `depth` further on (multi-token prediction), weighted as
    the step says (`PassPosition`); in an evaluation the one of both that is measured."""

    def record_operation(self, ops, loss, more, depth):
        return loss

    def run_on_blocks(self, ops, loss, more, depth):
        """Return the weighted sum, and add `more` to the sums of the pass's step."""
        if not ops.position.training:
            return more if ops.measured_depth == depth else loss
        ops.losses_ahead[depth] = ops.losses_ahead.get(depth, 0.0) + more.detach()
        factors = ops.position.ahead
        return loss + (factors[depth - 1] if factors else 1.0) * more

    def meter_memory(self, ops, loss, more, depth) -> Value:
        """Count the memory of a sum of losses: none to speak of."""
        return ops.plain(ops.tensor(1), [loss, more])
