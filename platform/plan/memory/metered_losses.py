"""Memory model of the losses in `platform.parallel.loss_ops`: what each allocates, saves and frees."""

from __future__ import annotations

from math import prod

from platform.plan.communication.loss_chunks import chunk_rows, gradients_at_once
from platform.plan.communication.planned import EinsumGroup, PlannedOperation
from platform.plan.language.ops import Spec
from platform.plan.memory.meter import Meter
from platform.plan.memory.storages import GradientKey, Gradients, MeteredStorage, Saved, Value


class MeteredLosses(Meter):
    """Runs the losses of a model on storages that only count bytes, in the same steps as
    `platform.parallel.loss_ops.LossOps` runs them on tensors."""

    def linear_cross_entropy(self, name, x, x_spec, table, spec, labels, smoothing=0.0, bias=None):
        product, planned = self.planned("project", table.name), self.planned("cross_entropy", name)
        (group, *_), weight = product.groups, self.parameter(table)
        if group.panels:
            return super().linear_cross_entropy(name, x, x_spec, table, spec, labels, smoothing, bias)
        more = self.converted(self.planned("shift", bias.name)) if bias else []
        *rows, columns = self.plan.local_shape(spec)
        n, width = prod(rows), self.plan.local_shape(x_spec)[-1]
        wide = self.wide == self.plan.itemsize["compute"]
        if x.elements and self.deferred is None and gradients_at_once(product, planned, n, columns, width, wide):
            gradients = tuple(self.new(v.elements) for v in (x, weight, *more))
            chunk = self.new(chunk_rows(n, columns) * columns)
            self._statistics(n, columns)
            del chunk
            loss = Value(self.new(1), 1)
            key = weight.key

            def backward(_: Gradients, saved: Saved) -> Gradients:
                dx, dtable, *rest = saved
                return [dx, None if self.in_place(key) else dtable, *rest]

            self.note([loss], [x, weight, *more], gradients, backward)
            return loss
        return self._kept(product, group, x, weight, more, spec)

    def in_place(self, key: GradientKey) -> bool:
        """Count the gradient of an operand that is added where it stays; return False for what is no parameter."""
        return isinstance(key, str) and self.leaves.in_place(key)

    def _statistics(self, rows: int, columns: int) -> None:
        """Count what the loss of one chunk of tokens takes for the logarithms of its probabilities, and before, if the
        compute type is another, for the logits in the type of statistics."""
        elements = chunk_rows(rows, columns) * columns
        wide = self.widened(None, elements)  # noqa: F841  (until the logarithms are allocated)
        self.new(elements, self.wide)

    def _kept(
        self, product: PlannedOperation, group: EinsumGroup, x: Value, weight: Value, more: list[Value], spec: Spec
    ) -> Value:
        """Count a loss that keeps the gradient of the logits, as `platform.parallel.kernels.loss` does; return it.
        `more`: the bias of the logits, if there is one."""
        (e,) = group.einsums
        use = (product.operation.kind, product.operation.name, 0)
        (local,), whole = self.operands(use, group, [weight]), self.forward(x, group.x)
        self.ahead.onward(use)
        logits = self.forward(self.inner(product, e.output), e.output)
        if logits.elements:
            *rows, columns = self.plan.local_shape(spec)
            self._statistics(prod(rows), columns)
        sizes = [v.elements for v in (x, weight, logits, whole, local)]
        key, deferred, loss = weight.key, self.deferred, Value(self.new(1), 1)
        widths = [v.elements for v in more]
        kept = (x if group.regathered else whole).storage, (weight if e.regathered else local).storage, logits.storage

        def backward(_: Gradients, saved: Saved) -> Gradients:
            x, weight, logits = saved
            dy = self.convert(logits, sizes[2], e.output.backward, e.output.after)[0]
            (table,) = self.operands(use, group, [Value(weight, sizes[1], key)], back=True)
            if group.regathered:
                x = self.forward(Value(x, sizes[0]), group.x).storage
            self.ahead.onward(use, back=True)
            total = self.new(sizes[3])  # until it is reduced, after the table's gradient
            dx = self.convert(total, sizes[3], group.x.backward, group.x.after)[0]

            def gradient() -> MeteredStorage | None:
                scaled = self.new(sizes[3])
                if not e.operand.backward and self.in_place(key):
                    return None
                found = self.new(sizes[4])
                reduced = self.convert(found, sizes[4], e.operand.backward, e.operand.after)[0]
                del scaled
                return reduced

            shifts = [self.new(n) for n in widths]
            if deferred is None:
                return [dx, gradient(), *shifts]
            del table, total

            def compute(held: Saved = (x, dy)) -> None:
                if found := gradient():
                    self.leaves.setdefault(key, found)

            deferred.append(compute)
            return [dx, None, *shifts]

        self.note([loss], [x, weight, *more], kept, backward)
        return loss

    def cross_entropy(self, name, logits, spec, labels, smoothing=0.0):
        loss = Value(self.new(1), 1)
        if not logits.elements:
            return self.plain(loss, [logits])
        *rows, columns = self.plan.local_shape(spec)
        gradient = self.new(logits.elements)
        self._statistics(prod(rows), columns)
        return self.plain(loss, [logits], (gradient,))

    def squared_error(self, name, y, target, spec, ids):
        error = self.widened(self.new(y.elements), y.elements)
        return self.plain(Value(self.new(1), 1), [y], (error,), y.elements, self.wide)
