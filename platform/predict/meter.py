"""The `Ops` of a memory forecast: a model's forward and backward pass on storages that only count bytes.

Each operation counts in its `meter_memory`, in the same steps as its `run_on_blocks` computes; the numbers follow
torch's CPU kernels. Their common parts are here. `MeteredSums` are the sums of gradients that
`platform.runtime.flat_buffers` allocates as gradients come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from platform.plan.chunks import Bucket, Chunk
from platform.plan.gather_order import ParameterPrefetcher, Use
from platform.plan.layout import is_at_index_zero
from platform.plan.model_types import NF4_PIECE, NF4_SCRATCH, Parameter, Spec
from platform.plan.operation_plan import (
    EinsumGroup,
    OffloadedActivation,
    PlannedOperation,
    count_data_numbers,
    shapes_along_steps,
)
from platform.plan.operations.attention import AttentionBlock
from platform.plan.operations.op import (
    INTEGER,
    Backward,
    GradientKey,
    Gradients,
    LeafGradients,
    Ledger,
    MeteredStorage,
    MeterTape,
    Op,
    Saved,
    Value,
)
from platform.plan.operations.registry import Ops
from platform.plan.plan import Plan
from platform.plan.quantisation import SCALE_BYTES
from platform.plan.rule import JOIN, LENDING, VANISH, Conversion, RelayoutStep
from platform.plan.whole_blocks import reasons_against_whole_blocks


class MemoryMeter(Ops):
    """Meter of one worker's memory: creates storages that only count bytes in `ledger` and converts their layouts, as
    the worker at mesh coordinates `at` would. `tape`: recorded operations, for the backward pass; `leaves`: gradients
    of parameters; `deferred`: pending computations of weight gradients, None unless the schedule splits them off;
    `device`: kind of the worker's (cpu, cuda); `compiles_functions`: it compiles (train.compile); `wholly`: the
    operation under way lies in a block that is compiled as one function.

    A tensor without elements stands for an absent block; operations pass it on.
    """

    plan: Plan

    def __init__(
        self,
        plan: Plan,
        dropout: float,
        at: Mapping[str, int],
        device: str = "cpu",
        *,
        ahead: bool = True,
        compiles: str = "",
    ):
        """Construct the memory meter of the worker at mesh coordinates `at`; `device`: cpu or cuda, `dropout`: its
        rate, `ahead`: parameters are gathered one matrix product ahead, see `Ahead`; `compiles`: "functions" if small
        functions are compiled (train.compile), "blocks" if whole blocks are too, where they can be."""
        self.plan, self.dropout_rate, self.recompute, self.at = plan, dropout, plan.recompute, at
        self.device, self.adapters = device, plan.adapters
        self.compiles_functions, self.wholly = bool(compiles), False
        self._reasons_against_whole: Mapping[str, str] = (
            reasons_against_whole_blocks(plan, device, dropout) if compiles == "blocks" else {}
        )
        self.ledger, self.tape = Ledger(), MeterTape()
        self.leaves = LeafGradients()
        self.deferred: list[Callable[[], None]] | None = None
        self.wide = plan.itemsize["accumulate"]
        self._spans: Sequence[tuple[Bucket, ...]] = []
        self._span = 0  # stretch of the forward pass under way
        self.ahead: ParameterPrefetcher[Value] = ParameterPrefetcher(plan, self._gather_parameter, ahead)
        self._whole: dict[int, MeteredStorage] = {}  # gathered buckets
        self._arriving: list[MeteredStorage] = []  # shards in 4 bits that are gathered for the next span
        # what hides scores, by window and positions: shared by all passes; by the layers of this one
        self.standing: dict[tuple[int, int], MeteredStorage] = {}
        self.of_pass: dict[tuple[int, int], MeteredStorage] = {}
        self.grad = True
        self.left: Counter[int] = Counter()  # bytes of an activation -> how many such are in host memory
        self._last: OffloadedActivation[MeteredStorage] | None = None  # of these, in this pass

    def bind_operation(self, op: Op) -> Callable[..., Any]:
        return op.bind_computation(self, op.meter_memory)

    def _gather_parameter(self, p: Parameter, conversion: Conversion) -> Value:
        """Count the bytes of converting a parameter to an operation's layout; return the converted stand-in."""
        return self.relayout_forward(self.parameter_block(p), conversion)

    def new(self, elements: int, itemsize: int = 0, *, parameter: bool = False) -> MeteredStorage:
        """Allocate a counted storage of `elements` floating-point numbers, of the plan's compute type unless `itemsize`
        (bytes) is given; `parameter`: a gathered copy of a parameter."""
        return MeteredStorage(self.ledger, elements * (itemsize or self.plan.itemsize["compute"]), elements, parameter)

    def tensor(self, elements: int, itemsize: int = 0) -> Value:
        """Allocate a counted stand-in for a tensor of `elements` numbers, with a storage as by `new`."""
        return Value(self.new(elements, itemsize), elements)

    Block = Value  # the meter's stand-in for a rank's block of an activation

    @staticmethod
    def absent(x: Value) -> bool:
        """Return True if the metered worker has no block of the tensor that x stands for: no elements."""
        return not x.elements

    @staticmethod
    def build_empty_block(blocks: Sequence[Value]) -> Value:
        """Return the empty stand-in for a block that the metered worker lacks, made of the `blocks` given."""
        return blocks[0]

    def integers(self, elements: int, itemsize: int = INTEGER) -> MeteredStorage:
        """Allocate a counted storage of `elements` integers or booleans, of `itemsize` bytes each."""
        return MeteredStorage(self.ledger, elements * itemsize, 0)

    def allocate_data(self, chunk: Chunk) -> MeteredStorage:
        """Allocate counted bytes for the data tensors (ids, labels) that a chunk's operations read, one per layout."""
        readers = ((name, o) for o in chunk.operations.values() for name in o.operation.reads)
        return self.integers(sum({(name, o.tokens): count_data_numbers(o, name) for name, o in readers}.values()))

    def widened(self, x: MeteredStorage | None, elements: int) -> MeteredStorage | None:
        """Count a cast of x to the type of statistics: a new storage only if that is not the compute type."""
        return x if self.wide == self.plan.itemsize["compute"] else self.new(elements, self.wide)

    def block(self, spec: Spec) -> Value:
        """Allocate a counted storage for this worker's block of an activation; it is empty if the worker has none."""
        elements = prod(self.plan.local_shape(spec)) * self.plan.has_block(spec, self.at)
        return self.tensor(elements, self.plan.itemsize[spec.dtype])

    def note_operation(self, outs: Sequence[Value], ins: Sequence[Value], saved: Saved, backward: Backward) -> None:
        """Record an operation on the memory meter's tape if gradients are wanted, as `MeterTape.note_operation`."""
        if self.grad:
            self.tape.note_operation(outs, ins, saved, backward)

    def plain(
        self, out: Value, ins: Sequence[Value], saved: Saved = (), scratch_elements: int = 0, itemsize: int = 0
    ) -> Value:
        """Record on the memory meter's autograd tape an operation with result `out` that keeps `saved`, and whose
        backward pass allocates a gradient per input, of its type, while `scratch_elements` elements of scratch are held
        (of the compute type unless `itemsize` is given); return `out`."""
        sizes = [(x.elements, x.itemsize) if self.takes_gradient(x) else None for x in ins]

        def backward(_: Gradients, __: Saved) -> Gradients:
            """Allocate the gradients of all inputs, while the scratch memory is held."""
            held = self.new(scratch_elements, itemsize) if scratch_elements else None  # noqa: F841  (until all gradients are allocated)
            return [size and self.new(*size) for size in sizes]

        self.note_operation([out], ins, saved, backward)
        return out

    def sum(self, out: Value, ins: Sequence[Value]) -> Value:
        """Record the memory of a sum, which keeps nothing and hands its gradient to its inputs; return its result."""
        n, sizes = out.elements, [x.elements * self.takes_gradient(x) for x in ins]
        self.note_operation([out], ins, (), lambda gs, _: [gs[0] if size == n else self.new(size) for size in sizes])
        return out

    def takes_gradient(self, x: Value) -> bool:
        """Return True unless the tensor that x stands for is a frozen parameter, perhaps in another layout."""
        return not isinstance(x.key, str) or x.key not in self.plan.frozen

    def convert_storage(
        self,
        storage: MeteredStorage | None,
        elements: int,
        steps: Sequence[RelayoutStep],
        shape: tuple[int, ...],
        parameter: bool = False,
        dtype: str = "compute",
    ) -> tuple[MeteredStorage | None, int]:
        """Count the memory of a conversion between layouts: return (storage, elements) of a tensor of local `shape`
        after `steps`, taken as `platform.runtime.conversion` does on this worker; an absent tensor has 0
        elements. A slice, but of pieces in zigzag, and a block without its padding, are views of the same storage; a
        collective allocates a new one, except a broadcast on its root. `parameter`: the tensor is a copy of a
        parameter; `dtype`: its type."""
        for step, _, after in shapes_along_steps(steps, shape, self.plan.mesh):
            if not is_at_index_zero(step.only, self.at):
                continue
            index = self.plan.mesh.index_in_group(self.at, step.axes)
            if step.op in VANISH and index:
                storage, elements = self.new(0, parameter=parameter), 0
                continue
            elements = prod(after)
            is_root = step.op == "broadcast" and not index
            if not (step.op == "drop" or (step.op == "slice" and step.zigzag < 0) or is_root):
                storage = self._allocate_collective_result(elements, step, parameter, self.plan.itemsize[dtype])
        return storage, elements

    def _allocate_collective_result(
        self, elements: int, collective: RelayoutStep, parameter: bool, itemsize: int
    ) -> MeteredStorage:
        """Allocate a counted storage for the result of a collective `collective`, of `elements` of `itemsize` bytes. A
        split or joined dim that is not first in memory, or lies in zigzag, costs a copy, before or after. `parameter`:
        it is a gathered copy of a parameter."""
        if collective.op in LENDING:
            return self._allocate_lent_experts(elements, collective, parameter, itemsize)
        last = collective.joined if collective.op == "all_to_all" else collective.dim
        before = collective.op in ("reduce_scatter", "all_to_all", "scatter") and collective.dim
        after = collective.op in ("all_gather", "gather", "all_to_all") and last
        larger = self.plan.mesh.count_ranks(collective.axes) if collective.op == "reduce_scatter" else 1
        folds = collective.op in ("reduce_scatter", "all_to_all") and collective.zigzag == collective.dim
        copies = [self.new(elements * larger, itemsize) for copied in (folds, before) if copied]
        out = self.new(elements, itemsize, parameter=parameter)
        del copies
        out = self.new(elements, itemsize, parameter=parameter) if after else out
        unfolds = collective.op in JOIN and collective.zigzag == last
        return self.new(elements, itemsize, parameter=parameter) if unfolds else out

    def _allocate_lent_experts(
        self, elements: int, lending_collective: RelayoutStep, parameter: bool, itemsize: int
    ) -> MeteredStorage:
        """Allocate a counted storage for a block of experts after `lending_collective`, of `elements` of `itemsize`
        bytes; at most, a rank lends to all others."""
        lent, others = self.plan.scheme.lent, self.plan.mesh.count_ranks(lending_collective.axes) - 1
        width = elements // lending_collective.shape[0]
        more = lent if lending_collective.op == "lend" else 0
        moved = [self.new(n * width, itemsize) for n in (lent * others, more) if n]
        out = self.new(elements + (0 if more else lent * width), itemsize, parameter=parameter)
        del moved
        return out

    def relayout_forward(self, x: Value, conversion: Conversion) -> Value:
        """Count the bytes of a conversion's forward steps of x, without a backward pass; return the result."""
        steps, shape = conversion.forward, conversion.before
        parameter = isinstance(x.key, str)
        return Value(*self.convert_storage(x.storage, x.elements, steps, shape, parameter, conversion.dtype))

    def relayout_backward(
        self, gradient: MeteredStorage | None, elements: int, conversion: Conversion
    ) -> MeteredStorage | None:
        """Count the memory of the backward steps of a conversion, for the gradient of its result, of `elements`."""
        steps, shape = conversion.backward, conversion.after
        return self.convert_storage(gradient, elements, steps, shape, dtype=conversion.dtype)[0]

    def convert_block(self, x: Value, conversion: Conversion, prefetched: Value | None = None) -> Value:
        """Count the memory of a conversion of x to another layout, unless it is `prefetched`, and record its backward
        steps on the autograd tape; return the converted tensor."""
        if not conversion.forward and not conversion.backward:
            return x
        out = prefetched or self.relayout_forward(x, conversion)
        if not self.takes_gradient(x):
            return Value(out.storage, out.elements, x.key)
        size = out.elements
        self.note_operation([out], [x], (), lambda gs, _: [self.relayout_backward(gs[0], size, conversion)])
        return out

    def convert_blocks(self, blocks: Sequence[Value], conversions: Sequence[Conversion]) -> list[Value]:
        """Count the memory of conversions of several blocks together, each of which is there until the last is done."""
        return [self.convert_block(x, conversion) for x, conversion in zip(blocks, conversions, strict=True)]

    def parameter_block(self, p: Parameter) -> Value:
        """Return the stand-in of a parameter as this worker computes with it, whose bytes are counted elsewhere."""
        return Value(None, prod(self.plan.local_shape(p)) * self.plan.has_block(p, self.at), p.name)

    def convert_parameters(self, planned: PlannedOperation) -> list[Value]:
        """Count the conversions of a planned operation's parameters, if it has no einsums; return the results."""
        operation = planned.operation
        use, parameters = (operation.kind, operation.name, 0), operation.parameters
        coming = self.ahead.take_parameters(use) if use in self.ahead else [None] * len(parameters)
        triples = zip(parameters, planned.conversions, coming, strict=False)
        return [self.convert_block(self.parameter_block(p), conversion, c) for p, conversion, c in triples]

    def adds_in_place(self, key: GradientKey) -> bool:
        """Return True if an operand is a parameter whose gradient is added in its bucket; count those bytes."""
        return isinstance(key, str) and self.leaves.adds_in_place(key)

    def additive_attention_mask(self, a: AttentionBlock, window: int, documents: bool) -> Value:
        """Count the memory of attention's mask for a `window` or for `documents`, made as
        `ParallelOps.additive_attention_mask` does: once for all layers of a pass, and without documents once for all
        passes."""
        masks = self.of_pass if documents else self.standing
        positions = a.length * a.memory_length
        if (window, positions) not in masks:
            masks[window, positions] = self.new(positions * (a.batch if documents else 1))
        return Value(masks[window, positions], positions)

    def operands(self, use: Use, group: EinsumGroup, stored: Sequence[Value], back: bool = False) -> list[Value]:
        """Return the operands of a group of einsums as converted for it, as `platform.runtime.residency` does;
        in the backward pass (`back`), operands kept as converted are returned as they are."""
        if any(e.operand.forward for e in group.einsums if e.regathered or not back) and use in self.ahead:
            return self.ahead.take_parameters(use, back)
        pairs = zip(stored, group.einsums, strict=True)
        return [self.relayout_forward(w, e.operand) if e.regathered or not back else w for w, e in pairs]

    def inner(self, planned: PlannedOperation, leave: Conversion) -> Value:
        """Allocate the metered local result of an operation, before its conversion; empty if not on this worker."""
        elements = prod(leave.before) * is_at_index_zero(planned.only, self.at)
        return self.tensor(elements, self.plan.itemsize[leave.dtype])

    def begin_forward(self, chunk: Chunk) -> None:
        """Begin a metered forward pass of a chunk: count the parameters gathered for its first span (ZeRO-3)."""
        self._spans = self._list_gathered_buckets(chunk)
        self._span, self._last = 0, None
        self.ahead.begin_pass()
        self._move_span(0, 1)

    def _list_gathered_buckets(self, chunk: Chunk) -> Sequence[tuple[Bucket, ...]]:
        """Return the buckets whose parameters are gathered for each span of a chunk (ZeRO-3); [] without."""
        spans = self.plan.buckets_by_chunk_span[chunk.number] if self.plan.frees_weights else []
        return [tuple(b for b in span if b.frees_weights) for span in spans]

    def end_forward(self) -> None:
        """End a metered forward pass: free gathered parameters (ZeRO-3) unless the backward pass follows at once."""
        if not self.plan.turns:
            self.end_pass()

    def begin_backward(self, chunk: Chunk) -> None:
        """Begin a metered backward pass of a chunk: count the parameters gathered for its last span (ZeRO-3)."""
        self._spans = self._list_gathered_buckets(chunk)
        self._move_span(len(self._spans) - 1, -1)

    def end_pass(self) -> None:
        """End a metered pass: free the parameters that it gathered (ZeRO-3)."""
        self._whole.clear()

    def _enter_span(self, x: Value) -> Value:
        """Count the move to the model's next span, whose parameters are gathered (ZeRO-3, as
        `platform.runtime.residency` does), and back in the backward pass; return x."""
        if not self._spans:  # the same, but what makes x again is no longer known, where a block begins or ends so
            return Value(x.storage, x.elements, x.key) if self.plan.frees_weights else x
        before, out = self._span, Value(x.storage, x.elements)
        self._span += 1
        self._move_span(self._span, 1)

        def backward(gs: Gradients, _: Saved) -> Gradients:
            """Count the parameters of the model's span before as gathered again, in the backward pass."""
            self._move_span(before, -1)
            return gs

        self.note_operation([out], [x], (), backward)
        return out

    def _move_span(self, span: int, direction: int) -> None:
        """Count span `span`'s and the next one's parameters as gathered; `direction`: 1 forward, -1 backward."""
        if self._spans:
            onwards = self._spans[span + 1 :] if direction > 0 else self._spans[:span][::-1]
            self._count_arriving_shards(self._spans[span])
            self._keep_only_gathered(self._spans[span])
            coming = next(filter(None, onwards), ())
            self._count_arriving_shards(coming)
            self._keep_only_gathered((*self._spans[span], *(b for b in coming if not b.has_narrow_gather)))

    def _count_arriving_shards(self, buckets: Sequence[Bucket]) -> None:
        """Count the shards in 4 or 8 bits that are gathered for a span, and are not numbers yet, and no others."""
        self._arriving.clear()
        missing = [b for b in buckets if b.has_narrow_gather and b.sharded and id(b) not in self._whole]
        for b in (b for b in missing if b.tiles):  # a weight of a shard, as it is rounded
            self.integers(min(b.shard_elements, max(b.sizes)), self.wide + 1)
        sent = [b.shards + bool(b.tiles) for b in missing]
        self._arriving = [self.integers(n * b.narrow_shard_bytes, 1) for n, b in zip(sent, missing, strict=True)]

    def _keep_only_gathered(self, buckets: Sequence[Bucket]) -> None:
        """Count only the parameter `buckets` as there in full: free others' bytes, allocate missing ones."""
        buckets_by_id = {id(b): b for b in buckets}
        self._whole = {key: kept for key, kept in self._whole.items() if key in buckets_by_id}
        missing = {key: b for key, b in buckets_by_id.items() if key not in self._whole}
        self._whole |= {key: self.new(b.elements, parameter=True) for key, b in missing.items()}
        decoded = max((b.elements for b in missing.values() if b.quantised), default=0)
        if not self.compiles_functions:  # by one kernel
            self.integers(min(decoded, NF4_PIECE[self.device]), NF4_SCRATCH)  # freed at once
        spread = [prod(t.shape[:2]) * t.columns for b in missing.values() for t in b.tiles]
        self.integers(max(spread, default=0), SCALE_BYTES)

    def recomputed(self, kind, name, function, spec, x, *more):
        """Count function(x, *more), recomputed in the backward pass if activations of this `kind` are."""
        if kind == "full" and self._reasons_against_whole.get(name) == "":
            function = partial(self._count_compiled_block, function)
        if kind == "full":
            outputs = self._count_recomputed(kind, function, spec, self._enter_span(x), *more)
            if isinstance(outputs, tuple):
                return (self._enter_span(outputs[0]), *outputs[1:])
            return self._enter_span(outputs)
        return self._count_recomputed(kind, function, spec, x, *more)

    def _count_compiled_block(self, function: Callable[..., Any], *arguments: Value | None) -> Any:
        """Count the memory of a block, `function`, that is compiled as one function, forward and backward: saved
        tensors are there until its backward pass ends, and so are all gradients. A third function makes the gradients
        of weights that a schedule defers."""
        present, outside, left = [x for x in arguments if x], (self.tape, self.grad, self.deferred), self.deferred
        of_weights = list[Callable[[], None]]()
        self.deferred = None if left is None else of_weights
        self.tape, self.grad, self.wholly = MeterTape(), True, True
        out, tape = function(*arguments), self.tape
        results: Sequence[Value] = out if isinstance(out, tuple) else (out,)
        (self.tape, self.grad, self.deferred), self.wholly = outside, False

        def backward(gs: Gradients, _: Saved) -> Gradients:
            """Count the memory of the block's backward pass; return the gradients of its arguments."""
            gradients: dict[GradientKey, MeteredStorage] = {y.key: g for y, g in zip(results, gs, strict=True) if g}
            self._count_block_gradients(partial(tape.run_backward, gradients))
            if left is not None:
                left.append(partial(self._count_block_gradients, partial(_count_weight_gradients, of_weights)))
            return [gradients.get(x.key) for x in present]

        self.note_operation(results, present, tuple(tape.distinct_saved_storages()), backward)
        return out

    def _count_block_gradients(self, compute: Callable[[LeafGradients], None]) -> None:
        """Count the gradients of parameters that a compiled function computes, added to sums once all are there."""
        leaves, self.leaves, self.wholly = self.leaves, _BlockGradients(), True
        compute(self.leaves)
        block_gradients, self.leaves, self.wholly = self.leaves, leaves, False
        for name, computed in block_gradients.computed:
            if not leaves.adds_in_place(name):
                leaves.setdefault(name, computed)

    def _count_recomputed(self, kind, function, spec, x, *more):
        """Count the memory of function(x, *more), run again in the backward pass if this `kind` is recomputed."""
        if kind != self.recompute.kind or not self.grad:
            return function(x, *more)
        inputs, elements, deferred = [v for v in (x, *more) if v], x.elements, self.deferred
        axes = self.plan.recompute_axes(spec) if elements else ()
        kept = x.storage
        if axes:
            self.new(elements)  # padded, before it is cut
            kept = self.new(self.plan.elements_per_part(spec, axes))
        offloads = self.recompute.offload and elements
        away = self._move_to_host(self.plan.elements_per_part(spec, axes)) if offloads else None
        self.grad = False
        out = function(x, *more)
        self.grad = True
        sizes = [v and v.elements for v in more]

        def backward(gs: Gradients, saved: Saved) -> Gradients:
            """Count the memory of the recomputed forward pass and of its backward pass; return the inputs'
            gradients."""
            part, others = away.take_back() if away else saved[0], iter(saved[1:])
            whole = Value(self.new(elements) if axes else part, elements)
            arguments = [None if n is None else Value(next(others), n) for n in sizes]
            before, self.tape, self.deferred = (self.tape, self.deferred), MeterTape(), deferred
            self.ahead.again, again = True, self.ahead.again
            out = function(whole, *arguments)
            self.ahead.again = again
            (self.tape, self.deferred), tape = before, self.tape
            results = out if isinstance(out, tuple) else (out,)
            gradients = {y.key: g for y, g in zip(results, gs, strict=True) if g}
            tape.run_backward(gradients, self.leaves)
            for key, g in gradients.items():
                if g.permuted:  # a leaf's gradient lies as the leaf does
                    gradients[key] = g.allocate_alike()
            return [gradients.get(v.key) for v in (whole, *arguments) if v]

        results = out if isinstance(out, tuple) else (out,)
        self.note_operation(results, inputs, (None if away else kept, *(v.storage for v in inputs[1:])), backward)
        return out

    def _move_to_host(self, elements: int) -> OffloadedActivation[MeteredStorage]:
        """Count an activation of `elements` as copied to host memory; taking it back allocates it again."""
        self.left[elements * self.plan.itemsize["compute"]] += 1
        self._last = OffloadedActivation(lambda: self.new(elements), self._last)
        return self._last


