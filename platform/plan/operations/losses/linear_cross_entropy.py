"""Product with a table and the cross-entropy of its result, as one."""

from __future__ import annotations

from math import prod

from platform.plan.communication.loss_chunks import chunk_rows, gradients_at_once
from platform.plan.communication.planned import EinsumGroup, PlannedOperation
from platform.plan.operations.losses.cross_entropy import meter_statistics
from platform.plan.operations.op import Op
from platform.plan.operations.storages import Gradients, MeteredStorage, Saved, Value


class LinearCrossEntropyOp(Op):
    """The `cross_entropy` of the logits of type `spec` [... vocab] to which `project` maps the activation x
    [... d_model] by `table` [vocab, d_model] and `bias` [vocab]. It is planned as these two; computed as one, it need
    not hold all logits."""

    def compose(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        (logits,) = ops.project(x, x_spec, (table,), (spec,), (bias,) if bias else ())
        return ops.cross_entropy(name, logits, spec, labels, smoothing)

    def run(self, ops, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
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
        product, found = ops.planned("project", table.name), ops.planned("cross_entropy", name)
        (group, *_), weight = product.groups, ops.parameter(table)
        if group.panels:
            return self.compose(ops, name, x, x_spec, table, spec, labels, smoothing, bias)
        more = ops.converted(ops.planned("shift", bias.name)) if bias else []
        *rows, columns = ops.plan.local_shape(spec)
        n, width = prod(rows), ops.plan.local_shape(x_spec)[-1]
        wide = ops.wide == ops.plan.itemsize["compute"]
        if not (x.elements and ops.deferred is None and gradients_at_once(product, found, n, columns, width, wide)):
            return _meter_kept(ops, product, group, x, weight, more, spec)
        gradients = tuple(ops.new(v.elements) for v in (x, weight, *more))
        chunk = ops.new(chunk_rows(n, columns) * columns)
        meter_statistics(ops, n, columns)
        del chunk
        loss, key = ops.tensor(1), weight.key

        def backward(_: Gradients, saved: Saved) -> Gradients:
            dx, dtable, *rest = saved
            return [dx, None if ops.in_place(key) else dtable, *rest]

        ops.note([loss], [x, weight, *more], gradients, backward)
        return loss


def _meter_kept(ops, product: PlannedOperation, group: EinsumGroup, x: Value, weight: Value, more, spec) -> Value:
    """Count a loss that keeps the gradient of the logits, as `platform.parallel.kernels.loss` does; return it.
    `more`: the bias of the logits, if there is one."""
    (e,) = group.einsums
    use = (product.operation.kind, product.operation.name, 0)
    (local,), whole = ops.operands(use, group, [weight]), ops.forward(x, group.x)
    ops.ahead.onward(use)
    logits = ops.forward(ops.inner(product, e.output), e.output)
    if logits.elements:
        *rows, columns = ops.plan.local_shape(spec)
        meter_statistics(ops, prod(rows), columns)
    sizes = [v.elements for v in (x, weight, logits, whole, local)]
    key, deferred, loss = weight.key, ops.deferred, Value(ops.new(1), 1)
    widths = [v.elements for v in more]
    kept = (x if group.regathered else whole).storage, (weight if e.regathered else local).storage, logits.storage

    def backward(_: Gradients, saved: Saved) -> Gradients:
        x, weight, logits = saved
        dy = ops.convert(logits, sizes[2], e.output.backward, e.output.after)[0]
        (table,) = ops.operands(use, group, [Value(weight, sizes[1], key)], back=True)
        if group.regathered:
            x = ops.forward(Value(x, sizes[0]), group.x).storage
        ops.ahead.onward(use, back=True)
        total = ops.new(sizes[3])  # until it is reduced, after the table's gradient
        dx = ops.convert(total, sizes[3], group.x.backward, group.x.after)[0]

        def gradient() -> MeteredStorage | None:
            scaled = ops.new(sizes[3])
            if not e.operand.backward and ops.in_place(key):
                return None
            found = ops.new(sizes[4])
            reduced = ops.convert(found, sizes[4], e.operand.backward, e.operand.after)[0]
            del scaled
            return reduced

        shifts = [ops.new(n) for n in widths]
        if deferred is None:
            return [dx, gradient(), *shifts]
        del table, total

        def compute(held: Saved = (x, dy)) -> None:
            if found := gradient():
                ops.leaves.setdefault(key, found)

        deferred.append(compute)
        return [dx, None, *shifts]

    ops.note([loss], [x, weight, *more], kept, backward)
    return loss
