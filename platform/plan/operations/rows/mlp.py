"""Feed-forward layer, whole or chunk by chunk of rows."""

from __future__ import annotations

from math import prod

from platform.plan.operations.op import Op
from platform.plan.operations.rows.pointwise import function_of
from platform.plan.operations.storages import Gradients, Saved, Tape, Value


class MlpOp(Op):
    """`down` of `function` of the products of x with the weights `inner` (their gate last): as type `spec` -> `hidden`
    -> `made`. It is planned as these products. On a rank it is computed in as many chunks of rows as the plan says
    (`mlp_chunks`): then `hidden` is there for one chunk at a time, and is computed again in the backward pass. It is
    computed whole if ranks exchange anything in the middle of it, and for rows of experts (`counts`)."""

    def compose(self, ops, function, x, spec, inner, hidden, biases, down, made, bias, counts=None):
        """Compose a feed-forward layer of its two products and the function between them."""
        h = ops.project(x, spec, inner, [hidden] * len(inner), biases, counts)
        return ops.project(ops.pointwise(function, *reversed(h)), hidden, (down,), (made,), bias, counts)[0]

    def run(self, ops, function, x, spec, inner, hidden, biases, down, made, bias, counts=None):
        """Compute a feed-forward layer on this rank's rows, in the chunks that the plan says."""
        if not self.divides(ops, x, inner, biases, down, counts):
            return self.compose(ops, function, x, spec, inner, hidden, biases, down, made, bias, counts)
        up, last, added = self._planned(ops, inner, down, bias)
        x = ops.apply(x, up.groups[0].x)
        of_rows, parameters = ops.kernels.hidden_rows, [[ops.parameter(p) for p in ps] for ps in (inner, biases, added)]
        layer = of_rows.HiddenRows(
            function_of(ops, function),
            parameters[0],
            parameters[1],
            ops.parameter(down),
            *(parameters[2] or [None]),
            -(-prod(x.shape[:-1]) // ops.plan.mlp_chunks),
        )
        y = ops.apply(of_rows.by_chunks(layer, x), last.groups[0].einsums[0].output)
        return y if added or not bias else ops.shift(y, made, bias[0], None)

    def meter(self, ops, function, x, spec, inner, hidden, biases, down, made, bias, counts=None):
        """Count the memory of a feed-forward layer whose hidden rows are there a chunk at a time."""
        if not self.divides(ops, x, inner, biases, down, counts):
            return self.compose(ops, function, x, spec, inner, hidden, biases, down, made, bias, counts)
        up, last, added = self._planned(ops, inner, down, bias)
        (output,) = (e.output for e in last.groups[0].einsums)
        x, y, rows = ops.apply(x, up.groups[0].x), ops.tensor(prod(output.before)), prod(output.before[:-1])
        piece = -(-rows // ops.plan.mlp_chunks) * ops.plan.local_shape(inner[0])[0]
        before, ops.grad = ops.grad, False
        _inner_rows(ops, function, len(inner), piece)
        ops.grad = before
        keys, size = [p.name for p in (*inner, down)], x.elements
        vectors = {p.name: prod(ops.plan.local_shape(p)) for p in (*biases, *added)}

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradients of the rows, and for a chunk the hidden rows and their gradients."""
            dx, before = ops.new(size), ops.tape
            for key in keys:
                ops.in_place(key)
            ops.tape = Tape()
            h = _inner_rows(ops, function, len(inner), piece)
            tape, ops.tape = ops.tape, before
            tape.unwind({h.key: ops.new(piece)}, ops.leaves)
            for name, n in vectors.items():
                ops.leaves.setdefault(name, ops.new(n))
            return [dx]

        ops.note([y], [x], (x.storage,), backward)
        y = ops.apply(y, output)
        return y if added or not bias else ops.shift(y, made, bias[0], None)

    def divides(self, ops, x, inner, biases, down, counts) -> bool:
        """Return True if the layer is computed in chunks of rows: a rank has whole weights of its part of `hidden`, and
        all that is converted is x before and the result after."""
        if ops.plan.mlp_chunks == 1 or counts is not None or ops.absent(x) or "experts" in down.dims:
            return False
        up, last = ops.planned("project", inner[0].name), ops.planned("project", down.name)
        groups = *up.groups, *last.groups
        inside = [*(e.operand for g in groups for e in g.einsums), *(e.output for g in up.groups for e in g.einsums)]
        stays = all(not c.forward and not c.backward for c in (*inside, *(g.x for g in last.groups)))
        plain = len(groups) == 2 and not any(g.panels or g.wide or g.regathered for g in groups)
        return stays and plain and (not biases or up.adds(ops.planned("shift", b.name) for b in biases))

    def _planned(self, ops, inner, down, bias):
        """Return the planned products before and after, and the biases that the latter adds itself."""
        up, last = ops.planned("project", inner[0].name), ops.planned("project", down.name)
        return up, last, bias if bias and last.adds([ops.planned("shift", bias[0].name)]) else ()


def _inner_rows(ops, function: str, count: int, elements: int) -> Value:
    """Count the hidden rows of a chunk, `elements` after the function of so many products."""
    return ops.pointwise(function, *[ops.tensor(elements) for _ in range(count)])