def _count_weight_gradients(deferred: list[Callable[[], None]], _: LeafGradients) -> None:
    """Count the gradients of weights that a compiled block's backward pass has left for later."""
    while deferred:
        deferred.pop(0)()


class _BlockGradients(LeafGradients):
    """Takes the gradients of parameters in the backward pass of a compiled block, which returns all of them at once:
    `computed`, by name."""

    def __init__(self) -> None:
        """Begin the forecast of a compiled block's backward pass, with no gradient counted."""
        self.computed: list[tuple[GradientKey, MeteredStorage]] = []

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Keep a parameter's metered gradient until the block's backward pass ends, as a forecast counts it."""
        self.computed.append((name, gradient))


UNDER_WAY = 2  # reductions of ZeRO-2 and 3 whose buffers are kept


class MeteredSums(LeafGradients):
    """Takes the gradients of parameters in passes of `chunk` on the memory meter, and adds them to flat sums per
    bucket. `summed`, `reduced`: numbers of the buckets with sums, and with shards of reduced ones, from earlier passes;
    `early`: buckets are reduced as soon as all their gradients have come, where each pass does so (ZeRO-2 and 3)."""

    def __init__(
        self, meter: MemoryMeter, chunk: Chunk, summed: Collection[int], reduced: Collection[int], *, early: bool
    ):
        """Construct the metered gradient sums of the buckets that `chunk` uses; arguments as in the class."""
        self._meter, self._plan, self._early = meter, meter.plan, early
        self._summed, self._reduced = summed, reduced
        trained = ((n, b) for n, b in enumerate(meter.plan.buckets) if not b.frozen)
        buckets = {n: b for n, b in trained if is_at_index_zero(b.only, meter.at)}
        self._buckets = {n: b for n, b in buckets.items() if chunk.parameter_names & b.parameter_ranges.keys()}
        self._number: dict[GradientKey, int] = {p.name: n for n, b in self._buckets.items() for p in b.parameters}
        self._sums: dict[int, MeteredStorage] = {}
        self._coming: dict[int, MeteredStorage] = {}  # gradients of the pass, where none can be added to sums at once
        self._taken: dict[int, list[MeteredStorage]] = {}  # gradients that will be added together with others
        self._came: dict[int, set[str]] = {n: set() for n in self._buckets}
        self._reducing: list[tuple[int, MeteredStorage, MeteredStorage]] = []
        self._parts: dict[int, MeteredStorage] = {}  # of buckets that passes have reduced: new shards

    def setdefault(self, name: GradientKey, gradient: MeteredStorage) -> None:
        """Count the addition of a parameter's gradient to its bucket's sums, after which it is freed."""
        if gradient.nbytes and name in self._number:
            self._taken.setdefault(self._number[name], []).append(gradient)
            self._note_gradient(name)

    def adds_in_place(self, name: GradientKey) -> bool:
        """Count a gradient that a kernel adds straight into the sums of its parameter's bucket; return True."""
        if name in self._number:
            self._allocate_addition_buffer(self._number[name])
            self._note_gradient(name)
        return True

    def _allocate_addition_buffer(self, number: int) -> None:
        """Count the bytes of the buffer into which a gradient of bucket number `number` is added when computed."""
        if self._plan.adds_gradients_into_sums(self._buckets[number], self._meter.device):
            self._allocate_sums_of_bucket(number)
        elif number not in self._coming:
            self._coming[number] = self._meter.new(self._buckets[number].elements)

    def _allocate_sums_of_bucket(self, number: int) -> None:
        """Allocate the metered gradient sums of bucket number `number`, if no earlier pass has."""
        if number not in self._sums:
            wide = 0 if self._buckets[number].zero >= 2 else self._plan.itemsize["master"]
            self._sums[number] = self._meter.new(0 if number in self._summed else self._buckets[number].elements, wide)

    def _note_gradient(self, name: GradientKey) -> None:
        """Note that a parameter's gradient has been computed; once its whole bucket is, count adding them to the
        sums."""
        assert isinstance(name, str)
        n = self._number[name]
        if name not in self._plan.multi_use_parameters:  # of which several parts come
            self._came[n].add(name)
        if len(self._came[n]) == len(self._buckets[n].parameters):
            self._add_bucket_to_sums(n)
            if self._early and self._buckets[n].zero >= 2:
                self._reduce_bucket(n)

    def _add_bucket_to_sums(self, number: int) -> None:
        """Count the addition of the gradients of bucket number `number` to its sums, after which they are freed."""
        if self._taken.get(number):
            self._allocate_addition_buffer(number)
            self._taken.pop(number)
        if number in self._coming:
            self._allocate_sums_of_bucket(number)
            del self._coming[number]

    def _reduce_bucket(self, number: int) -> None:
        """Count the reduction of a bucket's gradient sums into shards; the third reduction waits for the first."""
        each = self._buckets[number].shard_elements
        self._reducing.append((number, self._sums.pop(number), self._meter.new(each)))
        self._came[number].clear()
        while len(self._reducing) > UNDER_WAY:
            self._finish_oldest_reduction()

    def _finish_oldest_reduction(self) -> None:
        """End the oldest gradient reduction: free its buffers, and keep the bucket's shard of the sums if it is new."""
        n, _, part = self._reducing.pop(0)
        if n in self._parts:
            return
        same = self._plan.itemsize["master"] == self._plan.itemsize["compute"]
        each = 0 if n in self._reduced else self._buckets[n].shard_elements
        self._parts[n] = part if same and each else self._meter.new(each, self._plan.itemsize["master"])

    def flush_all(self) -> None:
        """Count the bytes of adding every gradient that is not yet in its bucket's sums to these."""
        for n in self._buckets:
            self._add_bucket_to_sums(n)

    def end_pass(self) -> None:
        """End a metered backward pass: count its last gradients' sums and (ZeRO-2 and 3) their reductions."""
        self.flush_all()
        for n in [n for n in self._sums if self._buckets[n].zero >= 2]:
            self._reduce_bucket(n)
        while self._reducing:
            self._finish_oldest_reduction()

    def list_held_storages(self) -> list[MeteredStorage]:
        """Return the metered gradient sums and reduced shards that stay in memory for the next pass."""
        return [*self._sums.values(), *self._parts.values()]

    def begun_bytes(self) -> dict[int, int]:
        """Return the bytes of the gradient sums that passes have begun and not reduced, by number of the bucket."""
        return {n: sum_.nbytes for n, sum_ in self._sums.items() if n not in self._summed}

    def shard_bytes(self) -> dict[int, int]:
        """Return the bytes of new shards of reduced buckets (ZeRO-2 and 3), by number of the bucket."""
        return {n: part.nbytes for n, part in self._parts.items()}
