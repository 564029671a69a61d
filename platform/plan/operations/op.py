"""Base of the operations that models are written in: one class each, which says all that is known of an operation.

| method | who calls it | what it says |
|---|---|---|
| `record_operation` | `Recorder`, which reads a model | dims, attributes and the data that is read: an `Operation` |
| `plan_operation` | `plan_operations` | how it splits: compute layout, conversions, collectives with their sizes |
| `count_flops` | placement of layers on stages | multiplications and additions of all ranks together |
| `run_on_blocks` | `ParallelOps`, on a rank | the forward pass on its blocks; autograd derives the backward pass |
| `meter_memory` | `MemoryMeter` | bytes that are allocated, kept for the backward pass, and taken there |
| `accesses_of_both_passes` | price of a step | elements that it reads and writes, by its attribute `memory_accesses` |

Its other attributes are what price, runtime and optimizer need to know of it. `run_on_blocks` and `meter_memory` of
a `BlockOp` see its activations and parameters as converted for it, and leave its result's conversion to it: what most
operations are.

An operation that is said in others (a residual connection: dropout, then a sum) has `compose_operation` in place of
them. `ops` is the one who calls. No module here imports torch where it is imported itself, as a plan is made without
torch: `run_on_blocks` computes with the methods of tensors and with `ops.kernels`, the modules of
`platform.runtime.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from sys import getrefcount
from typing import Any, NamedTuple

from platform.plan.layout import Layout, local_shape
from platform.plan.model_types import Operation, Parameter, Spec
from platform.plan.operation_plan import Collective, PlannedOperation
from platform.plan.planner import Planner
from platform.plan.rule import Conversion


class Op:
    """Operation of the models' language, an attribute of `Ops` by its `kind`: on a recorder, `ops.norm(...)` is
    `record_operation`, on a rank `run_on_blocks`, on a meter `meter_memory`, as `ops.bind_operation` says."""

    kind: str
    wide: Sequence[str] = ()  # which of its inputs and outputs may be in the type of statistics (Spec.dtype)
    open: Mapping[str, str] = {}  # "inputs" or "outputs" -> what of it may stay partial over ranks (Spec.open)
    # elements that it reads and writes per element of its first result (of a loss: of its logits, in the compute type),
    # in the forward and the backward pass; by default it reads one activation and writes another
    memory_accesses: tuple[float, float] = (2, 3)
    keeps_nothing = False  # True: it keeps no result of its own for the backward pass
    needs_no_value = False  # True: its gradients depend on no value of its inputs
    is_loss = False  # True: it ends the forward pass
    is_traceable = True  # False: a block with it is not compiled as one function
    sums_rows = False  # True: its gradients are sums of rows by index, in an order that torch would not keep
    keys_input = -1  # of an attention: which of its inputs has the dims of the keys that queries see
    chooses_kernel = False  # True: one kernel computes a whole attention, named by the attribute `kernel`
    moves_rows = False  # True: it sends as many rows of experts as their routing says
    multiplies_matrices = False  # True: its parameters are matrices, which Muon updates as a whole
    joins_branches = False  # True: its tensors are of several branches that are not alike, or of the stream around them
    bias_before = ""  # kind of the operation before it whose bias its own product adds

    def __set_name__(self, owner: type, name: str) -> None:
        """Set the operation's `kind` to the name of the attribute of `Ops` that it is."""
        self.kind = name

    def __get__(self, ops: Any, owner: type | None = None) -> Any:
        """Return this model operation bound to `ops`: its `record_operation`, `run_on_blocks` or `meter_memory`."""
        return self if ops is None else ops.bind_operation(self)

    def bind_computation(self, ops: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute`, which is `run_on_blocks` or `meter_memory`, bound to `ops` as a model calls it."""
        return partial(compute, ops)

    def compose_operation(self, ops: Any, *arguments: Any, **options: Any) -> Any:
        """Compose a model's operation from simpler ones, called on `ops`; return its results."""
        raise NotImplementedError(f"operation {self.kind} has neither this method nor `compose`")

    def record_operation(self, ops: Any, *arguments: Any, **options: Any) -> Any:
        """Record this operation in a model's forward pass, for the plan; return symbols of its results."""
        return self.compose_operation(ops, *arguments, **options)

    def run_on_blocks(self, ops: Any, *arguments: Any, **options: Any) -> Any:
        """Compute this operation's forward pass on this rank's blocks; return its results."""
        return self.compose_operation(ops, *arguments, **options)

    def meter_memory(self, ops: Any, *arguments: Any, **options: Any) -> Any:
        """Count the memory that this operation takes on the metered worker; return stand-ins for its results."""
        return self.compose_operation(ops, *arguments, **options)

    def whole_dims(self, operation: Operation) -> Sequence[str]:
        """Return the dims that this operation needs whole on a rank: gathered before, and split again after."""
        return ()

    def plan_operation(self, planner: Planner, operation: Operation) -> PlannedOperation:
        """Plan this operation in the layout of its result, except along the dims that it needs `whole_dims`; a data
        tensor that it reads is laid out as its result. Raises ValueError if its layouts do not allow computing it."""
        out, dims = operation.outputs[0], self.whole_dims(operation)
        layout, conversions = planner.layout(out), list[Conversion]()
        if dims:
            layout = layout.restrict_dims([d for d in out.dims if d not in dims])
            inputs = [t for t in operation.inputs if isinstance(t, Spec)]
            conversions = [planner.operand_conversion(t, layout.restrict_dims(t.dims), layout.axes) for t in inputs]
            conversions.append(planner.result_conversion(out, layout))
        read = token_fields(planner, out, layout.restrict_dims(("length", "batch"))) if operation.reads else {}
        return assemble_plan(planner, operation, layout, conversions, **read)

    def parameter_compute_axes(self, planner: Planner, operation: Operation) -> list[Sequence[str]]:
        """Return the axes that split the iteration space in which each parameter is used; the backward pass leaves its
        gradient partial over axes that do not split the parameter itself."""
        return [planner.layout(operation.outputs[0]).axes for _ in operation.parameters]

    def count_flops(self, operation: Operation, sizes: Mapping[str, int]) -> float:
        """Return the forward FLOPs of this operation's matrix products on all ranks. `sizes`: global, of model dims."""
        return 0.0

    def count_block_flops(self, planner: Planner, operation: Operation) -> float:
        """Return the forward FLOPs of a rank's products in an operation that is neither an einsum nor attention."""
        return 0.0

    def accesses_of_both_passes(
        self, operation: Operation, operations: Mapping[tuple[str, str], PlannedOperation]
    ) -> tuple[float, float]:
        """Return the `memory_accesses` of this operation; fewer where another planned one does a part of it."""
        return self.memory_accesses


class BlockOp(Op):
    """Operation whose `run_on_blocks` and `meter_memory` see blocks alone. They take the planned operation,
    `planned` (None where nothing of it is planned), then the arguments: activations and parameters as converted for
    it; their result is converted as planned. A rank without a block of the first activation computes nothing, and
    passes on an empty one that stays connected to the gradients of all of them."""

    def bind_computation(self, ops, compute):
        return partial(self._convert_and_compute, ops, compute)

    def _convert_and_compute(
        self, ops: Any, compute: Callable[..., Any], first: Any, *more: Any, **options: Any
    ) -> Any:
        """Convert an operation's activations and parameters to their planned layouts, call `compute` (its
        `run_on_blocks` or `meter_memory`) on the blocks, and convert the result. `first`, `more`: its arguments."""
        arguments = [first, *more]
        parameters = [a for a in arguments if isinstance(a, Parameter)]
        name = first if isinstance(first, str) else parameters[0].name if parameters else ""
        planned = ops.plan.operations.get((self.kind, name))
        conversions = list(planned.conversions) if planned else []
        if conversions and not parameters:
            moved = [i for i, a in enumerate(arguments) if isinstance(a, ops.Block)][: len(conversions)]
            into, conversions = conversions[: len(moved)], conversions[len(moved) :]
            for i, block in zip(moved, ops.convert_blocks([arguments[i] for i in moved], into), strict=True):
                arguments[i] = block
        blocks = [a for a in (*arguments, *options.values()) if isinstance(a, ops.Block)]
        if parameters and not (blocks and ops.absent(blocks[0])):
            vectors = ops.convert_parameters(planned)
            blocks = blocks or vectors[:1]
            arguments = [vectors.pop(0) if isinstance(a, Parameter) else a for a in arguments]
        y = ops.build_empty_block(blocks) if ops.absent(blocks[0]) else compute(ops, planned, *arguments, **options)
        leave = conversions[len(parameters) :]
        return ops.convert_block(y, *leave) if leave else y


def assemble_plan(
    planner: Planner,
    operation: Operation,
    layout: Layout,
    conversions: Sequence[Conversion] = (),
    statistics: Sequence[Collective] = (),
    **more: Any,
) -> PlannedOperation:
    """Assemble what an operation of a model plans for itself to compute in `layout`: the collectives of its
    `conversions`, then the ones that merge its `statistics` (such as the maximum of a softmax) over ranks. `more`:
    values of further fields of PlannedOperation, by name."""
    collectives = [c for conversion in conversions for c in planner.collectives_of_conversion(conversion)]
    placement = {"compute_axes": layout.axes, "only": layout.only, **more}
    return PlannedOperation(operation, (*collectives, *statistics), conversions=tuple(conversions), **placement)


def plan_with_vectors(
    planner: Planner, operation: Operation, statistics: Sequence[Collective] = (), **more: Any
) -> Any:
    """Plan a model's operation in the layout of its activation, to which its parameters, vectors of some of the dims,
    are converted. `statistics` and `more` as in `assemble_plan`."""
    layout = planner.layout(operation.inputs[0])
    vector_layout = Layout.build_canonical({**layout, **planner.row_expert_axes(operation.inputs[0])}, layout.only)
    conversions = enter_vectors(planner, operation, vector_layout, layout.axes)
    return assemble_plan(planner, operation, layout, conversions, statistics, **more)


def enter_vectors(planner: Planner, operation: Operation, layout: Layout, axes: Sequence[str]) -> list[Conversion]:
    """Return the conversions to `layout` of an operation's parameters, vectors of some dims, for use on `axes`."""
    pairs = [(p, planner.operand_conversion(p, layout.restrict_dims(p.dims), axes)) for p in operation.parameters]
    return [planner.parameter_conversion(operation, p, conversion) for p, conversion in pairs]


def token_fields(planner: Planner, spec: Spec | Parameter, tokens: Layout, length: str = "length") -> dict[str, Any]:
    """Return the fields `tokens` and `token_count` for the plan of an operation that reads a data tensor (token ids,
    labels, a mask) in the layout `tokens` over batch and length; the data tensor is as long as dim `length` of `spec`.
    """
    sizes = {"batch": planner.sizes["batch"], "length": planner.tensor_sizes(spec)[length]}
    return {"tokens": tokens, "token_count": prod(local_shape(("batch", "length"), sizes, tokens, planner.mesh))}


def global_extents(tensor: Spec | Parameter, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the global size of each dim of an operation's tensor, of rows all tokens'. `sizes`: the model's."""
    all_sizes = {**sizes, **dict(tensor.sizes)}
    return {d: all_sizes[d] * (all_sizes["length"] * all_sizes["batch"] if d == "rows" else 1) for d in tensor.dims}


# Stand-ins for device memory: storages that count their bytes while something refers to them, and an autograd tape
# whose backward passes allocate and free such storages.
#
# A forward pass run on them by `platform.predict.meter` keeps alive what it would keep alive on a device.

INTEGER = 8  # bytes of a token id, and of an element's index

GradientKey = int | str  # of a gradient: a parameter's name, or a number for an activation


@dataclass
class Ledger:
    """Count of the bytes of living metered storages: now, and their maximum since `peak` was last set."""

    now: int = 0
    peak: int = 0

    def add_bytes(self, nbytes: int) -> None:
        """Add the bytes that a metered operation has allocated to the bytes in use, and raise the peak if exceeded."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)


class MeteredStorage:
    """Memory under one or more tensors, counted until the last reference to it is gone. `counted`: its floating-point
    elements, 0 for integers; `parameter`: True for a gathered copy of a parameter; `permuted`: its dims lie in
    attention's order, and a product copies it."""

    __slots__ = ("_ledger", "counted", "nbytes", "parameter", "permuted")
    permuted: bool

    def __init__(self, ledger: Ledger, nbytes: int, counted: int, parameter: bool = False):
        """Construct a metered operation's storage of `nbytes`, added to `ledger`; other arguments as in the class."""
        self._ledger, self.nbytes, self.counted, self.parameter = ledger, nbytes, counted, parameter
        self.permuted = False
        ledger.add_bytes(nbytes)

    def allocate_alike(self) -> MeteredStorage:
        """Allocate another storage of as many bytes for a metered operation."""
        return MeteredStorage(self._ledger, self.nbytes, self.counted, self.parameter)

    def __del__(self) -> None:
        """Remove the bytes of a metered operation's storage from the ledger once nothing refers to it."""
        self._ledger.now -= self.nbytes


_KEYS = count()
_ALONE = 2  # references to what a dict alone holds, as `getrefcount` counts them: its own argument is one


class Value:
    """Stand-in for a tensor in the memory meter: a number of elements in a storage; the storage is None for a parameter
    as it is stored, whose bytes are counted apart."""

    __slots__ = ("elements", "key", "rebuild", "storage")

    def __init__(self, storage: MeteredStorage | None, elements: int, key: GradientKey | None = None):
        """Construct an operand or result of a metered operation; `key`: a parameter's name, by default a new number."""
        self.storage, self.elements = storage, elements
        self.key: GradientKey = next(_KEYS) if key is None else key
        self.rebuild: MeteredRebuild | None = None

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of a metered operation's operand or result, 0 for a stored parameter."""
        return self.storage.nbytes // self.storage.counted if self.storage and self.storage.counted else 0


class MeteredRebuild(NamedTuple):
    """Way to make a metered tensor again from storages that are `kept` anyway: `allocate` counts what that takes."""

    kept: Sequence[MeteredStorage | None]
    allocate: Callable[[], MeteredStorage]


Gradients = Sequence[MeteredStorage | None]
Saved = tuple[MeteredStorage | None, ...]
Backward = Callable[[Gradients, Saved], Gradients]  # (gradients of results, saved) -> gradients of inputs


@dataclass
class _Node:
    """Operation of a metered pass: its backward function, and the storages that this keeps."""

    outs: Sequence[GradientKey]
    ins: Sequence[GradientKey]
    saved: Saved
    backward: Backward


class LeafGradients:
    """Takes the gradients of parameters as they come in a backward pass, by name; this one drops them."""

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Accept the gradient that metered operations give the parameter `name`; without sums it is dropped."""

    def adds_in_place(self, name: GradientKey) -> bool:
        """Return True if a metered operation adds the gradient of `name` up in its bucket, once counted; here False."""
        return False


class MeterTape:
    """Autograd tape of the memory meter: the operations of forward passes, in order."""

    def __init__(self) -> None:
        """Start an empty tape of metered operations."""
        self._nodes: list[_Node] = []

    def note_operation(self, outs: Sequence[Value], ins: Sequence[Value], saved: Saved, backward: Backward) -> None:
        """Append a metered operation (outputs, inputs, `saved` storages, backward function) to the tape."""
        self._nodes.append(_Node([x.key for x in outs], [x.key for x in ins], saved, backward))

    def distinct_saved_storages(self) -> list[MeteredStorage]:
        """Return the distinct storages that the metered operations on this tape save for the backward pass."""
        return list({id(s): s for node in self._nodes for s in node.saved if s}.values())

    def run_backward(self, gradients: dict[GradientKey, MeteredStorage], leaves: LeafGradients) -> None:
        """Run the backward passes of the metered operations on this tape in reverse order, freeing the saved storages.
        `gradients`: the outputs' gradients on entry and the inputs' in the end, by the tensor's key; `leaves`: receiver
        of the parameters' gradients. A further gradient of the same tensor is added in place, unless something else
        holds the first."""
        while self._nodes:
            node = self._nodes.pop()
            output_gradients = [gradients.pop(key, None) for key in node.outs]
            if any(output_gradients):
                input_gradients = list(node.backward(output_gradients, node.saved))
                del output_gradients
                for key in reversed(node.ins):
                    if g := input_gradients.pop():
                        if isinstance(key, str):
                            leaves.setdefault(key, g)
                        elif key in gradients and getrefcount(gradients[key]) > _ALONE:
                            gradients[key] = g.allocate_alike()
                        else:
                            gradients.setdefault(key, g)
                    del g
