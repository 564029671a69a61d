"""All operations that models are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from platform.plan.model_types import NO_RECOMPUTATION, Adapter, Operation, Parameter, Recompute, Spec, resize_dim
from platform.plan.operation_plan import PlannedOperation
from platform.plan.operations.attention import AttentionOp, KeyValueCache, RecallOp, RememberOp, SoftmaxOp
from platform.plan.operations.delta_rule import ConvolveOp, DeltaRuleOp
from platform.plan.operations.einsums import ProductOp, ProjectOp
from platform.plan.operations.experts import CombineOp, CombineRowsOp, DispatchOp, DispatchRowsOp, RouteOp
from platform.plan.operations.fused_attention import FusedAttentionOp, RingAttentionOp
from platform.plan.operations.lookup import FeaturesOp, LookupOp, OneHotOp, RelativeBiasOp
from platform.plan.operations.loss_operations import (
    AddLossAheadOp,
    CrossEntropyOp,
    LinearCrossEntropyOp,
    SquaredErrorOp,
    TokenLossOp,
)
from platform.plan.operations.op import Op
from platform.plan.operations.pointwise import (
    DropoutOp,
    JitterOp,
    MlpOp,
    NormOp,
    PointwiseBySliceOp,
    PointwiseOp,
    ResidualNormOp,
    ResidualOp,
    RotateOp,
    ShiftOp,
    SinusoidOp,
)
from platform.plan.operations.recurrence import RecurrenceOp
from platform.plan.operations.reshaping import (
    ConcatenateOp,
    ExpandKvOp,
    ReduceOp,
    RelayoutOp,
    RelayoutTogetherOp,
    ReshapeOp,
    SequenceMeanOp,
    SplitBranchesOp,
    SumBranchesOp,
)
from platform.plan.operations.scaling import MultiplyByOp, NormaliseOp, ScaleByOp, ScaleOp


class Ops:
    """Operations that a model is written in. Tensors are opaque to it: symbols in the recorder, local blocks on a rank,
    counted storages in the memory meter."""

    plan: Any  # on a rank and in the meter, the Plan that they execute
    dropout_rate: float = 0.0
    recompute: Recompute = NO_RECOMPUTATION
    cache: KeyValueCache | None = None  # in a pass of generation
    adapters: Mapping[str, Adapter] = {}  # by the name of what they adapt

    lookup, one_hot, features, relative_bias = LookupOp(), OneHotOp(), FeaturesOp(), RelativeBiasOp()
    project, einsum = ProjectOp(), ProductOp()
    relayout, relayout_each = RelayoutOp(), RelayoutTogetherOp()
    reshape, concatenate = ReshapeOp(), ConcatenateOp()
    split_branches, sum_branches = SplitBranchesOp(), SumBranchesOp()
    reduce, expand_kv = ReduceOp(), ExpandKvOp()
    shift, norm, rotate, sinusoid, recurrence = ShiftOp(), NormOp(), RotateOp(), SinusoidOp(), RecurrenceOp()
    convolve, delta_rule = ConvolveOp(), DeltaRuleOp()
    pointwise, pointwise_each, normalise = PointwiseOp(), PointwiseBySliceOp(), NormaliseOp()
    scale, scale_by, multiply_by = ScaleOp(), ScaleByOp(), MultiplyByOp()
    dropout, residual, residual_norm = DropoutOp(), ResidualOp(), ResidualNormOp()
    jitter, mlp = JitterOp(), MlpOp()
    attention, softmax, fused_attention = AttentionOp(), SoftmaxOp(), FusedAttentionOp()
    ring_attention = RingAttentionOp()
    remember, recall = RememberOp(), RecallOp()
    route, dispatch, combine = RouteOp(), DispatchOp(), CombineOp()
    dispatch_rows, combine_rows = DispatchRowsOp(), CombineRowsOp()
    cross_entropy, linear_cross_entropy, squared_error = CrossEntropyOp(), LinearCrossEntropyOp(), SquaredErrorOp()
    token_loss, add_loss_ahead, sequence_mean = TokenLossOp(), AddLossAheadOp(), SequenceMeanOp()

    def bind_operation(self, op: Op) -> Callable[..., Any]:
        """Return what `ops.norm(...)` calls of an operation: its recording, its computation or its memory count."""
        raise NotImplementedError

    def recomputed(self, kind: str, name: str, function: Callable[..., Any], spec: Spec, x: Any, *more: Any) -> Any:
        """Return function(x, *more), an activation or a tuple of several, computed with activation checkpointing if
        `self.recompute` is of this `kind`, "selective" or "full": then only the arguments are kept, and the backward
        pass calls `function` again. `name`: the attention's, or the first block's, that `function` computes. x is of
        type `spec`; n ranks that replicate it keep 1/n of it each, in host memory under `self.recompute.offload`."""
        return function(x, *more)

    def fuses_attention(self, name: str, spec: Spec) -> bool:
        """Return True if one fused kernel does the attention `name` of type `spec`: the scheme leaves
        memory_length and d_kv whole there, and there is no dropout, or the kernel draws its masks."""
        return ("fused_attention", name) in self.plan.operations

    def uses_ring_attention(self, name: str, spec: Spec, kv: Spec, apart: bool) -> bool:
        """Return True if keys go around ranks in attention `name`, or on one as no whole kernel computes it."""
        return ("ring_attention", name) in self.plan.operations

    def is_dim_split(self, spec: Spec, dim: str) -> bool:
        """Return True if the scheme splits dim `dim` of activations in the region of `spec`."""
        return bool(self.plan.scheme.regions[spec.region][dim])

    def operation_plan(self, kind: str, name: str) -> PlannedOperation:
        """Return the planned operation `name` of this `kind`, such as ("lookup", "embedding"), where it is executed."""
        return self.plan.operations[kind, name]

    def remembered(self, spec: Spec) -> Spec:
        """Return the type of all keys or values that causal attention reads in a pass that computes ones of type
        `spec`: longer by the tokens of earlier passes that a key-value cache has, and where the scheme splits
        memory_length, renamed to it: ranks keep a part each."""
        if not self.cache:
            return spec
        cached = resize_dim(spec, "length", self.cache.capacity)
        return cached.rename_dim("length", "memory_length") if self.is_dim_split(spec, "memory_length") else cached

    def watch(self, name: str, x: Any, spec: Spec) -> Any:
        """Return the activation x, the output of the layer `name`, which monitoring of a run may see."""
        return x

    def product(self, name: str, x: Any, spec: Spec, others: Sequence[tuple[Any, Spec] | Parameter], out: Spec) -> Any:
        """Return the einsum of activation x with any number of other operands, (activation, its type) or parameters,
        computed pairwise from the left: each intermediate product is in the region of `out` and has the dims that are
        still needed. A good order contracts early.

        Every dim that `out` lacks must be in two or more operands; `reduce` sums over a dim of a single one.
        """
        for i, y in enumerate(others):
            y_dims, y_sizes = (y.dims, y.sizes) if isinstance(y, Parameter) else (y[1].dims, y[1].sizes)
            later = [t.dims if isinstance(t, Parameter) else t[1].dims for t in others[i + 1 :]]
            needed = {*out.dims, *(d for dims in later for d in dims)}
            dims = tuple(d for d in dict.fromkeys((*spec.dims, *y_dims)) if d in needed)
            sizes = tuple((d, n) for d, n in dict((*spec.sizes, *y_sizes)).items() if d in dims)
            product_spec = Spec(out.region, dims, sizes) if later else out
            if isinstance(y, Parameter):
                (x,) = self.project(x, spec, (y,), (product_spec,))
            else:
                x = self.einsum(f"{name}.{i}", x, spec, *y, product_spec)
            spec = product_spec
        return x


# by kind: what is planned, priced, metered and run by the kind of a recorded operation
OPERATIONS = {kind: op for kind, op in vars(Ops).items() if isinstance(op, Op)}


def count_flops(operation: Operation, sizes: Mapping[str, int]) -> float:
    """Return the forward FLOPs of matrix products on all ranks together. `sizes`: global sizes of model dims."""
    return OPERATIONS[operation.kind].count_flops(operation, sizes)
