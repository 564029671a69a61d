"""Product with a table and the cross-entropy of its result, as one."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from platform.plan.communication.loss_chunks import chunk_rows, gradients_at_once
from platform.plan.communication.planned import PlannedOperation
from platform.plan.operations.einsums import meter_group
from platform.plan.operations.losses.cross_entropy import meter_statistics
from platform.plan.operations.op import Op
from platform.plan.operations.storages import Gradients, Saved, Value


class LinearCrossEntropyOp(Op):
    """The `cross_entropy` of the logits of type `spec` [... vocab] to which `project` maps the activation x
    [... d_model] by `table` [vocab, d_model] and `bias` [vocab]. It is planned as these two; computed as one, it need
    not hold all logits."""

    def compose(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        """Compose the loss of a product with the vocabulary table from `project` and `cross_entropy`."""
        (logits,) = ops.project(x, x_spec, (table,), (spec,), (bias,) if bias else ())
        return ops.cross_entropy(name, logits, spec, labels, smoothing)

    def run(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        """Compute the loss chunk by chunk of tokens, so that the logits are never whole, unless SUMMA multiplies."""
        product, found = ops.planned("project", table.name), ops.planned("cross_entropy", name)
        if product.groups[0].panels:  # SUMMA never has a whole operand: it multiplies, the loss follows
            return self.compose(ops, name, x, x_spec, table, spec, labels, smoothing, bias)
        *rows, columns = ops.plan.local_shape(spec)
        wide = ops.kernels.statistics.widened(x).dtype == x.dtype
        return ops.kernels.loss.linear_cross_entropy(
            x,
            ops.parameter(table),
            ops.converted(ops.planned("shift", bias.name))[0] if bias else None,
            ops.targets(found, labels),
            ops.coming(product, 0),
            ops.classes(found, spec, smoothing),
            at_once=not ops.absent(x) and gradients_at_once(product, found, prod(rows), columns, x.shape[-1], wide),
            deferred=ops.deferred,
        )

    def meter(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        """Count the memory of gradients and one chunk of logits, or of all logits where the loss has to keep them."""
        product, found = ops.planned("project", table.name), ops.planned("cross_entropy", name)
        (group, *_), weight = product.groups, ops.parameter(table)
        if group.panels:
            return self.compose(ops, name, x, x_spec, table, spec, labels, smoothing, bias)
        more = ops.converted(ops.planned("shift", bias.name)) if bias else []
        *rows, columns = ops.plan.local_shape(spec)
        n, width = prod(rows), ops.plan.local_shape(x_spec)[-1]
        wide = ops.wide == ops.plan.itemsize["compute"]
        if not (x.elements and ops.deferred is None and gradients_at_once(product, found, n, columns, width, wide)):
            return _meter_kept(ops, product, x, weight, more, spec)
        gradients = (ops.new(x.elements), ops.new(weight.elements, ops.wide), *(ops.new(v.elements) for v in more))
        chunk = ops.new(chunk_rows(n, columns) * columns)
        meter_statistics(ops, n, columns)
        del chunk
        loss, key = ops.tensor(1), weight.key

        def backward(_: Gradients, saved: Saved) -> Gradients:
            """Return the stand-ins of x's and the table's gradients, which the forward pass has counted already."""
            dx, dtable, *rest = saved
            return [dx, None if ops.in_place(key) else dtable, *rest]

        ops.note([loss], [x, weight, *more], gradients, backward)
        return loss


def _meter_kept(ops, product: PlannedOperation, x: Value, weight: Value, more: Sequence[Value], spec) -> Value:
    """Count the memory of a loss that keeps its logits, whose gradient takes their place; `more`: their bias, if there
    is one."""
    (logits,) = meter_group(ops, product, 0, x, [weight], (), ops.deferred, scaled=True)
    if logits.elements:
        *rows, columns = ops.plan.local_shape(spec)
        meter_statistics(ops, prod(rows), columns)
    loss, sizes = ops.tensor(1), [v.elements for v in more]
    ops.note([loss], [logits, *more], (logits.storage,), lambda _, saved: [*saved, *map(ops.new, sizes)])
    return loss
