"""Products of an activation with what no product of matrices is: a number of the model, a number that is stored, a
vector, and the number of each row that normalises it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.op import BlockOp, Value, plan_with_vectors


class ScaleOp(BlockOp):
    """Activation x times `factor`, a number."""

    def record_operation(self, ops, x, spec, factor):
        ops.check_activation(x, spec)
        ops.note_operation(self.kind, spec)
        return replace(x, made_by="")

    def run_on_blocks(self, ops, planned, x, spec, factor):
        """Multiply this rank's block of x by the number `factor`."""
        return x * factor

    def meter_memory(self, ops, planned, x, spec, factor) -> Value:
        """Count the memory of x times a number, of which nothing is kept for the backward pass."""
        return ops.plain(ops.block(spec), [x])


class ScaleByOp(BlockOp):
    """Activation x times the number in one of the `states`, parameters without gradient."""

    needs_no_value = keeps_nothing = True

    def record_operation(self, ops, name, x, spec, states):
        return ops.record_operation(self.kind, name, [x], [spec, *states], [spec])

    def run_on_blocks(self, ops, planned, name, x, spec, states):
        """Multiply this rank's block of x by the number."""
        (state,) = states
        return x * ops.parameter_block(state).to(x.dtype)

    def meter_memory(self, ops, planned, name, x, spec, states) -> Value:
        """Count the memory of the product, of which nothing but the number is kept."""
        return ops.plain(ops.block(spec), [x], (ops.new(1),))


class MultiplyByOp(BlockOp):
    """Activation times a parameter of its last dim; the product is in the activation's type."""

    wide = "inputs", "outputs"
    memory_accesses = (2, 3)

    def record_operation(self, ops, x, spec, parameter):
        return ops.record_operation(self.kind, parameter.name, [x], [spec, parameter], [spec])

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan multiplying by a parameter in the activation's layout, to which it is converted."""
        return plan_with_vectors(planner, operation)

    def run_on_blocks(self, ops, planned, x, spec, parameter):
        """Multiply this rank's block of x by the parameter."""
        return x * parameter.to(x.dtype)

    def meter_memory(self, ops, planned, x, spec, parameter) -> Value:
        """Count the memory of the product, for whose gradients both factors are kept, in one type."""
        casts = x.itemsize != ops.plan.itemsize["compute"]
        factor = ops.new(parameter.elements, ops.wide) if casts else parameter.storage
        return ops.plain(ops.tensor(x.elements, x.itemsize), [x, parameter], (x.storage, factor))


class NormaliseOp(BlockOp):
    """Activation of type `spec` over the root of its mean square along d_kv, its last dim: an RMSNorm without gain, to
    which `eps` is added."""

    memory_accesses = (2, 3)

    def record_operation(self, ops, name, x, spec, eps):
        return ops.record_operation(self.kind, name, [x], [spec], [spec], eps=eps)

    def whole_dims(self, operation) -> Sequence[str]:
        """Return d_kv, over which means are taken."""
        return ("d_kv",)

    def run_on_blocks(self, ops, planned, name, x, spec, eps):
        """Normalise each row of this rank's block of x."""
        return ops.kernels.statistics.normalise_rows(x, eps)

    def meter_memory(self, ops, planned, name, x, spec, eps) -> Value:
        """Count the bytes of rows over their root mean squares; the input and a number a row are kept."""
        n, rows = x.elements, x.elements // ops.plan.planner.tensor_sizes(spec)["d_kv"]
        in_pieces = ops.device == "cpu" and not ops.compiles_functions
        casts = ops.wide != ops.plan.itemsize["compute"]
        saved = x.storage, ops.new(rows, ops.wide)
        wide = [ops.new(n, ops.wide) for _ in range(2 * in_pieces * casts)]
        out = ops.block(spec)
        del wide
        return ops.plain(out, [x], saved, n * in_pieces * (1 + 2 * casts), ops.wide)
