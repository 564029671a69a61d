"""Operations on rows of an activation: functions element by element, scaling, dropout and jitter, residual connections,
feed-forward layers, norms, rotary and sinusoidal positions, and sums with a parameter.

Functions element by element are not recorded: nothing of them is planned. `MlpOp` computes whole or chunk by chunk of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

from platform.plan.model_types import CENTRED, EPS, POINTWISE
from platform.plan.operation_plan import PlannedOperation, rebuilds_inputs
from platform.plan.operations.op import (
    INTEGER,
    BlockOp,
    Gradients,
    MeteredRebuild,
    MeteredStorage,
    MeterTape,
    Op,
    Saved,
    Value,
    plan_with_vectors,
)
from platform.plan.scheme import ModelMistake

_OF_RESULT = {"relu", "tanh", "sigmoid"}  # functions that save their result, not their input
# gated function -> tensors beside its result in the forward pass, and beside its gradients in the backward pass
_GATED_SCRATCH = dict.fromkeys(("gated_gelu", "gated_gelu_tanh", "gated_relu"), (1, 3))
_GATED_SCRATCH |= {"gated_silu": (1, 0), "gated_clamped": (3, 6)}
_REBUILT = {"gelu", "gelu_tanh", "silu", *_GATED_SCRATCH}  # whose arguments are kept, so that the result need not be


@cache
def _pointwise_functions() -> Mapping[str, Callable[..., Any]]:
    """Return torch's implementations of a model's pointwise functions (gelu, add, ...) by name."""
    import torch.nn.functional as F

    def apply_swiglu(gate, x):
        """Compute a gated pointwise operation: x times SiLU of its gate (SwiGLU, Shazeer 2020)."""
        return F.silu(gate) * x

    def apply_geglu(gate, x):
        """Compute a gated pointwise operation: x times GELU of its gate (GEGLU, Shazeer 2020)."""
        return F.gelu(gate) * x

    def apply_geglu_tanh(gate, x):
        """Compute a gated pointwise operation: x times GELU by tanh of its gate (GEGLU in T5's second version)."""
        return F.gelu(gate, approximate="tanh") * x

    def apply_clamped_swiglu(gate, x):
        """Multiply x + 1 by SiLU of 1.702 times its gate, over 1.702, both clamped at 7 (GPT-OSS, OpenAI 2025)."""
        return F.silu(1.702 * gate.clamp(max=7)) * ((x.clamp(-7, 7) + 1) / 1.702)

    def apply_reglu(gate, x):
        """Compute a gated pointwise operation: x times ReLU of its gate (ReGLU, Shazeer 2020)."""
        return F.relu(gate) * x

    return {
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "tanh": lambda x: x.tanh(),
        "sigmoid": lambda x: x.sigmoid(),
        "identity": lambda x: x,
        "absolute": lambda x: x.abs(),
        "add": lambda x, y: x + y,
        "multiply": lambda x, y: x * y,
        "gated_silu": apply_swiglu,
        "gated_gelu": apply_geglu,
        "gated_gelu_tanh": apply_geglu_tanh,
        "gated_relu": apply_reglu,
        "gated_clamped": apply_clamped_swiglu,
    }


def pointwise_function(ops, function: str, *, compiles: bool = True) -> Callable[..., Any]:
    """Return a pointwise function as a rank computes it. A gated one keeps its arguments alone for the backward pass:
    compiled, if the run compiles and so it `compiles`; else it is computed again there."""
    compute = _pointwise_functions()[function]
    if not function.startswith("gated_"):
        return compute
    if compiles and ops.compiles_functions:
        return ops.compile_function(compute)
    kernel = ops.kernels.recompute
    return kernel.gated_silu if function == "gated_silu" else partial(kernel.keep_arguments, compute)


def _note_rebuild(ops, y, compute: Callable[..., Any], *arguments):
    """Return the activation y = compute(*arguments), for whose products it is made again, if the plan makes so."""
    return ops.kernels.recompute.note_rebuild(y, compute, *arguments) if rebuilds_inputs(ops.plan.sizes) else y


class PointwiseOp(Op):
    """Pointwise function by name (gelu, gelu_tanh, relu, silu, tanh, identity, absolute, sigmoid; add, multiply, or
    gated_ and one of the first four or clamped, whose gate is first) of one or two activations that share a layout."""

    accesses_by_inputs = {1: (2, 3), 2: (3, 5)}  # `memory_accesses` by their number

    def record_operation(self, ops, function, *x):
        _check_pointwise_function(function, len(x))
        for other in x[1:]:
            ops.check_activation(other, x[0].spec)
        ops.note_operation(self.kind, function, x[0].spec)
        return replace(x[0], made_by=function if function in _REBUILT else "")

    def run_on_blocks(self, ops, function, *x):
        """Apply this pointwise function (gelu, add, ...) to this rank's blocks of its activations."""
        if ops.absent(x[0]):
            return _pointwise_functions()[function](*x)
        # rows of experts are another number in every pass, and each would be compiled for itself
        compute = pointwise_function(ops, function, compiles=x[0].dim() > 2)
        return _note_rebuild(ops, compute(*x), compute, *x) if function in _REBUILT else compute(*x)

    def meter_memory(self, ops, function, *x) -> Value:
        """Count the bytes of a pointwise function's result; the result or the arguments are kept for the backward."""
        if function == "identity":
            return x[0]
        n = min(v.elements for v in x)
        compiled_gate = function.startswith("gated_") and ops.compiles_functions
        forward_scratch, backward_scratch = (0, 0) if compiled_gate else _GATED_SCRATCH.get(function, (0, 0))

        def allocate() -> MeteredStorage:
            """Count the result, and what there is beside it until it is there."""
            scratch = [ops.new(n) for _ in range(forward_scratch)]  # noqa: F841
            return ops.new(n)

        out = Value(allocate(), n)
        if function == "add":
            return ops.sum(out, x)
        saved = (out.storage,) if function in _OF_RESULT else tuple(v.storage for v in x)
        if function == "gated_relu" and compiled_gate:  # keeps what passes the gate
            saved = (*saved, ops.new(n))
        if function == "relu" and ops.wholly:  # a compiled block keeps which elements pass, beside them
            saved = (out.storage, ops.integers(n, 1))
        out.rebuild = MeteredRebuild(saved, allocate) if function in _REBUILT else None
        return ops.plain(out, x, saved, n * backward_scratch)


class PointwiseBySliceOp(BlockOp):
    """Pointwise function `functions[i]` of slice i of x along `dim`, such as one per expert or branch."""

    def record_operation(self, ops, functions, x, spec, dim):
        for function in functions:
            _check_pointwise_function(function, 1)
        ops.check_activation(x, spec)
        ops.note_operation(self.kind, *functions, spec)
        return replace(x, made_by="")

    def run_on_blocks(self, ops, planned, functions, x, spec, dim):
        """Apply a pointwise function of its own to each slice along `dim` of this rank's block of x."""
        import torch

        i, known = spec.dims.index(dim), _pointwise_functions()
        first, n = ops.blocks[spec][i]
        mine = functions[first : first + n]
        return torch.stack([known[f](part) for f, part in zip(mine, x.unbind(i), strict=True)], i)

    def meter_memory(self, ops, planned, functions, x, spec, dim) -> Value:
        """Count the memory of pointwise functions per slice, as on the rank whose functions save most."""
        shape = dict(zip(spec.dims, ops.plan.local_shape(spec), strict=True))
        n, slices = shape[dim], range(0, len(functions), shape[dim])
        most = max(sum(f in _OF_RESULT for f in functions[i : i + n]) for i in slices)
        saved = [x.storage] if set(functions) - _OF_RESULT - {"identity"} else []
        saved += [ops.new(x.elements // n) for _ in range(most)]
        return ops.plain(ops.block(spec), [x], tuple(saved), x.elements)


def _check_pointwise_function(function: str, argument_count: int) -> None:
    """Raise ModelMistake for an unknown pointwise function, or one that takes another number of activations."""
    if function not in POINTWISE:
        raise ModelMistake(function, "no such pointwise function", POINTWISE)
    if POINTWISE[function] != argument_count:
        raise ModelMistake(function, f"takes {POINTWISE[function]} activations, not {argument_count}")


_PIECE = 1 << 15  # elements whose mask is drawn at once, as platform.runtime.residual.DRAWN_AT_ONCE


class DropoutOp(BlockOp):
    """Activation of which elements are dropped with probability `rate`, by default `dropout_rate`, by masks that do
    not depend on the plan."""

    memory_accesses = (2, 2)
    needs_no_value = True

    def record_operation(self, ops, name, x, spec, rate=None):
        if not self.drops(ops, rate):
            ops.check_activation(x, spec)
            return x
        return ops.record_operation(self.kind, name, [x], [spec], [spec])

    def drops(self, ops, rate) -> bool:
        """Return True if elements are dropped at all; passes of generation drop none."""
        return bool(ops.dropout_rate if rate is None else rate and not ops.cache)

    def run_on_blocks(self, ops, planned, name, x, spec, rate=None):
        """Apply dropout to this rank's block of x, by the mask of this step and microbatch; x itself if none drops."""
        drawing, kernel = ops.random_drawing(name, spec, x.device, rate=rate), ops.kernels.residual
        whole = ops.compiles_functions or ops.is_tracing
        draw = ops.compile_function(kernel.drop_elements) if whole else kernel.apply_draw_in_pieces
        return kernel.apply_dropout(x, drawing, draw) if drawing else x

    def meter_memory(self, ops, planned, name, x, spec, rate=None) -> Value:
        """Count the bytes of dropout: its result, and the random integers that draw one piece of the mask."""
        if not self.drops(ops, rate):
            return x
        # the states of the random numbers of a piece, before and after a shift
        drawn = 0 if ops.compiles_functions else 2 * min(x.elements, _PIECE)
        out = ops.block(spec)
        ops.integers(drawn)
        return ops.plain(out, [x], (), drawn, INTEGER)


class JitterOp(BlockOp):
    """Activation of which each element is multiplied by a uniform number in [1 - `rate`, 1 + `rate`) in training, the
    same under every plan."""

    memory_accesses = (2, 2)

    def record_operation(self, ops, name, x, spec, rate):
        if not rate or ops.cache:
            ops.check_activation(x, spec)
            return x
        return ops.record_operation(self.kind, name, [x], [spec], [spec], rate=rate)

    def run_on_blocks(self, ops, planned, name, x, spec, rate):
        """Multiply this rank's block of x by the numbers of this step and microbatch."""
        drawing = ops.random_drawing(name, spec, x.device, self.kind, rate)
        return ops.kernels.residual.apply_jitter(x, drawing) if drawing else x

    def meter_memory(self, ops, planned, name, x, spec, rate) -> Value:
        """Count the bytes of the product, and of the random numbers that draw one piece of it."""
        if not rate or ops.cache:
            return x
        drawn, out = 2 * min(x.elements, _PIECE), ops.block(spec)
        ops.integers(drawn)
        return ops.plain(out, [x], (), drawn, INTEGER)


class ResidualOp(Op):
    """x plus y, both of type `spec`, with dropout `name` of y: a residual connection."""

    memory_accesses = (3, 3)  # its gradient meets another, of the norm, and both are added
    needs_no_value = True

    def compose_operation(self, ops, name, x, y, spec):
        """Compose the residual connection x + dropout(y) from the model's operations add and dropout."""
        return ops.pointwise("add", x, ops.dropout(name, y, spec))

    def run_on_blocks(self, ops, name, x, y, spec):
        """Compute the residual sum x + dropout(y), in one kernel if compiled."""
        drawing = None if ops.absent(x) or not ops.compiles_functions else ops.random_drawing(name, spec, x.device)
        if not drawing:
            return self.compose_operation(ops, name, x, y, spec)
        return ops.kernels.residual.apply_residual(x, y, drawing, ops.compile_function)

    def meter_memory(self, ops, name, x, y, spec) -> Value:
        """Count the memory of the residual sum; of dropout, in one kernel if compiled, only the gradient of y."""
        if not (ops.compiles_functions and ops.dropout_rate) or ops.absent(x):
            return self.compose_operation(ops, name, x, y, spec)
        return ops.pointwise("add", x, ops.plain(Value(None, y.elements), [y]))


class ResidualNormOp(Op):
    """The `residual` of x and y, and the `norm` of it, which the next layer reads."""

    def compose_operation(self, ops, name, x, y, spec, kind, gain, bias, eps=EPS):
        """Compose the residual connection and its norm from the model's operations residual and norm."""
        total = ops.residual(name, x, y, spec)
        return total, ops.norm(total, spec, kind, gain, bias, eps)

    def run_on_blocks(self, ops, name, x, y, spec, kind, gain, bias, eps=EPS):
        """Compute the residual sum x + dropout(y) and its norm, in one kernel if compiled and the dim is whole."""
        planned_norm = ops.operation_plan("norm", gain.name)
        if ops.absent(x) or not ops.compiles_functions or planned_norm.over:
            return self.compose_operation(ops, name, x, y, spec, kind, gain, bias, eps)
        first, *second = ops.convert_parameters(planned_norm)
        drawing, apply = ops.random_drawing(name, spec, x.device), ops.kernels.residual.apply_residual_norm
        applied = ops.kernels.statistics.centre_gain(first) if kind == CENTRED else first
        total, out = apply(x, y, applied, second[0] if bias else None, kind, eps, drawing, ops.compile_function)
        return total, _note_rebuild(ops, out, _norm_function(ops, kind, eps), total, first, *second)


class MlpOp(Op):
    """`down` of `function` of the products of x with the weights `inner` (their gate last): as type `spec` -> `hidden`
    -> `out`. It is planned as these products. On a rank it is computed in as many chunks of rows as the plan says
    (`mlp_chunks`): then `hidden` is there for one chunk at a time, and is computed again in the backward pass. It is
    computed whole if ranks exchange anything in the middle of it, and for rows of experts (`counts`)."""

    def compose_operation(self, ops, function, x, spec, inner, hidden, biases, down, out, bias, counts=None):
        """Compose a feed-forward layer of its two products and the function between them."""
        h = ops.project(x, spec, inner, [hidden] * len(inner), biases, counts)
        return ops.project(ops.pointwise(function, *reversed(h)), hidden, (down,), (out,), bias, counts)[0]

    def run_on_blocks(self, ops, function, x, spec, inner, hidden, biases, down, out, bias, counts=None):
        """Compute a feed-forward layer on this rank's rows, in the chunks that the plan says."""
        if not self.computes_by_chunks(ops, x, inner, biases, down, counts):
            return self.compose_operation(ops, function, x, spec, inner, hidden, biases, down, out, bias, counts)
        up, last, added = self._product_plans(ops, inner, down, bias)
        x = ops.convert_block(x, up.groups[0].x)
        compute, of_rows = pointwise_function(ops, function), ops.kernels.chunked_loss
        weights, vectors, after = ([ops.parameter_block(p) for p in ps] for ps in (inner, biases, added))
        rows = -(-prod(x.shape[:-1]) // ops.plan.mlp_chunks)
        layer = of_rows.TwoLayerWeights(compute, weights, vectors, ops.parameter_block(down), *(after or [None]), rows)
        y = ops.convert_block(of_rows.compute_by_chunks(layer, x), last.groups[0].einsums[0].output)
        return y if added or not bias else ops.shift(y, out, bias[0], None)

    def meter_memory(self, ops, function, x, spec, inner, hidden, biases, down, out, bias, counts=None) -> Value:
        """Count the memory of a feed-forward layer whose hidden rows are there a chunk at a time."""
        if not self.computes_by_chunks(ops, x, inner, biases, down, counts):
            # of rows of experts, whose number differs between passes, nothing is compiled, and one function is ours
            compiles, as_compiled = ops.compiles_functions, counts is None or function == "gated_silu"
            ops.compiles_functions = compiles and as_compiled
            y = self.compose_operation(ops, function, x, spec, inner, hidden, biases, down, out, bias, counts)
            ops.compiles_functions = compiles
            return y
        up, last, added = self._product_plans(ops, inner, down, bias)
        (output,) = (e.output for e in last.groups[0].einsums)
        x, y, rows = ops.convert_block(x, up.groups[0].x), ops.tensor(prod(output.before)), prod(output.before[:-1])
        piece = -(-rows // ops.plan.mlp_chunks) * ops.plan.local_shape(inner[0])[0]
        before, ops.grad = ops.grad, False
        _meter_hidden_rows(ops, function, len(inner), piece)
        ops.grad = before
        size, weights = x.elements, {p.name: prod(ops.plan.local_shape(p)) for p in (*inner, down)}
        vectors = {p.name: prod(ops.plan.local_shape(p)) for p in (*biases, *added)}

        def meter_backward(_: Gradients, __: Saved) -> Gradients:
            """Count the gradients of the rows, and for a chunk the hidden rows and their gradients."""
            dx, before = ops.new(size), ops.tape
            for name, n in weights.items():
                if not ops.adds_in_place(name):
                    ops.leaves.setdefault(name, ops.new(n))
            ops.tape = MeterTape()
            h = _meter_hidden_rows(ops, function, len(inner), piece)
            tape, ops.tape = ops.tape, before
            tape.run_backward({h.key: ops.new(piece)}, ops.leaves)
            for name, n in vectors.items():
                ops.leaves.setdefault(name, ops.new(n))
            return [dx]

        ops.note_operation([y], [x], (x.storage,), meter_backward)
        y = ops.convert_block(y, output)
        return y if added or not bias else ops.shift(y, out, bias[0], None)

    def computes_by_chunks(self, ops, x, inner, biases, down, counts) -> bool:
        """Return True if the layer is computed in chunks of rows: a rank has whole weights of its part of `hidden`."""
        adapted = any(p.name in ops.adapters for p in (*inner, down))
        if ops.plan.mlp_chunks == 1 or adapted or counts is not None or ops.absent(x) or "experts" in down.dims:
            return False
        up, last = ops.operation_plan("project", inner[0].name), ops.operation_plan("project", down.name)
        stays = keeps_hidden_rows_local(up, False) and keeps_hidden_rows_local(last, True)
        return stays and (not biases or up.adds_biases(ops.operation_plan("shift", b.name) for b in biases))

    def _product_plans(self, ops, inner, down, bias):
        """Return the planned products before and after, and the biases that the latter adds itself."""
        up, last = ops.operation_plan("project", inner[0].name), ops.operation_plan("project", down.name)
        return up, last, bias if bias and last.adds_biases([ops.operation_plan("shift", bias[0].name)]) else ()


def keeps_hidden_rows_local(product: PlannedOperation, is_last: bool) -> bool:
    """Return True if ranks exchange nothing between a feed-forward layer's products, the first one or the last."""
    if len(product.groups) != 1:
        return False
    (group,) = product.groups
    inside = [*(e.operand for e in group.einsums), *([group.x] if is_last else [e.output for e in group.einsums])]
    is_plain = not (group.panels or group.has_wide_dtype or group.regathered)
    return is_plain and all(not c.forward and not c.backward for c in inside)


def _meter_hidden_rows(ops, function: str, count: int, elements: int) -> Value:
    """Count the hidden rows of a chunk, `elements` after the function of so many products."""
    return ops.pointwise(function, *[ops.tensor(elements) for _ in range(count)])


def _norm_function(ops, kind: str, eps: float) -> Callable[..., Any]:
    """Return the function of a norm over dims that are whole, of x, its gain and its bias if there is one."""
    if kind == CENTRED:
        plain = _norm_function(ops, "rmsnorm", eps)
        return lambda x, gain: plain(x, ops.kernels.statistics.centre_gain(gain))
    if kind == "rmsnorm" and ops.compiles_functions:  # LayerNorm is one kernel as it is
        compute = ops.compile_function(ops.kernels.statistics.apply_rms_norm)
        return lambda x, gain: compute(x, gain, eps)
    return lambda x, gain, bias=None: ops.kernels.statistics.apply_norm(x, gain, bias, kind, eps, ops.communicator, ())


class NormOp(BlockOp):
    """Normalisation `kind`, LayerNorm, RMSNorm or RMSNorm with a centred gain, of an activation over the dims of the
    parameters `gain` and `bias`, its last: d_model, d_kv, or the heads and d_kv of a token's query together. `eps` is
    added to the variance."""

    memory_accesses = (2, 5)  # the backward pass reads twice, for the gradients of input and parameters

    def record_operation(self, ops, x, spec, kind, gain, bias, eps=EPS):
        parameters = [gain] if bias is None else [gain, bias]
        out = ops.record_operation(self.kind, gain.name, [x], [spec, *parameters], [spec], norm=kind, eps=eps)
        return out if any(ops.is_dim_split(spec, d) for d in gain.dims) else replace(out, made_by=self.kind)

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan LayerNorm or RMSNorm: its statistics are merged by collectives over the axes that split its dims."""
        spec, dims = operation.inputs[0], operation.parameters[0].dims
        have = planner.layout(spec)
        over, rows = tuple(a for d in dims for a in have[d]), prod(planner.local_shape(spec)[: -len(dims)])
        cuts = planner.cuts_among_dims(spec, have, spec.dims[: -len(dims)])
        op, merged = ("all_gather", 2 * rows) if operation["norm"] == "layernorm" else ("all_reduce", rows)
        statistics = [
            *planner.statistics_collectives(over, have.only, merged, "forward", op, cuts),
            *planner.statistics_collectives(over, have.only, merged, "backward", cuts=cuts),
        ]
        return plan_with_vectors(planner, operation, statistics, over=over)

    def run_on_blocks(self, ops, planned, x, spec, kind, gain, bias, eps=EPS):
        """Compute LayerNorm or RMSNorm of this rank's block of x, merging statistics over a split dim."""
        if not planned.over:
            compute, vectors = _norm_function(ops, kind, eps), [gain] if bias is None else [gain, bias]
            return _note_rebuild(ops, compute(x, *vectors), compute, x, *vectors)
        widths, apply = ops.row_widths(spec, gain.dim(), planned.over), ops.kernels.statistics.apply_norm
        gain = ops.kernels.statistics.centre_gain(gain) if kind == CENTRED else gain
        return apply(x, gain, bias, kind, eps, ops.communicator, planned.over, widths)

    def meter_memory(self, ops, planned, x, spec, kind, gain, bias, eps=EPS) -> Value:
        """Count the bytes of LayerNorm or RMSNorm, which keeps its input and one or two numbers a row."""
        if kind == CENTRED:
            gain = ops.plain(ops.tensor(gain.elements, ops.wide), [gain])
        vectors, dims = [v for v in (gain, bias) if v], planned.operation.parameters[0].dims
        n, rows = x.elements, prod(ops.plan.local_shape(spec)[: -len(dims)])
        casts = ops.wide != ops.plan.itemsize["compute"]
        fused = ops.device != "cpu" or ops.compiles_functions or (kind == "layernorm" and not casts)
        in_pieces = bool(planned.over) or not fused
        saved = [x.storage, *(ops.new(rows, ops.wide) for _ in range(1 + (kind == "layernorm")))]
        saved += [v.storage for v in (vectors if kind == "layernorm" and not planned.over else vectors[:1])]

        def allocate() -> MeteredStorage:
            """Count the result, and what there is beside it until it is there."""
            wide = ops.widened(None, n * in_pieces)  # noqa: F841
            scratch = [ops.new(n, ops.wide) for _ in range(in_pieces * (1 + casts))]  # noqa: F841
            return ops.new(n)

        out = Value(allocate(), n)
        scratch_elements = n * in_pieces * (casts + (4 if planned.over else 1 + 2 * casts))
        if not planned.over:
            out.rebuild = MeteredRebuild((x.storage, *(v.storage for v in vectors)), allocate)
        return ops.plain(out, [x, *vectors], tuple(saved), scratch_elements, ops.wide)


class RotateOp(BlockOp):
    """Rotary position embedding with base `theta` of queries or keys, over d_kv at global positions along length
    (RoFormer), with angles scaled as `scaling` says. `width`: number of elements that rotate, at the end of d_kv, or at
    its beginning (`leading`), 0 for all; `pairs`: `halves` if the two elements of a pair are half of these apart, or
    `neighbours`."""

    memory_accesses = (2, 2)
    keeps_nothing = True  # its result takes its input's place

    def record_operation(self, ops, name, x, spec, theta, scaling=None, width=0, pairs="halves", leading=False):
        attributes = {"theta": theta, "scaling": scaling, "width": width, "pairs": pairs}
        attributes |= {"leading": True} if leading else {}
        return ops.record_operation(self.kind, name, [x], [spec], [spec], **attributes)

    def whole_dims(self, operation) -> Sequence[str]:
        """Return d_kv, which a rank needs whole, as the two elements of a rotated pair lie half of it apart."""
        return ("d_kv",)

    def run_on_blocks(self, ops, planned, name, x, spec, theta, scaling=None, width=0, pairs="halves", leading=False):
        """Compute queries or keys rotated by the angles of their positions, which all layers share."""
        positions = ops.kernels.positions
        wide = ops.kernels.statistics.widen_dtype(x).dtype
        turned = width or x.shape[-1]
        tokens = ops.cache.capacity if ops.cache else {**ops.plan.sizes, **dict(spec.sizes)}["length"]
        where = tokens, ops.offset, *ops.blocks[spec][spec.dims.index("length")]
        if (key := (where, turned, theta, scaling, pairs, wide, x.device, ops.is_tracing)) not in ops.angles:
            length = ops.global_positions(spec, "length", x.device)
            cos, sin = positions.rotary_angles(length, turned, theta, wide, scaling, pairs, tokens)
            ops.angles[key] = cos, positions.sign_sines(sin, pairs) if ops.is_tracing else sin
        sizes = dict(zip(spec.dims, x.shape, strict=True)) | {"d_kv": turned}
        shape = [n if d in ("length", "d_kv") else 1 for d, n in sizes.items()]
        cos, sin = (t.view(shape) for t in ops.angles[key])
        if ops.is_tracing:
            return positions.turn_pairs_traced(x, cos, sin, pairs, leading)
        return positions.apply_rotary(x, cos, sin, pairs, leading, ops.compile_function(positions.turn_pairs))

    def meter_memory(self, ops, planned, name, x, spec, theta, scaling=None, width=0, **_) -> Value:
        """Count the bytes of rotary queries or keys, computed in the type of statistics; nothing is kept."""
        if ops.compiles_functions:
            return ops.plain(ops.block(spec), [x])
        d_kv = ops.plan.local_shape(spec)[spec.dims.index("d_kv")]
        same, n = ops.wide == ops.plan.itemsize["compute"], x.elements
        turned = n // d_kv * (width or d_kv)
        wide = ops.widened(x.storage, turned)
        rotated_storage = ops.new(turned, ops.wide)
        rotated_storage = rotated_storage if same else ops.new(turned)
        out = Value(rotated_storage if turned == n else ops.new(n), n)
        del wide, rotated_storage
        return ops.plain(out, [x], (), turned * (turned < n) if same else 2 * turned, ops.wide)


class ShiftOp(BlockOp):
    """Activation plus a parameter (a bias, a position table), broadcast over the dims that the parameter lacks; the sum
    is in the activation's type. Of a table with the dim positions, a sequence takes as many rows as it has tokens. Rows
    of experts have `counts`: each is added the vector of its expert."""

    wide = "inputs", "outputs"
    memory_accesses = (2, 1)
    keeps_nothing = needs_no_value = True

    def record_operation(self, ops, x, spec, parameter, counts=None):
        of_rows = {} if counts is None else {"layer": counts}
        return ops.record_operation(self.kind, parameter.name, [x], [spec, parameter], [spec], **of_rows)

    def accesses_of_both_passes(self, operation, operations) -> tuple[float, float]:
        """Return no accesses in the forward pass where the product of the bias's layer adds it itself."""
        product = operations.get(("project", operation.name.removesuffix("_bias")))
        added = product and product.adds_biases([operations[self.kind, operation.name]])
        return (0, 1) if added else self.memory_accesses

    def plan_operation(self, planner, operation) -> PlannedOperation:
        """Plan adding a parameter, such as a bias, in its activation's layout, to which it is converted."""
        return plan_with_vectors(planner, operation)

    def run_on_blocks(self, ops, planned, x, spec, parameter, counts=None):
        """Add the parameter, a bias or a table of positions, to this rank's block of x."""
        if counts is not None:
            return x + ops.kernels.products.vectors_of_rows(counts, parameter)
        (dims,) = (p.dims for p in planned.operation.parameters)
        if dims[0] == "positions":
            from torch import cat

            rows = [parameter.narrow(0, first, n) for first, n in ops.block_stretches(spec, "length")]
            parameter, dims = cat(rows) if len(rows) > 1 else rows[0], ("length", *dims[1:])
        assert tuple(d for d in spec.dims if d in dims) == dims
        for i, d in enumerate(spec.dims):
            if d not in dims:
                parameter = parameter.unsqueeze(i)
        return x + parameter

    def meter_memory(self, ops, planned, x, spec, parameter, counts=None) -> Value:
        """Count the memory of the sum of an activation and a parameter, of which nothing is kept."""
        vectors = ops.new(x.elements if counts is not None else 0)  # noqa: F841  (until they are added)
        return ops.sum(ops.block(spec), [x, parameter])


class SinusoidOp(BlockOp):
    """scale * x plus the sinusoidal encoding ("Attention Is All You Need", 3.5) of the index along length, or of the
    data tensor `positions` [length, batch]: sines at even indices of d_model, cosines at odd ones."""

    def record_operation(self, ops, name, x, spec, scale, positions=None):
        return ops.record_operation(self.kind, name, [x], [spec], [spec], [positions], scale=scale)

    def run_on_blocks(self, ops, planned, name, x, spec, scale, positions=None):
        """Compute the sinusoidal position encoding of this rank's block, and add it to scale * x."""
        assert spec.dims == ("length", "batch", "d_model")
        if positions is None:
            length = ops.global_positions(spec, "length", x.device).unsqueeze(1)
        else:
            length = positions[self.kind, name]
        d_model = ops.global_positions(spec, "d_model", x.device)
        table = ops.kernels.positions.sinusoid_table(length.flatten(), d_model, ops.plan.sizes["d_model"])
        return x * scale + table.unflatten(0, length.shape).to(x.dtype)

    def meter_memory(self, ops, planned, name, x, spec, scale, positions=None) -> Value:
        """Count the bytes of a scaled activation and of its sum with the sinusoidal position encoding."""
        scaled = ops.new(x.elements)
        out = ops.plain(ops.block(spec), [x])
        del scaled
        return out
